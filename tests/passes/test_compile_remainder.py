from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specgraph.errors import ConfigError, PassError
from specgraph.ir import compiling, program
from specgraph.ir.graphs import remove_dead_code
from specgraph.ir.program import CompiledFor
from specgraph.passes.base import PassResult
from specgraph.passes.compile_remainder import CompileRemainder
from specgraph.passes.pipeline import run_passes
from tests.compiler.test_pipeline import every_pass, everything, first, last
from tests.decoding import compiled
from tests.models import make_model, ragged_prompts


def test_eager_leaves_everything_as_it_is():
    program = first().copy()
    stages, reports = run_passes(program, [CompileRemainder()])
    assert reports[0].result == PassResult(0, notes=("what remains runs eagerly",))
    assert stages["compile_remainder"] is program and program.compiled == frozenset()


def test_inductor_marks_the_modules_that_are_called_and_changes_no_graph():
    program = last(first("draft_model"), every_pass()[:5])
    after = last(program, [CompileRemainder("inductor")])
    assert after.compiled == {"target", "lm_head", "draft"} and program.compiled == frozenset()
    assert everything(after) == everything(program)


def test_a_module_that_is_not_called_is_not_compiled():
    program = last(first("draft_model"), every_pass()[:5]).copy()
    program.modules["other"] = program.modules["lm_head"]
    after = last(program, [CompileRemainder("inductor")])
    assert after.compiled == {"target", "lm_head", "draft"}


def test_dead_code_elimination_keeps_calls_of_compiled_modules():
    program = last(first("draft_model"), every_pass()[:3])
    program.compiled = frozenset({"draft"})
    for node in program.with_role("drafts"):
        node.replace_all_uses_with(program.input("verified_tokens"))
        program.graph.erase_node(node)
    program.set_output(program.one("logits"))
    module = program.executable()
    remove_dead_code(module)
    assert [n.name for n in module.graph.nodes if n.target == "draft"] == ["draft_0", "draft_1", "draft_2"]


def test_an_unknown_backend_is_refused():
    with pytest.raises((PassError, ConfigError, ValueError), match="inductr"):
        CompileRemainder("inductr").apply(first().copy())


@pytest.mark.usefixtures("torch_compile")
def test_inductor_gives_the_tokens_of_eager():
    torch._dynamo.utils.counters.clear()
    model = make_model("llama", dtype=torch.float64, num_hidden_layers=1)
    prompts = ragged_prompts((3, 9))
    eager, inductor = (
        compiled(model, k=2, lowering={"name": name}).generate(prompts, max_new_tokens=12)
        for name in ("eager", "inductor")
    )
    assert eager.stats.steps == inductor.stats.steps
    assert all(map(torch.equal, eager.new_tokens, inductor.new_tokens))
    assert torch._dynamo.utils.counters["aot_autograd"]["total"] > 0


@pytest.mark.usefixtures("torch_compile")
def test_compiled_modules_read_the_weights_that_the_model_has_now():
    """Calls do not check weights, so they must read whatever is written into them or takes the place of their data."""
    model, prompts = make_model("llama", dtype=torch.float64, num_hidden_layers=1), ragged_prompts((3, 9))
    inductor = compiled(model, k=2, lowering={"name": "inductor"})
    seen = [inductor.generate(prompts, max_new_tokens=12).new_tokens]
    for change in (lambda p: p.data.copy_(p.data.flip(0)), lambda p: setattr(p, "data", p.data.roll(3, -1))):
        for parameter in model.parameters():
            change(parameter)
        fresh = compiled(model, k=2, lowering={"name": "eager"}).generate(prompts, max_new_tokens=12).new_tokens
        seen.append(inductor.generate(prompts, max_new_tokens=12).new_tokens)
        assert all(map(torch.equal, seen[-1], fresh)) and not all(map(torch.equal, seen[-1], seen[-2]))
    assert torch._dynamo.utils.counters["aot_autograd"]["total"] > 0


def test_on_a_cpu_a_prompt_runs_through_the_modules_as_they_are(monkeypatch: pytest.MonkeyPatch):
    """A decode step has 3 rows per sequence; a module with at most twice as many is compiled."""
    compiled_widths: list[int] = []

    def compile_nothing(module: torch.nn.Module) -> torch.nn.Module:
        def noting(*args: object, **kwargs: torch.Tensor) -> object:
            (first,) = {value.shape[1] for value in (*args, *kwargs.values()) if getattr(value, "ndim", 0) == 3} or {0}
            compiled_widths.append(first)
            return module(*args, **kwargs)

        return Call(noting)

    monkeypatch.setattr(program, "compile_module", compile_nothing)
    model = make_model("llama", num_hidden_layers=1)
    compiled(model, k=2, lowering={"name": "inductor"}).generate([torch.arange(3, 24)], max_new_tokens=9)
    assert compiled_widths and max(compiled_widths) <= 6


class Call(torch.nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.function(*args, **kwargs)


def test_a_module_that_takes_no_rows_is_compiled_as_well():
    """As the one that holds the hidden state of P-EAGLE's mask rows."""
    constant = Call(lambda: 3)
    assert CompiledFor(4, Call(lambda: 2), constant)() == 3


@pytest.mark.usefixtures("torch_compile")
def test_code_that_was_compiled_for_other_ops_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor keeps code on disk, and knows ops by their names alone."""
    counters, linear = torch._dynamo.utils.counters, torch.fx.symbolic_trace(torch.nn.Linear(3, 2))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def misses() -> int:
        compiling._regions.clear()
        counters.clear()
        with torch.no_grad():
            compiling.compile_module(linear)(torch.ones(1, 3))
        return int(counters["inductor"]["fxgraph_cache_miss"])

    assert (misses(), misses()) == (1, 0)
    monkeypatch.setattr(compiling, "_digest", lambda: b"other ops")
    assert (misses(), misses()) == (1, 0)
