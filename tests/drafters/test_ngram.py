"""n-gram lookup: a plain search as its oracle, fresh starts, planted bugs, and tokens of the model alone."""

from __future__ import annotations

from tests.drafters.contract import Case, by_rule, planted
from tests.drafters.lookup_contract import HISTORY_BUGS, LookupContract
from tests.pairwise import product


def looked_up(tokens: list[int], k: int, longest: int = 4) -> list[int]:
    """What followed the longest, then latest, earlier occurrence of the last n-gram; padded with -1."""
    for n in range(longest, 0, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                found = tokens[end : end + k]
                return found + [-1] * (k - len(found))
    return [-1] * k


AXES = {"k": (1, 2, 4, 7), "seed": range(3)}


class TestDrafts(LookupContract):
    KIND, ALPHABET, OPTIONS = "ngram", 7, {"usual": {}}
    CASES = tuple(Case(f"usual, {seed}", k) for k, seed in product(AXES))
    REAL = by_rule("usual, 0", 4)
    SEEDED = tuple(Case("usual, 0", k) for k in (4, 1, 7))
    BUGS = planted(Case("usual, 0", 4), HISTORY_BUGS)

    @classmethod
    def expected(cls, tokens: list[int], case: Case) -> list[int]:
        return looked_up(tokens, case.k)
