"""Drafts of another family that are made of one of the target's: all of their tokens are worth as much as its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.share_of_tokens import decoded, other_family
from benchmarks.texts import ask, read_questions

MODELS = Path("examples/models/tiny-math")


def test_other_ids_are_worth_the_same_and_fewer_tokens_less(tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    questions = read_questions("examples/data/gsm8k_test_200.jsonl")[:4]
    prompts = [torch.tensor(ids) for ids in ask(tokenizer, questions)]
    own = decoded(target, MODELS / "draft", prompts, 40)
    found = [
        decoded(target, other_family(MODELS / "draft", tmp_path / str(missing), missing), prompts, 40)
        for missing in (0, 2200)
    ]
    assert [tokens for _, tokens in found] == [own[1]] * 2
    assert found[0][0] == pytest.approx(own[0]) and 1.2 < found[1][0] < own[0]
