"""Steps that pause for the host, as two CUDA graphs: the bits of plain decoding, and none beside them is disturbed."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from specgraph import GenerateOutput, SpeculativeDecoder
from tests.gpu.test_bitwise_gpu import MODELS, decoder, prompts
from tests.runtime.schemas import SCHEMAS

COUNT, NEW_TOKENS = 16, 96
TOKENIZER = AutoTokenizer.from_pretrained(MODELS / "target")
KINDS = [("ngram", 4), ("eagle3", 3), ("draft", 5), ("dflash", 4)]


@functools.cache
def made(kind: str, k: int = 1) -> SpeculativeDecoder:
    return decoder(kind, k)


def wave(tokens: Tensor, scores: Tensor) -> Tensor:
    """Integers and powers of two, so that no device rounds it in another way."""
    places = torch.arange(scores.shape[1], device=scores.device)
    return scores + 0.25 * ((places + tokens.sum() + tokens.shape[1]) % 3)


OPTIONS: dict[str, dict[str, Any]] = {
    "a processor": {"logits_processor": [wave], "eos_token_id": []},
    "with those of the device": {"logits_processor": [wave], "repetition_penalty": 1.25, "eos_token_id": []},
    "a pattern": {"regex": r"[0-9a-z ]{20,60}\.", "tokenizer": TOKENIZER},
    "a pattern for some": {
        "regex": [None if n % 3 else r"[0-9a-z ]{20,60}\." for n in range(COUNT)], "tokenizer": TOKENIZER,
    },
}  # fmt: skip


def run(compiled: SpeculativeDecoder, name: str, batch: int, temperature: float) -> list[tuple[Tensor, Tensor]]:
    found: list[tuple[Tensor, Tensor]] = []
    for begin in range(0, COUNT, batch):
        rows = slice(begin, begin + batch)
        options = {key: v[rows] if key == "regex" and isinstance(v, list) else v for key, v in OPTIONS[name].items()}
        out: GenerateOutput = compiled.generate(
            prompts()[:COUNT][rows], max_new_tokens=NEW_TOKENS, temperature=temperature, return_logprobs=True,
            seed=[*range(COUNT)][rows], **options,
        )  # fmt: skip
        assert (out.logprobs is not None and out.stats.host_steps > 0) or batch == 1
        found += zip(out.new_tokens, out.logprobs or [], strict=True)
    return found


@functools.cache
def plain(name: str, temperature: float) -> list[tuple[Tensor, Tensor]]:
    return run(made("none"), name, 1, temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("kind", "k"), KINDS)
def test_drafts_and_batch_change_no_bit(kind: str, k: int, name: str, temperature: float) -> None:
    expected = plain(name, temperature)
    for batch in (1, 16) if kind == "eagle3" else (5,):
        for (tokens, logprobs), (other, values) in zip(run(made(kind, k), name, batch, temperature), expected,
                                                       strict=True):  # fmt: skip
            assert torch.equal(tokens, other) and torch.equal(logprobs, values)


def test_a_step_that_pauses_is_two_graphs_and_others_stay_one() -> None:
    tested = decoder("eagle3", 3)
    free = tested.generate(prompts()[:4], max_new_tokens=32)
    paused = tested.generate(prompts()[:4], max_new_tokens=32, logits_processor=[lambda tokens, scores: scores])
    assert torch.equal(free.sequences, paused.sequences)
    space = tested._runners.idle
    assert space is not None
    halves = {shape.half for shape in space.shapes if shape.mode.paused}
    assert halves == {1, 2} and {shape.half for shape in space.shapes if not shape.mode.paused} == {1}
    again = tested.generate(prompts()[:4], max_new_tokens=32)
    assert torch.equal(free.sequences, again.sequences) and again.stats.host_steps == 0


def test_scores_are_the_logits_whose_log_softmax_is_reported() -> None:
    out = made("eagle3", 3).generate(
        prompts()[:3], max_new_tokens=24, eos_token_id=[], output_scores=True, output_logits=True, return_logprobs=True
    )
    assert out.scores is not None and out.logits is not None and out.logprobs is not None
    for row, (new, logprobs) in enumerate(zip(out.new_tokens, out.logprobs, strict=True)):
        logits = torch.stack([step[row] for step in out.logits])
        assert torch.equal(logits, torch.stack([step[row] for step in out.scores]))
        assert torch.equal(logits.argmax(-1).cpu(), new)
        expected = logits.double().log_softmax(-1)[range(len(new)), new.cuda()]
        torch.testing.assert_close(logprobs.double(), expected.cpu(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_fifty_schemas_are_followed(temperature: float) -> None:
    prompt = TOKENIZER("Question: What is 3 + 4?\nAnswer:")["input_ids"]
    out = made("eagle3", 3).generate(
        [prompt] * 50, max_new_tokens=160, temperature=temperature, seed=[*range(50)], tokenizer=TOKENIZER,
        json_schema=[{**schema, "x-guidance": {"whitespace_pattern": ""}} for schema in SCHEMAS.values()],
    )  # fmt: skip
    ended = [n for n, reason in enumerate(out.finish_reasons) if reason == "eos"]
    for number, schema in enumerate(SCHEMAS.values()):
        if number in ended:
            written = TOKENIZER.decode(out.new_tokens[number], skip_special_tokens=True)
            jsonschema.validate(json.loads(written), schema)
    assert len(ended) >= 49
