"""Prompt lookup and the recording of tokens on a GPU: as plain PyTorch gives them, over many shapes and in a graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from specgraph.kernels.launch import arrival_counters, new_counters, own_counters
from specgraph.kernels.step import ngram, record_tokens_
from tests.gpu.capture import captured, no_synchronisation

DEVICE = torch.device("cuda")
OPTIONS = ((4, 4, 1), (1, 1, 1), (7, 10, 3))
"""K, the longest and the shortest n-gram."""


def histories(batch: int, longest: int, alphabet: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens ``[batch, longest]`` and lengths; the first is all of the history, the last may be 0."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    history = torch.randint(alphabet, (batch, longest), generator=generator, device=DEVICE)
    length = torch.randint(longest + 1, (batch,), generator=generator, device=DEVICE)
    length[0] = longest
    return history, length


def chosen_rows(batch: int, seed: int = 0) -> Iterator[Tensor | None]:
    """No rows; a permutation in which every third entry is no sequence; fewer than there are histories."""
    yield None
    rows = torch.randperm(batch, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
    yield torch.where(torch.arange(batch, device=DEVICE) % 3 == 2, -1, rows)
    yield rows[: (batch + 1) // 2]


@pytest.mark.parametrize("alphabet", [1, 3, 1000])
@pytest.mark.parametrize("longest", [1, 2, 15, 1024, 1025, 4096, 40_001, 131_072])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_lookups_of_many_shapes(batch: int, longest: int, alphabet: int) -> None:
    history, length = histories(batch, longest, alphabet)
    for options in OPTIONS:
        for rows in chosen_rows(batch):
            of = length if rows is None else length[: len(rows)]
            found = torch.ops.specgraph.ngram_lookup(history, rows, of, *options)
            assert torch.equal(found, ngram.NGRAM_LOOKUP.form("reference")(history, rows, of, *options))
    assert not arrival_counters(DEVICE).any()


@pytest.mark.parametrize("longest", [4096, 4097])
def test_every_length_around_the_borders_of_tiles(longest: int) -> None:
    history, _ = histories(2, longest, 500)
    lengths = [n for tile in range(5) for n in range(tile * 1024 - 5, tile * 1024 + 6) if 0 <= n <= longest]
    length = torch.tensor(lengths, device=DEVICE)
    for row in (0, 1):
        rows = torch.full_like(length, row)
        found = torch.ops.specgraph.ngram_lookup(history, rows, length, 4, 4, 1)
        assert torch.equal(found, ngram.NGRAM_LOOKUP.form("reference")(history, rows, length, 4, 4, 1))


def test_one_place_in_a_long_history_is_found_wherever_it_is() -> None:
    """All else is different, so a program that misses its tile, or a score that gets lost, gives no draft."""
    longest = 131_072
    history = torch.arange(longest, device=DEVICE).repeat(2, 1)
    length = torch.full((2,), longest, device=DEVICE)
    for place in [*range(0, longest - 1, 4099), longest - 2]:
        history[:, -1] = place
        found = torch.ops.specgraph.ngram_lookup(history, None, length, 1, 4, 1)
        assert found.tolist() == [[place + 1 if place + 1 < longest - 1 else place]] * 2


@pytest.mark.parametrize("width", [1, 5, 9, 257, 2049])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_recording_of_many_shapes(batch: int, width: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(width)
    history, _ = histories(batch, 3000, 1000)
    start = torch.randint(-3, 3003, (batch, 1), generator=generator, device=DEVICE)
    positions = start + torch.arange(width, device=DEVICE)
    tokens = torch.randint(2**62, (batch, width), generator=generator, device=DEVICE)
    count = torch.randint(-1, width + 2, (batch,), generator=generator, device=DEVICE)
    for rows in chosen_rows(batch):
        n = batch if rows is None else len(rows)
        given = (tokens[:n], positions[:n], count[:n])
        found, expected = history.clone(), history.cpu()
        record_tokens_(found, rows, *given)
        ngram.RECORD_TOKENS.form("reference")(expected, None if rows is None else rows.cpu(), *(t.cpu() for t in given))
        assert torch.equal(found.cpu(), expected)


def run_steps(state: dict[str, Tensor], out: Tensor, count: int) -> None:
    """``count`` steps of a drafter whose every draft is accepted: record the drafts (or a token), look up again."""
    for index in range(count):
        place = state["length"].unsqueeze(1) + torch.arange(4, device=DEVICE)
        record_tokens_(state["history"], state["rows"], state["drafts"], place, state["num_rows"])
        state["length"] += state["num_rows"]
        drafts = torch.ops.specgraph.ngram_lookup(state["history"], state["rows"], state["length"], 4, 4, 1)
        out[index] = drafts
        state["num_rows"].copy_((drafts >= 0).sum(1).clamp_min(1))
        state["drafts"].copy_(drafts.clamp_min(0))


def state_of(longest: int, seed: int) -> dict[str, Tensor]:
    """Three sequences in rows 4, 0 and 2 of six, and an entry that is none."""
    history, _ = histories(6, longest, 40, seed)
    return {
        "history": history,
        "rows": torch.tensor([4, -1, 0, 2], device=DEVICE),
        "length": torch.tensor([longest // 2, 3, 30, longest - 60], device=DEVICE),
        "drafts": torch.full((4, 4), 5, device=DEVICE),
        "num_rows": torch.tensor([2, 4, 1, 0], device=DEVICE),
    }


def steps_by_reference(longest: int, seed: int, count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """The drafts of all steps and the last history, by plain PyTorch."""
    state, out = state_of(longest, seed), torch.zeros(count, 4, 4, dtype=torch.int64, device=DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops.specgraph, "ngram_lookup", ngram.NGRAM_LOOKUP.form("reference"))
        patch.setattr(torch.ops.specgraph, "record_tokens", ngram.RECORD_TOKENS.form("reference"))
        run_steps(state, out, count)
    return out, state["history"]


@pytest.mark.parametrize("longest", [128, 1001, 20_000])
def test_steps_in_a_graph_that_is_replayed_on_new_values(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
        drafts, history = steps_by_reference(longest, seed, count, monkeypatch)
        assert torch.equal(out, drafts) and torch.equal(state["history"], history)
        assert bool((drafts[:, [0, 2, 3]] >= 0).any()) and bool((drafts[:, 1] == -1).all())
