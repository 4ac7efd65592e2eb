"""Steps that pause for the host: Python processors, structure, and the logits that tokens were chosen from."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import (
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from specgraph import InputError, SpeculativeDecoder
from tests.decoding import compiled
from tests.models import VOCAB, ragged_prompts, shared_model
from tests.runtime.test_runner import replaying

PROMPTS = ragged_prompts((3, 17, 8, 1, 5, 9))
NEW = 30


@pytest.fixture(scope="module")
def model() -> Any:
    return shared_model("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def plain(model: Any) -> SpeculativeDecoder:
    return compiled(model, "none", max_batch_size=4)


@pytest.fixture(scope="module", params=["ngram", "draft_model"])
def decoder(request: pytest.FixtureRequest, model: Any) -> SpeculativeDecoder:
    """One that drafts, and that runs fewer sequences together than there are. The draft model is the target itself."""
    return compiled(model, request.param, 3, model if request.param == "draft_model" else None, max_batch_size=4)


class Alternating(LogitsProcessor):
    """Allows even tokens behind odd lengths and the other way round, and shifts all by the sum of the tokens."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == 1 and scores.shape == (1, VOCAB)
        places = torch.arange(VOCAB)
        wave = 0.3 * torch.sin(places * input_ids.sum())
        return torch.where(places % 2 == input_ids.shape[1] % 2, scores + wave, -torch.inf)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processors_give_the_same_with_and_without_drafts(
    decoder: SpeculativeDecoder, plain: SpeculativeDecoder, temperature: float
) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": temperature, "seed": [*range(1, 1 + len(PROMPTS))]}
    outs = [each.generate(PROMPTS, **options, logits_processor=[Alternating()]) for each in (decoder, plain)]
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert outs[0].stats.acceptance_length > (1.3 if decoder.config.draft.kind == "draft_model" else 1)
    free = plain.generate(PROMPTS, **options)
    assert not torch.equal(outs[1].sequences, free.sequences)


def test_greedy_processors_are_those_of_transformers(model: Any, decoder: SpeculativeDecoder) -> None:
    processors = LogitsProcessorList([Alternating(), NoRepeatNGramLogitsProcessor(2)])
    out = decoder.generate(PROMPTS, max_new_tokens=NEW, eos_token_id=[7, 50], logits_processor=processors)
    for prompt, new in zip(PROMPTS, out.new_tokens, strict=True):
        own = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": [7, 50]}
        expected = model.generate(prompt.unsqueeze(0), **own, logits_processor=processors)
        assert torch.equal(new, expected[0, len(prompt) :])


def test_processors_of_the_device_come_before_those_of_the_host(model: Any, decoder: SpeculativeDecoder) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, "repetition_penalty": 1.7, "logits_processor": [Alternating()]}
    out = decoder.generate(PROMPTS, **options)
    for prompt, new in zip(PROMPTS, out.new_tokens, strict=True):
        expected = model.generate(prompt.unsqueeze(0), do_sample=False, **options)
        assert torch.equal(new, expected[0, len(prompt) :])


def test_sequences_beside_them_are_what_they_are_alone(decoder: SpeculativeDecoder) -> None:
    """A session in which some sequences have processors; rows are handed on while others decode."""
    allowed = [None if n % 2 else re.compile("x") for n in range(len(PROMPTS))]

    def only_small(place: int, tokens: Tensor) -> list[int]:
        return list(range(40)) if allowed[place] else list(range(VOCAB))

    options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 1.0, "seed": [*range(1, 1 + len(PROMPTS))]}
    free = decoder.generate(PROMPTS, **options)
    out = decoder.generate(PROMPTS, **options, prefix_allowed_tokens_fn=only_small)
    for place, (own, new) in enumerate(zip(out.new_tokens, free.new_tokens, strict=True)):
        if allowed[place]:
            assert int(own.max()) < 40
        else:
            assert torch.equal(own, new)


def test_raw_logprobs_stay_those_of_the_target(model: Any, decoder: SpeculativeDecoder) -> None:
    out = decoder.generate(PROMPTS, max_new_tokens=9, logits_processor=[Alternating()], return_logprobs=True)
    assert out.logprobs is not None
    for prompt, new, logprobs in zip(PROMPTS, out.new_tokens, out.logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.cat([prompt, new]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, new.unsqueeze(1))[:, 0]
        torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sample", [False, True])
def test_scores_and_logits_are_those_of_transformers(model: Any, decoder: SpeculativeDecoder, sample: bool) -> None:
    """For the tokens that came out, since transformers draws others."""
    options: dict[str, Any] = {"temperature": 0.8, "top_k": 9, "seed": 3} if sample else {}
    out = decoder.generate(
        PROMPTS, max_new_tokens=9, eos_token_id=[7, 50], output_scores=True, output_logits=True,
        logits_processor=[Alternating()], **options,
    )  # fmt: skip
    longest = max(map(len, out.new_tokens))
    assert out.scores is not None and out.logits is not None
    assert len(out.scores) == len(out.logits) == longest and out.scores[0].shape == (len(PROMPTS), VOCAB)
    warpers = LogitsProcessorList([Alternating()])
    warpers += [TemperatureLogitsWarper(0.8), TopKLogitsWarper(9)] if sample else []
    for number, (prompt, new) in enumerate(zip(PROMPTS, out.new_tokens, strict=True)):
        whole = torch.cat([prompt, new]).unsqueeze(0)
        with torch.no_grad():
            logits = model(whole).logits[0, len(prompt) - 1 : -1].float()
        for at, raw in enumerate(logits):
            torch.testing.assert_close(out.logits[at][number], raw, atol=1e-5, rtol=0)
            expected = warpers(whole[:, : len(prompt) + at], raw.unsqueeze(0))[0]
            torch.testing.assert_close(out.scores[at][number], expected, atol=1e-4, rtol=0)
        for at in range(len(new), longest):
            assert not out.scores[at][number].any() and not out.logits[at][number].any()


def test_the_report_and_the_statistics_say_what_it_cost(model: Any) -> None:
    decoder = compiled(model, "ngram", 3)
    assert decoder.generate(PROMPTS, max_new_tokens=5).stats.host_steps == 0
    assert "waited for the host" not in decoder.report()
    stats = decoder.generate(PROMPTS, max_new_tokens=5, output_logits=True).stats
    assert 0 < stats.host_steps <= stats.steps and stats.host_seconds > 0
    assert f"{stats.host_steps} steps waited for the host, which was at work for" in decoder.report()
    assert "pause_step" in decoder.stages


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graphs_in_two_halves_give_the_same(plain: SpeculativeDecoder, temperature: float) -> None:
    """Calls stand in for graphs. Requests with and without processors take turns, in batches of two sizes."""
    tested = replaying(max_batch_size=4)
    options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": temperature, "seed": [*range(1, 1 + len(PROMPTS))]}
    for more in ({"logits_processor": [Alternating()]}, {}, {"logits_processor": [Alternating()]}):
        expected = plain.generate(PROMPTS, **options, **more)
        assert torch.equal(tested.generate(PROMPTS, **options, **more).sequences, expected.sequences)
        alone = tested.generate(PROMPTS[:1], **{**options, "seed": [1]}, **more)
        assert torch.equal(alone.new_tokens[0], expected.new_tokens[0])
    space = tested._runners.idle
    assert space is not None
    cut = {shape._replace(half=1) for shape in space.shapes if shape.half == 2}
    assert cut == {shape for shape in space.shapes if shape.mode.paused and shape.half == 1} and len(cut) > 2


def test_a_stream_and_stopping_criteria_go_with_them(decoder: SpeculativeDecoder) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, "logits_processor": Alternating()}
    whole = decoder.generate(PROMPTS, **options)

    def long_enough(tokens: Tensor, scores: Any) -> bool:
        return tokens.shape[1] >= 20

    out = decoder.generate(PROMPTS, **options, stopping_criteria=long_enough, output_scores=True)
    assert out.scores is not None and len(out.scores) == max(map(len, out.new_tokens))
    for prompt, new, every in zip(PROMPTS, out.new_tokens, whole.new_tokens, strict=True):
        assert torch.equal(new, every[: max(1, 20 - len(prompt))])
    rows: list[list[int]] = [[] for _ in PROMPTS]
    for chunk in decoder.stream(PROMPTS, **options):
        for row, new in zip(rows, chunk.tokens, strict=True):
            row += new
    assert rows == [new.tolist() for new in whole.new_tokens]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a number": ({"logits_processor": [3]}, "logits_processor is a LogitsProcessor of transformers .*, not 3"),
    "no scores": (
        {"logits_processor": [lambda tokens, scores: None]}, r"returns scores \[1, 101\], .* returned NoneType",
    ),
    "another shape": ({"logits_processor": [lambda tokens, scores: scores[0]]}, r"returned a tensor \[101\]"),
    "nothing allowed": (
        {"prefix_allowed_tokens_fn": lambda place, tokens: []}, "allows no token behind 3 of sequence 0",
    ),
    "no function": ({"prefix_allowed_tokens_fn": 3}, "prefix_allowed_tokens_fn is a function .*, not 3"),
    "a flag": ({"output_scores": "yes"}, "output_scores is True, False or None, not 'yes'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_sentence_and_leaves_the_decoder_usable(
    decoder: SpeculativeDecoder, plain: SpeculativeDecoder, name: str
) -> None:
    options, message = WRONG[name]
    with pytest.raises(InputError, match=message):
        decoder.generate(PROMPTS, max_new_tokens=4, **options)
    expected = plain.generate(PROMPTS, max_new_tokens=4).sequences
    assert torch.equal(decoder.generate(PROMPTS, max_new_tokens=4).sequences, expected)
