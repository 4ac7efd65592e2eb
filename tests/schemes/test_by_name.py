"""Quantised models that commands and drafts name by their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import specgraph
from specgraph.cli import main
from specgraph.errors import UnsupportedModelError
from specgraph.schemes.layers import PackedLinear
from specgraph.schemes.load import load_causal_lm
from tests.cli.conftest import save_model
from tests.decoding import CONFIG
from tests.models import make_model, ragged_prompts, saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, whose linear layers are in four bits."""
    path = save_model(tmp_path_factory.mktemp("packed") / "target")
    return saved(specgraph.quantise(AutoModelForCausalLM.from_pretrained(path), group_size=8), path)


def test_a_command_decodes_a_quantised_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tokens are those of the loaded model's own ``generate``."""
    words = ["generate", f"model={folder}", "prompt=abc", "max_new_tokens=8", "eos_token_id=[]", "format=jsonl"]
    assert main([*words, "draft=ngram", "device=cpu", "dtype=float32"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), specgraph.load(folder)
    ids = tokenizer("abc", return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=8, eos_token_id=[], do_sample=False)[0, ids.shape[1] :]
    assert json.loads(line)["tokens"] == expected.tolist(), line


def test_a_draft_model_is_loaded_with_packed_weights(tmp_path: Path) -> None:
    target, prompts = make_model("llama", seed=3), ragged_prompts()
    small = saved(specgraph.quantise(make_model("llama", seed=4, num_hidden_layers=1), group_size=16), tmp_path)
    decoder = specgraph.compile_speculative(target, CONFIG, draft=small)
    held: Any = list(decoder.stages.values())[-1]
    assert any("packed_linear" in str(node.target) for m in held.modules.unchanged.values() for node in m.graph.nodes)
    plain = specgraph.compile_speculative(target, {**CONFIG, "draft": {"kind": "none"}})
    expected = plain.generate(prompts, max_new_tokens=8).new_tokens
    found = decoder.generate(prompts, max_new_tokens=8).new_tokens
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("dtype", "wanted"), [("auto", torch.float32), ("bfloat16", torch.bfloat16), (torch.float64, torch.float64)]
)
def test_the_dtype_is_that_of_all_that_is_not_packed(dtype: Any, wanted: torch.dtype, folder: Path) -> None:
    model = load_causal_lm(folder, dtype, "model=x")
    assert model.dtype == wanted and sum(isinstance(layer, PackedLinear) for layer in model.modules()) == 14


def test_another_format_of_compressed_tensors_is_refused(tmp_path: Path) -> None:
    saved(specgraph.quantise(make_model("llama"), group_size=16), tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    stated["quantization_config"]["format"] = "float-quantized"
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert AutoConfig.from_pretrained(tmp_path).quantization_config["format"] == "float-quantized"
    with pytest.raises(UnsupportedModelError, match="format of quantization_config is 'float-quantized'"):
        load_causal_lm(tmp_path, "auto", "model=x")
