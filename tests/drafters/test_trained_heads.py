"""The heads that were trained for tiny-math and lie beside it, on real questions: lossless, and worth their calls."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import specgraph
from specgraph.drafters.registry import open_checkpoint
from tests.decoding import assert_same_tokens, reference_greedy

EXAMPLES = Path(specgraph.__file__).parents[1] / "examples"
MODELS = EXAMPLES / "models" / "tiny-math"
HEADS = {
    "eagle": ("eagle", 2.5), "eagle3": ("eagle3", 2.5), "peagle": ("eagle3", 2.5), "medusa": ("medusa", 1.5),
    "mtp": ("mtp", 2.5), "dflash": ("dflash", 2.5), "dflash2": ("dflash2", 2.5),
    "dspark": ("dspark", 2.5),
}  # fmt: skip
"""By folder: the drafter that runs it, and a number of tokens per step that it exceeds by far on the model card."""
NEW_TOKENS = 32


@functools.cache
def target() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float64)
    return model


@functools.cache
def prompts() -> list[Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    lines = (EXAMPLES / "data" / "gsm8k_test_200.jsonl").read_text().splitlines()[:4]
    texts = [f"Question: {json.loads(line)['question']}\nAnswer:" for line in lines]
    return [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts]


@functools.cache
def expected() -> list[Tensor]:
    """transformers' own greedy answers to the first two questions, and samples of plain decoding for the others."""
    own = generate("none").new_tokens
    greedy = reference_greedy(target(), prompts()[:2], NEW_TOKENS)
    assert_same_tokens(target(), prompts()[:2], own[:2], greedy)
    return [*greedy, *own[2:]]


def generate(kind: str, draft: Path | None = None) -> specgraph.GenerateOutput:
    config = {"draft": {"kind": kind, "num_speculative_tokens": 5}, "debug": {"self_check": False},
              "pipeline": {"verify": False}}  # fmt: skip
    decoder = specgraph.compile_speculative(target(), config, draft=draft)
    return decoder.generate(prompts(), max_new_tokens=NEW_TOKENS, temperature=[0, 0, 1, 1], seed=[*range(4)])


@pytest.mark.parametrize("head", HEADS)
def test_a_trained_head_changes_no_token_and_saves_steps(head: str) -> None:
    kind, least = HEADS[head]
    out = generate(kind, MODELS / head)
    assert_same_tokens(target(), prompts(), out.new_tokens, expected())
    accepted = [number for sequence in out.stats.emitted_per_step[:2] for number in sequence]
    assert sum(accepted) / len(accepted) > least


@pytest.mark.parametrize("head", HEADS)
def test_the_checkpoint_says_which_drafter_runs_it(head: str) -> None:
    assert open_checkpoint(MODELS / head).kind == HEADS[head][0]
