"""Masks: each attention call is judged by the mask that reaches it, and by no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function, create_causal_mask, create_chunked_causal_mask
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

from specgraph.errors import UnsupportedModelError
from specgraph.frontend.masks import AttentionCall, BuiltMask, check_masks
from specgraph.frontend.tracing import ATTENTION, trace
from tests.models import WINDOW, make_model

BUILDERS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "slice": lambda mask: mask[:, :, :, : mask.shape[-1]],
    "device": lambda mask: mask.to("cpu"),
    "dtype": lambda mask: mask.to(torch.bool),
    "layout": lambda mask: mask.contiguous(),
    "none": lambda mask: None,
}
"""What a model may do with its mask, or leave it to the attention."""
ALTERED: dict[str, Callable[[Tensor], Tensor]] = {
    "combined": lambda mask: mask & torch.ones_like(mask),
    "turned": lambda mask: mask.transpose(-1, -2),
    "shorter": lambda mask: mask[:, :, :, :64],  # has no effect yet in a forward of a few tokens
    "last ones": lambda mask: mask[:, :, -64:],
    "additive": lambda mask: mask.to(torch.float32),
    "written": lambda mask: mask.logical_or_(mask),
    "cell written": lambda mask: mask.index_put_([torch.tensor(0)] * 4, torch.tensor(True)),
    "its own": lambda mask: torch.ones(mask.shape[-2:], dtype=torch.bool).tril(),
}


def odd(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Shows a token others that come later."""
    return key % 2 == 0


def llama_with(change: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A llama that changes the mask it has built."""

    def build(**kwargs: Any) -> Any:
        mask = create_causal_mask(**kwargs)
        return None if mask is None else change(mask)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", build)
    return make_model("llama")


def windows(model: PreTrainedModel) -> list[int | None]:
    """The window of every attention node of the traced model."""
    return [n.kwargs.get("window") for n in trace(model).body.graph.nodes if n.target is ATTENTION]


@pytest.mark.parametrize("name", BUILDERS)
def test_a_mask_that_is_passed_on_whole_is_recognised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert windows(llama_with(BUILDERS[name], monkeypatch)) == [None, None]


@pytest.mark.parametrize("name", ALTERED)
def test_an_altered_mask_is_refused_with_its_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama_with(ALTERED[name], monkeypatch)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM alters the attention mask of layer 0, or builds"):
        trace(model)


def test_a_mask_is_recognised_in_inference_mode_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        assert windows(llama_with(BUILDERS["slice"], monkeypatch)) == [None, None]
        with pytest.raises(UnsupportedModelError, match="alters the attention mask of layer 0"):
            trace(llama_with(ALTERED["written"], monkeypatch))


def test_an_odd_mask_that_no_layer_uses_is_of_no_importance(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(**kwargs: Any) -> Any:
        create_causal_mask(**kwargs, or_mask_function=odd)
        return create_causal_mask(**kwargs)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", build)
    assert windows(make_model("llama")) == [None, None]


def test_a_window_matters_where_a_layer_uses_its_mask() -> None:
    # qwen2_moe builds the mask of its window, 0 if it has none, whether a layer is given it or not; and the layers that
    # are given it do not tell their attention about the window.
    assert windows(make_model("qwen2_moe", use_sliding_window=False)) == [None, None]
    options = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    with pytest.raises(UnsupportedModelError, match=r"Qwen2Moe.* gives layer 0 .* its attention names \(None\)"):
        trace(make_model("qwen2_moe", **options))


def test_a_window_that_no_position_reaches_is_none() -> None:
    # phimoe tells no attention about its window, which in the published model is as long as its longest sequence.
    assert windows(make_model("phimoe", sliding_window=128)) == [None, None]
    with pytest.raises(UnsupportedModelError, match=r"Phimoe.* gives layer 0 .* its attention names \(None\)"):
        trace(make_model("phimoe", sliding_window=127))


@pytest.mark.parametrize("create", [create_chunked_causal_mask, create_causal_mask])
@pytest.mark.parametrize(("name", "layer"), [("create_sliding_window_causal_mask", 0), ("create_causal_mask", 1)])
def test_an_odd_mask_is_refused_with_the_layer_that_uses_it(
    create: Callable[..., Any], name: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("gemma2")
    model.config.attention_chunk_size = 8
    function = {} if create is create_chunked_causal_mask else {"or_mask_function": odd}
    monkeypatch.setattr(modeling_gemma2, name, lambda **kwargs: create(**kwargs, **function))
    message = rf"Gemma2.* layer {layer} an attention mask that is not the causal window .*\({(WINDOW, None)[layer]}\)"
    with pytest.raises(UnsupportedModelError, match=message):
        trace(model)


def test_a_layer_that_is_given_the_mask_of_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Both masks are windows that some layer names: only which of them reaches which layer is wrong.
    masks = modeling_gemma2.create_causal_mask, modeling_gemma2.create_sliding_window_causal_mask
    monkeypatch.setattr(modeling_gemma2, "create_causal_mask", masks[1])
    monkeypatch.setattr(modeling_gemma2, "create_sliding_window_causal_mask", masks[0])
    with pytest.raises(UnsupportedModelError, match="gives layer 0 an attention mask that is not the causal window"):
        trace(make_model("gemma2"))


def test_a_window_needs_a_mask() -> None:
    mask = BuiltMask.build(causal_mask_function, batch_size=1, q_length=3, kv_length=3)
    check_masks([AttentionCall(mask, None), AttentionCall(None, None)], "Toy")
    with pytest.raises(UnsupportedModelError, match=r"Toy gives layer 1 .* its attention names \(4\)"):
        check_masks([AttentionCall(mask, None), AttentionCall(None, 4)], "Toy")


def test_what_is_exported_must_be_what_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama", num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    forward = attention.forward

    def windowed(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs, **({"sliding_window": 4} if torch.compiler.is_exporting() else {}))

    monkeypatch.setattr(attention, "forward", windowed)
    with pytest.raises(
        UnsupportedModelError, match=r"LlamaForCausalLM makes other attention calls .* \[4\] instead of \[None\]"
    ):
        trace(model)
