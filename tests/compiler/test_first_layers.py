"""Copies of models with their first layers alone, by which models are checked that are larger than a GPU."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specgraph import UnsupportedModelError
from specgraph.compiler import selfcheck
from specgraph.config import load_config
from specgraph.frontend.first_layers import first_layers
from specgraph.frontend.tracing import trace
from specgraph.runtime.requests.request import Limits
from tests.models import VOCAB, make_model

CPU = torch.device("cpu")
LIMITS, CONFIG = Limits(VOCAB, 64, 64, None), load_config(None)


def hidden(model: PreTrainedModel) -> tuple[torch.Tensor, ...]:
    ids = torch.arange(12)[None] % VOCAB
    with torch.no_grad():
        found: Any = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    return tuple(found)


@pytest.mark.parametrize(
    ("architecture", "options", "kept"),
    [
        ("llama", {"num_hidden_layers": 5}, 2),
        ("gemma3_text", {"num_hidden_layers": 5, "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 2}, 4),
        ("qwen3_moe", {"num_hidden_layers": 5, "mlp_only_layers": [0, 1]}, 3),
    ],
)
def test_a_copy_has_a_layer_of_every_kind_and_the_model_stays_as_it_is(
    architecture: str, options: dict[str, Any], kept: int
) -> None:
    model = make_model(architecture, **options)
    before, weights = hidden(model), [*model.parameters()]
    short = first_layers(model, CPU)
    assert short is not None and short.config.num_hidden_layers == kept
    assert all(map(torch.equal, hidden(short)[:kept], before))
    assert all(own is other for own, other in zip(model.parameters(), weights, strict=True))
    assert model.config.num_hidden_layers == 5 and all(map(torch.equal, hidden(model), before))
    assert {id(weight) for weight in short.parameters()}.isdisjoint(map(id, weights))


def test_nothing_of_a_copy_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[weakref.ref[torch.Tensor]]()

    def noted(*given: Any) -> PreTrainedModel | None:
        short = first_layers(*given)
        assert short is not None
        made.extend(map(weakref.ref, short.parameters()))
        return short

    monkeypatch.setattr(selfcheck, "first_layers", noted)
    model = make_model("llama", num_hidden_layers=3)
    selfcheck.short_self_check(model, trace(model), LIMITS, CONFIG, [CPU, CPU])
    assert made and not any(weight() is not None for weight in made)


def test_a_model_without_spare_layers_is_checked_whole() -> None:
    assert first_layers(make_model("llama", num_hidden_layers=2), CPU) is None
    assert first_layers(make_model("gpt2", num_hidden_layers=3), CPU) is not None


def test_what_a_copy_finds_is_decided_by_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama", num_hidden_layers=3)
    target = trace(model)
    line = selfcheck.short_self_check(model, target, LIMITS, CONFIG, [CPU, CPU])
    assert line.startswith("cached decoding of LlamaForCausalLM, as 2 devices share it, agrees")
    assert line.endswith("of a copy with its first 2 of 3 layers, on cpu")
    run, asked = selfcheck._cached_forward, list[int]()

    def broken(traced: Any, *given: Any) -> list[torch.Tensor]:
        asked.append(traced.info.attention_layers)
        return [state + (asked[-1] in bad) for state in run(traced, *given)]

    monkeypatch.setattr(selfcheck, "_cached_forward", broken)
    bad = {2}
    assert "copy" not in selfcheck.short_self_check(model, target, LIMITS, CONFIG, [CPU, CPU]) and asked == [2, 3]
    bad = {2, 3}
    with pytest.raises(UnsupportedModelError, match="differ"):
        selfcheck.short_self_check(model, target, LIMITS, CONFIG, [CPU, CPU])
