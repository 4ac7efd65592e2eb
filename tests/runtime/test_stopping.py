"""Stopping criteria of a caller, which run on the host between two steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph import InputError, SpeculativeDecoder
from tests.decoding import compiled
from tests.models import ragged_prompts, shared_model

PROMPTS = ragged_prompts((3, 17, 8, 1, 5, 9))
OPTIONS: dict[str, Any] = {"max_new_tokens": 30, "seed": list(range(len(PROMPTS))), "temperature": 1.0}
ENDS = [3, 14, 15, 92, 65, 35]


@pytest.fixture(scope="module", params=["none", "ngram"])
def decoder(request: pytest.FixtureRequest) -> SpeculativeDecoder:
    """One that runs fewer sequences together than there are."""
    return compiled(shared_model("llama", dtype=torch.float64), request.param, max_batch_size=4)


def after_ends(tokens: Tensor, scores: Any) -> Tensor:
    assert tokens.shape[0] == 1 and scores is None
    return torch.isin(tokens[:, -1], torch.tensor(ENDS))


def cut(new: Tensor) -> Tensor:
    """The first tokens of ``new`` up to one of :data:`ENDS`."""
    found = torch.isin(new, torch.tensor(ENDS)).nonzero()
    return new[: int(found[0]) + 1] if len(found) else new


def test_a_sequence_ends_behind_the_token_that_a_criterion_ends_it_with(decoder: SpeculativeDecoder) -> None:
    whole = decoder.generate(PROMPTS, **OPTIONS, return_logprobs=True)
    wanted = [cut(new) for new in whole.new_tokens]
    assert any(len(a) < len(b) for a, b in zip(wanted, whole.new_tokens, strict=True))
    out = decoder.generate(PROMPTS, **OPTIONS, return_logprobs=True, stopping_criteria=after_ends)
    assert all(map(torch.equal, out.new_tokens, wanted))
    assert out.logprobs is not None and whole.logprobs is not None
    for own, logprobs, new in zip(out.logprobs, whole.logprobs, wanted, strict=True):
        torch.testing.assert_close(own, logprobs[: len(new)])
    ends = zip(whole.new_tokens, wanted, whole.finish_reasons, strict=True)
    assert out.finish_reasons == ["stop" if len(new) < len(every) else reason for every, new, reason in ends]


def test_a_stream_ends_there_too(decoder: SpeculativeDecoder) -> None:
    wanted = decoder.generate(PROMPTS, **OPTIONS, stopping_criteria=[after_ends]).new_tokens
    rows: list[list[int]] = [[] for _ in PROMPTS]
    finished = [False] * len(PROMPTS)
    for chunk in decoder.stream(PROMPTS, **OPTIONS, stopping_criteria=[after_ends]):
        for number, new in enumerate(chunk.tokens):
            assert not (finished[number] and new)
            rows[number] += new
        finished = chunk.finished
    assert rows == [new.tolist() for new in wanted] and all(finished)


def test_every_token_is_shown_once_and_in_order(decoder: SpeculativeDecoder) -> None:
    seen: list[list[int]] = []

    def watch(tokens: Tensor, scores: Any) -> bool:
        seen.append(tokens[0].tolist())
        return False

    padded = torch.tensor([[0, 0, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    new = decoder.generate(padded, mask, max_new_tokens=9, stopping_criteria=watch).new_tokens[0].tolist()
    assert seen == [[0, 0, 5, 6, 7, *new[:count]] for count in range(1, len(new) + 1)]


def test_why_a_sequence_ended(decoder: SpeculativeDecoder) -> None:
    out = decoder.generate(PROMPTS[:3], max_new_tokens=[0, 1, 40], eos_token_id=list(range(101)))
    assert out.finish_reasons == ["length", "eos", "eos"]
    assert decoder.generate(PROMPTS[:1], max_new_tokens=2, eos_token_id=[]).finish_reasons == ["length"]


def test_an_error_of_a_criterion_is_the_callers(decoder: SpeculativeDecoder) -> None:
    def broken(tokens: Tensor, scores: Any) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        decoder.generate(PROMPTS, **OPTIONS, stopping_criteria=broken)
    assert decoder.generate(PROMPTS[:1], max_new_tokens=2).new_tokens[0].numel() == 2


def test_what_is_no_criterion_is_refused(decoder: SpeculativeDecoder) -> None:
    with pytest.raises(InputError, match=r"stopping_criteria is a StoppingCriteria .*, not 3"):
        decoder.generate(PROMPTS, stopping_criteria=[after_ends, 3])  # type: ignore[list-item]
