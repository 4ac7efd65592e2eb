"""``model=FILE.gguf`` on the command line: the tokens of the same weights loaded by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import specgraph
from specgraph.cli import main
from specgraph.cli.loading import load_model

gguf = pytest.importorskip("gguf", reason="the extra 'gguf' is not installed")

TOKENIZER = Path(__file__).parents[2] / "examples/models/tiny-math/target"
QUICK = ["prompt=one two", "max_new_tokens=8", "lowering=eager", "debug.self_check=false", "format=jsonl"]
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def stored_name(name: str) -> str:
    """The name that llama.cpp has for a tensor of Qwen2."""
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}  # fmt: skip
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, leaf = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[module]}.{leaf}"


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    size = len(AutoTokenizer.from_pretrained(TOKENIZER))
    config = Qwen2Config(
        vocab_size=size, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with its matrices in eight bits, as those weights are then."""
    path, config = tmp_path_factory.mktemp("gguf") / "tiny.gguf", model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    vocabulary = json.loads((TOKENIZER / "tokenizer.json").read_text())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(AutoTokenizer.from_pretrained(TOKENIZER).convert_ids_to_tokens(range(config.vocab_size)))
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in vocabulary["merges"]])
    writer.add_eos_token_id(0)
    for name, tensor in model.state_dict().items():
        kind = gguf.GGMLQuantizationType.Q8_0 if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        packed = gguf.quants.quantize(tensor.float().numpy(), kind)
        writer.add_tensor(stored_name(name), packed, raw_dtype=kind)
        tensor.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kind).reshape(tensor.shape).copy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("beside", [False, True])
def test_a_gguf_file_is_a_model(file: Path, model: Any, beside: bool, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"model={file.parent}", f"gguf_file={file.name}"] if beside else [f"model={file}"]
    load_model.cache_clear()
    assert main(["generate", *given, *QUICK, "dtype=float32"]) == 0
    shown = capsys.readouterr()
    record = json.loads(shown.out)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    prompt = tokenizer("one two", return_tensors="pt")
    expected = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert record["tokens"] == expected.tolist()
    assert f"model={file}: the weights of the GGUF file are dequantised to float32" in shown.err


def test_a_gguf_file_is_a_draft(file: Path, model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    load_model.cache_clear()
    assert main(["generate", f"model={file}", f"draft={file}", *QUICK, "dtype=float32"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["tokens"]
    assert f"draft={file}: the weights of the GGUF file are dequantised to the dtype of the model" in shown.err
    config = {"lowering": "eager", "draft": {"num_speculative_tokens": 4}}
    decoder = specgraph.compile_speculative(model, config, draft=file)
    prompt = torch.tensor([5, 6, 7])
    out = decoder.generate([prompt], max_new_tokens=8)
    assert out.new_tokens[0].equal(model.generate(prompt[None], max_new_tokens=8, do_sample=False)[0, 3:])
    assert out.stats.acceptance_per_position[0] == 1  # it is the same model
    assert f"the weights of {file} are dequantised to float32" in decoder.report()
    with pytest.raises(specgraph.ConfigError, match=r"The draft '.*none\.gguf' cannot be .*: there is no such file"):
        specgraph.compile_speculative(model, draft=file.parent / "none.gguf")


def test_what_transformers_has_dequantised_is_a_model_like_any_other(file: Path, model: Any) -> None:
    """Without a kernel for packed weights it dequantises them, and still calls the model quantised."""
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    prompt = torch.tensor([5, 6, 7])
    expected = model.generate(prompt[None], max_new_tokens=8, do_sample=False)[0, 3:]
    decoder = specgraph.compile_speculative(loaded)
    assert decoder.generate([prompt], max_new_tokens=8).new_tokens[0].equal(expected)


def test_a_file_that_is_not_there_or_cannot_be_read_is_one_sentence(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", f"model={file.parent}/other.gguf", *QUICK]) == 2
    assert f"model={file.parent}/other.gguf: there is no such file" in capsys.readouterr().err
    broken = file.parent / "broken.gguf"
    broken.write_bytes(b"GGUF")
    assert main(["generate", f"model={broken}", *QUICK]) == 2
    assert f"error: model={broken} " in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["generate", f"model={file}", *QUICK]) == 2
    assert "install it with pip install -e '.[gguf]'" in capsys.readouterr().err
