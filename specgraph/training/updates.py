"""The part that all training loops share: updates of a module by AdamW, with a schedule of the learning rate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specgraph.training.config import OptimConfig


def autocast_on(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.autocast:
    """A context with bf16 autocast on a GPU.

    On a CPU there is autocast only if ``dtype`` is bf16, that of a frozen model whose tensors the trained module uses.
    """
    enabled = device.type == "cuda" or dtype == torch.bfloat16
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


class Updates:
    """One module in training, with its optimiser."""

    def __init__(self, model: torch.nn.Module, cfg: OptimConfig) -> None:
        self._cfg, self._parameters = cfg, [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self._parameters, cfg)

    def update(self, loss: Tensor, share: float) -> Tensor:
        """Make one update for a scalar loss, which is returned detached, with a share of the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._cfg.learning_rate * share
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters, self._cfg.grad_clip)
        self.optimizer.step()
        return loss.detach()


def make_optimizer(parameters: list[torch.nn.Parameter], cfg: OptimConfig) -> torch.optim.Optimizer:
    """AdamW for parameters of one device. Weight decay applies to matrices and not to norms."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(0.9, 0.95), fused=parameters[0].is_cuda)


def lr_factor(step: int, cfg: OptimConfig) -> float:
    """The share of the learning rate at ``step``, counted from 0. It rises to 1 in the warm-up and follows a cosine."""
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    done = (step - cfg.warmup_steps) / max(1, cfg.steps - cfg.warmup_steps)
    return cfg.final_lr_ratio + (1 - cfg.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
