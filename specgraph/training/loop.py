"""The training loop of a head. A run that is killed can continue from its last checkpoint."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgraph.checkpoints.files import load_pickle
from specgraph.errors import ConfigError
from specgraph.progress import Note, Progress
from specgraph.training.chain import ChainLoss, counted_rows, step_weights
from specgraph.training.config import HeadTrainConfig
from specgraph.training.data import Batch, Encoded, shuffled
from specgraph.training.measure import Measured, measure
from specgraph.training.teacher import Teacher
from specgraph.training.updates import Updates, lr_factor

CHECKPOINT = "checkpoint.pt"
"""The file of the last checkpoint of a run, in its output."""
_FREE = {"output", "device", "max_seconds", "checkpoint_every", "file"}
"""The keys that may differ between a run and the run that continues it."""


@dataclass
class HeadProgress:
    """The progress of a run. ``losses`` holds pairs of a step and the mean loss since the pair before. ``measured``
    holds tuples of a step, the held-out loss and the acceptance length. Losses are in nats per token. Those of training
    include that of a confidence head."""

    step: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)
    measured: list[tuple[int, float, float]] = field(default_factory=list)
    pending: list[float] = field(default_factory=list)
    """The losses since the last entry of ``losses``."""


class HeadLoop:
    """Trains one head in place."""

    def __init__(self, trained: ChainLoss, teacher: Teacher, cfg: HeadTrainConfig, save: Callable[[], None]) -> None:
        """Prepare the training. ``save`` is called at every checkpoint, so a killed run also leaves a usable head."""
        self.cfg, self.teacher, self.save = cfg, teacher, save
        self.progress = HeadProgress()
        self.trained, self.updates = trained, Updates(trained, cfg.optim)
        self.file = Path(cfg.output) / CHECKPOINT
        self._began = time.monotonic()

    def run(
        self, documents: Sequence[Encoded], heldout: Sequence[Encoded], pad_id: int
    ) -> tuple[HeadProgress, Measured]:
        """Train on ``documents``, from the last checkpoint if there is one, and measure on ``heldout``."""
        self._resume()
        done, optim = self.progress, self.cfg.optim
        self._began = time.monotonic() - done.seconds
        batches = shuffled(documents, optim.batch_size, pad_id, self.cfg.seed, question_weight=0.0)
        with Progress(self.cfg.draft, optim.steps, True, done=done.step, keep=True) as bar:
            for batch in itertools.islice(batches, done.step, None):
                if self._finished():
                    break
                done.pending.append(self._update(batch))
                done.step += 1
                bar.advance(1, self._report(heldout))
        done.seconds = round(time.monotonic() - self._began, 1)
        final = self._measure(heldout)
        self._note(final)
        return done, final

    def clear(self) -> None:
        """Remove the checkpoint, when a run has succeeded."""
        self.file.unlink(missing_ok=True)

    def _finished(self) -> bool:
        limit = self.cfg.optim.max_seconds
        late = limit is not None and time.monotonic() - self._began >= limit
        return self.progress.step >= self.cfg.optim.steps or late

    def _lr_factor(self) -> float:
        """The share of the learning rate. Under a time limit, the cosine follows the time if it runs ahead of steps."""
        optim, step = self.cfg.optim, self.progress.step
        if optim.max_seconds is not None and step >= optim.warmup_steps:
            share = (time.monotonic() - self._began) / optim.max_seconds
            step = min(optim.steps, max(step, int(share * optim.steps)))
        return lr_factor(step, optim)

    def _update(self, batch: Batch) -> Any:
        """Make one update and return the loss, on the device."""
        # The rows are drawn on the CPU with a seed for each step, so that a resumed run draws the same rows.
        generator = torch.Generator().manual_seed(1_000_003 * self.cfg.seed + self.progress.step)
        rows = counted_rows(batch.weights, self.cfg.chain, generator)
        device = self.teacher.device
        tokens = batch.tokens.to(device, non_blocking=True)
        chosen = [chosen.to(device, non_blocking=True) for chosen in rows]
        lesson = self.teacher(tokens)
        with self.teacher.autocast():
            losses: Tensor = self.trained(tokens, lesson, chosen)
        return self.updates.update((losses * step_weights(self.cfg.chain, device)).sum(), self._lr_factor())

    def _report(self, heldout: Sequence[Encoded]) -> Note:
        """Measure and save if enough steps have passed, and return a line about the training."""
        optim, step = self.cfg.optim, self.progress.step
        last = step == optim.steps
        note: Note = self._loss
        if step % optim.eval_every == 0 and not last:
            self._note(self._measure(heldout))
            (_, held, length), (_, loss) = self.progress.measured[-1], self.progress.losses[-1]
            note = f"loss {loss:.4f} held-out {held:.4f} acceptance length {length:.3f}"
        if step % optim.checkpoint_every == 0 and not last:
            self._checkpoint()
        return note

    def _loss(self) -> str:
        """The mean loss since the last measurement."""
        pending = self.progress.pending
        return f"loss {_mean(pending):.4f}" if pending else ""

    def _measure(self, heldout: Sequence[Encoded]) -> Measured:
        cfg = self.cfg
        return measure(self.trained, self.teacher, heldout, cfg.chain, cfg.eval_drafts, cfg.optim.batch_size)

    def _note(self, measured: Measured) -> None:
        done = self.progress
        if done.pending:
            done.losses.append((done.step, round(_mean(done.pending), 4)))
            done.pending = []
        done.measured.append((done.step, round(measured.loss, 4), round(measured.acceptance_length, 4)))

    def _checkpoint(self) -> None:
        """Write a checkpoint, which takes the place of the one before when it is complete."""
        self.progress.seconds = time.monotonic() - self._began
        self.progress.pending = [float(loss) for loss in self.progress.pending]
        self.save()
        state = {
            "config": _fixed(self.cfg), "progress": vars(self.progress), "trained": self.trained.state_dict(),
            "optimizer": self.updates.optimizer.state_dict(),
        }  # fmt: skip
        torch.save(state, self.file.with_suffix(".tmp"))
        os.replace(self.file.with_suffix(".tmp"), self.file)

    def _resume(self) -> None:
        if not self.file.is_file():
            return
        saved = load_pickle(self.file)
        other = sorted(key for key, value in _fixed(self.cfg).items() if saved["config"].get(key, value) != value)
        if other:
            before = f"{other[0]}={saved['config'][other[0]]}"
            raise ConfigError(
                f"output={self.cfg.output} holds an unfinished run with {before}: give the same settings to go on with "
                f"it, another output, or delete its file {CHECKPOINT}."
            )
        self.trained.load_state_dict(saved["trained"])
        self.updates.optimizer.load_state_dict(saved["optimizer"])
        self.progress = HeadProgress(**saved["progress"])


def _fixed(cfg: HeadTrainConfig) -> dict[str, Any]:
    """The values that must be equal in a run and in the run that continues it, by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(cfg).items():
        flat |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return {key: value for key, value in flat.items() if key.rpartition(".")[2] not in _FREE}


def _mean(losses: Sequence[Any]) -> float:
    return float(sum(losses) / len(losses))
