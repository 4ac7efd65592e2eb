"""What every drafter has to hold, whatever it keeps: histories, the definition, slots, planted bugs, equal tokens.

A test file derives a class from :class:`DraftContract`, or from :class:`CachedDraftContract` if the drafter has caches
of its own, and gives what is the drafter's. A test that no drafter shares stands in that file as a function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.drafters.step import VERIFIED
from specgraph.ir.program import Program
from specgraph.runtime.outputs.output import GenerateOutput
from tests import harness
from tests.decoding import assert_same_tokens, compiled, reference_greedy
from tests.detectors import NextLogits, check_fresh_start, check_oracle, check_slots, failing
from tests.dump.test_dump import assert_runs_alike
from tests.harness import Run, draft_caches, drafting_config, drafting_stage, forced_run, real_run, slots_of
from tests.models import ragged_prompts
from tests.once import once


class Case(NamedTuple):
    """What a decoder is compiled with: a draft by its name, K, and the rule of verification."""

    name: str
    k: int
    rule: str = "strict"

    def __str__(self) -> str:
        return f"{self.name}-{self.k}-{self.rule}"


def by_rule(name: str, k: int) -> list[Case]:
    """A draft with each rule that keeps the target's distribution."""
    return [Case(name, k, rule) for rule in ("strict", "probabilistic", "block")]


class Planted(NamedTuple):
    """A bug, where it is planted, and the detectors that must find it; others may find it as well."""

    bug: str
    case: Case
    caught: set[str]

    def __str__(self) -> str:
        return f"{self.bug}-{self.case.name}-{self.case.rule}"


def planted(case: Case, caught: Mapping[str, set[str]]) -> list[Planted]:
    """Several bugs in one case, with the detectors that must find them."""
    return [Planted(bug, case, found) for bug, found in caught.items()]


SHIFTED_CHAIN_BUGS = {
    "noise off by one position": {"oracle"},
    "window instead of emitted, shifted": {"oracle"},
    "target hidden in the chain": {"oracle"},
    "chained position off by one": {"fresh start", "oracle", "slots"},
    "chained rows not written": {"oracle", "slots"},
    "catch-up skips the last row, shifted": {"fresh start", "oracle", "slots"},
    "rejected rows written, shifted": {"slots"},
    "proposals from the row before": {"fresh start", "oracle"},
}
"""What breaks a head that reads its own hidden states one draft after the other, and no row for the first token."""


def check_untouched(run: Run) -> None:
    """No cache has anything in the pages that no sequence owns."""
    owned = [slot for row, limit in enumerate(run.limits) for slot in slots_of(run, row, range(limit))]
    for cache in (*run.state["target_caches"], *draft_caches(run.state)):
        rows = cache.flatten(0, 1).clone()
        assert len(rows) > len(owned) and rows[owned].any()
        assert not rows.index_fill(0, torch.tensor(owned), 0).any()


def check_idle(run: Run) -> None:
    """A step in which nobody is active changes nothing of what is kept."""
    batch, before = len(run.limits), {name: _flat(value) for name, value in run.state.items() if name != "num_rows"}
    idle = {"num_rows": torch.zeros(batch, dtype=torch.int64), VERIFIED: torch.full((batch, run.k + 1), -1)}
    with torch.no_grad():
        run.module(window=torch.ones(batch, run.k + 1, dtype=torch.int64), **{**run.state, **idle})
    for name, value in before.items():
        assert torch.equal(_flat(run.state[name]), value), name


def _flat(value: Tensor | Sequence[Tensor]) -> Tensor:
    return value.clone() if isinstance(value, Tensor) else torch.cat([each.flatten() for each in value])


class Contract:
    """Gives the tests of a class the values that its subclasses name for their arguments."""

    ARGUMENTS: ClassVar[Mapping[str, str]] = {}
    """The attribute with the values, by the name of a test's argument."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a test for every value of the attribute that belongs to its argument."""
        for argument, attribute in self.ARGUMENTS.items():
            if argument in metafunc.fixturenames:
                values = getattr(self, attribute)
                assert values, f"{type(self).__name__}.{attribute} is empty, so that nothing would be tested"
                metafunc.parametrize(argument, [*values], ids=str)


class DraftContract(Contract):
    """A drafter under the detectors of :mod:`tests.detectors`, and equal tokens.

    A run is recorded once for each case, and all tests look at that record.
    """

    ARGUMENTS: ClassVar[Mapping[str, str]] = {"case": "CASES", "real": "REAL", "bug": "BUGS", "seeded": "SEEDED"}

    KIND: ClassVar[str]
    CASES: ClassVar[Sequence[Case]]
    """What is run under forced histories."""
    REAL: ClassVar[Sequence[Case]]
    """What decodes with its own verification; every rule occurs."""
    SEEDED: ClassVar[Sequence[Case]]
    """What must give the tokens of plain decoding at any temperature, which the rule ``strict`` does."""
    BUGS: ClassVar[Sequence[Planted]]
    """Planted bugs. Their cases are among ``CASES``, so without a bug no detector fails."""
    TOKENS_TOO: ClassVar[bool] = False
    """Whether the tests also show of every bug that tokens stay equal."""
    PASSES: ClassVar[Mapping[str, bool]] = {}
    """Further passes in the order: ``parallel`` or ``recurrent`` (see :func:`tests.harness.drafting_config`)."""
    BUG_PASS: ClassVar[type[harness.PlantBug]] = harness.PlantBug

    PROMPTS: ClassVar[list[Tensor]] = ragged_prompts((3, 9, 5))
    LIMITS: ClassVar[tuple[int, ...]] = (48, 41, 23)
    """Lengths at which the sequences of a forced history end; the last one gets there."""
    STEPS: ClassVar[int] = 14
    FRESH_STARTS: ClassVar[int] = 4
    """At how many steps of a history a fresh start is compared."""
    REAL_PROMPTS: ClassVar[list[Tensor]] = ragged_prompts((3, 17, 8))
    NEW_TOKENS: ClassVar[int] = 18

    # What a drafter says

    @classmethod
    def target(cls) -> PreTrainedModel:
        """A target that computes in float64 throughout."""
        raise NotImplementedError

    @classmethod
    def draft(cls, name: str) -> Any:
        """A draft by its name, which computes in float64 throughout."""
        raise NotImplementedError

    @classmethod
    def oracle(cls, name: str) -> NextLogits:
        """The drafter's definition, without a cache."""
        raise NotImplementedError

    @classmethod
    def keys(cls, name: str) -> dict[str, Any]:
        """Further keys of the group ``draft``."""
        return {}

    @classmethod
    def check_slots(cls, run: Run) -> None:
        """The slots that a run may write."""
        check_slots(run)

    @classmethod
    def detectors(cls, run: Run, case: Case) -> dict[str, Callable[[], None]]:
        """The detectors by their names, ready to be called."""
        return {
            "fresh start": lambda: check_fresh_start(run, cls.FRESH_STARTS),
            "oracle": lambda: check_oracle(run, cls.oracle(case.name), case.rule),
            "slots": lambda: cls.check_slots(run),
        }

    @classmethod
    def real_detectors(cls, run: Run, case: Case) -> dict[str, Callable[[], None]]:
        """The detectors for a run with its own verification."""
        return cls.detectors(run, case)

    def check_history(self, case: Case, run: Run) -> None:
        """What a forced history must have had in it."""
        assert case.k > 7 or {0, case.k} <= set(run.accept_counts), "the history accepts none and all"
        assert case.k < 3 or len(run.steps[-1].accepted[2]) == self.LIMITS[2], "the history reaches an end"

    def check_program(self, case: Case, program: Program) -> None:
        """What a drafter says of itself in the stage after drafting."""

    def check_real(self, case: Case, run: Run) -> None:
        """What must be true of a run with its own verification."""

    def check_greedy(self, case: Case, out: GenerateOutput) -> None:
        """What must be true of a greedy result besides its tokens."""

    # What is made once

    @classmethod
    def compiled_with(cls, case: Case, bug: str | None) -> SpeculativeDecoder:
        """A decoder whose drafter is broken if ``bug`` names a bug."""
        keys = {"kind": cls.KIND, "num_speculative_tokens": case.k, **cls.keys(case.name)}
        config = drafting_config(keys, case.rule, bug, bugs=cls.BUG_PASS, **cls.PASSES)
        return specgraph.compile_speculative(cls.target(), config, draft=cls.draft(case.name))

    @classmethod
    def run_forced(cls, case: Case, bug: str | None) -> Run:
        """A forced history."""
        return forced_run(drafting_stage(cls.decoder(case, bug)), cls.PROMPTS, cls.LIMITS, seed=0, steps=cls.STEPS)

    @classmethod
    @once
    def decoder(cls, case: Case, bug: str | None = None) -> SpeculativeDecoder:
        """:meth:`compiled_with`, made once."""
        return cls.compiled_with(case, bug)

    @classmethod
    @once
    def forced(cls, case: Case, bug: str | None = None) -> Run:
        """:meth:`run_forced`, recorded once."""
        return cls.run_forced(case, bug)

    @classmethod
    @functools.cache
    def plain(cls) -> SpeculativeDecoder:
        """The target without drafts."""
        return compiled(cls.target(), "none", 1)

    @classmethod
    @functools.cache
    def greedy(cls) -> list[Tensor]:
        """The target's own greedy tokens behind ``PROMPTS``."""
        return cls.reference(cls.PROMPTS, cls.NEW_TOKENS)

    @classmethod
    def reference(cls, prompts: Sequence[Tensor], count: int) -> list[Tensor]:
        """transformers' own greedy tokens behind some prompts."""
        return reference_greedy(cls.target(), prompts, count)

    @classmethod
    @functools.cache
    def plain_tokens(cls) -> list[list[int]]:
        """The tokens of plain decoding at three temperatures."""
        return cls.tokens_of(cls.plain())

    @classmethod
    def tokens_of(cls, tested: SpeculativeDecoder) -> list[list[int]]:
        """The tokens of a decoder at three temperatures."""
        options: dict[str, Any] = {"temperature": [0.0, 0.8, 1.3], "seed": [11, -5, 7]}
        out = tested.generate(cls.PROMPTS, max_new_tokens=18, eos_token_id=[], **options)
        return [tokens.tolist() for tokens in out.new_tokens]

    # The detectors

    def test_drafts_of_forced_histories_pass_every_detector(self, case: Case) -> None:
        """Drafts depend on accepted tokens alone and are those of the definition, and only own slots are written."""
        run = self.forced(case)
        self.check_program(case, run.program)
        for detector in self.detectors(run, case).values():
            detector()
        check_untouched(run)
        self.check_history(case, run)
        check_idle(run)

    def test_real_decoding_passes_every_detector(self, real: Case) -> None:
        """Histories by the drafter's own verification, of a prompt that is longer than a chunk among others."""
        run = real_run(self.decoder(real), self.REAL_PROMPTS, (30, 41, 23))
        assert [len(tokens) for tokens in run.steps[-1].accepted] == [30, 41, 23]
        self.check_real(real, run)
        for detector in self.real_detectors(run, real).values():
            detector()

    def test_planted_bugs_are_caught(self, bug: Planted) -> None:
        """At least these detectors find the bug."""
        assert bug.case in self.CASES, "the same run without a bug must be known to pass"
        detectors = self.detectors(self.forced(bug.case, bug.bug), bug.case)
        assert failing({name: detectors[name] for name in bug.caught}) == bug.caught
        if self.TOKENS_TOO and bug.case.rule == "strict":
            assert self.tokens_of(self.decoder(bug.case, bug.bug)) == self.plain_tokens(), "speculation is lossless"

    # Equal tokens

    def test_greedy_tokens_are_those_of_transformers(self, real: Case) -> None:
        """By every rule, since a greedy draft is accepted if it is the target's token."""
        out = self.decoder(real).generate(self.PROMPTS, max_new_tokens=self.NEW_TOKENS)
        assert_same_tokens(self.target(), self.PROMPTS, out.new_tokens, self.greedy())
        self.check_greedy(real, out)

    def test_seeded_tokens_are_those_without_drafts(self, seeded: Case) -> None:
        """A seed draws the same tokens with and without drafts."""
        assert self.tokens_of(self.decoder(seeded)) == self.plain_tokens()

    def test_one_sequence_of_a_single_token_alone(self) -> None:
        """``test_matrix.py`` has one of nine tokens alone, of every drafter."""
        (prompt,), tested = ragged_prompts((1,), seed=4), self.decoder(self.SEEDED[0])
        found = tested.generate([prompt], max_new_tokens=12).new_tokens
        assert_same_tokens(self.target(), [prompt], found, self.reference([prompt], 12))
        options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "seed": [3], "eos_token_id": []}
        drawn, expected = (each.generate([prompt], **options).new_tokens[0] for each in (tested, self.plain()))
        assert drawn.tolist() == expected.tolist() and drawn.numel() == 12

    # What a user sees

    def test_a_dump_runs_bit_for_bit_as_the_decoder(self, tmp_path: Path) -> None:
        """The stages with the drafter in them, by a rule that keeps logits."""
        tested = self.decoder(next(case for case in self.REAL if case.rule != "strict"))
        folder = tested.dump(tmp_path / "graphs")
        for index, (name, program) in enumerate(tested.stages.items()):
            if name in ("insert_draft", "insert_verify"):
                assert_runs_alike(specgraph.load_dump(folder / f"{index:02d}_{name}"), program)


class CachedDraftContract(DraftContract):
    """A drafter with caches of its own, which hold rows that later steps must not read."""

    ARGUMENTS: ClassVar[Mapping[str, str]] = {**DraftContract.ARGUMENTS, "poisoned": "POISONED"}
    POISONED: ClassVar[Sequence[Case]]
    """What is run while every cached row that no accepted token owns is NaN."""
    POISONED_SEED: ClassVar[int] = 0
    POISON_DETECTORS: ClassVar[Sequence[str]] = ("oracle",)
    """A fresh start holds if every row of an accepted token has been written, which a block's newest one has not."""

    def test_rejected_rows_are_never_read(self, poisoned: Case) -> None:
        """Their values would make every draft behind them NaN."""
        stage = drafting_stage(self.decoder(poisoned))
        run = forced_run(stage, self.PROMPTS, self.LIMITS, seed=self.POISONED_SEED, poison=True)
        caches = run.steps[-1].caches
        assert caches and all(cache.isnan().any() for cache in caches)
        for name in self.POISON_DETECTORS:
            self.detectors(run, poisoned)[name]()


def tokens_are_those_of_plain_decoding(kind: str, model: PreTrainedModel, draft: Any, k: int) -> None:
    """Greedily and drawn, for a target that is not the one of the detectors."""
    prompts, options = DraftContract.PROMPTS, {"max_new_tokens": 9, "seed": [3, 1, 4]}
    tested, plain = compiled(model, kind, k, draft=draft), compiled(model, "none", 1)
    for temperature in (0.0, 1.0):
        found, expected = (each.generate(prompts, temperature=temperature, **options).new_tokens
                           for each in (tested, plain))  # fmt: skip
        assert_same_tokens(model, prompts, found, expected)
