"""Seeded tokens of ``probabilistic`` and ``block`` do not depend on how prompts are cut, nor on what runs beside them.

They would if noise were keyed by a step's first row, because that row depends on the cut. In float64 the logits of a
position are the same to the last digits however its prompt is cut, so tokens have to be equal, and so do the drafts
that every step makes, those of the step that ends the prompt included.
"""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

from specgraph import SpeculativeDecoder
from specgraph.ir.program import Program
from specgraph.kernels import step
from specgraph.kernels.step import step as step_functions
from specgraph.kernels.verify import pieces
from tests import harness
from tests.drafters.test_matrix import VOCAB, decoder, heads_exported_once  # noqa: F401  (a fixture of all tests here)
from tests.models import ragged_prompts

RULES = ("probabilistic", "block")
DRAFTERS = ("ngram", "draft_model", "eagle3", "mtp, 3 chained", "dflash")
K, NEW_TOKENS, TRIALS = 3, 10, 4
PROMPTS = ragged_prompts((1, 2, 4, 7, 9, 17), vocab=VOCAB)
SEEDS = (11, -5, 1 << 40, 7, 3, -(1 << 50))
OPTIONS = harness.Options((2.0, 1.5, 3.0, 2.0, 2.5, 2.0), (0, 0, 6, 0, 0, 7), SEEDS)
"""So hot that other noise mostly draws another token."""


@functools.cache
def made(drafter: str, rule: str) -> SpeculativeDecoder:
    return decoder(drafter, None, "llama", rule, K)


class Turn(NamedTuple):
    """What one sequence does in one step from the one on that ends its prompt.

    ``drafts`` are those that the step leaves for the next one, and ``num_rows`` the number of rows that it will have.
    """

    emitted: list[int]
    drafts: list[int]
    num_rows: int


class Play:
    """Steps of a compiled program over prompts that are cut anywhere, beside whatever else runs.

    Without ``chance``, every prompt is one window. With it, each step runs some of the sequences: for those with a
    prompt left it takes a part of that, and the others decode.
    """

    def __init__(self, program: Program, chosen: list[int], chance: random.Random | None) -> None:
        self._prompts = [PROMPTS[row].tolist() for row in chosen]
        limits = [len(prompt) + NEW_TOKENS for prompt in self._prompts]
        self._state = harness.blank_state(program, limits, seed=1, guard=0)
        OPTIONS.fill(self._state, chosen)
        self._module = program.step()
        self._chance = chance
        self._done = [0] * len(chosen)
        self.turns: list[list[Turn]] = [[] for _ in chosen]

    def run(self) -> list[list[Turn]]:
        """Decode to the end."""
        while open_rows := [row for row in range(len(self._done)) if self._pending(row) or self._rows_left(row)]:
            self._step(self._some(open_rows))
        return self.turns

    def _pending(self, row: int) -> int:
        return len(self._prompts[row]) - self._done[row]

    def _rows_left(self, row: int) -> int:
        return int(self._state["num_rows"][row])

    def _some(self, rows: list[int]) -> list[int]:
        return self._chance.sample(rows, self._chance.randint(1, len(rows))) if self._chance else rows

    def _window(self, row: int) -> list[int]:
        """A window of a sequence: the next part of its prompt, or what its last step has laid out."""
        left, begin = self._pending(row), self._done[row]
        if not left:
            laid_out: list[int] = self._state["next_window"][row].tolist()
            return laid_out
        count = self._chance.randint(1, left) if self._chance else left
        known = self._prompts[row][begin : begin + count + 1]
        self._done[row] += count
        self._state["num_rows"][row], self._state["num_forced"][row] = count, len(known) - 1
        return known

    def _step(self, rows: list[int]) -> None:
        windows = [self._window(row) for row in rows]
        width = max(K + 1, *map(len, windows))
        window = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in windows])
        forced = [int(self._state["num_forced"][row]) for row in rows]
        with torch.no_grad():
            emitted, count = self._module(window=window, **{**self._state, "rows": torch.tensor(rows)})[:2]
        for row, tokens, first, end in zip(rows, emitted.tolist(), forced, count.tolist(), strict=True):
            if not self._pending(row):
                drafts = self._state["next_window"][row, 1:].tolist()
                self.turns[row].append(Turn(tokens[first:end], drafts, self._rows_left(row)))


def different_plays(tested: SpeculativeDecoder) -> int:
    """Of the sequences of all trials, how many do anything that they do not do alone with their prompt in one piece."""
    program, everyone = tested._program, [*range(len(PROMPTS))]
    alone = [Play(program, [row], None).run()[0] for row in everyone]
    counts = {len(turn.emitted) for turns in alone for turn in turns[1:-1]}
    assert len(counts) > 1, "no draft was accepted, or all were"
    plays = [Play(program, everyone, random.Random(trial)).run() for trial in range(TRIALS)]
    return sum(play[row] != alone[row] for play in plays for row in everyone)


@pytest.mark.parametrize(("drafter", "rule"), [*itertools.product(DRAFTERS, RULES)])
def test_no_cut_and_no_neighbour_moves_a_token_or_a_draft(drafter: str, rule: str) -> None:
    assert different_plays(made(drafter, rule)) == 0


@pytest.mark.parametrize(
    ("drafter", "rule", "chunks"), [*zip(DRAFTERS, itertools.cycle(RULES), itertools.cycle([(1, 5), (3, 256), (3, 5)]))]
)
def test_the_chunk_of_a_decoder_and_its_batch_move_no_token(drafter: str, rule: str, chunks: tuple[int, int]) -> None:
    """By the public call."""
    everyone = [*range(len(PROMPTS))]
    alone = [new_tokens(made(drafter, rule), [row])[0] for row in everyone]
    for chunk in chunks:
        other = decoder(drafter, None, "llama", rule, K, cache={"prefill_chunk": chunk, "block_size": 4})
        assert new_tokens(other, everyone) == alone


def new_tokens(tested: SpeculativeDecoder, rows: list[int]) -> list[list[int]]:
    """The new tokens of these prompts."""
    options = {"temperature": OPTIONS.temperature, "top_k": OPTIONS.top_k, "seed": OPTIONS.seeds}
    chosen: dict[str, Any] = {name: [values[row] for row in rows] for name, values in options.items()}
    out = tested.generate([PROMPTS[row] for row in rows], max_new_tokens=NEW_TOKENS, **chosen)
    return [tokens.tolist() for tokens in out.new_tokens]


@pytest.mark.parametrize("rule", RULES)
def test_a_steps_key_is_the_number_of_tokens_known_before_it(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So keys grow, and no noise is used twice. The drafts of a step have been drawn with its key."""
    keys: list[int] = []
    drawn: list[int] = []
    program, step_noise = made("eagle3", rule)._program, pieces.step_noise
    sample_draft = step_functions.sample_draft

    def seen_noise(*given: Tensor) -> tuple[Tensor, Tensor]:
        key, row = step_noise(*given)
        keys.append(int(key[0, 0]))
        return key, row

    def seen_draft(logits: Tensor, temperature: Tensor, seeds: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
        drawn.append(int(key))
        return sample_draft(logits, temperature, seeds, key, *rest, **options)

    monkeypatch.setattr(pieces, "step_noise", seen_noise)
    monkeypatch.setattr(step_functions, "sample_draft", seen_draft)
    for chance in (None, random.Random(1)):
        keys.clear()
        drawn.clear()
        (turns,) = Play(program, [5], chance).run()
        emitted = itertools.accumulate((len(turn.emitted) for turn in turns), initial=len(PROMPTS[5]))
        *wanted, end = emitted
        # Verification asks twice in a step: for its uniforms, and for the token after the accepted prefix.
        assert keys[-2 * len(turns) :] == [key for key in wanted for _ in range(2)]
        assert drawn[-K * len(turns) :] == [key for key in [*wanted[1:], end] for _ in range(K)]


# Planted bugs


def by_the_first_row(positions: Tensor, num_forced: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """The key of the step's noise as it was once: the first row's position, forced or not."""
    return positions[:, :1].expand_as(row), row


@pytest.mark.parametrize("rule", RULES)
def test_noise_of_the_first_row_is_caught(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "step_noise", by_the_first_row)
    assert different_plays(made("eagle3", rule)) > TRIALS * len(PROMPTS) // 3


def drawn_by_the_window(
    draft_logits: Tensor | None, logits: Tensor, length: Tensor, num_emitted: Tensor, *rest: Any, **options: Any
) -> Tensor:
    """Drafts whose noise is keyed by the step that draws them, not by the one that verifies them."""
    return step.propose_(draft_logits, logits, length - num_emitted, num_emitted, *rest, **options)  # type: ignore[return-value]


class PlantBug(harness.PlantBug):
    """Breaks drafting on purpose, with a bug of this file."""

    bugs: ClassVar = {"drawn by the window": lambda p: harness._replace(p, step.propose_, drawn_by_the_window)}


@pytest.mark.parametrize("rule", RULES)
def test_draft_noise_of_the_step_that_draws_is_caught(rule: str) -> None:
    order = ["expose_features", "insert_kv_cache", "insert_draft", "plant_bug", "insert_verify"]
    passes = {"plant_bug": {"_target_": f"{__name__}.PlantBug", "bug": "drawn by the window"}}
    broken = decoder("eagle3", None, "llama", rule, K, pipeline={"order": order, "verify": False}, passes=passes)
    assert different_plays(broken) > TRIALS * len(PROMPTS) // 3
