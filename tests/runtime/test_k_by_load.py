"""K by load: steps make and verify fewer drafts while many sequences decode, and no token changes under ``strict``."""

from __future__ import annotations

import random
from typing import Any

import pytest

from specgraph import SpeculativeDecoder
from tests.drafters.test_matrix import NEW_TOKENS, PROMPTS, decoder, heads_exported_once
from tests.runtime.test_runner import Calls

__all__ = ["heads_exported_once"]
pytestmark = pytest.mark.usefixtures("cached_traces")

K, TABLE = 5, {1: 5, 2: 3, 4: 0, 5: 2}
"""Six sequences cross all borders, up and down."""
OPTIONS: list[dict[str, Any]] = [
    {
        "max_new_tokens": NEW_TOKENS + 7 * (index % 3),
        "temperature": (0.0, 1.0)[index % 2],
        "seed": 40 + index,
        "eos_token_id": [],
    }
    for index in range(len(PROMPTS))
]
KINDS = [
    ("ngram", None),
    ("suffix", None),
    ("draft_model", None),
    ("pard", None),
    ("eagle3", None),
    ("peagle", "ngram"),
    ("medusa", None),
    ("mtp, 3 chained", None),
    ("mtp, 3 target-fed", "ngram"),
    ("dflash", None),
    ("dspark", "suffix"),
]


def made(
    drafter: str, first: str | None = None, rule: str = "strict", table: dict[int, int] | None = TABLE, **extra: Any
) -> SpeculativeDecoder:
    tested: Any = decoder(drafter, first, "llama", rule, table or K, max_length=64, **extra)  # type: ignore[arg-type]
    return tested  # type: ignore[no-any-return]


def captured(tested: SpeculativeDecoder) -> SpeculativeDecoder:
    """Its decode steps are replayed, and read one step behind."""
    tested._program.captured = True
    tested._runners.make_pool = Calls
    return tested


def alone(tested: SpeculativeDecoder) -> list[list[int]]:
    """What each sequence gives by itself."""
    found = []
    for prompt, options in zip(PROMPTS, OPTIONS, strict=True):
        out = tested.generate([prompt], **{**options, "seed": [options["seed"]]})
        found.append(out.new_tokens[0].tolist())
    return found


def in_a_session(tested: SpeculativeDecoder, seed: int = 0) -> tuple[list[list[int]], set[int]]:
    """The sequences after random arrivals, and the values of K of the steps in which they decoded."""
    dice, left = random.Random(seed), list(range(len(PROMPTS)))
    with tested.session() as session:
        names: dict[int, int] = {}
        tokens: list[list[int]] = [[] for _ in PROMPTS]
        widths = set()
        while left or not session._engine.idle:
            for _ in range(min(len(left), dice.choice((0, 0, 1, 2, 3)))):
                index = left.pop()
                names[session.submit(PROMPTS[index], **OPTIONS[index])] = index
            for event in session.step():
                tokens[names[event.id]] += event.tokens
            widths.add(session._engine._runner.width - 1)
    return tokens, widths


@pytest.mark.parametrize(("drafter", "first"), KINDS)
def test_under_strict_no_token_changes(drafter: str, first: str | None) -> None:
    expected = alone(made(drafter, first, table=None))
    tested = made(drafter, first)
    assert alone(tested) == expected
    for both in (tested, captured(tested)):
        tokens, drafts = in_a_session(both)
        assert tokens == expected
        assert drafts == {*TABLE.values()}
