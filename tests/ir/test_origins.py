"""The line of a model's source that a traced node comes from."""

from __future__ import annotations

from pathlib import Path

import torch

from specgraph.ir.origins import model_line
from specgraph.ir.source import listing
from tests.decoding import compiled
from tests.models import shared_model

FRAME = '  File "{}", line {}, in forward\n    {}\n'


def test_the_innermost_line_that_is_the_models(tmp_path: Path) -> None:
    package = tmp_path / "own" / "layers"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    frames = [
        FRAME.format(tmp_path / "script.py", 3, "out = model(tokens)"),
        FRAME.format(package / "mixer.py", 17, "x = self.mix(x)  # café"),
        FRAME.format(Path(torch.__file__).parent / "nn" / "modules" / "linear.py", 134, "return F.linear(input)"),
    ]
    assert model_line({"stack_trace": "".join(frames)}) == "own/layers/mixer.py:17: x = self.mix(x)  # café"
    assert model_line({"stack_trace": frames[0] + frames[2]}) == "script.py:3: out = model(tokens)"
    assert model_line({"stack_trace": frames[2]}) is model_line({"stack_trace": None}) is model_line({}) is None


def test_nodes_of_a_model_have_lines_and_those_of_the_step_have_none() -> None:
    decoder = compiled(shared_model("llama"))
    last = decoder.stages[list(decoder.stages)[-1]]
    lines = [node["line"] for node in listing(last, "target") if node["op"] == "call_function"]
    known = [line for line in lines if line is not None]
    assert len(known) > len(lines) / 2
    assert all(line.startswith(("transformers/models/llama/", "transformers/")) for line in known)
    assert {node["line"] for node in listing(last)} == {None}
    # The innermost frame of a linear layer is PyTorch's; that of a rotation is in a function that is no ``forward``.
    traced = [(node["calls"], node["line"]) for node in listing(decoder.stages["trace"], "target")]
    linears = [line for calls, line in traced if calls == "aten.linear.default"]
    assert linears and all("_proj(" in line for line in linears)
    assert any("apply_rotary_pos_emb(" in line for calls, line in traced if calls == "aten.cat.default")
