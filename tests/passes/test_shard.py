"""Several devices that share a target give the tokens of one, and what they do not share is said."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from transformers import PreTrainedModel

import specgraph
from specgraph import ConfigError, NumericsError, PassError, SpeculativeDecoder
from specgraph.compiler.numerics import compare_stages, observe
from specgraph.drafters.none import NoDrafter
from specgraph.errors import VerificationError
from specgraph.frontend.first_program import first_program
from specgraph.frontend.tracing import trace
from specgraph.ir.graphs import DEVICE, calls, get_attribute
from specgraph.ir.program import Program
from specgraph.ir.verifier import check_devices, verify_program
from specgraph.passes.base import Pass, PassResult
from specgraph.passes.expose_features import ExposeFeatures
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.pipeline import run_passes
from specgraph.passes.shard import ALL_REDUCE, Shard, weights_on
from tests.decoding import assert_same_tokens, compiled, in_a_stream_and_a_session, reference_greedy
from tests.models import double_model, make_head, make_model, ragged_prompts

PROMPTS = ragged_prompts()
NEW = 10
SPLIT = {
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {}, "gemma2": {}, "gemma3_text": {}, "phi": {}, "phi3": {},
    "gpt_neox": {}, "gpt2": {}, "starcoder2": {}, "granite": {}, "cohere": {}, "smollm3": {}, "glm4": {},
    "stablelm": {}, "opt": {},
}  # fmt: skip
"""The dense architectures, all layers of which are split."""


def parallel(count: int) -> dict[str, Any]:
    return {"tensor": count, "devices": ["cpu"] * count}


@functools.cache
def model(architecture: str = "llama") -> PreTrainedModel:
    return double_model(architecture, 1)


@functools.cache
def decoder(architecture: str, kind: str, count: int) -> SpeculativeDecoder:
    given = {"parallel": parallel(count), "pipeline": {"verify": True}} if count > 1 else {}
    return compiled(model(architecture), kind, **given)


@functools.cache
def greedy(architecture: str) -> list[Tensor]:
    return reference_greedy(model(architecture), PROMPTS, NEW)


def sharded(count: int, architecture: str = "llama", last: Pass | None = None, **options: Any) -> Program:
    target = trace(make_model(architecture, dtype=torch.float64, **options))
    passes = [ExposeFeatures(), last or Shard(count), InsertKVCache(4)]
    program = [*run_passes(first_program(target, NoDrafter()), passes)[0].values()][-1]
    verify_program(program)
    return program


@pytest.mark.parametrize("architecture", SPLIT)
def test_tokens_are_those_of_one_device_and_of_generate(architecture: str) -> None:
    for count in (2, 4):
        many = decoder(architecture, "none", count)
        assert_same_tokens(model(architecture), PROMPTS, many.generate(PROMPTS, max_new_tokens=NEW).new_tokens,
                           greedy(architecture))  # fmt: skip
        drawn = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.9, "seed": 7}
        one = decoder(architecture, "none", 1).generate(PROMPTS, **drawn).new_tokens
        assert_same_tokens(model(architecture), PROMPTS, many.generate(PROMPTS, **drawn).new_tokens, one)
        target = many.stages["shard"].modules.unchanged["target"]
        layers = model(architecture).config.num_hidden_layers
        assert len([*calls(target.graph, ALL_REDUCE)]) == 2 * layers, "attention and what follows it in every layer"
        whole = [miss.where for miss in result(many).near_misses]
        assert whole and all("embed" in name or "lm_head" in name or "wpe" in name for name in whole)


def result(decoder: SpeculativeDecoder) -> PassResult:
    """What the pass says that it did."""
    return next(report.result for report in decoder._reports if report.name == "shard")
