"""Recurrent layers in training: the losses and gradients of transformers' own function."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

from benchmarks.tiny_models.recurrent import fast_recurrence


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_5_text", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, linear_num_key_heads=1, linear_num_value_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def gradients(model: torch.nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("length", [5, 64, 150])
def test_gradients_are_those_of_transformers(length: int) -> None:
    model, tokens = make_model(), torch.randint(64, (3, length), generator=torch.Generator().manual_seed(1))
    theirs = gradients(model, tokens)
    with fast_recurrence(model):
        ours = gradients(model, tokens)
    assert any(not torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-6)


def test_a_cache_and_what_is_behind_the_context_are_those_of_transformers() -> None:
    model, tokens = make_model().eval(), torch.arange(10).unsqueeze(0)
    before = modeling_qwen3_5.torch_chunk_gated_delta_rule
    plain = model.generate(tokens, max_new_tokens=5, do_sample=False)
    with fast_recurrence(model):
        assert torch.equal(model.generate(tokens, max_new_tokens=5, do_sample=False), plain)
        assert modeling_qwen3_5.torch_chunk_gated_delta_rule is not before
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is before
