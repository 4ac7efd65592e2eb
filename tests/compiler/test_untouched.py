"""No call changes the model that it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig

import specgraph
from specgraph import UnsupportedModelError
from tests.decoding import CONFIG
from tests.models import make_head, make_model, ragged_prompts

PROMPTS = ragged_prompts()
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 4, "long_factor": [3.0] * 4,
            "original_max_position_embeddings": 48, "factor": 2.0}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
ORIGINAL = {"original_max_position_embeddings": 48}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: make_model("llama"),
    "experts": lambda: make_model("phimoe", num_hidden_layers=1),
    "longrope": lambda: make_model("phi3", rope_parameters=LONGROPE, num_hidden_layers=1, **ORIGINAL),
    "dynamic": lambda: make_model("llama", rope_parameters=DYNAMIC, num_hidden_layers=1, max_position_embeddings=48),
}


def described(value: Any) -> Any:
    """A value in a form that can be compared: tensors by their identity, writes, place and values."""
    if isinstance(value, Tensor):
        return id(value), value._version, value.data_ptr(), value.requires_grad, value.grad, value.detach().tolist()
    if isinstance(value, nn.Module):
        return id(value), type(value)
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    if isinstance(value, PretrainedConfig | GenerationConfig):
        return id(value), described(vars(value))
    return value if isinstance(value, str | int | float) else (id(value), repr(value))


def state(*models: nn.Module) -> dict[str, Any]:
    """Everything that the modules hold, and what their classes do."""
    found: dict[str, Any] = {}
    for number, model in enumerate(models):
        for name, module in model.named_modules():
            found |= {f"{number}.{name}.{key}": described(value) for key, value in vars(module).items()}
            for cls in type(module).__mro__[:-1]:
                found |= {f"{cls.__qualname__}.{key}": id(value) for key, value in vars(cls).items()}
    return found


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert [key for key in before | after if before.get(key) != after.get(key)] == []


def decode(decoder: specgraph.SpeculativeDecoder) -> None:
    decoder.generate(PROMPTS, max_new_tokens=4, return_logprobs=True)
    decoder.generate(PROMPTS, max_new_tokens=4, temperature=1.0, seed=1)
    [*decoder.stream(PROMPTS, max_new_tokens=4)]
    with decoder.session() as session:
        session.submit(PROMPTS[0], max_new_tokens=4)
        list(session)
    decoder.report()


@pytest.mark.parametrize("name", MODELS)
def test_compiling_and_decoding_leave_the_model_as_it_was(name: str) -> None:
    model = MODELS[name]().train()
    model.get_output_embeddings().eval()
    before = state(model)
    decoder = specgraph.compile_speculative(model, {"cache": CONFIG["cache"]})
    assert_same(before, state(model))
    decode(decoder)
    assert_same(before, state(model))


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
@pytest.mark.parametrize("grown", [False, True])
def test_frequencies_of_long_sequences_leave_the_model_as_it_was(name: str, grown: bool) -> None:
    model = MODELS[name]()
    if grown:
        model(input_ids=PROMPTS[0].new_full((1, 200), 5))
    before = state(model)
    decode(specgraph.compile_speculative(model, {"cache": CONFIG["cache"], "max_length": 100}))
    assert_same(before, state(model))


def test_a_draft_is_left_as_it_was() -> None:
    model, draft = make_model("llama"), make_model("llama", seed=1).train()
    head = make_head(model)
    before = state(model, draft, head.module)
    for given in (draft, head):
        decode(specgraph.compile_speculative(model, CONFIG, draft=given))
    assert_same(before, state(model, draft, head.module))


def test_attaching_and_detaching_leave_the_model_as_it_was() -> None:
    model = make_model("llama")
    before = state(model)
    specgraph.attach(model, CONFIG)
    assert_same(before, {key: value for key, value in state(model).items() if key != "0..generate"})
    model.generate(PROMPTS[0].unsqueeze(0), max_new_tokens=4)
    specgraph.detach(model)
    assert_same(before, state(model))


def test_a_model_that_is_refused_is_left_as_it_was() -> None:
    model = make_model("doge", attention="eager", keep_window_size=8)
    before = state(model)
    with pytest.raises(UnsupportedModelError, match="alters the attention mask"):
        specgraph.attach(model)
    assert_same(before, state(model))


def test_a_change_would_be_found() -> None:
    model = make_model("llama")
    changes: list[Callable[[], object]] = [
        lambda: setattr(model.config, "_attn_implementation", "eager"),
        lambda: model.model.layers[0].train(),
        lambda: model.lm_head.weight.detach().add_(0),
        lambda: model.model.norm.register_forward_hook(lambda *_: None),
        lambda: model.lm_head.weight.requires_grad_(False),
        lambda: setattr(model.generation_config, "max_length", 7),
    ]
    for change in changes:
        last = state(model)
        change()
        with pytest.raises(AssertionError):
            assert_same(last, state(model))
