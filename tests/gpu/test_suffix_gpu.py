"""Suffix lookup on a GPU: as plain PyTorch gives it, over many shapes, without waiting, and in a graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specgraph.kernels.launch import arrival_counters, new_counters, own_counters
from specgraph.kernels.step import record_tokens_, suffix
from tests.gpu.capture import captured, no_synchronisation
from tests.gpu.test_ngram_gpu import DEVICE, chosen_rows, histories, state_of

OPTIONS = ((4, 24, 1, 1.0, 0.0, 0.1), (1, 1, 1, 1.0, 0.0, 0.0), (8, 12, 3, 2.5, -1.0, 0.3))
"""K, the longest and the shortest match, the factor and the offset of the limit, and the smallest probability."""
REFERENCE = suffix.SUFFIX_LOOKUP.form("reference")


def texts(batch: int, longest: int, alphabet: int) -> tuple[Tensor, Tensor]:
    """Histories with frequent and rare tokens and repeated passages, and lengths."""
    history, length = histories(batch, longest, alphabet)
    history = torch.minimum(history, histories(batch, longest, alphabet, seed=1)[0])
    half = longest // 2
    history[:, longest - half :][:, : half // 2] = history[:, :half][:, : half // 2].clone()
    return history, length


def looked_up(history: Tensor, rows: Tensor | None, length: Tensor, options: tuple[float, ...]) -> Tensor:
    found: Tensor = torch.ops.specgraph.suffix_lookup(history, rows, length, *options)
    return found


@pytest.mark.parametrize("alphabet", [1, 3, 1000])
@pytest.mark.parametrize("longest", [1, 2, 15, 1024, 1025, 4096, 40_001, 131_072])
@pytest.mark.parametrize("batch", [1, 8])
def test_lookups_of_many_shapes(batch: int, longest: int, alphabet: int) -> None:
    history, length = texts(batch, longest, alphabet)
    for options in OPTIONS:
        for rows in chosen_rows(batch):
            of = length if rows is None else length[: len(rows)]
            assert torch.equal(looked_up(history, rows, of, options), REFERENCE(history, rows, of, *options))
    assert not arrival_counters(DEVICE).any()


def test_a_large_batch() -> None:
    history, length = texts(64, 4096, 40)
    for options in OPTIONS:
        assert torch.equal(looked_up(history, None, length, options), REFERENCE(history, None, length, *options))


@pytest.mark.parametrize("longest", [4096, 4097])
def test_every_length_around_the_borders_of_tiles(longest: int) -> None:
    history, _ = texts(2, longest, 30)
    lengths = [n for tile in range(5) for n in range(tile * 1024 - 5, tile * 1024 + 6) if 0 <= n <= longest]
    length = torch.tensor(lengths, device=DEVICE)
    for row in (0, 1):
        rows = torch.full_like(length, row)
        assert torch.equal(looked_up(history, rows, length, OPTIONS[0]), REFERENCE(history, rows, length, *OPTIONS[0]))


def test_one_place_in_a_long_history_is_found_wherever_it_is() -> None:
    """All else is different, so a program that misses its tile, or a score that gets lost, gives no draft."""
    longest = 131_072
    history = torch.arange(longest, device=DEVICE).repeat(2, 1)
    length = torch.full((2,), longest, device=DEVICE)
    for place in [*range(0, longest - 1, 4099), longest - 2]:
        history[:, -1] = place
        found = looked_up(history, None, length, (1, 24, 1, 1.0, 0.0, 0.1))
        assert found.tolist() == [[place + 1 if place + 1 < longest - 1 else place]] * 2


def test_a_sequence_has_the_same_drafts_in_every_batch() -> None:
    history, length = texts(64, 5000, 40)
    together = looked_up(history, None, length, OPTIONS[0])
    for row in (0, 7, 63):
        alone = looked_up(history[row : row + 1], None, length[row : row + 1], OPTIONS[0])
        assert torch.equal(alone[0], together[row])


def run_steps(state: dict[str, Tensor], out: Tensor, count: int, *, reference: bool = False) -> None:
    """``count`` steps of a drafter whose every draft is accepted: record the drafts (or a token), look up again."""
    look_up = REFERENCE if reference else torch.ops.specgraph.suffix_lookup
    for index in range(count):
        place = state["length"].unsqueeze(1) + torch.arange(4, device=DEVICE)
        record_tokens_(state["history"], state["rows"], state["drafts"], place, state["num_rows"])
        state["length"] += state["num_rows"]
        drafts = look_up(state["history"], state["rows"], state["length"], *OPTIONS[0])
        out[index] = drafts
        state["num_rows"].copy_((drafts >= 0).sum(1).clamp_min(1))
        state["drafts"].copy_(drafts.clamp_min(0))


@pytest.mark.parametrize("longest", [128, 1001, 20_000])
def test_steps_in_a_graph_that_is_replayed_on_new_values(longest: int) -> None:
    """Kernels follow each other without a gap here: a lookup that did not wait would miss what was just recorded."""
    count = 8
    state, out = state_of(longest, 0), torch.zeros(count, 4, 4, dtype=torch.int64, device=DEVICE)
    run_steps(state, out, count)
    with no_synchronisation():
        run_steps(state, out, count)
    counters = new_counters(DEVICE)  # the graph knows their address alone, so they must outlive it
    with own_counters(counters):
        graph, _ = captured(lambda: run_steps(state, out, count))
    for seed in (1, 2, 3):
        for name, value in state_of(longest, seed).items():
            state[name].copy_(value)
        graph.replay()
        again, expected = state_of(longest, seed), torch.zeros_like(out)
        run_steps(again, expected, count, reference=True)
        assert torch.equal(out, expected) and torch.equal(state["history"], again["history"])
        assert bool((expected[:, [0, 2, 3]] >= 0).any()) and bool((expected[:, 1] == -1).all())
