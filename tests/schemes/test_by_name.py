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
from specgraph.ir.linear import linears
from specgraph.schemes import load as load_module
from specgraph.schemes.load import load_causal_lm
from tests.cli.conftest import save_model
from tests.decoding import CONFIG
from tests.models import make_model, ragged_prompts, saved
from tests.schemes.models import FORMATS, packed_layers, quantised

GROUPS = {"int4": 8, "mxfp4": None, "fp8": None}
every_scheme = pytest.mark.parametrize("scheme", GROUPS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each scheme, a model with a tokenizer whose linear layers are packed."""
    found = {}
    for scheme, size in GROUPS.items():
        path = save_model(tmp_path_factory.mktemp(scheme) / "target", intermediate_size=64)
        model = specgraph.quantise(AutoModelForCausalLM.from_pretrained(path), scheme, group_size=size)
        found[scheme] = saved(model, path)
    return found


@every_scheme
def test_a_command_decodes_a_quantised_model(
    scheme: str, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tokens are those of the loaded model's own ``generate``."""
    folder = folders[scheme]
    words = ["generate", f"model={folder}", "prompt=abc", "max_new_tokens=8", "eos_token_id=[]", "format=jsonl"]
    assert main([*words, "draft=ngram", "device=cpu", "dtype=float32"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), specgraph.load(folder)
    ids = tokenizer("abc", return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=8, eos_token_id=[], do_sample=False)[0, ids.shape[1] :]
    assert json.loads(line)["tokens"] == expected.tolist(), line


@pytest.mark.parametrize(
    ("architecture", "scheme"), [("llama", "int4"), ("llama", "mxfp4"), ("llama", "fp8"), ("gpt_oss", "mxfp4")]
)
def test_a_draft_model_is_loaded_with_packed_weights(architecture: str, scheme: str, tmp_path: Path) -> None:
    target, prompts = make_model("llama", seed=3), ragged_prompts()
    small = saved(quantised(architecture, scheme, torch.float32, layers=1), tmp_path)
    decoder = specgraph.compile_speculative(target, CONFIG, draft=small)
    held: Any = list(decoder.stages.values())[-1]
    names = {linear.scheme.name for m in held.modules.unchanged.values() for linear in linears(m.graph)}
    assert names == {"dense", FORMATS[scheme]}
    plain = specgraph.compile_speculative(target, {**CONFIG, "draft": {"kind": "none"}})
    expected = plain.generate(prompts, max_new_tokens=8).new_tokens
    found = decoder.generate(prompts, max_new_tokens=8).new_tokens
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@every_scheme
@pytest.mark.parametrize(
    ("dtype", "wanted"), [("auto", torch.float32), ("bfloat16", torch.bfloat16), (torch.float64, torch.float64)]
)
def test_the_dtype_is_that_of_all_that_is_not_packed(
    dtype: Any, wanted: torch.dtype, scheme: str, folders: dict[str, Path]
) -> None:
    model = load_causal_lm(folders[scheme], dtype, "model=x")
    assert model.dtype == wanted and len(packed_layers(model)) == 14


@pytest.mark.parametrize(
    ("scheme", "key", "value"),
    [("int4", "format", "marlin-24"), ("mxfp4", "format", "mxfp8-quantized"),
     ("fp8", "activation_scheme", "static")],
)  # fmt: skip
def test_another_format_of_a_known_tool_is_refused(scheme: str, key: str, value: str, tmp_path: Path) -> None:
    saved(quantised("llama", scheme), tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    stated["quantization_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert AutoConfig.from_pretrained(tmp_path).quantization_config[key] == value
    with pytest.raises(UnsupportedModelError, match=f"{key} of quantization_config is '{value}'"):
        load_causal_lm(tmp_path, "auto", "model=x")


@pytest.mark.parametrize("method", ["bitsandbytes", "torchao"])
def test_tools_whose_weights_only_they_unpack_are_refused(method: str, tmp_path: Path) -> None:
    """transformers would load them, and then no graph of them could be traced."""
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    message = f"quant_method .* is '{method}', whose weights only {method} unpacks; load the checkpoint from which"
    for read in (specgraph.load, lambda folder: load_causal_lm(folder, "auto", "model=x")):
        with pytest.raises(UnsupportedModelError, match=message):
            read(tmp_path)


@pytest.mark.parametrize("stated", [{"quant_method": "aqlm"}, "fp8"], ids=str)
def test_what_no_layout_of_ours_states_is_left_to_transformers(
    stated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stated}))
    asked: list[Any] = []
    monkeypatch.setattr(load_module, "load_by_transformers", lambda *given: asked.append(given))
    load_causal_lm(tmp_path, "auto", "model=x")
    assert asked == [(tmp_path, "auto", "model=x", False)]
