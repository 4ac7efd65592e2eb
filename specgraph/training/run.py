"""A whole run: the target writes answers, a head is trained on them, and a report is written."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from specgraph.drafters.base import DraftHead
from specgraph.training.answers import split_rollouts
from specgraph.training.chain import ChainLoss
from specgraph.training.config import HeadTrainConfig, check_dtype, check_head_config
from specgraph.training.data import Encoded, collate, read_documents, split_documents
from specgraph.training.head import bf16_copy, build_head, start_from
from specgraph.training.loop import HeadLoop, HeadProgress
from specgraph.training.measure import Measured
from specgraph.training.plot import plot_losses
from specgraph.training.teacher import Teacher


@dataclass
class HeadTrainReport:
    """The results of :func:`train_head`, which are also written to ``<output>/training_report.json``.

    ``measured`` is estimated without a decoder, from greedy answers to held-out questions. ``progress`` has the loss
    curve.
    """

    algorithm: str
    parameters: int
    steps: int
    seconds: float
    documents: int
    heldout: int
    eval_drafts: int
    measured: Measured
    progress: HeadProgress
    device: str
    config: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        measured = self.measured
        lines = [
            f"{self.algorithm}: {self.parameters / 1e6:.2f}M trained parameters, {self.steps} steps in "
            f"{self.seconds:.0f} s on {self.device}, {self.documents} answers",
            f"greedy, {self.heldout} held-out questions, K={self.eval_drafts}: loss {measured.loss:.4f} nats/token, "
            f"acceptance length {measured.acceptance_length:.3f}",
            "accepted per position: " + " ".join(f"{share:.3f}" for share in measured.per_position),
            *self.notes,
        ]
        return "\n".join(lines)


def train_head(model: PreTrainedModel, tokenizer: Any, cfg: HeadTrainConfig) -> HeadTrainReport:
    """Train a draft head for a frozen target on the target's own answers.

    This writes ``config.json`` and ``model.safetensors`` (bf16, in the layout of the drafter) to ``cfg.output``, and
    beside them ``training_report.json`` and ``loss.png``. During the run, there is a checkpoint in
    ``<output>/checkpoint.pt``. If the run is killed, the same call continues from there. Without a time limit, it ends
    with the same weights on the same machine. Progress is shown on standard error. All randomness follows from
    ``cfg.seed``, and the caller's random generators do not change.

    Args:
        model: the target, in evaluation mode and on the device for the training. It does not change.
        tokenizer: the target's tokenizer.
        cfg: the configuration of the run.

    Raises:
        ConfigError: a setting is out of range, or does not fit the target.
        InputError: a data file is missing, empty or malformed.
        UnsupportedModelError: the target cannot be traced.
    """
    check_head_config(cfg)
    check_dtype(model.device.type, str(model.dtype).removeprefix("torch."))
    train, heldout = split_documents(read_documents(cfg.data), cfg.heldout, cfg.seed)
    device = model.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(cfg.seed)
        model.requires_grad_(False)
        learned, measured = split_rollouts(model, tokenizer, train, heldout, cfg)
        torch.manual_seed(cfg.seed)  # again, so that it does not matter whether answers were written or read
        return _train(model, tokenizer, learned, measured, cfg)


def _train(
    model: PreTrainedModel,
    tokenizer: Any,
    learned: Sequence[Encoded],
    heldout: Sequence[Encoded],
    cfg: HeadTrainConfig,
) -> HeadTrainReport:
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    head = build_head(model, cfg, pad_id, learned)
    teacher = Teacher(model, head.features)
    if cfg.head.init is None:
        head.module.match_scale(teacher(collate(heldout[:16], pad_id).tokens.to(teacher.device)).hidden)
    else:
        start_from(head.module, cfg.head.init)

    def save() -> None:
        _save(head, model, cfg)

    loop = HeadLoop(ChainLoss(head, cfg.chain.steps, cfg.chain.overlap), teacher, cfg, save)
    progress, measured = loop.run(learned, heldout, pad_id)
    save()
    report = HeadTrainReport(
        algorithm=cfg.draft,
        parameters=sum(p.numel() for p in head.module.parameters() if p.requires_grad),
        steps=progress.step,
        seconds=progress.seconds,
        documents=len(learned),
        heldout=len(heldout),
        eval_drafts=cfg.eval_drafts,
        measured=measured,
        progress=progress,
        device=_device_name(teacher.device),
        config=asdict(cfg),
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
    )
    _write_report(report, Path(cfg.output))
    loop.clear()
    return report


def _save(head: DraftHead, model: PreTrainedModel, cfg: HeadTrainConfig) -> None:
    """Save the head without the tensors that are the target's own."""
    cfg.drafter().save_head(
        bf16_copy(head),
        cfg.output,
        target_name=cfg.model,
        algorithm=cfg.draft,
        num_speculative_tokens=cfg.chain.steps,
        shared=model.parameters(),
        target_architectures=list(model.config.architectures or []),
    )


def _write_report(report: HeadTrainReport, folder: Path) -> None:
    curve = folder / "loss.png"
    title = f"{report.algorithm} for {report.config['model']}"
    if not plot_losses(report.progress, title, curve):
        report.notes.append("no loss curve was drawn: matplotlib is missing; pip install -e '.[train]'")
    saved = asdict(report) | {"measured": report.measured._asdict()}
    del saved["notes"], saved["progress"]["pending"]
    (folder / "training_report.json").write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
