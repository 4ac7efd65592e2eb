"""How sequences begin in rows of a state, by themselves and as a graph for more of them than there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from specgraph.ir.program import Program
from specgraph.ir.state import State, allocate
from specgraph.kernels.state import buffers_of
from specgraph.runtime.memory.state_rows import Admission, StateRowInitializer
from specgraph.runtime.requests.request import Request
from specgraph.runtime.requests.sampling import Sampling
from tests.decoding import compiled
from tests.models import shared_model

SIZES = {"B": 5, "M": 3, "N": 15, "S": 48, "E": 2}


@pytest.fixture(scope="module", params=["none", "ngram", "draft_model"])
def program(request: pytest.FixtureRequest) -> Program:
    model = shared_model("llama", dtype=torch.float64)
    draft = model if request.param == "draft_model" else None
    decoder = compiled(model, request.param, draft=draft, verify={"rule": "probabilistic"})
    return decoder._program


def used(program: Program) -> State:
    """A state with something in every element."""
    state = allocate(program, SIZES, torch.device("cpu"))
    return pytree.tree_map(lambda t: t.fill_(1) if isinstance(t, Tensor) else t, state)  # type: ignore[no-any-return]


def entering(row: int, begin: int = 0, **options: Any) -> Admission:
    request = Request(torch.arange(3, 9), 20 + row, Sampling(seed=row + 7, **options), (2,) * (row % 3))
    return Admission(row, request, [4 * row, row], begin)


NEW = [entering(3, temperature=0.5), entering(0, begin=4, top_k=9), entering(1, min_p=0.25)]


def own_tensors(program: Program, state: State) -> list[Tensor]:
    """What belongs to sequences."""
    pairs = ((buffers_of(program.inputs[name]), pytree.tree_leaves(value)) for name, value in state.items())
    return [there for own, tensors in pairs for b, there in zip(own, tensors, strict=True) if b.owner == "sequence"]


def equal(program: Program, a: State, b: State) -> bool:
    return all(map(torch.equal, own_tensors(program, a), own_tensors(program, b)))


def test_together_or_one_after_the_other_is_the_same(program: Program) -> None:
    together, alone = used(program), used(program)
    StateRowInitializer(program, together).admit(NEW)
    entrance = StateRowInitializer(program, alone)
    for new in NEW:
        entrance.admit([new])
    assert equal(program, together, alone) and not equal(program, together, used(program))


@pytest.mark.parametrize("count", [3, 4, 5])
def test_values_for_more_sequences_begin_the_same_ones(program: Program, count: int) -> None:
    wanted, state = used(program), used(program)
    StateRowInitializer(program, wanted).admit(NEW)
    entrance = StateRowInitializer(program, state)
    entrance.values(NEW[::-1], count)  # what an earlier call has said is not said again
    values = entrance.values(NEW, count).clone()
    for _ in range(2):
        assert entrance.load(values, count).tolist() == [3, 0, 1, 1, 1][:count]
    entrance.write_tokens(NEW)
    assert equal(program, wanted, state)


def test_other_rows_keep_what_they_have(program: Program) -> None:
    state = used(program)
    StateRowInitializer(program, state).admit(NEW)
    assert all(bool((there[[2, 4]] == 1).all()) for there in own_tensors(program, state))


def test_a_row_that_was_used_is_as_good_as_a_fresh_one(program: Program) -> None:
    fresh, state = allocate(program, SIZES, torch.device("cpu")), used(program)
    StateRowInitializer(program, fresh).admit(NEW)
    StateRowInitializer(program, state).admit(NEW)
    for a, b in zip(own_tensors(program, fresh), own_tensors(program, state), strict=True):
        assert torch.equal(a[[3, 0, 1]], b[[3, 0, 1]])
