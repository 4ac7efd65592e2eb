"""Lookups in the outputs of earlier requests: what is drafted is what a search in these tokens finds, and no token
depends on it.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch import Tensor

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.errors import ConfigError
from specgraph.kernels import step
from specgraph.kernels.state import SEPARATOR
from tests.decoding import CONFIG, compiled, in_a_stream_and_a_session
from tests.drafters.test_ngram import looked_up
from tests.kernels.step.test_suffix import searched
from tests.models import VOCAB, double_model, ragged_prompts
from tests.once import once

MODEL = double_model("llama", 0)
PROMPTS = ragged_prompts((5, 9, 3))
K, NEW = 3, 16
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": [], "seed": 7}
AT = (0.0, 1.3, 0.0, 0.7, 0.0)
"""Temperatures of requests one after the other, the prompts in turns."""


def decoder(kind: str = "suffix", most: int = 40, **extra: Any) -> SpeculativeDecoder:
    draft = {"kind": kind, "num_speculative_tokens": K, "max_cached_tokens": most, "adaptive": False}
    return specgraph.compile_speculative(MODEL, {**CONFIG, "draft": draft, **extra})


@once
def plain(place: int, temperature: float) -> list[int]:
    made: Tensor = compiled(MODEL, "none").generate([PROMPTS[place]], temperature=temperature, **OPTIONS).new_tokens[0]
    return made.tolist()


def expected(earlier: list[int], tokens: list[int], kind: str) -> list[int]:
    """The drafts that a plain search finds behind all of these tokens."""
    text = [*earlier, *tokens]
    found = searched(text, K, 24, 1, 8.0, 0.0, 0.1) if kind == "suffix" else looked_up(text, K)
    return [*itertools.takewhile(lambda token: 0 <= token < VOCAB, found)]


def check_requests(tested: SpeculativeDecoder, kind: str, most: int) -> list[int]:
    """Every draft of some requests is that of the search. Returns how many steps each of them took."""
    earlier: list[int] = [SEPARATOR] * most
    counts = []
    for place, temperature in zip(itertools.cycle(range(3)), AT):
        out = tested.generate([PROMPTS[place]], temperature=temperature, trace=True, **OPTIONS)
        assert out.new_tokens[0].tolist() == plain(place, temperature)
        known = PROMPTS[place].tolist()
        for each in out.trace:
            if not each.prompt:
                room = len(PROMPTS[place]) + NEW - len(known) - 1
                drafts = [draft.token for draft in each.drafts]
                assert drafts == expected(earlier, known, kind)[:room], "drafts"
            known += each.tokens
        earlier = [*earlier, *out.new_tokens[0].tolist(), SEPARATOR][-most:]
        counts.append(len(out.trace))
    return counts


@pytest.mark.parametrize(("kind", "most"), [("suffix", 60), ("suffix", 9), ("ngram", 60)])
def test_drafts_are_those_of_a_search_in_as_many_tokens_as_were_asked_for(kind: str, most: int) -> None:
    counts = check_requests(decoder(kind, most), kind, most)
    again = counts[3] < counts[0], counts[4] < counts[1]
    assert any(again) if most > NEW else not all(again), counts


BUGS = {
    "drafts go on behind the end of an output": ("until_separator", lambda right: lambda drafts: drafts % VOCAB),
    "own tokens in front of earlier ones": (
        "behind_earlier",
        lambda right: lambda earlier, history, rows, length: right(earlier.flip(0), history, rows, length),
    ),
    "the last token is not read": (
        "behind_earlier", lambda right: lambda *given: (right(*given)[0], right(*given)[1] - 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found_and_change_no_token(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = BUGS[bug]
    monkeypatch.setattr(step, name, plant(getattr(step, name)))
    tested = decoder(most=60)
    with pytest.raises(AssertionError, match="draft"):
        check_requests(tested, "suffix", 60)


def test_outputs_are_of_one_decoder_and_are_forgotten_when_asked() -> None:
    tested, other = decoder(), decoder()

    def steps(each: SpeculativeDecoder) -> int:
        return len(each.generate([PROMPTS[0]], temperature=0.0, trace=True, **OPTIONS).trace)

    first, second, another = map(steps, (tested, tested, other))
    assert second < first == another
    tested.forget_outputs()
    assert steps(tested) == first


def test_streams_and_sessions_share_them() -> None:
    tested, prompts = decoder(most=300), (*PROMPTS, *PROMPTS)
    want = [plain(place, 0.0) for place in (0, 1, 2, 0, 1, 2)]
    streamed, submitted, stats = in_a_stream_and_a_session(tested, prompts, temperature=0.0, **OPTIONS)
    assert streamed == submitted == want
    assert stats.acceptance_length > 2, "all of it was there before"


@pytest.mark.parametrize(
    ("options", "rule", "message"),
    [
        ({"max_cached_tokens": -1}, "strict", "draft.max_cached_tokens is 0 or a number of tokens, got -1"),
        (
            {"max_cached_tokens": 5},
            "probabilistic",
            "draft.max_cached_tokens=5 .* rule probabilistic would then bias requests .* take strict",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], rule: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        specgraph.compile_speculative(
            MODEL, {**CONFIG, "draft": {"kind": "suffix", **options}, "verify": {"rule": rule}}
        )
