"""The training loop for a target and for a draft model that start from scratch, with the loss of each."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.tiny_models.config import OptimConfig
from specgraph.progress import Note, Progress
from specgraph.training.data import Batch
from specgraph.training.updates import Updates, autocast_on, lr_factor

Loss = Callable[[Batch], Tensor]
"""A function from a batch to the loss of every predicted token, float32 ``[B, S - 1]``, without weights."""


@dataclass
class StageReport:
    """The training of one model. Losses are in nats per weighted token.

    ``curve`` holds tuples of the step, the training loss and the held-out loss. ``heldout_loss`` is the best held-out
    loss of the curve, and the weights of that step are kept. A model that was loaded and not trained has 0 steps and no
    ``train_loss``.
    """

    parameters: int = 0
    steps: int = 0
    best_step: int = 0
    train_loss: float | None = None
    heldout_loss: float = math.inf
    seconds: float = 0.0
    curve: list[tuple[int, float, float]] = field(default_factory=list)


def cross_entropy(model: Any, input_noise: float = 0.0) -> Loss:
    """The next-token cross-entropy of ``model``. In training, random tokens replace a share of its input tokens."""

    def loss(batch: Batch) -> Tensor:
        inputs = batch.tokens[:, :-1]
        if input_noise > 0 and model.training:
            inputs = replace_randomly(inputs, input_noise, model.config.vocab_size)
        logits = model(input_ids=inputs, use_cache=False).logits.float()
        losses: Tensor = F.cross_entropy(logits.transpose(1, 2), batch.tokens[:, 1:], reduction="none")
        return losses

    return loss


def replace_randomly(tokens: Tensor, share: float, vocab_size: int) -> Tensor:
    """``tokens`` with about ``share`` of them replaced by ids drawn from the whole vocabulary."""
    chosen = torch.rand(tokens.shape, device=tokens.device) < share
    return torch.where(chosen, torch.randint_like(tokens, vocab_size), tokens)


def distillation(draft: Any, target: Any) -> Loss:
    """KL(target || draft) over the full vocabulary, at temperature 1 (Hinton et al. 2015, arXiv 1503.02531)."""

    def loss(batch: Batch) -> Tensor:
        inputs = batch.tokens[:, :-1]
        with torch.no_grad():
            wanted = target(input_ids=inputs, use_cache=False).logits.float().log_softmax(-1)
        given = draft(input_ids=inputs, use_cache=False).logits.float().log_softmax(-1)
        divergence: Tensor = (wanted.exp() * (wanted - given)).sum(-1)
        return divergence

    return loss


def optimise(
    label: str,
    model: torch.nn.Module,
    loss: Loss,
    batches: Iterator[Batch],
    heldout: Sequence[Batch],
    cfg: OptimConfig,
    device: torch.device,
) -> StageReport:
    """Train ``model`` in place on ``cfg.steps`` batches, and give it the weights that had the best held-out loss.

    The weights stay float32, and losses are computed under autocast on a GPU.
    """
    start, updates = time.monotonic(), Updates(model.to(device), cfg)
    watch = _Watch(model, loss, heldout, device, cfg)
    with Progress(label, cfg.steps, True, keep=True) as progress:
        for step, batch in enumerate(itertools.islice(batches, cfg.steps), 1):
            watch.losses.append(updates.update(_mean_loss(loss, batch, device), lr_factor(step - 1, cfg)))
            progress.advance(1, watch.note(step))
    return watch.finish(round(time.monotonic() - start, 1))


class _Watch:
    """Measures a model every ``cfg.eval_every`` steps and at the end, and remembers its best weights.

    Attributes:
        losses: the loss of every batch since the last measurement, on the device.
    """

    def __init__(
        self, model: torch.nn.Module, loss: Loss, heldout: Sequence[Batch], device: torch.device, cfg: OptimConfig
    ) -> None:
        self._model, self._loss, self._heldout, self._device, self._cfg = model, loss, heldout, device, cfg
        self._report = StageReport(parameters=sum(p.numel() for p in model.parameters()), steps=cfg.steps)
        self._best: dict[str, Tensor] = {}
        self.losses: list[Tensor] = []

    def note(self, step: int) -> Note:
        """Measure if ``cfg.eval_every`` steps have passed, and return a line about the training."""
        if step % self._cfg.eval_every and step != self._cfg.steps:
            return lambda: f"loss {self._mean():.4f}"
        report, mean = self._report, self._mean()
        held = evaluate(self._model, self._loss, self._heldout, self._device)
        report.curve.append((step, round(mean, 4), round(held, 4)))
        report.train_loss, self.losses = mean, []
        if held < report.heldout_loss:
            report.heldout_loss, report.best_step = held, step
            self._best = {name: value.detach().clone() for name, value in self._model.state_dict().items()}
        return f"loss {mean:.4f} held-out {held:.4f}"

    def finish(self, seconds: float) -> StageReport:
        """Give the model its best weights, and report on the training."""
        if self._best:
            self._model.load_state_dict(self._best)
        self._report.seconds = seconds
        return self._report

    def _mean(self) -> float:
        return float(sum(self.losses)) / len(self.losses)


def evaluate(model: torch.nn.Module, loss: Loss, batches: Sequence[Batch], device: torch.device) -> float:
    """The weighted mean loss over ``batches``, in nats per token. The model's training mode does not change."""
    training = model.training
    model.eval()
    total = weight = 0.0
    with torch.no_grad():
        for batch in batches:
            moved = _to(batch, device)
            with autocast_on(device):
                total += float((loss(moved) * moved.weights).sum())
            weight += float(batch.weights.sum())
    model.train(training)
    return total / weight


def _mean_loss(loss: Loss, batch: Batch, device: torch.device) -> Tensor:
    """The weighted mean over the predicted tokens of one batch, as a scalar on the device."""
    moved = _to(batch, device)
    with autocast_on(device):
        mean: Tensor = (loss(moved) * moved.weights).sum() / moved.weights.sum()
    return mean


def _to(batch: Batch, device: torch.device) -> Batch:
    return Batch(batch.tokens.to(device, non_blocking=True), batch.weights.to(device, non_blocking=True))
