"""Updates on accelerate: those of a plain loop, on a process whose own accelerate is left as it was."""

from __future__ import annotations

import sys

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor

from specgraph.errors import ConfigError
from specgraph.training.config import OptimConfig
from specgraph.training.updates import Updates, accelerator_on, lr_factor, make_optimizer

CPU = torch.device("cpu")
CFG = OptimConfig(steps=5, learning_rate=0.05, warmup_steps=2, weight_decay=0.1, grad_clip=0.5)


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))


def _losses(model: torch.nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(3, 4) for _ in range(CFG.steps)]


def test_updates_have_the_bits_of_a_plain_loop() -> None:
    plain, trained = _model(), _model()
    optimizer = make_optimizer(plain, CFG, CPU)
    for step, inputs in enumerate(_losses(plain)):
        for group in optimizer.param_groups:
            group["lr"] = CFG.learning_rate * lr_factor(step, CFG)
        optimizer.zero_grad()
        plain(inputs).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), CFG.grad_clip)
        optimizer.step()
    with accelerator_on(CPU) as accelerator:
        updates = Updates(trained, CFG, accelerator)
        for inputs in _losses(trained):
            loss = updates.update(updates.model(inputs).square().mean())
            assert not loss.requires_grad
    for one, other in zip(plain.parameters(), trained.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(trained[0].weight, _model()[0].weight)  # type: ignore[index]


def test_accelerate_is_left_as_it_was() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    with accelerator_on(CPU):
        assert AcceleratorState().mixed_precision == "no"
    assert not PartialState._shared_state and not AcceleratorState._shared_state
    own = Accelerator(cpu=True, mixed_precision="bf16")
    try:
        with accelerator_on(CPU) as accelerator:
            assert (accelerator.mixed_precision, accelerator.device) == ("no", CPU)
        assert own.mixed_precision == "bf16" and own.state.initialized
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with (
        pytest.raises(ConfigError, match=r"^Training needs the package accelerate: pip install -e '\.\[train\]'\.$"),
        accelerator_on(CPU),
    ):
        pass
