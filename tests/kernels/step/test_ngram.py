"""Prompt lookup and the recording of tokens: every form against searches and writes in plain Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from specgraph.kernels import gpus
from specgraph.kernels.launch import arrival_counters
from specgraph.kernels.step import ngram, record_tokens_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NONE = -1
Lookup = Callable[[Tensor, Tensor | None, Tensor, int, int, int], Tensor]
Record = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], None]
LOOKUPS: dict[str, tuple[str, Lookup]] = {
    "reference": ("cpu", ngram.NGRAM_LOOKUP.form("reference")),
    "triton": (DEVICE, ngram.NGRAM_LOOKUP.form("triton")),
    "op": (DEVICE, torch.ops.specgraph.ngram_lookup),
}
RECORDS: dict[str, tuple[str, Record]] = {
    "reference": ("cpu", ngram.RECORD_TOKENS.form("reference")),
    "triton": (DEVICE, ngram.RECORD_TOKENS.form("triton")),
    "op": (DEVICE, record_tokens_),
}


def ids(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def draw(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator)


def searched(tokens: Sequence[int], count: int, longest: int, shortest: int) -> list[int]:
    """The definition, word by word: of the longest n-gram at the end that has occurred before, the last occurrence."""
    for size in range(longest, shortest - 1, -1):
        wanted = tokens[len(tokens) - size :]
        ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == wanted]
        if size <= len(tokens) and ends:
            found = tokens[ends[-1] : ends[-1] + count]
            return [*found, *[NONE] * (count - len(found))]
    return [NONE] * count


def expected(
    history: Tensor, rows: Tensor | None, length: Tensor, count: int, longest: int, shortest: int
) -> list[list[int]]:
    chosen = range(len(length)) if rows is None else rows.tolist()
    tokens = [history[row, :n].tolist() if row >= 0 else [] for row, n in zip(chosen, length.tolist(), strict=True)]
    return [searched(t, count, longest, shortest) for t in tokens]


def assert_found(form: str, history: Tensor, rows: Tensor | None, length: Tensor, *options: int) -> list[list[int]]:
    """The form gives what the search in Python gives; returns that."""
    device, function = LOOKUPS[form]
    given = [None if t is None else t.to(device) for t in (history, rows, length)]
    before = given[0].clone()
    found = function(*given, *options)
    wanted = expected(history, rows, length, *options)
    assert found.dtype == torch.int64 and found.device.type == device
    assert found.tolist() == wanted
    assert torch.equal(given[0], before), "a lookup writes nothing into the history"
    return wanted


@pytest.fixture(params=[None, 16], ids=["tiles of 1024", "tiles of 16"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small tiles, short sequences take several programs as well, and those several tiles."""
    if request.param is not None:
        monkeypatch.setattr(ngram, "TILE", request.param)
        monkeypatch.setattr(gpus, "HOPPER", dataclasses.replace(gpus.HOPPER, search_programs=12))


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("form", LOOKUPS)
@pytest.mark.parametrize("seed", range(8))
def test_ragged_histories(form: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, longest = (1, 2, 3, 5)[seed % 4], (1, 7, 16, 33, 61, 97, 160, 301)[seed]
    history = draw(generator, 0, 2 + 2 * seed, batch, longest)
    length = draw(generator, 0, longest + 1, batch)
    length[0] = longest
    shortest = 1 + seed % 3
    assert_found(form, history, None, length, 1 + seed, shortest + seed % 4, shortest)


@pytest.mark.parametrize("form", LOOKUPS)
def test_every_length_of_one_history(form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    history = draw(generator, 0, 3, 1, 37).expand(38, -1).contiguous()
    assert_found(form, history, None, torch.arange(38), 3, 4, 1)


@pytest.mark.parametrize("form", LOOKUPS)
def test_a_history_of_several_tiles(form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    history = draw(generator, 0, 9, 4, 2501)
    assert_found(form, history, None, ids(2501, 2048, 1025, 1024), 4, 6, 2)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("form", LOOKUPS)
def test_nothing_precedes_the_first_token(form: str) -> None:
    history = torch.full((4, 5), 8)
    found = assert_found(form, history, None, ids(0, 1, 2, 3), 2, 3, 1)
    assert found == [[NONE, NONE], [NONE, NONE], [8, NONE], [8, NONE]]


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("form", LOOKUPS)
@pytest.mark.parametrize("length", [5, 64, 99])
def test_in_a_history_of_one_token_the_most_recent_place_wins(form: str, length: int) -> None:
    found = assert_found(form, torch.full((2, 99), 6), None, ids(length, length - 1), 3, 4, 1)
    assert found == [[6, NONE, NONE]] * 2


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("form", LOOKUPS)
def test_the_longest_match_wins_over_a_later_one(form: str) -> None:
    history = torch.arange(100, 180).unsqueeze(0)
    history[0, 3:6], history[0, 40:42], history[0, 77:] = ids(1, 2, 3), ids(2, 3), ids(1, 2, 3)
    assert assert_found(form, history, None, ids(80), 2, 4, 1) == [[106, 107]]
    assert assert_found(form, history, None, ids(80), 2, 2, 1) == [[142, 143]]
    assert assert_found(form, history, None, ids(80), 2, 4, 3) == [[106, 107]]
    assert assert_found(form, history, None, ids(80), 2, 4, 4) == [[NONE, NONE]]


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("form", LOOKUPS)
def test_token_ids_are_compared_in_all_64_bits(form: str) -> None:
    high = 2**62
    history = ids([7, 1, high + 7, 2, -high + 7, 3, 2**63 - 1, 4, 7], [high + 7, 1, 7, 2, 2**63 - 1, 9, 9, 9, high + 7])
    assert assert_found(form, history, None, ids(9, 9), 2, 3, 1) == [[1, high + 7], [1, 7]]
    assert assert_found(form, history, None, ids(7, 7), 1, 3, 1) == [[NONE], [9]]


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("form", LOOKUPS)
def test_a_match_at_the_very_end_proposes_what_is_left(form: str) -> None:
    history = torch.arange(70).unsqueeze(0)
    history[0, -2:] = 5000
    assert assert_found(form, history, None, ids(70), 4, 4, 1) == [[5000, NONE, NONE, NONE]]
    history[0, -4:] = ids(5, 6, 5, 6)
    assert assert_found(form, history, None, ids(70), 4, 4, 1) == [[5, 6, NONE, NONE]]


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("form", LOOKUPS)
@pytest.mark.parametrize("length", [1, 2, 17, 32, 48])
def test_stale_tokens_behind_the_length_are_not_found(form: str, length: int) -> None:
    history = torch.arange(64).repeat(2, 1)
    history[:, length:] = length - 1  # each of them equals the sequence's last token
    assert assert_found(form, history, None, ids(length, length), 3, 4, 1) == [[NONE] * 3] * 2


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("form", LOOKUPS)
def test_neighbouring_rows_are_not_found(form: str) -> None:
    """In an odd number of columns every other row begins between two boundaries of 16 bytes."""
    for columns in (1, 2, 15, 16, 17):
        history = torch.full((4, columns), 7)
        history[1::2] = torch.arange(columns) + 8
        history[1::2, -1] = 7
        assert_found(form, history, None, torch.full((4,), columns), 2, 3, 1)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("form", LOOKUPS)
@pytest.mark.parametrize("columns", [16, 17, 32, 33, 49, 64])
def test_the_first_and_the_last_place_of_every_row_are_searched(form: str, columns: int) -> None:
    """In a row that begins between two boundaries, the last place may lie in one more tile."""
    history = torch.arange(4 * columns).view(4, columns)
    for place in (0, columns - 2):
        history[:, -1] = history[:, place]
        drafts = assert_found(form, history, None, torch.full((4,), columns), 1, 3, 1)
        assert drafts == history[:, place + 1 : place + 2].tolist()


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("form", LOOKUPS)
@pytest.mark.parametrize("rows", [(3, 0, 5, 1), (NONE, 4, NONE, 2), (NONE,), (5,), (2, 2)])
def test_rows_name_the_histories(form: str, rows: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    history, length = draw(generator, 0, 4, 6, 45), draw(generator, 20, 46, len(rows))
    found = assert_found(form, history, ids(*rows), length, 3, 3, 1)
    assert all(drafts == [NONE] * 3 for row, drafts in zip(rows, found, strict=True) if row < 0)


@pytest.mark.parametrize("form", LOOKUPS)
def test_a_history_may_be_a_view(form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = draw(generator, 0, 4, 6, 90)
    for view in (whole[1:4], whole[:, 3:30], whole[::2, 1:], whole[:, ::2], whole.T):
        assert_found(form, view, None, torch.full((len(view),), min(view.shape[1], 29)), 3, 3, 1)


@pytest.mark.parametrize("form", LOOKUPS)
def test_a_length_beyond_the_history_counts_as_its_size(form: str) -> None:
    device, function = LOOKUPS[form]
    history = torch.arange(20).repeat(2, 1) % 5
    found = function(history.to(device), None, ids(99, 20).to(device), 3, 3, 1)
    assert found.tolist() == [searched(history[0].tolist(), 3, 3, 1)] * 2


@pytest.mark.parametrize("form", LOOKUPS)
def test_no_sequences_and_no_drafts(form: str) -> None:
    device, function = LOOKUPS[form]
    history, none = (
        torch.zeros(3, 9, dtype=torch.int64, device=device),
        torch.zeros(0, dtype=torch.int64, device=device),
    )
    assert function(history, none, none, 4, 3, 1).shape == (0, 4)
    assert function(history, None, torch.full((3,), 9, device=device), 0, 3, 1).shape == (3, 0)


def test_programs_that_share_a_sequence_leave_their_counters_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "TILE", 16)
    history = (torch.arange(300) % 7).repeat(5, 1).to(DEVICE)
    length = ids(300, 120, 17, 16, 0).to(DEVICE)
    results = [ngram.NGRAM_LOOKUP.form("triton")(history, None, length, 4, 4, 1) for _ in range(3)]
    assert all(torch.equal(result, results[0]) for result in results)
    assert not arrival_counters(history.device).any()


@pytest.mark.parametrize(
    ("batch", "longest", "parts"),
    [(1, 1, 1), (1, 1024, 1), (1, 1025, 2), (1, 131072, 128), (8, 131072, 128), (64, 131072, 16), (1, 2**20, 256),
     (1000, 4096, 1), (5000, 4096, 1)],
)  # fmt: skip
def test_programs_per_sequence(batch: int, longest: int, parts: int) -> None:
    assert ngram._parts(batch, longest) == parts


def written(
    history: Tensor, rows: Tensor | None, tokens: Tensor, positions: Tensor, num_rows: Tensor
) -> list[list[int]]:
    """The history after every real token has been written at its position, one after the other."""
    lines = history.tolist()
    for b, count in enumerate(num_rows.tolist()):
        row = b if rows is None else int(rows[b])
        for token, place in list(zip(tokens[b].tolist(), positions[b].tolist(), strict=True))[: max(count, 0)]:
            if row >= 0 and 0 <= place < history.shape[1]:
                lines[row][place] = token
    return lines


def assert_written(form: str, history: Tensor, rows: Tensor | None, *given: Tensor) -> None:
    """The form writes what the loop in Python writes, and nothing around the history."""
    device, function = RECORDS[form]
    wanted = written(history, rows, *given)
    around = torch.full((history.shape[0] + 2, history.shape[1] + 3), 77, device=device)
    inner = around[1:-1, 1:-2]
    inner.copy_(history)
    function(inner, None if rows is None else rows.to(device), *(t.to(device) for t in given))
    assert inner.tolist() == wanted
    inner.fill_(77)
    assert bool((around == 77).all())


@pytest.mark.parametrize("form", RECORDS)
@pytest.mark.parametrize("seed", range(6))
def test_real_tokens_are_written_and_nothing_else(form: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, width, longest = 1 + seed % 4, (1, 2, 5, 9, 33, 600)[seed], (5, 1, 12, 30, 41, 700)[seed]
    history = draw(generator, 50, 90, batch, longest)
    positions = draw(generator, -3, longest + 2, batch, 1) + torch.arange(width)
    tokens, num_rows = draw(generator, 0, 2**62, batch, width), draw(generator, -1, width + 2, batch)
    assert_written(form, history, None, tokens, positions, num_rows)


@pytest.mark.parametrize("form", RECORDS)
@pytest.mark.parametrize("rows", [(3, 0, 4, 1), (NONE, 0, NONE, 4), (0, NONE), (NONE,)])
def test_tokens_go_to_the_rows_that_are_named(form: str, rows: tuple[int, ...]) -> None:
    """The entries that are no sequence lie in front of, behind and between writers of row 0."""
    batch = len(rows)
    tokens = torch.arange(100, 100 + 3 * batch).view(batch, 3)
    positions, num_rows = torch.arange(3).repeat(batch, 1), torch.full((batch,), 3)
    assert_written(form, torch.arange(40).view(5, 8), ids(*rows), tokens, positions, num_rows)


@pytest.mark.parametrize("form", RECORDS)
def test_any_bits_replace_any_bits(form: str) -> None:
    extremes = [2**63 - 1, -(2**63), 0, -1]
    history, tokens = ids(extremes, extremes[::-1]), ids(extremes[::-1], extremes)
    assert_written(form, history, None, tokens, torch.arange(4).repeat(2, 1), ids(4, 3))


@pytest.mark.parametrize("form", RECORDS)
def test_no_tokens_write_nothing(form: str) -> None:
    none = torch.zeros(2, 0, dtype=torch.int64)
    assert_written(form, torch.ones(2, 4, dtype=torch.int64), None, none, none, ids(0, 0))
    assert_written(form, torch.ones(2, 4, dtype=torch.int64), none[0], none[:0], none[:0], none[0])


def test_a_history_of_any_strides_is_written() -> None:
    history = torch.zeros(6, 4, dtype=torch.int64, device=DEVICE)
    given = (t.to(DEVICE) for t in (ids([1, 2], [3, 4]), ids([1, 2], [4, 5]), ids(2, 2)))
    ngram.RECORD_TOKENS.form("triton")(history.T, ids(3, 0).to(DEVICE), *given)
    assert history.T.tolist() == [[0, 0, 0, 0, 3, 4], [0] * 6, [0] * 6, [0, 1, 2, 0, 0, 0]]


def test_what_was_recorded_is_found() -> None:
    history, rows = torch.full((4, 32), 9, device=DEVICE), ids(2, 0).to(DEVICE)
    tokens = ids([4, 5, 6, 4, 5], [1, 1, 9, 9, 9]).to(DEVICE)
    positions = torch.arange(5, device=DEVICE).repeat(2, 1)
    record_tokens_(history, rows, tokens, positions, ids(5, 2).to(DEVICE))
    found = torch.ops.specgraph.ngram_lookup(history, rows, ids(5, 2).to(DEVICE), 3, 4, 1)
    assert found.tolist() == [[6, 4, 5], [1, NONE, NONE]]


def test_the_ops_are_registered_as_they_behave() -> None:
    ops, length = torch.ops.specgraph, ids(9, 4).to(DEVICE)
    history, rows = (torch.arange(45).view(5, 9) % 4).to(DEVICE), ids(4, NONE).to(DEVICE)
    positions, tokens = torch.arange(3, device=DEVICE).repeat(2, 1), torch.full((2, 3), 7, device=DEVICE)
    for lines, chosen in ((history, rows), (history[:2].clone(), None)):
        torch.library.opcheck(ops.ngram_lookup, (lines, chosen, length, 3, 4, 1))
        torch.library.opcheck(ops.record_tokens, (lines, chosen, tokens, positions, length))


def test_what_does_not_fit_is_refused() -> None:
    ops, meta = torch.ops.specgraph, torch.zeros(3, 9, dtype=torch.int64, device="meta")
    length = meta[:, 0]
    with pytest.raises(ValueError, match="history has 3 rows, not 2: name the row of each sequence in rows"):
        ops.ngram_lookup(meta, None, length[:2], 3, 4, 1)
    with pytest.raises(ValueError, match=r"rows must be \[B\] = \[2\], not \[3\]"):
        ops.ngram_lookup(meta, length, length[:2], 3, 4, 1)
    with pytest.raises(ValueError, match=r"length must be \[B\], not \[3, 9\]"):
        ops.ngram_lookup(meta, None, meta, 3, 4, 1)
    with pytest.raises(ValueError, match=r"history must be \[N, S\], not \[3\]"):
        ops.ngram_lookup(length, None, length, 3, 4, 1)
    with pytest.raises(ValueError, match=r"history must be int64, not torch\.int32"):
        ops.ngram_lookup(meta.int(), None, length, 3, 4, 1)
    for longest, shortest in ((4, 0), (2, 3)):
        with pytest.raises(
            ValueError, match=f"min_ngram must be at least 1 .* not {shortest} with max_ngram {longest}"
        ):
            ops.ngram_lookup(meta, None, length, 3, longest, shortest)
    with pytest.raises(ValueError, match=r"positions must be \[B, T\] = \[3, 9\], not \[3, 8\]"):
        ops.record_tokens(meta, None, meta, meta[:, 1:], length)
    with pytest.raises(ValueError, match=r"num_rows must be \[B\] = \[3\], not \[2\]"):
        ops.record_tokens(meta, None, meta, meta, length[:2])
