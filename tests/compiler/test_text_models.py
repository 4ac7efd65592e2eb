"""Multimodal models decode text by their text models: the tokens are those of the whole model's own ``generate``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

import specgraph
from specgraph.compiler.text_models import text_model
from specgraph.errors import InputError, UnsupportedModelError
from specgraph.frontend.tracing import is_multimodal
from tests.models import make_model

TEXT: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "initializer_range": 0.3,
}  # fmt: skip
VISION: dict[str, Any] = {"intermediate_size": 48, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN_VISION = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}
QWEN_IDS = {"image_token_id": 299, "video_token_id": 298, "vision_start_token_id": 297, "vision_end_token_id": 296}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
"""Rotary embeddings of three positions for each token, which are equal in text."""


def gemma3() -> Any:
    vision = {"hidden_size": 32, "num_hidden_layers": 1, **VISION}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=TEXT | {"sliding_window": 16}, vision_config=vision,
                     mm_tokens_per_image=4, image_token_index=299, boi_token_index=297, eoi_token_index=298)
    )  # fmt: skip


def llava() -> Any:
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 2, **VISION}
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=TEXT | {"model_type": "llama"}, vision_config=vision,
                    image_token_index=299)
    )  # fmt: skip


def qwen2_5_vl() -> Any:
    text, vision = TEXT | {"rope_parameters": ROPE}, QWEN_VISION | {"depth": 1}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **QWEN_IDS))


def qwen3_vl() -> Any:
    text, vision = TEXT | {"rope_parameters": ROPE}, QWEN_VISION | {"depth": 2, "deepstack_visual_indexes": [0]}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **QWEN_IDS))


def mistral3() -> Any:
    vision = {"model_type": "pixtral", "hidden_size": 32, "num_hidden_layers": 1, **VISION}
    return Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=TEXT | {"model_type": "mistral"}, vision_config=vision,
                       image_token_index=299)
    )  # fmt: skip


def smolvlm() -> Any:
    vision = {"hidden_size": 32, "num_hidden_layers": 1, **VISION}
    return SmolVLMForConditionalGeneration(
        SmolVLMConfig(text_config=TEXT | {"model_type": "llama"}, vision_config=vision,
                      image_token_id=299)
    )  # fmt: skip


def doubled(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    model = make().double().eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("make", [gemma3, llava, mistral3, qwen2_5_vl, qwen3_vl, smolvlm])
def test_tokens_of_text_prompts_are_those_of_the_whole_model(make: Callable[[], Any]) -> None:
    model = doubled(make)
    prompts = torch.randint(1, 290, (2, 21))
    expected = model.generate(prompts, max_new_tokens=24, do_sample=False)
    before = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    decoder = specgraph.compile_speculative(model, "ngram")
    assert decoder.model is model
    out = decoder.generate(prompts, max_new_tokens=24, eos_token_id=[])
    assert torch.equal(out.sequences, expected)
    assert before == {name: tensor.data_ptr() for name, tensor in model.named_parameters()}


def test_an_attached_model_takes_text_and_refuses_images_by_name() -> None:
    model = doubled(gemma3)
    prompts = torch.randint(1, 290, (1, 9))
    expected = model.generate(prompts, max_new_tokens=8, do_sample=False)
    specgraph.attach(model)
    assert torch.equal(model.generate(prompts, max_new_tokens=8, do_sample=False), expected)
    with pytest.raises(InputError, match="does not take pixel_values="):
        model.generate(prompts, pixel_values=torch.zeros(1, 3, 28, 28), max_new_tokens=8)
    specgraph.detach(model)
    assert torch.equal(model.generate(prompts, max_new_tokens=8, do_sample=False), expected)


def test_a_layer_of_the_whole_model_that_is_replaced_is_noticed() -> None:
    model = doubled(llava)
    decoder = specgraph.compile_speculative(model)
    model.lm_head = torch.nn.Linear(64, 300, bias=False).double()
    with pytest.raises(InputError, match="lm_head was replaced by a Linear"):
        decoder.generate(torch.randint(1, 290, (1, 9)), max_new_tokens=2)


def test_other_models_are_left_alone() -> None:
    llama = make_model("llama", num_hidden_layers=1)
    assert text_model(llama) is llama and not is_multimodal(llama)
    with torch.device("meta"):
        t5 = T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16))
    assert not is_multimodal(t5) and not is_multimodal("gpt2")


def test_a_text_model_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = doubled(llava)
    whole = model.forward

    def capped(*args: Any, **kwargs: Any) -> Any:
        out = whole(*args, **kwargs)
        out.logits = out.logits.tanh()
        return out

    monkeypatch.setattr(model, "forward", capped)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM inside of it compute other logits of 1 token "):
        specgraph.compile_speculative(model)


def test_one_whose_text_has_other_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = doubled(llava)
    whole = model.forward
    every_second = torch.arange(0, 2 * 8, 2)[None]
    monkeypatch.setattr(
        model, "forward",
        lambda input_ids, **options: whole(
            input_ids=input_ids, position_ids=every_second[:, : input_ids.shape[1]], **options
        ),
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="compute other logits of 8 tokens "):
        specgraph.compile_speculative(model)


def test_one_without_a_projection_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = doubled(llava)
    monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    with pytest.raises(UnsupportedModelError, match="has no projection of which a causal LM could be made"):
        specgraph.compile_speculative(model)
