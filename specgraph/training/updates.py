"""The part that all training loops share: updates of a module by AdamW with a schedule, on accelerate."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from specgraph.errors import ConfigError
from specgraph.training.config import OptimConfig


@contextlib.contextmanager
def accelerator_on(device: torch.device, dtype: torch.dtype = torch.float32) -> Iterator[Any]:
    """An ``accelerate.Accelerator`` for one device, with bf16 autocast on a GPU.

    On a CPU there is autocast only if ``dtype`` is bf16, that of a frozen model whose tensors the trained module uses.

    The first Accelerator of a process determines the device and precision of all later ones. To give every run its own,
    that global state is removed while the context lasts, and put back afterwards.

    Raises:
        ConfigError: accelerate is not installed.
    """
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState, PartialState
    except ImportError:
        raise ConfigError("Training needs the package accelerate: pip install -e '.[train]'.") from None
    on_gpu = device.type == "cuda"
    autocast = on_gpu or dtype == torch.bfloat16
    shared = [kind._shared_state for kind in (PartialState, AcceleratorState, GradientState)]
    with _set_aside(shared), torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
        yield Accelerator(cpu=not on_gpu, mixed_precision="bf16" if autocast else "no")


@contextlib.contextmanager
def _set_aside(shared: list[dict[str, Any]]) -> Iterator[None]:
    """A context in which the dictionaries are empty. Their contents are put back afterwards."""
    before = [dict(state) for state in shared]
    for state in shared:
        state.clear()
    try:
        yield
    finally:
        for state, contents in zip(shared, before, strict=True):
            state.clear()
            state.update(contents)


class Updates:
    """One module in training, with its optimiser and its schedule.

    Attributes:
        model: the module, as prepared by accelerate, on the accelerator's device.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cfg: OptimConfig,
        accelerator: Any,
        factor: Callable[[int], float] | None = None,
    ) -> None:
        """Make the optimiser. ``factor`` gives the share of the learning rate at a step; None is :func:`lr_factor`."""
        self._accelerator, self._grad_clip = accelerator, cfg.grad_clip
        self.model = accelerator.prepare(model)
        optimizer = make_optimizer(self.model, cfg, accelerator.device)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor or (lambda step: lr_factor(step, cfg)))
        self._optimizer, self._schedule = accelerator.prepare(optimizer, schedule)

    def update(self, loss: Tensor) -> Tensor:
        """Make one update for a scalar loss, which is returned detached, on the device."""
        self._optimizer.zero_grad(set_to_none=True)
        self._accelerator.backward(loss)
        self._accelerator.clip_grad_norm_(self.model.parameters(), self._grad_clip)
        self._optimizer.step()
        self._schedule.step()
        return loss.detach()


def make_optimizer(model: torch.nn.Module, cfg: OptimConfig, device: torch.device) -> torch.optim.Optimizer:
    """AdamW for the parameters that have a gradient. Weight decay applies to matrices and not to norms."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")


def lr_factor(step: int, cfg: OptimConfig) -> float:
    """The share of the learning rate at ``step``, counted from 0. It rises to 1 in the warm-up and follows a cosine."""
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    done = (step - cfg.warmup_steps) / max(1, cfg.steps - cfg.warmup_steps)
    return cfg.final_lr_ratio + (1 - cfg.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
