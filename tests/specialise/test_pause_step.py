"""The step that pauses for the host, and its two halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from specgraph.errors import PassError
from specgraph.ir.graphs import calls
from specgraph.kernels import step
from specgraph.kernels.processors import PROCESSORS
from specgraph.passes.insert_processors import OPTIONS
from specgraph.passes.pipeline import run_passes
from specgraph.specialise.pause_step import PauseStep, halves
from specgraph.specialise.specialise_step import SpecialiseStep
from tests.decoding import compiled
from tests.models import shared_model

ALL = (*OPTIONS, "top_k", "top_p", "min_p", "seeds")


@pytest.fixture(scope="module")
def program() -> Any:
    return compiled(shared_model("llama", dtype=torch.float64), "ngram", 3)._program


def paused(program: Any, *unused: str) -> Any:
    passes = [SpecialiseStep("raw", unused), PauseStep()]
    return run_passes(program, passes, [])[0]["pause_step"]


@pytest.mark.parametrize("unused", [ALL, ()], ids=["no processors", "all processors"])
def test_the_host_comes_behind_the_last_processor(program: Any, unused: tuple[str, ...]) -> None:
    made = paused(program, *unused)
    (node,) = calls(made.graph, step.for_host)
    logits = made.one("logits")
    assert (node.args[0] is logits) == bool(unused)
    (verify,) = node.users
    assert verify.args[0] is node and verify.kwargs["raw_logits"] is logits
    last: fx.Node = node.args[0]
    assert (last.target in PROCESSORS) == (not unused) and not {*PROCESSORS}.intersection(u.target for u in last.users)


def test_two_halves_do_what_the_whole_does(program: Any) -> None:
    """On a state of random values, with the row index that names both sequences; what is written is compared, too."""
    from specgraph.ir.state import allocate
    from specgraph.kernels.state import ROWS

    made = paused(program, *ALL)
    sizes = {"B": 2, "M": 4, "N": 8, "S": 16, "E": 1}
    results = []
    for cut in (False, True):
        state = allocate(made, sizes, torch.device("cpu"))
        state["block_table"].copy_(torch.arange(8).view(2, 4))
        state["max_length"].fill_(16)
        state["num_rows"].fill_(4)
        state["num_forced"].fill_(3)
        given = {"window": torch.arange(5, 13).view(2, 4), **state, ROWS: torch.arange(2)}
        if cut:
            both = halves(made.executable(), made.one("logits").name)
            kept = both.before(made={}, **given)
            assert kept["for_host"].data_ptr() != kept["logits"].data_ptr()
            torch.testing.assert_close(kept["for_host"], kept["logits"], rtol=0, atol=0)
            out = both.after(made=kept, **given)
        else:
            out = made.executable()(**given)
        results.append((out, state))
    (whole, left), (parts, right) = results
    assert all(map(torch.equal, whole, parts))
    assert all(torch.equal(left[name], right[name]) for name in left if isinstance(left[name], torch.Tensor))
    assert int(left["start"].sum()) > 0


def test_only_a_step_that_pauses_has_halves(program: Any) -> None:
    with pytest.raises(PassError, match="pauses behind its node for_host, and this one has 0"):
        halves(program.executable(), "logits")


def test_for_host_is_a_copy_of_single_precision_at_least() -> None:
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        logits = torch.zeros(1, 2, 3, dtype=dtype)
        copy = step.for_host(logits)
        copy += 1
        assert copy.dtype == wide and not logits.any()


def test_the_second_half_needs_only_what_stands_before_it(program: Any) -> None:
    made = paused(program)
    both = halves(made.executable(), made.one("logits").name)
    for module in (both.before, both.after):
        assert isinstance(module, fx.GraphModule)
        module.graph.lint()
    called = {node.target for node in both.after.graph.nodes if node.op == "call_module"}
    assert "target" not in called and "target" in {n.target for n in both.before.graph.nodes if n.op == "call_module"}
