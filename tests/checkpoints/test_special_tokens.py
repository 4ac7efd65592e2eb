"""Draft models whose tokenizer has another token at an id: which are taken, under which rules."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgraph
from specgraph import SpecgraphWarning, SpeculativeDecoder
from tests.decoding import CONFIG, assert_same_tokens, reference_greedy

TINY = Path(specgraph.__file__).parents[1] / "examples/models/tiny-math"


@functools.cache
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float64)


def drafted(folder: Path, rule: str) -> SpeculativeDecoder:
    config = {**CONFIG, "verify": {"rule": rule}, "lowering": "eager"}
    return specgraph.compile_speculative(target(), config, draft=folder)


def renamed(folder: Path, old: str, new: str) -> Path:
    """The small model of tiny-math, whose tokenizer has another name for a token."""
    shutil.copytree(TINY / "draft", folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / file).read_text()
        (folder / file).write_text(text.replace(json.dumps(old), json.dumps(new)))
    return folder


@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block"])
def test_a_draft_with_another_special_token_is_taken_where_the_output_is_the_targets(rule: str, tmp_path: Path) -> None:
    folder = renamed(tmp_path / "draft", "<|pad|>", "<|other|>")
    with pytest.warns(SpecgraphWarning, match="special tokens differ .*: id 1 is '<.pad.>' for .* '<.other.>' for"):
        decoder = drafted(folder, rule)
    assert "but for special tokens: id 1 is '<|pad|>'" in decoder.report()
    prompts = [torch.tensor([31, 40, 50, 61])]
    assert_same_tokens(target(), prompts, decoder.generate(prompts, max_new_tokens=12).new_tokens,
                       reference_greedy(target(), prompts, 12))  # fmt: skip


@pytest.mark.parametrize(("old", "rule"), [("<|pad|>", "typical"), ("<|pad|>", "synthetic"), (None, "strict")])
def test_else_the_draft_drafts_the_other_tokens_alone(old: str | None, rule: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    index = 20 if old is None else 1
    folder = renamed(tmp_path / "draft", tokenizer.convert_ids_to_tokens(index), "Ŀĸ" if old is None else "<|other|>")
    decoder = drafted(folder, rule)
    assert f"the draft has another tokenizer (id {index} is " in decoder.report()
    assert f": {len(tokenizer) - 1} of the target's {len(tokenizer)} tokens (" in decoder.report()
    drafted_ids = decoder._program.drafter.draft_to_target
    assert index not in drafted_ids and len(drafted_ids) == len(tokenizer) - 1
    if rule == "strict":
        prompts = [torch.tensor([31, 40, 50, 61])]
        assert_same_tokens(target(), prompts, decoder.generate(prompts, max_new_tokens=12).new_tokens,
                           reference_greedy(target(), prompts, 12))  # fmt: skip
