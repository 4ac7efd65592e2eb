"""The suffix drafter: a search in a trie as its oracle, fresh starts, planted bugs, and tokens of the model alone."""

from __future__ import annotations

from typing import Any

import pytest

from specgraph.config import load_config
from specgraph.errors import ConfigError
from tests.drafters.contract import Case, by_rule, planted
from tests.drafters.lookup_contract import HISTORY_BUGS, LookupContract
from tests.kernels.step.test_suffix import searched
from tests.pairwise import cover, product

OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "as vLLM": {"max_spec_factor": 1.0},
    "eager": {"max_match": 5, "max_spec_factor": 3.0, "max_spec_offset": 1.0, "min_token_prob": 0.0},
    "cautious": {"min_match": 2, "min_token_prob": 0.6},
}


AXES = {"options": (*OPTIONS,), "k": (1, 3, 7), "seed": range(2)}


class TestDrafts(LookupContract):
    KIND, ALPHABET, LENGTHS, OPTIONS = "suffix", 6, (3, 19, 5), OPTIONS
    CASES = tuple(Case(f"{options}, {seed}", k) for options, k, seed in cover(product(AXES), (0, 1)))
    REAL = by_rule("eager, 0", 3)
    SEEDED = tuple(Case("eager, 0", k) for k in (3, 1, 7))
    BUGS = planted(Case("usual, 1", 3), HISTORY_BUGS)

    @classmethod
    def expected(cls, tokens: list[int], case: Case) -> list[int]:
        draft: Any = cls.decoder(case).config.draft
        return searched(
            tokens, draft.num_speculative_tokens, draft.max_match, draft.min_match, draft.max_spec_factor,
            draft.max_spec_offset, draft.min_token_prob,
        )  # fmt: skip

    def test_drafts_are_of_many_lengths(self) -> None:
        """Where matches are long, as many as there are."""
        for k in (3, 7):
            runs = [self.forced(Case(f"eager, {seed}", k)) for seed in range(2)]
            made = {int((drafts >= 0).sum()) for run in runs for step in run.steps for drafts in step.drafts}
            assert made >= {0, 1, k}


@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block"])
def test_drafts_are_point_masses_without_saying_so(rule: str) -> None:
    inputs = TestDrafts.decoder(Case("eager, 0", 3, rule)).stages["insert_verify"].inputs
    assert "history" in inputs and not {"point_mass", "draft_logits"} & set(inputs)


def test_the_defaults_are_those_of_the_preset() -> None:
    draft: Any = load_config("suffix").draft
    assert (draft.max_match, draft.max_spec_factor, draft.max_spec_offset, draft.min_token_prob) == (24, 8.0, 0.0, 0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_match": 0}, "draft.min_match and draft.max_match must hold 1 <= min_match <= max_match <= 127, got 0"),
        ({"max_match": 128}, "draft.min_match and draft.max_match must hold 1 <= min_match <= max_match <= 127, got 1"),
        ({"max_spec_factor": -1.0}, "draft.max_spec_factor must be from 0 to 1e6 and draft.max_spec_offset from -1e6"),
        ({"min_token_prob": 1.5}, "draft.min_token_prob is a probability from 0 to 1, got 1.5."),
        ({"max_ngram": 4, "max_mach": 3}, "Unknown configuration key 'draft.max_mach'"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"draft": {"kind": "suffix", **options}})
    assert str(caught.value).startswith(message)
