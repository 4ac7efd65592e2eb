"""What every drafter that looks the end of a sequence up in its own tokens has to hold: its history, its proposals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specgraph import SpeculativeDecoder
from tests import harness
from tests.decoding import assert_same_tokens
from tests.detectors import check_fresh_start
from tests.drafters.contract import Case, DraftContract
from tests.harness import Run, drafting_stage, forced_run
from tests.models import double_model, ragged_prompts


def check_history(run: Run) -> None:
    """The buffer holds accepted tokens and nothing else, after every step of a forced history."""
    for step in run.steps:
        assert step.history is not None
        for row, tokens in enumerate(step.accepted):
            started = tokens if len(tokens) > 1 else []
            rest = step.history.shape[1] - len(started)
            assert step.history[row].tolist() == started + [harness.UNWRITTEN] * rest


def repetitive(lengths: tuple[int, ...]) -> list[Tensor]:
    """Prompts that repeat themselves, with three tokens in between."""
    return [torch.cat([p, p[:3].flip(0), p])[: 2 * len(p)] for p in ragged_prompts(lengths)]


HISTORY_BUGS = {
    bug: {"history"} for bug in ("catch-up skips the last row", "rejected rows written", "window instead of emitted")
}  # fmt: skip
"""What breaks the record of accepted tokens."""


class LookupContract(DraftContract):
    """A drafter whose proposals have no distribution. A case is named by its options and the seed of its history."""

    ALPHABET: ClassVar[int]
    """Of how few tokens histories are, so that n-grams repeat."""
    LENGTHS: ClassVar[tuple[int, ...]] = (3, 9, 5)
    OPTIONS: ClassVar[dict[str, dict[str, Any]]]
    """The keys of ``draft`` by the names of cases."""
    TOKENS_TOO = True

    @classmethod
    def target(cls) -> PreTrainedModel:
        return double_model("llama", 0)

    @classmethod
    def draft(cls, name: str) -> None:
        return None

    @classmethod
    def keys(cls, name: str) -> dict[str, Any]:
        return cls.OPTIONS[name.rpartition(", ")[0]]

    @classmethod
    def compiled_with(cls, case: Case, bug: str | None) -> SpeculativeDecoder:
        """A decoder for all seeds of histories."""
        options, _, seed = case.name.rpartition(", ")
        return (
            super().compiled_with(case, bug) if seed == "0" else cls.decoder(case._replace(name=f"{options}, 0"), bug)
        )

    @classmethod
    def expected(cls, tokens: list[int], case: Case) -> list[int]:
        """The K proposals behind accepted tokens, by a plain search; padded with -1."""
        raise NotImplementedError

    @classmethod
    def run_forced(cls, case: Case, bug: str | None) -> Run:
        seed = int(case.name.rpartition(", ")[2])
        prompts = ragged_prompts(cls.LENGTHS, seed=seed, vocab=cls.ALPHABET)
        stage = drafting_stage(cls.decoder(case, bug))
        return forced_run(stage, prompts, cls.LIMITS, seed=seed, alphabet=cls.ALPHABET)

    @classmethod
    def check_proposals(cls, run: Run, case: Case, real: bool = False) -> None:
        """Proposals are those of a plain search; in a real run, those that fit behind the accepted tokens."""
        for step in run.steps:
            for row, count in enumerate(step.num_emitted):
                if count > 0:
                    usable = run.usable(row, len(step.accepted[row])) if real else run.k
                    assert step.drafts[row, :usable].tolist() == cls.expected(step.accepted[row], case)[:usable]

    @classmethod
    def detectors(cls, run: Run, case: Case) -> dict[str, Callable[[], None]]:
        return {
            "fresh start": lambda: check_fresh_start(run, len(run.steps)),
            "history": lambda: check_history(run),
            "proposals": lambda: cls.check_proposals(run, case),
            "slots": lambda: cls.check_slots(run),
        }

    @classmethod
    def real_detectors(cls, run: Run, case: Case) -> dict[str, Callable[[], None]]:
        return {
            "proposals": lambda: cls.check_proposals(run, case, real=True),
            "slots": lambda: cls.check_slots(run),
        }

    def check_history(self, case: Case, run: Run) -> None:
        """How many drafts are accepted depends on what was found; see :meth:`test_histories_accept_none_and_all`."""

    def test_histories_accept_none_and_all(self) -> None:
        """In the cases with one K together."""
        for k in {case.k for case in self.CASES}:
            counts = {count for case in self.CASES if case.k == k for count in self.forced(case).accept_counts}
            assert {0, k} <= counts

    def test_decoding_emits_what_the_model_alone_does(self, seeded: Case) -> None:
        """Prompts that repeat themselves, and one of a single token."""
        prompts = [*repetitive((4, 17, 8)), torch.tensor([5])]
        for temperature in (0.0, [0.3, 0.0, 1.0, 0.2]):
            options: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": [], "temperature": temperature,
                                       "seed": [1, -2, 3, 1 << 40]}  # fmt: skip
            out = self.decoder(seeded).generate(prompts, **options)
            expected = self.plain().generate(prompts, **options).new_tokens
            assert_same_tokens(self.target(), prompts, out.new_tokens, expected)
            assert out.stats.acceptance_length > 1.0
