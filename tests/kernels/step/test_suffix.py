"""Suffix lookup: every form against a suffix trie with counts, in plain Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels import gpus
from specgraph.kernels.launch import MAX_COUNTERS, arrival_counters
from specgraph.kernels.step import record_tokens_, suffix

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NONE = -1
ONE = 1 << 30
Lookup = Callable[..., Tensor]
LOOKUPS: dict[str, tuple[str, Lookup]] = {
    "reference": ("cpu", suffix.SUFFIX_LOOKUP.form("reference")),
    "triton": (DEVICE, suffix.SUFFIX_LOOKUP.form("triton")),
    "op": (DEVICE, torch.ops.specgraph.suffix_lookup),
}
USUAL = (4, 8, 1, 1.0, 0.0, 0.1)
"""K, the longest and the shortest match, the factor and the offset of the limit, and the smallest probability."""


@dataclass
class Node:
    """A node of the trie: how many occurrences pass through it, where the last one of them ends, and its children."""

    count: int = 0
    last: int = -1
    children: dict[int, Node] = field(default_factory=dict)

    def insert(self, tokens: Sequence[int], place: int) -> None:
        """Add one occurrence, whose match ends at ``place``."""
        self.count, self.last = self.count + 1, max(self.last, place)
        if tokens:
            self.children.setdefault(tokens[0], Node()).insert(tokens[1:], place)

    def path(self, limit: int, threshold: int) -> Iterator[tuple[int, int]]:
        """The most frequent continuation and the probability of each of its tokens, in units of ``1 / ONE``."""
        node, prob = self, ONE
        while limit > 0 and node.children:
            token, child = max(node.children.items(), key=lambda item: (item[1].count, item[1].last))
            prob = prob * child.count // sum(other.count for other in node.children.values())
            if prob < threshold:
                return
            yield token, prob
            node, limit = child, limit - 1


def trie(tokens: Sequence[int], size: int, count: int, voters: int) -> Node:
    """What followed the last ``size`` tokens at each of the last ``voters`` places where they occurred before."""
    root, wanted = Node(), list(tokens[len(tokens) - size :])
    places = [at for at in range(size - 1, len(tokens) - 1) if list(tokens[at + 1 - size : at + 1]) == wanted]
    for at in places[-voters:]:
        root.insert(tokens[at + 1 : at + 1 + count], at)
    return root


def limit_of(size: int, count: int, factor: float, offset: float) -> int:
    return min(count, int(size * factor + offset + 1e-6)) if size * factor + offset > 0 else 0


def searched(
    tokens: Sequence[int], count: int, longest: int, shortest: int, factor: float, offset: float, least: float
) -> list[int]:
    """The definition: of all lengths of match, the path with the highest sum of probabilities."""
    best: list[tuple[int, int]] = []
    for size in range(min(longest, len(tokens)), shortest - 1, -1):
        root = trie(tokens, size, count, suffix.VOTERS)
        found = list(root.path(limit_of(size, count, factor, offset), int(least * ONE)))
        if sum(prob for _, prob in found) > sum(prob for _, prob in best):
            best = found
    return [token for token, _ in best] + [NONE] * (count - len(best))


def assert_found(form: str, history: Tensor, rows: Tensor | None, length: Tensor, *options: Any) -> list[list[int]]:
    """The form gives what the search in the trie gives; returns that."""
    device, function = LOOKUPS[form]
    given = [None if t is None else t.to(device) for t in (history, rows, length)]
    before = given[0].clone()
    found = function(*given, *options)
    chosen = range(len(length)) if rows is None else rows.tolist()
    tokens = [history[row, :n].tolist() if row >= 0 else [] for row, n in zip(chosen, length.tolist(), strict=True)]
    wanted = [searched(own, *options) for own in tokens]
    assert found.dtype == torch.int64 and found.device.type == device
    assert found.tolist() == wanted
    assert torch.equal(given[0], before), "a lookup writes nothing into the history"
    return wanted


def ids(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def draw(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator)


def text(generator: torch.Generator, alphabet: int, *shape: int) -> Tensor:
    """Tokens of which low ones are frequent, as in text, so that matches are long and continuations differ."""
    return torch.minimum(draw(generator, 0, alphabet, *shape), draw(generator, 0, alphabet, *shape))


@pytest.fixture(params=[None, 16], ids=["tiles of 1024", "tiles of 16"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small tiles, short sequences take several programs as well, and those several tiles."""
    if request.param is not None:
        monkeypatch.setattr(suffix, "TILE", request.param)
        monkeypatch.setattr(gpus, "HOPPER", dataclasses.replace(gpus.HOPPER, search_programs=12))


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("form", LOOKUPS)
@pytest.mark.parametrize("seed", range(8))
def test_ragged_histories(form: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, longest = (1, 2, 3, 5)[seed % 4], (1, 7, 16, 33, 61, 97, 160, 301)[seed]
    history, length = text(generator, 2 + seed, batch, longest), draw(generator, 0, longest + 1, batch)
    length[0] = longest
    shortest = 1 + seed % 3
    factor, offset, least = ((1.0, 0.0, 0.1), (2.5, -1.0, 0.0), (1 / 3, 1.0, 0.5), (9.0, 2.0, 0.3))[seed % 4]
    assert_found(form, history, None, length, 1 + seed, shortest + 3 * (seed % 4), shortest, factor, offset, least)


@pytest.mark.parametrize("form", LOOKUPS)
def test_every_length_of_one_history(form: str) -> None:
    history = text(torch.Generator().manual_seed(0), 3, 1, 37).expand(38, -1).contiguous()
    assert_found(form, history, None, torch.arange(38), 3, 6, 1, 2.0, 0.0, 0.2)


@pytest.mark.parametrize("form", LOOKUPS)
def test_a_history_of_several_tiles_and_more_voters_than_count(form: str) -> None:
    history = text(torch.Generator().manual_seed(0), 9, 4, 2501)
    for options in (USUAL, (7, 24, 2, 3.0, 0.0, 0.0)):
        assert_found(form, history, None, ids(2501, 2048, 1025, 1024), *options)


@pytest.mark.parametrize("form", LOOKUPS)
def test_only_the_last_occurrences_are_counted(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "VOTERS", 4)
    # After a 9 come five 1s, then two 2s and two 3s, of which the 3 is the last one.
    history = ids([9, 1] * 5 + [9, 2, 9, 3, 9, 2, 9, 3] + [9])
    assert assert_found(form, history, None, ids(19), 1, 1, 1, 1.0, 0.0, 0.5) == [[3]]
    assert assert_found(form, history, None, ids(19), 1, 1, 1, 1.0, 0.0, 0.6) == [[NONE]]
    monkeypatch.setattr(suffix, "VOTERS", 16)
    assert assert_found(form, history, None, ids(19), 1, 1, 1, 1.0, 0.0, 0.5) == [[1]]


@pytest.mark.parametrize("form", LOOKUPS)
def test_the_more_frequent_continuation_wins_over_the_last_one(form: str) -> None:
    history = ids([5, 1, 2, 5, 1, 2, 5, 7, 8, 5])
    assert assert_found(form, history, None, ids(10), 3, 4, 1, 3.0, 0.0, 0.1) == [[1, 2, 5]]


@pytest.mark.parametrize("form", LOOKUPS)
def test_a_draft_stops_where_it_becomes_improbable(form: str) -> None:
    """After 5 always comes a 1, and then something else in each case: of the three the last one, with 1 / 3."""
    history = ids([5, 1, 2, 5, 1, 3, 5, 1, 4, 5])
    for least, drafts in ((0.3, [1, 4, 5]), (1 / 3, [1, 4, 5]), (0.34, [1, NONE, NONE]), (1.0, [1, NONE, NONE])):
        assert assert_found(form, history, None, ids(10), 3, 4, 1, 3.0, 0.0, least) == [drafts]


@pytest.mark.parametrize("form", LOOKUPS)
def test_the_limit_follows_the_match(form: str) -> None:
    """The last three tokens have occurred, and no more than these."""
    history = torch.arange(100, 140).unsqueeze(0)
    history[0, 37:] = history[0, 10:13]
    limits = {(1.0, 0.0): 3, (1 / 3, 0.0): 1, (0.1, 0.0): 0, (0.0, 2.0): 2, (2.0, -1.0): 5, (1.0, -9.0): 0}
    for (factor, offset), count in limits.items():
        drafts = assert_found(form, history, None, ids(40), 8, 24, 1, factor, offset, 0.1)
        assert drafts == [[*range(113, 113 + count), *[NONE] * (8 - count)]]


@pytest.mark.parametrize("form", LOOKUPS)
def test_a_longer_match_wins_if_it_expects_more_drafts(form: str) -> None:
    """A 2 is followed by 8 in most places, but after 1, 2 always comes 3."""
    history = ids([2, 8, 2, 8, 2, 8, 1, 2, 3, 4, 1, 2])
    assert assert_found(form, history, None, ids(12), 2, 4, 1, 2.0, 0.0, 0.1) == [[3, 4]]
    assert assert_found(form, history, None, ids(12), 2, 1, 1, 2.0, 0.0, 0.1) == [[8, 2]]


@pytest.mark.parametrize("form", LOOKUPS)
def test_a_shorter_match_wins_if_it_expects_more_drafts(form: str) -> None:
    """Before the end of the history nothing follows the longer match for two tokens."""
    history = ids([7, 1, 1, 1, 1])
    assert assert_found(form, history, None, ids(5), 3, 3, 1, 3.0, 0.0, 0.1) == [[1, 1, 1]]


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("form", LOOKUPS)
@pytest.mark.parametrize("length", [5, 64, 99])
def test_a_history_of_one_token(form: str, length: int) -> None:
    found = assert_found(form, torch.full((2, 99), 6), None, ids(length, length - 1), 3, 4, 1, 3.0, 0.0, 0.1)
    assert found[0] == [6, 6, 6]


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("form", LOOKUPS)
def test_nothing_precedes_the_first_token(form: str) -> None:
    found = assert_found(form, torch.full((4, 5), 8), None, ids(0, 1, 2, 3), 2, 3, 1, 2.0, 0.0, 0.1)
    assert found[:3] == [[NONE, NONE], [NONE, NONE], [8, NONE]]


@pytest.mark.parametrize("form", LOOKUPS)
def test_a_match_that_is_too_short_proposes_nothing(form: str) -> None:
    history = ids([1, 2, 3, 4, 9, 2, 3])
    assert assert_found(form, history, None, ids(7), 2, 8, 2, 1.0, 0.0, 0.1) == [[4, 9]]
    assert assert_found(form, history, None, ids(7), 2, 8, 3, 1.0, 0.0, 0.1) == [[NONE, NONE]]


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("form", LOOKUPS)
@pytest.mark.parametrize("length", [1, 2, 17, 32, 48])
def test_stale_tokens_behind_the_length_are_not_found(form: str, length: int) -> None:
    history = torch.arange(64).repeat(2, 1)
    history[:, length:] = length - 1  # each of them equals the sequence's last token
    assert assert_found(form, history, None, ids(length, length), *USUAL) == [[NONE] * 4] * 2


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("form", LOOKUPS)
@pytest.mark.parametrize("columns", [16, 17, 32, 33, 64])
def test_the_first_and_the_last_place_of_every_row_are_searched(form: str, columns: int) -> None:
    history = torch.arange(4 * columns).view(4, columns)
    for place in (0, columns - 2):
        history[:, -1] = history[:, place]
        drafts = assert_found(form, history, None, torch.full((4,), columns), 1, 3, 1, 1.0, 0.0, 0.1)
        assert drafts == history[:, place + 1 : place + 2].tolist()


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("form", LOOKUPS)
@pytest.mark.parametrize("rows", [(3, 0, 5, 1), (NONE, 4, NONE, 2), (NONE,), (5,), (2, 2)])
def test_rows_name_the_histories(form: str, rows: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    history, length = text(generator, 4, 6, 45), draw(generator, 20, 46, len(rows))
    found = assert_found(form, history, ids(*rows), length, *USUAL)
    assert all(drafts == [NONE] * 4 for row, drafts in zip(rows, found, strict=True) if row < 0)


@pytest.mark.parametrize("form", LOOKUPS)
def test_a_history_may_be_a_view(form: str) -> None:
    whole = text(torch.Generator().manual_seed(0), 4, 6, 90)
    for view in (whole[1:4], whole[:, 3:30], whole[::2, 1:], whole[:, ::2], whole.T):
        assert_found(form, view, None, torch.full((len(view),), min(view.shape[1], 29)), *USUAL)


@pytest.mark.parametrize("form", LOOKUPS)
def test_a_length_beyond_the_history_counts_as_its_size(form: str) -> None:
    device, function = LOOKUPS[form]
    history = (torch.arange(20).repeat(2, 1) % 5).to(device)
    found = function(history, None, ids(99, 20).to(device), *USUAL)
    assert found.tolist() == [searched(history[0].tolist(), *USUAL)] * 2


@pytest.mark.parametrize("form", LOOKUPS)
def test_no_sequences_and_no_drafts(form: str) -> None:
    device, function = LOOKUPS[form]
    history, none = (torch.zeros(*shape, dtype=torch.int64, device=device) for shape in ((3, 9), (0,)))
    assert function(history, none, none, *USUAL).shape == (0, 4)
    assert function(history, None, torch.full((3,), 9, device=device), 0, *USUAL[1:]).shape == (3, 0)


def test_programs_that_share_a_sequence_leave_their_counters_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "TILE", 16)
    history, length = (torch.arange(300) % 7).repeat(5, 1).to(DEVICE), ids(300, 120, 17, 16, 0).to(DEVICE)
    results = [suffix.SUFFIX_LOOKUP.form("triton")(history, None, length, *USUAL) for _ in range(3)]
    assert all(torch.equal(result, results[0]) for result in results)
    assert not arrival_counters(history.device).any()


def test_more_sequences_than_counters_are_left_to_the_reference() -> None:
    length = torch.zeros(MAX_COUNTERS + 1, dtype=torch.int64)
    for size, name in ((MAX_COUNTERS, "triton"), (MAX_COUNTERS + 1, "reference")):
        given = suffix.SuffixLookup(length.unsqueeze(1), None, length[:size], *USUAL)
        assert suffix.SUFFIX_LOOKUP.choose("cuda", given).name == name


def test_what_was_recorded_is_found() -> None:
    history, rows = torch.full((4, 32), 9, device=DEVICE), ids(2, 0).to(DEVICE)
    tokens = ids([4, 5, 6, 4, 5], [1, 1, 9, 9, 9]).to(DEVICE)
    record_tokens_(history, rows, tokens, torch.arange(5, device=DEVICE).repeat(2, 1), ids(5, 2).to(DEVICE))
    found = torch.ops.specgraph.suffix_lookup(history, rows, ids(5, 2).to(DEVICE), 3, 4, 1, 2.0, 0.0, 0.1)
    assert found.tolist() == [[6, 4, 5], [1, NONE, NONE]]


def test_the_op_is_registered_as_it_behaves() -> None:
    history, rows = (torch.arange(45).view(5, 9) % 4).to(DEVICE), ids(4, NONE).to(DEVICE)
    for lines, chosen in ((history, rows), (history[:2].clone(), None)):
        torch.library.opcheck(torch.ops.specgraph.suffix_lookup, (lines, chosen, ids(9, 4).to(DEVICE), *USUAL))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((4, 8, 0, 1.0, 0.0, 0.1), "1 <= min_match <= max_match <= 127 must hold, not 0 and 8"),
        ((4, 2, 3, 1.0, 0.0, 0.1), "1 <= min_match <= max_match <= 127 must hold, not 3 and 2"),
        ((4, 128, 1, 1.0, 0.0, 0.1), "1 <= min_match <= max_match <= 127 must hold, not 1 and 128"),
        ((4, 8, 1, -0.5, 0.0, 0.1), "max_spec_factor must be in 0 .. 1000000, not -0.5"),
        ((4, 8, 1, 1.0, 2e6, 0.1), "max_spec_offset must be in -1000000 .. 1000000, not 2000000.0"),
        ((4, 8, 1, 1.0, 0.0, 1.1), "min_token_prob must be in 0 .. 1, not 1.1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: tuple[Any, ...], message: str) -> None:
    meta = torch.zeros(3, 9, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=message):
        torch.ops.specgraph.suffix_lookup(meta, None, meta[:, 0], *options)
    with pytest.raises(ValueError, match="history has 3 rows, not 2: name the row of each sequence in rows"):
        torch.ops.specgraph.suffix_lookup(meta, None, meta[:2, 0], *USUAL)
