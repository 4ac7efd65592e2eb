"""Models in the modes and wrappers of others: compiled as they are, or refused by a sentence that says what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

import specgraph
from specgraph import UnsupportedModelError
from tests.decoding import compiled
from tests.models import make_model, ragged_prompts, shared_model

PROMPTS = ragged_prompts()[:2]


@pytest.mark.parametrize("kind", ["ngram", "draft_model"])
def test_a_callers_autocast_does_not_reach_what_is_compiled(kind: str) -> None:
    model = shared_model("llama")
    draft = make_model("llama", seed=1) if kind == "draft_model" else None
    options: dict[str, Any] = {"draft": draft, "lowering": "eager", "debug": {"self_check": True}}
    expected = compiled(model, kind, **options).generate(PROMPTS, max_new_tokens=6).new_tokens
    with torch.autocast("cpu", torch.bfloat16):
        new = compiled(model, kind, **options).generate(PROMPTS, max_new_tokens=6).new_tokens
    assert all(map(torch.equal, new, expected))


WRAPPERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hooks": (
        lambda model: accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True),
        "LlamaForCausalLM has hooks of accelerate, .* load it onto one device, or take them off with accelerate.hooks",
    ),
    "torch.compile": (
        torch.compile,
        "This model is the OptimizedModule of a LlamaForCausalLM .*; pass model._orig_mod.",
    ),
    "a parallel module": (nn.DataParallel, "the DataParallel of a LlamaForCausalLM .*; pass model.module."),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_are_named(name: str) -> None:
    wrap, message = WRAPPERS[name]
    wrapped = wrap(make_model("llama"))
    for call in (
        lambda: specgraph.compile_speculative(wrapped),
        lambda: specgraph.attach(wrapped),
        lambda: specgraph.compile_speculative(shared_model("llama"), draft=wrapped),
    ):
        with pytest.raises(UnsupportedModelError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_model_without_its_hooks_is_compiled() -> None:
    """As the sentence says."""
    model = accelerate.dispatch_model(make_model("llama"), {"": "cpu"}, force_hooks=True)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    compiled(model, lowering="eager")
