"""Graphs as Python: rendered source runs, dumps load again, and nobody's files are lost.

A dump is written once for all tests of it, so they are in one file.
"""

from __future__ import annotations

import ast
import json
import math
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, fx, nn

from specgraph.compiler.numerics import example
from specgraph.config.drafters import NGramConfig
from specgraph.drafters.draft_model import draft_model
from specgraph.drafters.ngram import NGramDrafter
from specgraph.drafters.none import NoDrafter
from specgraph.dump import LoadedStage, Module, class_name, dump, load_stage, render, weights_of
from specgraph.errors import ConfigError
from specgraph.frontend.first_program import first_program
from specgraph.frontend.tracing import trace
from specgraph.ir.graphs import new_module, set_attribute
from specgraph.ir.model_info import ModelInfo
from specgraph.ir.program import Program
from specgraph.kernels import step
from specgraph.kernels.state import Buffer, per_call
from specgraph.passes import PASSES
from specgraph.passes.pipeline import run_passes
from tests.models import make_model, shared_model

aten = torch.ops.aten


def shift(values: Tensor, by: float = 1.0) -> Tensor:
    return values + by


def toy_program() -> Program:
    """A step of its own: adds a row of a table to a total in place and moves on."""
    info = ModelInfo("toy", 7, 1, 4, torch.float32, torch.device("cpu"), None)
    program = Program(fx.Graph(), {}, {}, info, NoDrafter())
    program.modules["table"] = table_module()
    total = program.placeholder("total", Buffer(("B", 4), torch.float32, 0.5))
    start = program.placeholder("start", Buffer(("B",)))
    pair = program.placeholder("pair", (Buffer(("B", 2)), per_call(3, dtype=torch.bool)))
    first = program.call(operator.getitem, pair, 0)
    rows = program.call(step.row_positions, start, first, name="row_positions", role="positions")
    picked = program.call("table", positions=rows, name="picked")
    row = program.call(operator.getitem, picked, (slice(None), -1), name="row")
    added = program.call(aten.add_.Tensor, total, row, alpha=2)
    moved = program.call(aten.add_.Tensor, start, 1)
    program.set_output(program.call(aten.clone.default, added), program.call(aten.clone.default, moved))
    return program


def table_module() -> fx.GraphModule:
    root, graph = nn.Module(), fx.Graph()
    generator = torch.Generator().manual_seed(0)
    set_attribute(root, "layers.0.table", nn.Parameter(torch.randn(8, 4, generator=generator)))
    set_attribute(root, "layers.1.scale", torch.rand(5, 8, generator=generator).T)
    positions = graph.placeholder("positions")
    table, scale = graph.get_attr("layers.0.table"), graph.get_attr("layers.1.scale")
    mixed = graph.call_function(
        aten.mul.Tensor, (table, scale.graph.call_function(aten.slice.Tensor, (scale, 1, 0, 4)))
    )
    graph.output(graph.call_function(aten.embedding.default, (mixed, positions)))
    return new_module(root, graph, "table")


def toy_state() -> dict[str, Any]:
    pair = (torch.zeros(2, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.bool))
    return {"total": torch.ones(2, 4), "start": torch.tensor([0, 2]), "pair": pair}


def function_program(*calls: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> Program:
    """``x`` through a chain of calls; ``"x"`` among the arguments is the value so far."""
    info = ModelInfo("toy", 7, 1, 4, torch.float32, torch.device("cpu"), None)
    program = Program(fx.Graph(), {}, {}, info, NoDrafter())
    value = program.placeholder("x", Buffer(("B", 3, 4), torch.float32))
    for target, args, kwargs in calls:
        value = program.call(target, *(value if a == "x" else a for a in args), **kwargs)
    program.set_output(value)
    return program


def run_source(text: str, name: str = "step", **parts: Any) -> Module:
    namespace: dict[str, Any] = {"__name__": "rendered"}
    exec(compile(text, "rendered", "exec"), namespace)
    made: Module = namespace[class_name(name)](**parts)
    return made


def compiled_stages(kind: str = "draft_model", rule: str = "strict") -> dict[str, Program]:
    """All passes over a small model, and a draft that is another one or a part of the same."""
    target = trace(shared_model("llama"))
    draft = trace(shared_model("qwen2", seed=3)) if kind == "draft_model" else None
    made = draft_model(draft, 3) if draft else NGramDrafter(3, options=NGramConfig(max_ngram=3))
    ruled = ("insert_draft", "insert_verify")
    passes = [cls(rule=rule) if name in ruled else cls() for name, cls in PASSES.items()]  # type: ignore[call-arg]
    return run_passes(first_program(target, made), passes)[0]


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    """Bit for bit, through tuples and mappings."""
    if isinstance(theirs, Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), where
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert_same(ours[name], theirs[name], name)
    else:
        assert len(ours) == len(theirs), where
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(a, b, f"{where}[{index}]")


def assert_runs_alike(loaded: LoadedStage, program: Program, steps: int = 3) -> None:
    """Several steps from the same state, each on what the one before left."""
    states = [example(program, 4)[1] for _ in range(2)]
    window = torch.randint(101, (2, 4), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for index in range(steps):
            blocks = [window if index == 0 else state.get("next_window", window).clone() for state in states]
            assert_same(loaded(window=blocks[0], **states[0]), program.step()(window=blocks[1], **states[1]))
            assert_same(*states)
    assert loaded.inputs == program.inputs


# render


def test_the_source_of_a_step_reads_as_a_program():
    program = toy_program()
    program.one("positions").meta["pass_name"] = "by_hand"
    lines = [line.strip() for line in render(program).splitlines()]
    expected = [
        "total,  # f32[B, 4]",
        "pair,  # (i64[B, 2], bool[3])",
        "getitem = pair[0]  # i64[B, 2]",
        "row_positions = step_row_positions(start, getitem)  # i64[B, 2], by_hand",
        "picked = self.table(positions=row_positions)  # f32[B, 2, 4]",
        "row = picked[:, -1]  # f32[B, 4]",
        "add__tensor = torch.ops.aten.add_.Tensor(total, row, alpha=2)  # f32[B, 4]",
        "return clone_default, clone_default_1  # (f32[B, 4], i64[B])",
        "from specgraph.kernels.step import row_positions as step_row_positions",
    ]
    assert [line for line in expected if line not in lines] == []


def test_the_source_of_a_module_names_its_weights_as_python_does():
    text = render(toy_program(), "table")
    assert "class Table(Module):" in text
    assert "torch.ops.aten.slice.Tensor(self.layers[1].scale, 1, 0, 4)  # f32[8, 4]" in text
    assert "get_attr" not in text and "= None" not in text


def test_rendered_source_runs_as_the_graph_does():
    program = toy_program()
    weights = {name.removeprefix("table."): value for name, value in weights_of(program).items()}
    table = run_source(render(program, "table"), "table", weights=weights)
    ours, theirs = toy_state(), toy_state()
    loaded, graph = run_source(render(program), modules={"table": table}), program.step()
    with torch.no_grad():
        for _ in range(3):
            assert_same(loaded(**ours), graph(**theirs))
            assert_same(ours, theirs)
    assert not torch.equal(ours["total"], toy_state()["total"])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ((operator.add, ("x", 1), {}), "x + 1"),
        ((operator.getitem, ("x", (0, slice(None, None, 2), None)), {}), "x[0, ::2, None]"),
        ((operator.neg, ("x",), {}), "operator.neg(x)"),
        ((torch.sum, ("x",), {"dim": (0,), "dtype": torch.float64}), "torch.sum(x, dim=(0,), dtype=torch.float64)"),
        ((torch.nn.functional.relu, ("x",), {}), "torch.nn.functional.relu(x)"),
        ((aten.full_like.default, ("x", -math.inf), {"device": torch.device("cpu")}),
         'torch.ops.aten.full_like.default(x, -torch.inf, device=torch.device("cpu"))'),
        ((aten.mul.Tensor, ("x", 1e-5), {}), "torch.ops.aten.mul.Tensor(x, 1e-05)"),
        ((shift, ("x",), {"by": 0.1}), "test_dump_shift(x, by=0.1)"),
        ((aten.div.Tensor_mode, ("x", 2), {"rounding_mode": "floor"}),
         'torch.ops.aten.div.Tensor_mode(x, 2, rounding_mode="floor")'),
        ((len, ("x",), {}), "len(x)"),
    ],
)  # fmt: skip
def test_every_kind_of_call_is_written_and_runs(call: tuple[Any, ...], text: str):
    program = function_program(call)
    source = render(program)
    line = next(line for line in source.splitlines() if " = " in line).split(" = ")[1].split("  #")[0]
    assert line == text
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    ours, theirs = run_source(source)(x=x), program.step()(x=x)
    assert torch.equal(ours, theirs) if isinstance(theirs, Tensor) else ours == theirs


def test_names_that_python_would_confuse_are_kept_apart():
    program = function_program((torch.relu, ("x",), {}), (shift, ("x",), {}), (torch.relu, ("x",), {}))
    names = ["torch", "class", "shift"]
    for node, name in zip([n for n in program.graph.nodes if n.op == "call_function"], names, strict=True):
        node.name = name
    x = torch.randn(1, 3, 4)
    source = render(program)
    ast.parse(source)
    assert torch.equal(run_source(source)(x=x), torch.relu(torch.relu(x) + 1))


def test_a_function_that_cannot_be_imported_is_said_in_its_file():
    program = function_program((lambda x: x * 2, ("x",), {}))
    assert "was defined inside a function and cannot be imported: define it here." in render(program)


def test_a_graph_with_wrong_shapes_can_still_be_read():
    program = function_program((aten.view.default, ("x", [5, 7]), {}))
    assert "torch.ops.aten.view.default(x, [5, 7])" in render(program)


def test_an_unknown_module_is_named_with_those_that_exist():
    with pytest.raises(ConfigError, match="no module 'targt'; it has step, table"):
        render(toy_program(), "targt")


def test_the_step_of_a_draft_model_fits_a_screen():
    program = list(compiled_stages().values())[-1]
    text = program.print_readable()
    body = text[text.index("    ):\n") :].splitlines()[1:]
    assert len(body) <= 25
    assert all("  # " in line for line in body)
    assert any(line.strip().startswith("token_1 = propose_(None, draft_0, length") for line in body)
    assert 'logprobs="none", raw_logits=logits)  # (i64[B, T], i64[B], ... 5 in all), insert_verify' in text
    assert all(len(line) <= 120 for line in text[: text.index("class Step")].splitlines())
    assert "; " not in text.replace('"""', "")


# dump and load


def test_a_toy_stage_comes_back(tmp_path: Path):
    program = toy_program()
    folder = dump({"only": program}, tmp_path / "graphs", report="# toy\n")
    assert folder == tmp_path / "graphs"
    loaded = load_stage(folder / "00_only")
    assert loaded.name == "only" and loaded.inputs == program.inputs
    ours, theirs = loaded.allocate({"B": 2}), toy_state()
    assert ours["total"].shape == (2, 4) and bool((ours["total"] == 0.5).all())
    ours["total"].fill_(1), ours["start"].copy_(theirs["start"])
    graph = program.step()
    with torch.no_grad():
        for _ in range(3):
            assert_same(loaded(**ours), graph(**theirs))
            assert_same(ours, theirs)


@pytest.mark.parametrize(("kind", "rule"), [("draft_model", "strict"), ("draft_model", "probabilistic"),
                                            ("ngram", "strict")])  # fmt: skip
def test_every_stage_runs_bit_for_bit_as_before(tmp_path: Path, kind: str, rule: str):
    stages = compiled_stages(kind, rule)
    folder = dump(stages, tmp_path / "graphs", report="# report")
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == [f"{i:02d}_{n}" for i, n in enumerate(stages)]
    for index, (name, program) in enumerate(stages.items()):
        assert_runs_alike(load_stage(folder / f"{index:02d}_{name}"), program)


def test_a_stage_runs_with_the_weights_of_the_live_model(tmp_path: Path):
    stages = compiled_stages()
    folder = dump(stages, tmp_path / "graphs", report="# report", weights=False)
    assert not (folder / "weights.safetensors").exists()
    last = (folder / "report.md").read_text().splitlines()[-1]
    assert "were left out" in last and "weights_of(decoder.stages['capture_cuda_graph'])" in last
    program = stages["capture_cuda_graph"]
    (stage,) = folder.glob("*_capture_cuda_graph")
    loaded = load_stage(stage, tensors=weights_of(program))
    assert_runs_alike(loaded, program)
    weight = loaded.module.get_submodule("target.model.embed_tokens").get_buffer("weight")
    assert weight.data_ptr() == weights_of(program)["target.model.embed_tokens.weight"].data_ptr()


def test_weights_are_saved_once(tmp_path: Path):
    tied = make_model("llama", tie_word_embeddings=True)
    traced = trace(tied)
    program = first_program(traced, draft_model(traced, 1))
    folder = dump({"a": program, "b": program.copy()}, tmp_path / "graphs", report="# report")
    with safe_open(folder / "weights.safetensors", "pt") as file:
        keys = set(file.keys())
    distinct = {t.data_ptr() for t in weights_of(program).values()}
    assert len(keys) == len(distinct) < len(weights_of(program))
    names = json.loads((folder / "01_b" / "weights.json").read_text())["names"]
    tied_names = {name: key for name, key in names.items() if "lm_head" in name or "embed_tokens" in name}
    assert len(tied_names) == 4 and len(set(tied_names.values())) == 1
    loaded = dict(load_stage(folder / "01_b").module.named_buffers(remove_duplicate=False))
    assert len({id(loaded[name]) for name in tied_names}) == 1


def test_buffers_that_a_state_dict_leaves_out_survive(tmp_path: Path):
    model = shared_model("llama")
    assert not any("inv_freq" in name for name in model.state_dict())
    program = first_program(trace(model), NoDrafter())
    folder = dump({"trace": program}, tmp_path / "graphs", report="")
    rotary: Any = load_stage(folder / "00_trace").module.get_submodule("target.model.rotary_emb")
    assert torch.equal(rotary.inv_freq, model.model.rotary_emb.inv_freq)


def test_views_of_one_memory_and_their_strides_survive(tmp_path: Path):
    base = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    views = {"whole": base, "left": base[:, :3], "turned": base.T, "wide": base[:1].expand(3, 6)}
    root, graph = nn.Module(), fx.Graph()
    for name, value in views.items():
        set_attribute(root, name, value)
    graph.output(tuple(graph.get_attr(name) for name in views))
    program = toy_program()
    program.modules["views"] = new_module(root, graph, "views")
    folder = dump({"only": program}, tmp_path / "graphs", report="")
    loaded = load_stage(folder / "00_only").module.get_submodule("views")
    for name, value in views.items():
        assert torch.equal(loaded.get_buffer(name), value), name
    assert loaded.get_buffer("turned").stride() == (1, 6) and loaded.get_buffer("left").stride() == (6, 1)


# folders


def test_what_is_no_folder_is_refused(tmp_path: Path):
    for folder, weights, message in (
        (3, None, "A dump goes to a folder, which is given by its path, not by int"),
        (tmp_path, "yes", "weights is True, False or None, not 'yes'"),
    ):
        with pytest.raises(ConfigError, match=message):
            dump({}, folder, report="", weights=weights)


def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path: Path):
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "chapter.md").write_text("years of work")
    with pytest.raises(ConfigError, match=r"thesis is not empty and holds no dump of specgraph\. Nothing was written"):
        dump({"only": toy_program()}, mine, report="")
    assert [p.name for p in tmp_path.rglob("*")] == ["thesis", "chapter.md"]
    with pytest.raises(ConfigError, match=r"chapter\.md is a file"):
        dump({"only": toy_program()}, mine / "chapter.md", report="")


@pytest.mark.parametrize("marker", ["", "{}", '{"written_by": "specgraph", "files": ["../chapter.md"]}',
                                    '{"written_by": "someone", "files": []}'])  # fmt: skip
def test_a_marker_that_is_not_ours_marks_nothing(tmp_path: Path, marker: str):
    folder = tmp_path / "graphs"
    folder.mkdir()
    (folder / "dump.json").write_text(marker)
    with pytest.raises(ConfigError, match="holds no dump of specgraph"):
        dump({"only": toy_program()}, folder, report="")
    assert (folder / "dump.json").read_text() == marker


def test_an_earlier_dump_is_replaced_and_notes_beside_it_stay(tmp_path: Path):
    folder = tmp_path / "graphs"
    dump({"a": toy_program(), "b": toy_program()}, folder, report="first")
    (folder / "notes.md").write_text("mine")
    (folder / "01_b" / "notes.md").write_text("mine, too")
    dump({"c": toy_program()}, folder, report="second", weights=False)
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    stage = [f"00_c/{name}" for name in ("inputs.json", "nodes.json", "step.py", "table.py", "weights.json")]
    assert files == sorted([*stage, "01_b/notes.md", "compilation.json", "dump.json", "notes.md", "report.md"])
    assert (folder / "report.md").read_text().startswith("second")
    assert not (folder / "00_a").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["graphs"]


def test_a_users_file_in_the_way_is_not_overwritten(tmp_path: Path):
    folder = dump({"a": toy_program()}, tmp_path / "graphs", report="first")
    (folder / "01_b").mkdir()
    (folder / "01_b" / "step.py").write_text("mine")
    with pytest.raises(ConfigError, match=r"01_b/step\.py is in the way and was not written by a dump"):
        dump({"a": toy_program(), "b": toy_program()}, folder, report="second")
    assert (folder / "01_b" / "step.py").read_text() == "mine"
    assert (folder / "report.md").read_text().startswith("first")


def test_a_failure_leaves_nothing_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = dump({"a": toy_program()}, tmp_path / "graphs", report="first")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specgraph.dump.files.save_file", full)
    for target in (folder, tmp_path / "new"):
        with pytest.raises(ConfigError, match=r"cannot be written .*No space left on device.* Choose another folder\."):
            dump({"a": toy_program(), "b": toy_program()}, target, report="second")
    assert [p.name for p in tmp_path.iterdir()] == ["graphs"]
    assert (folder / "report.md").read_text().startswith("first") and not (folder / "01_b").exists()
    load_stage(folder / "00_a")


def test_weights_over_the_limit_are_left_out_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("specgraph.dump.files.SAVED_UNASKED", 100)
    folder = dump({"a": toy_program()}, tmp_path / "graphs", report="")
    assert not (folder / "weights.safetensors").exists()
    with pytest.raises(ConfigError, match=r"dumped without weights: pass tensors=.*weights_of.*weights=True\.$"):
        load_stage(folder / "00_a")
    dump({"a": toy_program()}, folder, report="", weights=True)
    assert load_stage(folder / "00_a").name == "a"


def test_wrong_folders_and_weights_are_said_in_one_sentence(tmp_path: Path):
    folder = dump({"a": toy_program()}, tmp_path / "graphs", report="")
    with pytest.raises(ConfigError, match=r"is not a dumped stage .* one of its stages, such as .*00_a\.$"):
        load_stage(folder)
    with pytest.raises(ConfigError, match=r"There is no folder .*nothing; give a folder below"):
        load_stage(tmp_path / "nothing")
    weights = weights_of(toy_program())
    del weights["table.layers.0.table"]
    with pytest.raises(ConfigError, match=r"tensors lacks table\.layers\.0\.table"):
        load_stage(folder / "00_a", tensors=weights)
    with pytest.raises(ConfigError, match=r"is float32 \[2\], .* needs float32 \[8, 4\]"):
        load_stage(folder / "00_a", tensors={**weights, "table.layers.0.table": torch.ones(2)})
    (folder / "00_a" / "step.py").write_text("import nowhere")
    with pytest.raises(ConfigError, match=r"step\.py cannot be loaded \(ModuleNotFoundError.*\); mend the file"):
        load_stage(folder / "00_a")


def test_a_file_that_somebody_edited_runs_as_edited(tmp_path: Path):
    folder = dump({"a": toy_program()}, tmp_path / "graphs", report="")
    path = folder / "00_a" / "step.py"
    path.write_text(path.read_text().replace("alpha=2", "alpha=0"))
    state = toy_state()
    load_stage(folder / "00_a")(**state)
    assert torch.equal(state["total"], torch.ones(2, 4))
    assert not list(folder.rglob("__pycache__"))
