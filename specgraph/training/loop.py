"""The optimisation loop that the target and the draft share, and their two losses."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .config import OptimConfig
from .data import Batch
from .progress import Progress

Loss = Callable[[Batch], Tensor]
"""Loss of every predicted token, ``[B, S - 1]`` float32, not weighted."""


@dataclass
class StageReport:
    """One trained model. Losses are in nats per weighted token; ``curve`` holds (step, training, held-out) losses.

    ``heldout_loss`` is the best on the curve, and the weights kept are those of that step. A model that was loaded, not
    trained, has 0 steps and no ``train_loss``.
    """

    parameters: int = 0
    steps: int = 0
    best_step: int = 0
    train_loss: float | None = None
    heldout_loss: float = math.inf
    seconds: float = 0.0
    curve: list[tuple[int, float, float]] = field(default_factory=list)


def cross_entropy(model: Any, input_noise: float = 0.0) -> Loss:
    """Next-token cross-entropy of ``model``; in training, with a share of its input tokens replaced by random ones."""

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
    """Forward KL(target || draft) over the full vocabulary (Hinton et al. 2015, arXiv 1503.02531), temperature 1."""

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
    """Train ``model`` in place on ``cfg.steps`` batches and leave it with the weights of its best held-out loss.

    Weights stay float32; on a GPU the forward pass runs under bf16 autocast.
    """
    report, best = StageReport(parameters=sum(p.numel() for p in model.parameters()), steps=cfg.steps), {}
    optimizer = make_optimizer(model, cfg, device)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, cfg))
    progress, start = Progress(label, cfg.steps), time.monotonic()
    running, seen = torch.zeros((), device=device), 0
    for step, batch in enumerate(itertools.islice(batches, cfg.steps), 1):
        running, seen = running + _update(model, loss, _to(batch, device), optimizer, cfg.grad_clip), seen + 1
        schedule.step()
        if step % cfg.eval_every == 0 or step == cfg.steps:
            mean, held = float(running) / seen, evaluate(model, loss, heldout, device)
            report.curve.append((step, round(mean, 4), round(held, 4)))
            report.train_loss, running, seen = mean, torch.zeros((), device=device), 0
            progress.show(step, f"loss {mean:.4f} held-out {held:.4f}")
            if held < report.heldout_loss:
                report.heldout_loss, report.best_step = held, step
                best = {name: value.detach().clone() for name, value in model.state_dict().items()}
        elif progress.due():
            progress.show(step, f"loss {float(running) / seen:.4f}")
    if best:
        model.load_state_dict(best)
    report.seconds = round(time.monotonic() - start, 1)
    return report


def evaluate(model: torch.nn.Module, loss: Loss, batches: Sequence[Batch], device: torch.device) -> float:
    """Weighted mean loss over ``batches``, in nats per token; the model is left in training mode as it was."""
    training = model.training
    model.eval()
    total = weight = 0.0
    with torch.no_grad():
        for batch in batches:
            moved = _to(batch, device)
            with _autocast(device):
                total += float((loss(moved) * moved.weights).sum())
            weight += float(batch.weights.sum())
    model.train(training)
    return total / weight


def lr_factor(step: int, cfg: OptimConfig) -> float:
    """Share of the learning rate at ``step`` (from 0): up to 1 during the warm-up, then a cosine."""
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    done = (step - cfg.warmup_steps) / max(1, cfg.steps - cfg.warmup_steps)
    return cfg.final_lr_ratio + (1 - cfg.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def _update(
    model: torch.nn.Module, loss: Loss, batch: Batch, optimizer: torch.optim.Optimizer, grad_clip: float
) -> Tensor:
    """One step of the optimizer; returns the batch's mean loss, still on the device."""
    with _autocast(batch.tokens.device):
        mean = (loss(batch) * batch.weights).sum() / batch.weights.sum()
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(mean)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    return mean.detach()


def make_optimizer(model: torch.nn.Module, cfg: OptimConfig, device: torch.device) -> torch.optim.Optimizer:
    """AdamW for what has a gradient; matrices decay, norms do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")


def _autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def _to(batch: Batch, device: torch.device) -> Batch:
    return Batch(batch.tokens.to(device, non_blocking=True), batch.weights.to(device, non_blocking=True))
