"""A decoder notices a change of its model that it does not follow, and it follows what is written in place."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import pipeline

import specgraph
from specgraph import InputError, SpeculativeDecoder
from tests.decoding import CONFIG, compiled, reference_greedy
from tests.dropin.test_attach import word_tokenizer
from tests.models import double_model, make_head, make_model, ragged_prompts

PROMPTS = ragged_prompts()
NEW = 6
AGAIN = "after this decoder was compiled, .* compile the model again"


class Lora(nn.Module):
    """A low-rank update around a linear layer, as peft puts it there."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + self.lora_b(self.lora_a(x))
        return out


def doubled(self: nn.Linear, x: Tensor) -> Tensor:
    return 2 * nn.Linear.forward(self, x)


class Doubled(nn.Linear):
    forward = doubled


def swap(module: nn.Module, name: str, new: Any) -> Callable[[], None]:
    """Set an attribute; returns what undoes it."""
    before = getattr(module, name)
    setattr(module, name, new)
    return lambda: setattr(module, name, before)


def attention(model: Any) -> Any:
    return model.model.layers[1].self_attn


def lora(model: Any) -> Callable[[], None]:
    return swap(attention(model), "q_proj", Lora(attention(model).q_proj))


def new_parameter(model: Any) -> Callable[[], None]:
    return swap(model.model.norm, "weight", nn.Parameter(model.model.norm.weight.detach().clone()))


def shorter(model: Any) -> Callable[[], None]:
    weight = model.lm_head.weight
    before = weight.data
    weight.data = before[:50].clone()
    return lambda: setattr(weight, "data", before)


def resized(model: Any) -> Callable[[], None]:
    embedding, head = model.get_input_embeddings(), model.lm_head
    before = embedding.weight.data
    model.resize_token_embeddings(200, mean_resizing=False)

    def undo() -> None:
        embedding.weight.data, model.lm_head = before, head

    return undo


def half(model: Any) -> Callable[[], None]:
    before = [parameter.data for parameter in model.parameters()]
    rotary = model.model.rotary_emb
    buffers = dict(rotary.named_buffers())
    model.half()

    def undo() -> None:
        for parameter, data in zip(model.parameters(), before, strict=True):
            parameter.data = data
        rotary._buffers.update(buffers)

    return undo


def elsewhere(model: Any) -> Callable[[], None]:
    weight = model.lm_head.weight
    before = weight.data
    model.lm_head._parameters["weight"] = nn.Parameter(before.to("meta"))
    return lambda: model.lm_head._parameters.update(weight=weight)


def removed(model: Any) -> Callable[[], None]:
    layer = model.model.layers[0]
    norm = layer._modules.pop("input_layernorm")
    return lambda: layer._modules.update(input_layernorm=norm)


def forward(model: Any) -> Callable[[], None]:
    linear = attention(model).v_proj
    linear.forward = types.MethodType(doubled, linear)
    return lambda: delattr(linear, "forward")


def parametrized(model: Any) -> Callable[[], None]:
    linear = attention(model).o_proj
    weight = linear._parameters.pop("weight")
    linear.__class__ = Doubled

    def undo() -> None:
        linear.__class__ = nn.Linear
        linear._parameters["weight"] = weight

    return undo


def tied(model: Any) -> Callable[[], None]:
    return swap(model.lm_head, "weight", model.model.embed_tokens.weight)


def hooked(model: Any) -> Callable[[], None]:
    handle = attention(model).v_proj.register_forward_hook(lambda module, args, out: 2 * out)
    return lambda: handle.remove()


CHANGES: dict[str, tuple[Callable[[Any], Callable[[], None]], str]] = {
    "LoRA": (lora, "model.layers.1.self_attn.q_proj was replaced by a Lora"),
    "new parameter": (new_parameter, "model.norm.weight was replaced by another tensor"),
    "shorter": (shorter, r"lm_head.weight was resized from \[101, 32\] to \[50, 32\]"),
    "resize_token_embeddings": (resized, "lm_head was replaced by a Linear"),
    "dtype": (half, "model.embed_tokens.weight was converted from torch.float64 to torch.float16"),
    "device": (elsewhere, "lm_head.weight was moved from cpu to meta"),
    "a layer less": (removed, "model.layers.0.input_layernorm was removed"),
    "forward": (forward, "model.layers.1.self_attn.v_proj got another forward method"),
    "class": (parametrized, "model.layers.1.self_attn.o_proj became a Doubled"),
    "tied": (tied, "lm_head.weight was replaced by another tensor"),
    "hook": (hooked, "model.layers.1.self_attn.v_proj got another forward hook"),
}


@pytest.fixture(scope="module")
def pair() -> tuple[Any, SpeculativeDecoder, list[Tensor]]:
    model = double_model("llama", 0)
    decoder = compiled(model)
    return model, decoder, decoder.generate(PROMPTS, max_new_tokens=NEW).new_tokens


def calls(decoder: SpeculativeDecoder) -> list[Callable[[], object]]:
    return [
        lambda: decoder.generate(PROMPTS, max_new_tokens=NEW),
        lambda: decoder.stream(PROMPTS, max_new_tokens=NEW),
        lambda: decoder.session().submit(PROMPTS[0], max_new_tokens=NEW),
        lambda: decoder.score(PROMPTS),
    ]


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_is_named_by_every_call_until_the_change_is_undone(
    name: str, pair: tuple[Any, SpeculativeDecoder, list[Tensor]]
) -> None:
    model, decoder, expected = pair
    change, message = CHANGES[name]
    undo = change(model)
    for call in calls(decoder):
        with pytest.raises(InputError, match=f"^{message} {AGAIN}") as caught:
            call()
        assert "\n" not in str(caught.value)
    undo()
    again = decoder.generate(PROMPTS, max_new_tokens=NEW).new_tokens
    assert all(map(torch.equal, again, expected))


def test_hooks_that_were_there_are_run_and_must_stay() -> None:
    model = double_model("llama", 0)
    plain = reference_greedy(model, PROMPTS, NEW)
    undo = hooked(model)
    expected = reference_greedy(model, PROMPTS, NEW)
    decoder = compiled(model)
    model(PROMPTS[0].unsqueeze(0), output_hidden_states=True)  # for which transformers adds hooks of its own
    new = decoder.generate(PROMPTS, max_new_tokens=NEW).new_tokens
    assert all(map(torch.equal, new, expected)) and not all(map(torch.equal, new, plain))
    undo()
    with pytest.raises(InputError, match=r"v_proj lost a forward hook"):
        decoder.generate(PROMPTS, max_new_tokens=NEW)


def test_a_session_that_is_open_takes_no_further_sequences_of_a_changed_model(
    pair: tuple[Any, SpeculativeDecoder, list[Tensor]],
) -> None:
    model, decoder, _ = pair
    with decoder.session() as session:
        session.submit(PROMPTS[0], max_new_tokens=NEW)
        undo = lora(model)
        with pytest.raises(InputError, match="q_proj was replaced by a Lora"):
            session.submit(PROMPTS[1], max_new_tokens=NEW)
        undo()
        session.submit(PROMPTS[1], max_new_tokens=NEW)
        assert sum(event.finish_reason is not None for event in session) == 2


def train(model: Any, tmp_path: Path) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = PROMPTS[1].unsqueeze(0)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimiser.step()


def load(model: Any, tmp_path: Path) -> None:
    torch.save(double_model("llama", 7).state_dict(), tmp_path / "weights.pt")
    model.load_state_dict(torch.load(tmp_path / "weights.pt"))


def copy_in(model: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0))


def through_data(model: Any, tmp_path: Path) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(0)


def train_mode(model: Any, tmp_path: Path) -> None:
    model.train().requires_grad_(False)
    model.eval().to(model.device, model.dtype)
    model(input_ids=PROMPTS[1].unsqueeze(0), output_hidden_states=True)


@pytest.mark.parametrize("change", [train, load, copy_in, through_data, train_mode])
def test_values_written_in_place_reach_the_decoder(change: Callable[[Any, Path], None], tmp_path: Path) -> None:
    model = double_model("llama", 0)
    decoder = compiled(model)
    before = decoder.generate(PROMPTS, max_new_tokens=NEW).new_tokens
    change(model, tmp_path)
    after = decoder.generate(PROMPTS, max_new_tokens=NEW).new_tokens
    expected = reference_greedy(model, PROMPTS, NEW)
    assert all(torch.equal(a, b[: len(a)]) and len(a) for a, b in zip(after, expected, strict=True))
    assert (change is train_mode) == all(map(torch.equal, before, after))


def test_own_forward_passes_that_set_the_rotary_frequencies_change_nothing() -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
               "original_max_position_embeddings": 32, "rope_theta": 1e4}  # fmt: skip
    model = make_model("phi3", rope_parameters=scaling, num_attention_heads=4)
    decoder = compiled(model)
    expected = decoder.generate(PROMPTS, max_new_tokens=NEW).new_tokens
    for length in (40, 3):
        model(input_ids=torch.full((1, length), 5))
    assert all(map(torch.equal, decoder.generate(PROMPTS, max_new_tokens=NEW).new_tokens, expected))


def test_a_changed_draft_is_named_as_the_draft() -> None:
    model = make_model("llama")
    draft, head = make_model("llama", seed=1), make_head(model)
    own, eagle = compiled(model, draft=draft), compiled(model, "eagle3", draft=head)
    lora(draft)
    with pytest.raises(InputError, match=f"^draft.model.layers.1.self_attn.q_proj was replaced by a Lora {AGAIN}"):
        own.generate(PROMPTS, max_new_tokens=NEW)
    head.module.half()
    with pytest.raises(InputError, match=f"^draft.[a-z0-9_.]+ was converted from torch.float32 to .*16 {AGAIN}"):
        eagle.generate(PROMPTS, max_new_tokens=NEW)


def test_an_attached_model_that_a_pipeline_has_converted_says_so() -> None:
    model = copy.deepcopy(make_model("llama"))
    specgraph.attach(model, {**CONFIG, "draft": {"kind": "ngram", "num_speculative_tokens": 3}})
    generate = pipeline("text-generation", model=model, tokenizer=word_tokenizer(), device="cpu")
    generate("w5 w6", max_new_tokens=4)
    model.to(torch.float64)  # as a pipeline moves its model to the first GPU
    with pytest.raises(InputError, match=f"was converted from torch.float32 to torch.float64 {AGAIN}"):
        generate("w5 w6", max_new_tokens=4)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_other_strides_are_followed_unless_code_was_compiled_for_them(lowering: str) -> None:
    model = double_model("llama", 0)
    decoder = compiled(model, lowering={"name": lowering, "remainder": lowering})
    weight = model.lm_head.weight
    weight.data = weight.data.t().contiguous().t()
    if lowering == "eager":
        assert len(decoder.generate(PROMPTS, max_new_tokens=NEW).new_tokens) == len(PROMPTS)
        return
    with pytest.raises(InputError, match=r"lm_head.weight was laid out anew from \[32, 1\] to \[1, 101\]"):
        decoder.generate(PROMPTS, max_new_tokens=NEW)


def test_what_is_written_into_a_packed_weight_is_followed() -> None:
    """Nothing takes a copy of it, and the decoder reads it where it lies."""
    model = specgraph.quantise(make_model("llama", dtype=torch.bfloat16, intermediate_size=64), group_size=32)
    decoder = specgraph.compile_speculative(model, {**CONFIG, "lowering": {"name": "inductor"}})
    with torch.no_grad():
        model.model.norm.weight.mul_(1)
        before = decoder.generate(PROMPTS, max_new_tokens=NEW).new_tokens
        model.model.layers[1].mlp.up_proj.weight_scale.mul_(-30)
    found = decoder.generate(PROMPTS, max_new_tokens=NEW).new_tokens
    fresh = specgraph.compile_speculative(model, {**CONFIG, "lowering": {"name": "inductor"}})
    assert all(map(torch.equal, found, fresh.generate(PROMPTS, max_new_tokens=NEW).new_tokens))
    assert not all(map(torch.equal, found, before))
