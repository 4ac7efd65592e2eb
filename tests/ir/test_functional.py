"""In-place ops are replaced where nothing else has a view of what they write, and traced again where something has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specgraph.ir.functional import functional

INPUT = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 7.0]])


class Written(nn.Module):
    """A function of a tensor as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def own_result(x: Tensor) -> Tensor:
    y = x + 1
    total = y.sum()
    y.div_(total)
    return y * 2


def one_of_several_results(x: Tensor) -> Tensor:
    values, indices = x.topk(2)
    values /= values.sum(-1, keepdim=True)
    return values + indices


def scattered(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y.scatter_(1, x.argmax(-1, keepdim=True), 1.0)
    return y + 1


def twice(x: Tensor) -> Tensor:
    return (x + 1).mul_(3).relu_()


def slices_put_together(x: Tensor) -> Tensor:
    y = x.new_empty((2, 3))
    y[:, :1] = x[:, 1:2].int()
    y[:, 1:] = x[:, :1]
    return y + 1


def view_of_a_slice_that_is_read_before(x: Tensor) -> Tensor:
    y = x + 1
    total = y[:, 2].sum()
    y[:, 1:] = x[:, :2] * total
    return y[:, 1:] * 2


def view_afterwards(x: Tensor) -> Tensor:
    y = x + 1
    y.mul_(2)
    return y[:, 1:].sum() + y.view(3, 2)


def view_before(x: Tensor) -> Tensor:
    y = x + 1
    row = y[0]
    y.mul_(2)
    return row


def written_view(x: Tensor) -> Tensor:
    y = x + 1
    y[0].mul_(2)
    return y


def slice_assigned(x: Tensor) -> Tensor:
    y = x + 1
    y[:, 1:] = 0
    return y


def slice_of_an_input(x: Tensor) -> Tensor:
    y = x.view(3, 2)
    y[1:] = x.sum()
    return y * 2


def view_between_two_slices(x: Tensor) -> Tensor:
    y = x + 1
    y[:1] = x[1:]
    row = y[1]
    y[1:] = x[:1]
    return row


def slice_that_is_read_afterwards(x: Tensor) -> Tensor:
    y = x + 1
    part = y[:, 1:]
    part.copy_(x[:, :2])
    return y.sum() + part


def identity_before(x: Tensor) -> Tensor:
    y = x + 1
    same = torch.dropout(y, 0.5, train=False)
    y.mul_(2)
    return same


def view_between_two(x: Tensor) -> Tensor:
    y = (x + 1).mul_(2)
    row = y[0]
    y.add_(1)
    return row


def exported(function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, bool]:
    """The functional program of a function, and whether it was traced again."""
    again: list[object] = []
    program = torch.export.export(Written(function), (INPUT.clone(),), strict=False)
    decompose = torch.export.ExportedProgram.run_decompositions

    def noted(self: Any, table: Any) -> Any:
        again.append(self)
        return decompose(self, table)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", noted)
    return functional(program), bool(again)


@pytest.mark.parametrize("function", [
    own_result, one_of_several_results, scattered, twice, view_afterwards, slices_put_together,
    view_of_a_slice_that_is_read_before,
])  # fmt: skip
def test_what_nothing_else_sees_is_replaced(
    function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, again = exported(function, monkeypatch)
    check(program, function)
    assert not again


@pytest.mark.parametrize("function", [
    view_before, written_view, slice_assigned, view_between_two, slice_of_an_input, view_between_two_slices,
    slice_that_is_read_afterwards,
])  # fmt: skip
def test_what_something_else_sees_is_traced_again(
    function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, again = exported(function, monkeypatch)
    check(program, function)
    assert again


def test_an_op_that_may_return_its_argument_counts_as_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    # What comes out is not compared: the fake tensors of torch take the result of this op for a new one.
    _, again = exported(identity_before, monkeypatch)
    assert again


def test_a_program_without_in_place_ops_is_left_as_it_is() -> None:
    program = torch.export.export(Written(torch.relu), (INPUT,), strict=False)
    assert functional(program) is program


def check(program: Any, function: Callable[[Tensor], Tensor]) -> None:
    """No op writes, and the outputs are those of the function."""
    targets = [node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert not any(target._schema.is_mutable for target in targets)
    program.graph.lint()
    program.graph_module.recompile()
    assert torch.equal(program.module()(INPUT.clone()), function(INPUT.clone()))
