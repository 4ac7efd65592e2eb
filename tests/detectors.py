"""Three detectors for broken drafters: a fresh start, an oracle without a cache, the slots it writes.

They read runs that ``tests.harness`` recorded and know three kinds of drafting: a plain draft model, a shifted head
(row ``t`` runs token ``t + 1``), and each of them in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specgraph.kernels.sampling.constants import STREAM_DRAFT, STREAM_TARGET
from specgraph.kernels.sampling.sample import gumbel
from tests import harness
from tests.harness import Run, fresh_start, slots_of

TOLERANCE = {"rtol": 0.0, "atol": 1e-11}
"""Absolute, for values up to 10: the same sums in another order differ by 2e-14, wrong cache rows by more than 1."""

NextLogits = Callable[[Sequence[list[int]], Sequence[list[int]]], Tensor]
"""The oracle of a drafter: raw logits ``[N, Vd]`` of the next draft, from the accepted tokens of each sequence and the
drafts before it, computed without any cache."""


def failing(detectors: Mapping[str, Callable[[], None]]) -> set[str]:
    """The names of the detectors that fail."""
    caught = set()
    for name, detector in detectors.items():
        try:
            detector()
        except AssertionError:
            caught.add(name)
    return caught


def expected_drafts(
    next_logits: NextLogits, sequences: Sequence[list[int]], rows: Sequence[int], run: Run, rule: str
) -> tuple[Tensor, Tensor]:
    """Drafts ``[N, K]`` and the log-weights ``[N, K, Vd]`` they are drawn from, by an oracle.

    ``rows`` ``[N]`` names the sampling options of each sequence of accepted tokens.
    """
    options, to_target = run.options, run.program.drafter.draft_to_target
    temperature = torch.tensor(options.temperature)[list(rows)].double().unsqueeze(1)
    top_k, seeds = (torch.tensor(values)[list(rows)] for values in (options.top_k, options.seeds))
    drafted: list[list[int]] = [[] for _ in sequences]
    weights = []
    for row in range(run.k):
        weights.append(_process(next_logits(sequences, drafted), temperature, top_k))
        ids = weights[-1].shape[1] if to_target is None else to_target
        key = torch.tensor([len(s) for s in sequences]).unsqueeze(1)
        if rule == "strict":
            noise = gumbel(seeds, STREAM_TARGET, key + row, None, ids)
        else:
            noise = gumbel(seeds, STREAM_DRAFT, key, torch.full_like(key, row), ids)
        chosen = (weights[-1] + noise[:, 0]).argmax(-1)
        chosen = chosen if to_target is None else to_target[chosen]
        drafted = [[*d, int(new)] for d, new in zip(drafted, chosen, strict=True)]
    return torch.tensor(drafted), torch.stack(weights, dim=1)


def _process(logits: Tensor, temperature: Tensor, top_k: Tensor) -> Tensor:
    """Temperature and top-k; temperature 0 is 0 at the argmax and -inf elsewhere."""
    weights = logits / torch.where(temperature == 0, 1.0, temperature)
    for row in range(len(weights)):
        if temperature[row] == 0:
            weights[row] = torch.full_like(weights[row], -torch.inf).index_fill(0, logits[row].argmax(), 0.0)
        elif top_k[row] > 0:
            weights[row][weights[row] < weights[row].topk(int(top_k[row])).values[-1]] = -torch.inf
    return weights


def check_fresh_start(run: Run, times: int = 4, atol: float = TOLERANCE["atol"]) -> None:
    """Caches, proposals and draft logits equal those of each sequence alone in a new state, at a few of the steps.

    ``atol`` is for models that round to float32 inside, which a difference of 2e-14 can change by 6e-8.
    """
    last = len(run.steps) - 1
    for at in sorted({last * part // times for part in range(1, times + 1)}):
        for row, tokens in enumerate(run.steps[at].accepted):
            if len(tokens) > 1:
                _check_fresh_start(run, at, row, tokens, atol)


def _check_fresh_start(run: Run, at: int, row: int, tokens: list[int], atol: float) -> None:
    step = run.steps[at]
    caches, drafts, logits, kept = fresh_start(run, row, tokens)
    rows = slots_of(run, row, range(run.real_rows(len(tokens))))
    for index, (cache, fresh) in enumerate(zip(step.caches, caches, strict=True)):
        _close(cache.flatten(0, 1)[rows], fresh, f"step {at}, sequence {row}, cache {index}", atol)
    for name, fresh in kept.items():
        own = step.kept[name][row][tuple(slice(size) for size in fresh.shape)]  # alone, a sequence has its own S
        _close(own, fresh, f"step {at}, sequence {row}, {name}", atol)
    usable = run.usable(row, len(tokens))
    assert step.drafts[row, :usable].tolist() == drafts[:usable].tolist(), f"step {at}, sequence {row}"
    if logits is not None and step.draft_logits is not None:
        _close(step.draft_logits[row, :usable], logits[:usable], f"step {at}, sequence {row}, draft logits", atol)


def check_fresh_drafts(run: Run, times: int = 4) -> None:
    """Proposals equal those of each sequence alone in a new state, at a few of the steps.

    Unlike :func:`check_fresh_start`, this compares no numbers, so it also holds for models that round to float32.
    """
    last = len(run.steps) - 1
    for at in sorted({last * part // times for part in range(1, times + 1)}):
        for row, tokens in enumerate(run.steps[at].accepted):
            usable = run.usable(row, len(tokens))
            if len(tokens) > 1 and usable:
                drafts = fresh_start(run, row, tokens)[1]
                assert run.steps[at].drafts[row, :usable].tolist() == drafts[:usable].tolist(), f"step {at}, row {row}"


def _close(actual: Tensor, expected: Tensor, where: str, atol: float = TOLERANCE["atol"]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=atol, msg=lambda text: f"{where}: {text}")


def check_oracle(run: Run, next_logits: NextLogits, rule: str) -> None:
    """Proposals of every step equal the oracle's, and so do the logits they were drawn from, where they are kept."""
    proposed = [(step, row) for step in run.steps for row, count in enumerate(step.num_emitted) if count > 0]
    sequences, rows = [step.accepted[row] for step, row in proposed], [row for _, row in proposed]
    drafts, weights = expected_drafts(next_logits, sequences, rows, run, rule)
    compared = 0
    for index, (step, row) in enumerate(proposed):
        usable = run.usable(row, len(sequences[index]))
        assert step.drafts[row, :usable].tolist() == drafts[index, :usable].tolist(), f"sequence {sequences[index]}"
        if step.draft_logits is not None:
            _close(step.draft_logits[row, :usable], weights[index, :usable], f"sequence {sequences[index]}")
        compared += usable
    assert compared > len(run.steps)


def check_slots(run: Run) -> None:
    """The target writes exactly its real rows, the draft exactly accepted rows and the drafts behind them."""
    for at, step in enumerate(run.steps):
        per_call = 2 * run.program.target.attention_layers
        block = [range(s, s + n) for s, n in zip(step.start, step.num_rows, strict=True)]
        assert step.slots["other"] == []
        assert [s.tolist() for s in step.slots["target"]] == [_slots(run, block, step.width)] * per_call, f"step {at}"
        assert [s.tolist() for s in step.slots["draft"]] == _draft_slots(run, step), f"step {at}"


def _draft_slots(run: Run, step: harness.Step) -> list[list[list[int]]]:
    """Slots of every cache write of the draft: the catch-up call of every module, with mask rows or followed by calls
    of one row for the other drafts.

    With several modules, a call runs again what lies before the window, as many rows as there are further modules.
    Modules that take turns write the last row of the prefix with every further draft, so a call runs at least this one
    again.
    """
    drafter: Any = run.program.drafter
    modules = len(drafter.models)
    if not modules:
        return []
    further = 0 if run.parallel else run.k - modules
    turns = getattr(drafter, "beyond", None) == "turns" and further > 0
    masks, again = run.k - 1 if run.parallel else 0, max(modules - 1, int(turns))
    # Positions that the accepted prefix ends before: one more is run by a drafter that is not shifted.
    ends = [s + run.real_rows(n + 1) for s, n in zip(step.start, step.num_emitted, strict=True)]
    active = [n > 0 for n in step.num_emitted]
    caught_up = [
        range(s - again, e + masks) if a else range(0) for s, e, a in zip(step.start, ends, active, strict=True)
    ]
    calls = [_slots(run, caught_up, run.real_rows(step.width + 1) + masks + again)] * modules
    for offset in range(further):
        rows = [e - 1 if turns else e + offset for e in ends]
        calls.append(_slots(run, [range(row, row + a) for row, a in zip(rows, active, strict=True)], 1))
    return [call for call in calls for _ in range(2 * run.program.drafter.model.attention_layers)]


def _slots(run: Run, positions: Sequence[range], width: int) -> list[list[int]]:
    """Slots ``[B, width]`` of rows at ``positions``: -1 past them, before the sequence, and past its end."""
    rows = []
    for row, wanted in enumerate(positions):
        inside = [p for p in wanted if 0 <= p < run.limits[row]]
        before = sum(p < 0 for p in wanted)
        slots = [-1] * before + slots_of(run, row, inside)
        rows.append(slots + [-1] * (width - len(slots)))
    return rows


def caught_by(run: Run, next_logits: NextLogits, rule: str) -> set[str]:
    """The detectors that fail on a run."""
    detectors: dict[str, Callable[[], None]] = {
        "fresh start": lambda: check_fresh_start(run),
        "oracle": lambda: check_oracle(run, next_logits, rule),
        "slots": lambda: check_slots(run),
    }
    caught = set()
    for name, detector in detectors.items():
        try:
            detector()
        except AssertionError:
            caught.add(name)
    return caught
