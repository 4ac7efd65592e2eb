"""``diff``: stages and dumps node by node, and the first node whose value differs."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from specgraph.dump import load_stage
from specgraph.errors import ConfigError
from specgraph.explore.diff import diff
from specgraph.explore.difference import difference, translate
from specgraph.explore.dump_files import Node, Stage, read_dump
from tests.decoding import compiled
from tests.models import shared_model


def dumped(folder: Path, edit: Callable[[PreTrainedModel], object] | None = None, k: int = 3) -> Path:
    """The dump of a small model that drafts with another one; ``edit`` changes a copy of it before."""
    model = shared_model("llama")
    if edit is not None:
        model = copy.deepcopy(model)
        edit(model)
    draft = shared_model("llama", seed=1)
    path: Path = compiled(model, "draft_model", k, draft, lowering={"name": "eager"}).dump(folder, weights=True)
    return path


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dumped(tmp_path_factory.mktemp("dump") / "graphs")


def stage(dump: Path, name: str) -> str:
    return str(next(dump.glob(f"*_{name}")))


def with_weight(model: PreTrainedModel, change: float) -> None:
    model.get_parameter("model.layers.1.mlp.up_proj.weight").data[0, 0] += change


def with_eps(model: PreTrainedModel) -> None:
    model.get_submodule("model.layers.1.input_layernorm").variance_epsilon = 1e-3


def test_two_stages_of_a_dump_show_what_the_pass_did(dump: Path) -> None:
    lines = diff(stage(dump, "insert_verify"), stage(dump, "insert_processors"), numerics=True).splitlines()
    assert lines[0] == "insert_verify -> insert_processors: step -0 +18 ~1"
    made = [line.split()[1] for line in lines if line.startswith("  + ")]
    assert made[-5:] == ["after_add_biases", "after_penalise", "after_ban_ngrams", "after_force_tokens", "recorded"]
    assert "  ~ verification = torch.ops.specgraph.verify.default(logits, " in "\n".join(lines)
    assert lines[-1].startswith("  values: all that both compute (") and lines[-1].endswith("equal in every bit")


def test_every_node_of_both_stages_is_in_the_difference_once(dump: Path) -> None:
    stages = read_dump(dump).stages
    for same in (True, False):
        for old, new in itertools.pairwise(stages):
            for found in difference(old, new, same_dump=same):
                first = [a.name for a, _ in found.entries if a is not None]
                second = [b.name for _, b in found.entries if b is not None]
                assert sorted(first) == sorted(node.name for node in old.graphs.get(found.graph, []))
                assert second == [node.name for node in new.graphs.get(found.graph, [])]


def test_a_dump_is_equal_to_itself_and_to_one_written_again(dump: Path, tmp_path: Path) -> None:
    lines = diff(str(dump), str(dumped(tmp_path / "again")), numerics=True).splitlines()
    headings, values = lines[::2], lines[1::2]
    assert all(line.endswith(": equal") for line in headings) and len(headings) == len(read_dump(dump).stages)
    assert all("equal in every bit" in line or line == "  values: as above" for line in values)
    assert sum("equal in every bit" in line for line in values) > 5


def test_the_first_node_of_another_model_is_named(dump: Path, tmp_path: Path) -> None:
    other = dumped(tmp_path / "eps", with_eps)
    lines = diff(stage(dump, "trace"), stage(other, "trace"), numerics=True).splitlines()
    assert lines[0] == "trace: target -0 +0 ~1"
    node = lines[2].split()[1]
    assert lines[2].split("  #")[0].endswith("1e-06)") and lines[3].split("  #")[0].endswith("0.001)")
    assert lines[4].strip() == "differs in: code"
    assert lines[5].startswith(f"  first value that differs: target/{node}, made by trace, in call 1 of step 1: ")
    # Of whole dumps, later stages are counted, and their nodes are not shown again.
    whole = diff(str(dump), str(other)).splitlines()
    assert sum(line.startswith("  ~ ") for line in whole) == 1
    assert [line.partition(": ")[2] for line in whole if line.startswith("insert_kv_cache: ")] == ["target -0 +0 ~1"]


@pytest.mark.parametrize(("change", "rounding"), [(1e-7, True), (0.5, False)])
def test_a_weight_that_differs_is_found_at_the_product_that_reads_it(
    dump: Path, tmp_path: Path, change: float, rounding: bool
) -> None:
    folder = dumped(tmp_path / "weights", lambda model: with_weight(model, change))
    heading, first, *further = diff(stage(dump, "trace"), stage(folder, "trace"), numerics=True).splitlines()
    product = next(
        node.name for node in read_dump(dump).stages[0].graphs["target"]
        if node.op == "call_function" and "layers[1].mlp.up_proj.weight" in node.code
    )  # fmt: skip
    assert heading == "trace: equal" and f" target/{product}, made by trace, " in first
    assert further == (["  no value differs by more than rounding"] if rounding else [])


def test_a_draft_more_is_shown_by_what_it_calls(dump: Path, tmp_path: Path) -> None:
    text = diff(str(dumped(tmp_path / "fewer", k=2)), str(dump))
    (heading,) = (line for line in text.splitlines() if line.startswith("insert_draft: "))
    assert heading == "insert_draft: step -0 +3 ~3"
    assert text.splitlines()[0] == "trace: equal"


def nodes(*codes: str) -> list[Node]:
    return [Node(code.split(" = ")[0], "call_function", code.split(" = ")[1].split("(")[0], (), code.split(" = ")[1],
                 None, None, "trace") for code in codes]  # fmt: skip


def test_a_node_more_only_renames_those_behind_it() -> None:
    old = Stage("a", {"step": nodes("mul = f(x)", "mul_1 = g(mul)", "cat = h(mul_1, cat=mul)")}, [], {})
    new = Stage(
        "a", {"step": nodes("mul = f(x)", "mul_1 = f2(x)", "mul_2 = g(mul)", "cat = h(mul_2, cat=mul)")}, [], {}
    )
    (found,) = difference(old, new, same_dump=False)
    assert [(a and a.name, b and b.name) for a, b in found.changed] == [(None, "mul_1")]
    assert found.renamed["mul_1"] == "mul_2"


def test_only_variables_are_translated() -> None:
    code = 'torch.ops.aten.cat.default([cat, x], cat=1, rule="cat", same=cat == x)'
    renamed = translate(code, {"cat": "cat_1", "rule": "no", "torch": "torch"})
    assert renamed == 'torch.ops.aten.cat.default([cat_1, x], cat=1, rule="cat", same=cat_1 == x)'


def test_long_differences_are_cut_and_one_graph_is_shown_whole(dump: Path) -> None:
    first, last = stage(dump, "trace"), stage(dump, "index_rows")
    text = diff(first, last)
    assert "more; graph=target shows all" in text
    whole = diff(first, last, graph="target")
    assert "more; graph=" not in whole and "  step" not in whole.splitlines()
    assert sum(line.startswith("  ~ ") for line in whole.splitlines()) > 20


def test_what_cannot_be_compared_is_refused(dump: Path, tmp_path: Path) -> None:
    one = stage(dump, "trace")
    for old, new, options, message in [
        (str(dump), one, {}, "One is a dump and the other a stage; give a stage of "),
        (one, one, {"graph": "targe"}, "graph=targe: the stages have no such graph; they have step, target"),
        (str(tmp_path / "none"), one, {}, "there is no such folder"),
        (str(tmp_path), one, {}, "is no dump"),
    ]:
        with pytest.raises(ConfigError, match=message):
            diff(old, new, **options)  # type: ignore[arg-type]


def test_values_need_weights(tmp_path: Path) -> None:
    folder = compiled(shared_model("llama"), "ngram", lowering={"name": "eager"}).dump(tmp_path / "g", weights=False)
    assert diff(str(folder), str(folder)).startswith("trace: equal")
    with pytest.raises(ConfigError, match="was dumped without weights"):
        diff(str(folder), str(folder), numerics=True)


def test_watching_changes_nothing(dump: Path) -> None:
    seen: list[tuple[str, str]] = []
    plain = load_stage(stage(dump, "trace"))
    watched = load_stage(stage(dump, "trace"), watch=lambda graph, name, value: seen.append((graph, name)))
    state = plain.allocate({"B": 1, "M": 1, "N": 1, "S": 8, "E": 1})
    window = torch.tensor([[3, 1, 4]])
    assert torch.equal(plain(window=window, **state), watched(window=window, **state))
    assert {graph for graph, _ in seen} >= {"step", "target", "lm_head"}


def test_a_dumped_stage_runs_in_a_process_that_has_compiled_nothing(dump: Path) -> None:
    script = (
        "import sys, torch, specgraph; stage = specgraph.load_dump(sys.argv[1]); "
        "state = stage.allocate({'B': 1, 'M': 1, 'N': 1, 'S': 8, 'E': 1}); "
        "print(tuple(stage(window=torch.tensor([[3, 1, 4]]), **state).shape))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, stage(dump, "trace")], capture_output=True, text=True, check=False
    )
    assert done.stdout == "(1, 3, 101)\n", done.stderr
