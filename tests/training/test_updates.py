"""Updates have the bits of a loop in which the schedule is PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.training.config import OptimConfig
from specgraph.training.updates import Updates, lr_factor, make_optimizer

CFG = OptimConfig(steps=5, learning_rate=0.05, warmup_steps=2, weight_decay=0.1, grad_clip=0.5)


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))


def _losses(model: torch.nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(3, 4) for _ in range(CFG.steps)]


def test_updates_have_the_bits_of_a_plain_loop() -> None:
    plain, trained = _model(), _model()
    optimizer = make_optimizer([*plain.parameters()], CFG)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, CFG))
    for inputs in _losses(plain):
        optimizer.zero_grad()
        plain(inputs).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), CFG.grad_clip)
        optimizer.step()
        schedule.step()
    updates = Updates(trained, CFG)
    for step, inputs in enumerate(_losses(trained)):
        loss = updates.update(trained(inputs).square().mean(), lr_factor(step, CFG))
        assert not loss.requires_grad
    for one, other in zip(plain.parameters(), trained.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(trained[0].weight, _model()[0].weight)  # type: ignore[index]
