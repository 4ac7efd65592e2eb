"""The functions that step graphs are written in, on cases worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from specgraph.kernels import step
from specgraph.kernels.ops import OPS
from specgraph.kernels.sampling.sample import process_logits
from specgraph.kernels.step.tokens import ADVANCE, cut_at_eos
from tests.kernels.step.step_cases import moved, run_case, step_cases, tensors

NONE = -1
EOS = 7
NAN = float("nan")


def ids(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_positions_count_up_from_each_start():
    assert step.row_positions(ids(5, 0), torch.zeros(2, 3)).tolist() == [[5, 6, 7], [0, 1, 2]]


def test_slots_go_through_the_block_table_and_are_none_for_padding_and_past_the_end():
    positions = ids([3, 4, 5, 6], [0, 1, 2, 3], [6, 7, 8, 9], [0, 1, 2, 3])
    table = ids([9, 2], [4, NONE], [1, 3], [0, 5])
    slots = step.row_slots(positions, ids(3, 9, 4, 0), table, ids(100, 100, 8, 100), block_size=4)
    assert slots.tolist() == [[39, 8, 9, NONE], [16, 17, 18, 19], [14, 15, NONE, NONE], [NONE] * 4]


def test_slots_of_pages_that_are_not_allocated_or_lie_past_the_table_are_none():
    positions, table = ids([3, 4, 7], [7, 8, 100]), ids([6, NONE], [6, 2])
    slots = step.row_slots(positions, ids(3, 3), table, ids(8, 8), block_size=4)
    assert slots.tolist() == [[27, NONE, NONE], [11, NONE, NONE]]


@pytest.mark.parametrize("form", ["op", "kernel"])
def test_rows_before_the_first_position_have_no_slot(form: str):
    # By the remainder of its position alone, a row at -1 would be the last one of page 0.
    positions, table = ids([-2, -1, 0, 1], [-5, -4, -1, 0], [-8, -7, -6, -5]), ids([6, 3], [NONE, 2], [6, 3])
    arguments = (positions, ids(4, 4, 4), table, ids(8, 8, 8))
    if form == "op":
        slots = step.row_slots(*arguments, block_size=4)
    else:
        slots = OPS["row_slots"].form("triton")(*(tensor.to(DEVICE) for tensor in arguments), block_size=4)
    assert slots.tolist() == [[NONE, NONE, 24, 25], [NONE] * 4, [NONE] * 4]


@pytest.mark.parametrize(
    ("forced", "count", "rows"),
    [
        (0, 2, [0, 1]),
        (2, 2, [2, 3]),
        (3, 2, [3, 4]),
        (4, 2, [3, 4]),  # at the end of the block there are always `count` rows, so it begins earlier
        (5, 2, [3, 4]),
        (3, 9, [0, 1, 2, 3, 4]),
    ],
)
def test_needed_rows_begin_after_the_forced_ones(forced: int, count: int, rows: list[int]):
    hidden = torch.arange(10).view(1, 5, 2)
    assert torch.equal(step.needed_rows(hidden, ids(forced), count), hidden[:, rows])


def test_needed_rows_differ_per_sequence():
    hidden = torch.arange(8.0).view(2, 4, 1)
    assert step.needed_rows(hidden, ids(0, 9), 2).flatten(1).tolist() == [[0, 1], [6, 7]]


def test_taken_rows_stay_inside_the_block():
    values = torch.arange(12.0).view(4, 3, 1)
    assert step.take_rows(values, ids(0, 2, 3, -1), 1).flatten().tolist() == [0, 5, 8, 9]


def test_draft_tokens_follow_the_last_accepted_one():
    assert step.draft_tokens(ids([4, 5, 6])).tolist() == [[5, 6]]
    assert step.draft_tokens(ids([4], [5])).shape == (2, 0)


@pytest.mark.parametrize(
    ("bad_row", "num_rows", "num_forced", "found"),
    [
        (0, 4, 0, True),
        (1, 4, 0, True),  # the last row of logits
        (1, 1, 0, False),  # padding
        (0, 0, 0, False),  # inactive
        (0, 4, 2, True),  # block row 2
        (1, 3, 2, False),  # block row 3 is padding
        (1, 4, 2, True),
        (0, 4, 3, False),  # clamped to the block's end: row 2 is forced
        (1, 4, 3, True),
        (1, 4, 4, False),  # all rows are forced
    ],
)
def test_nan_counts_in_real_unforced_rows_as_needed_rows_places_them(
    bad_row: int, num_rows: int, num_forced: int, found: bool
):
    logits = torch.zeros(2, 2, 3)
    logits[1, bad_row, 1] = NAN
    window = torch.zeros(2, 4)
    bad = step.bad_rows(logits, window, ids(4, num_rows), ids(0, num_forced))
    assert bad.tolist() == [0, -1 if found else 0]


def test_bad_rows_sees_exactly_the_rows_that_needed_rows_takes():
    width, count = 6, 3
    for forced in range(width):
        for row in range(width):
            hidden = torch.zeros(1, width, 1)
            hidden[0, row] = NAN
            taken = step.needed_rows(hidden, ids(forced), count)
            bad = step.bad_rows(taken, torch.zeros(1, width), ids(width), ids(forced))
            assert bad.tolist() == [-1 if forced <= row < forced + count else 0]


def test_the_first_needed_row_of_nothing_but_minus_infinity_is_named_by_its_place_in_the_block():
    width, count, vocab = 6, 3, 5
    for forced in range(width):
        for rows in ([0], [3], [2, 4], [5], [*range(6)]):
            hidden = torch.zeros(1, width, vocab)
            hidden[0, rows] = -torch.inf
            hidden[0, 1] = torch.tensor([-torch.inf] * (vocab - 1) + [0.0])  # one token is left
            taken = step.needed_rows(hidden, ids(forced), count)
            bad = step.bad_rows(taken, torch.zeros(1, width), ids(width - 1), ids(forced))
            empty = [row for row in rows if forced <= row < min(forced + count, width - 1) and row != 1]
            assert bad.tolist() == [1 + min(empty) if empty else 0]
            assert bad.dtype == torch.int32


def test_everything_after_the_first_unforced_eos_is_cut():
    emitted = ids([3, EOS, 4, EOS], [EOS, EOS, 5, 6], [EOS, 3, 4, NONE], [1, 2, 3, 8], [NONE] * 4)
    cut = cut_at_eos(emitted, ids(0, 1, 1, 0, 0), ids(*[[EOS, 8, NONE]] * 5))
    assert cut.tolist() == [
        [3, EOS, NONE, NONE],
        [EOS, EOS, NONE, NONE],  # the first one is the prompt's
        [EOS, 3, 4, NONE],
        [1, 2, 3, 8],
        [NONE] * 4,
    ]


def test_every_sequence_ends_at_its_own_eos():
    emitted = ids([3, EOS, 4], [3, EOS, 4], [3, EOS, 4])
    cut = cut_at_eos(emitted, ids(0, 0, 0), ids([EOS, NONE], [NONE, NONE], [4, 3]))
    assert cut.tolist() == [[3, EOS, NONE], [3, EOS, 4], [3, NONE, NONE]]


def test_without_eos_ids_nothing_is_cut():
    emitted = ids([3, EOS, NONE])
    assert torch.equal(cut_at_eos(emitted, ids(0), ids([NONE])), emitted)


def test_history_records_real_rows_up_to_its_border_and_nothing_else():
    history = torch.full((3, 5), 50)
    tokens = ids([1, 2, 3], [4, 5, 6], [7, 8, 9])
    positions = step.row_positions(ids(0, 3, 1), tokens)
    step.record_tokens_(history, None, tokens, positions, ids(2, 3, 0))
    assert history.tolist() == [[1, 2, 50, 50, 50], [50, 50, 50, 4, 5], [50] * 5]


def test_history_records_at_most_what_is_real_however_the_rows_lie():
    tokens = torch.arange(1, 5).expand(4, 4)
    for start in range(8):
        positions = step.row_positions(ids(start, start, start, start), tokens)
        history = torch.full((4, 6), 50)
        step.record_tokens_(history, None, tokens, positions, ids(0, 1, 3, 4))
        expected = torch.full((4, 10 + start), 50)
        for row, count in enumerate((0, 1, 3, 4)):
            expected[row, start : start + count] = tokens[row, :count]
        assert torch.equal(history, expected[:, :6])


def propose(kept: Tensor | None, logits: Tensor, *, row: int, num_emitted: Tensor, rule: str = "block") -> Tensor:
    """Two sequences: greedy, and drawn at temperature 1."""
    temperature, seeds, length = torch.tensor([0.0, 1.0]), ids(1, 2), ids(4, 9)
    options = {"row": row, "rule": rule, "target_vocab_size": 4}
    return step.propose_(kept, logits, length, num_emitted, temperature, seeds, None, None, None, **options)


def test_proposals_keep_what_they_were_drawn_from_in_their_row_of_active_sequences():
    kept = torch.full((2, 3, 5), 9.0)
    logits = torch.randn(2, 1, 5, generator=torch.Generator().manual_seed(0))
    logits[0, 0, 4] = 99.0  # no token of the target
    token = propose(kept, logits, row=1, num_emitted=ids(2, 0))
    expected = process_logits(logits.index_fill(2, ids(4), -torch.inf), torch.tensor([0.0, 1.0]))
    assert token[0].item() == expected[0, 0].argmax() < 4
    assert torch.equal(kept[0, 1], expected[0, 0])
    kept[0, 1] = 9.0
    assert bool((kept == 9.0).all())
    propose(kept, logits, row=2, num_emitted=ids(1, 1))
    assert torch.equal(kept[:, 2], expected[:, 0]) and bool((kept[:, :2] == 9.0).all())


def test_strict_proposals_share_noise_by_position_and_others_do_not():
    flat = torch.zeros(2, 1, 101)
    active = ids(1, 1)

    def drawn(rule: str, rows: range, advance: int) -> list[int]:
        options = {"rule": rule, "target_vocab_size": 101}
        temperature, seeds = torch.ones(2), ids(1, 2)
        tokens = [
            step.propose_(
                None, flat, ids(4, 9) + advance, active, temperature, seeds, None, None, None, row=r, **options
            )
            for r in rows
        ]
        return torch.cat(tokens, 1)[1].tolist()

    assert drawn("strict", range(1, 4), 0) == drawn("strict", range(3), 1)
    assert drawn("block", range(1, 4), 0) != drawn("block", range(3), 1)


def advance(
    emitted: list[int], drafts: list[int], *, forced: int = 0, max_length: int = 100, num_rows: int = 4
) -> tuple[list[int], int, int, int]:
    """One sequence at position 10 beside a neighbour that must not matter; returns what it left."""
    window, start, rows = ids([1, 2, 3], [4, 5, 6]), ids(10, 20), ids(num_rows, 1)
    counts, num_forced = ids(sum(t >= 0 for t in emitted), 1), ids(forced, 0)
    both = ids(emitted, [8] + [NONE] * (len(emitted) - 1))
    proposals = [ids([d], [NONE]) for d in drafts]
    step.advance_(
        window, start, rows, num_forced, both, counts, proposals, ids(max_length, 100), ids([EOS, NONE], [6, 30])
    )
    assert window[1].tolist() == [8, 0, 0] and (start[1], rows[1], num_forced[1]) == (21, 1, 0)
    return window[0].tolist(), int(start[0]), int(rows[0]), int(num_forced[0])


def test_a_sequence_moves_to_its_last_token_and_takes_the_drafts():
    assert advance([5, 6, NONE], [30, 31]) == ([6, 30, 31], 12, 3, 0)


def test_rows_end_at_the_first_missing_draft():
    assert advance([5, NONE, NONE], [30, NONE]) == ([5, 30, 0], 11, 2, 0)
    assert advance([5, NONE, NONE], [NONE, 31]) == ([5, 0, 31], 11, 1, 0)


@pytest.mark.parametrize(("max_length", "rows"), [(16, 3), (15, 2), (14, 1), (13, 0), (12, 0)])
def test_rows_are_capped_so_that_no_token_lands_at_max_length(max_length: int, rows: int):
    window, start, left, _ = advance([5, 6, NONE], [30, 31], max_length=max_length)
    assert (window, start, left) == ([6, 30, 31], 12, min(rows, 3))
    assert left == 0 or start + left <= max_length - 1


def test_an_eos_ends_the_sequence_unless_it_was_forced():
    assert advance([5, EOS, NONE], [30, 31])[2] == 0
    assert advance([5, EOS, NONE], [30, 31], forced=1)[2] == 0
    assert advance([5, EOS, NONE], [30, 31], forced=2) == ([EOS, 30, 31], 12, 3, 0)


def test_a_sequence_that_emits_nothing_keeps_its_window_and_place_and_stays_ended():
    assert advance([NONE] * 3, [30, 31], num_rows=0) == ([1, 2, 3], 10, 0, 0)


def test_drafts_may_come_several_to_a_tensor_or_not_at_all():
    state = ids([1, 2, 3]), ids(10), ids(3), ids(0)
    step.advance_(*state, ids([5, NONE, NONE]), ids(1), [ids([8, 9])], ids(100), ids([EOS]))
    assert [t.tolist() for t in state] == [[[5, 8, 9]], [11], [3], [0]]
    state = ids([1]), ids(10), ids(1), ids(0)
    step.advance_(*state, ids([5]), ids(1), [], ids(100), ids([EOS]))
    assert [t.tolist() for t in state] == [[[5]], [11], [1], [0]]


@pytest.mark.parametrize("form", ["reference", "triton"])
def test_a_window_has_no_drafts_in_columns_that_are_not_given(form: str):
    for given, window, rows in (([8, 9], [5, 8, 9, 0], 3), ([8, NONE], [5, 8, 0, 0], 2), ([], [5, 0, 0, 0], 1)):
        state = [t.to(DEVICE) for t in (ids([1, 2, 3, 4]), ids(10), ids(4), ids(0))]
        read = [t.to(DEVICE) for t in (ids([5, NONE]), ids(1))]
        wide = ids([*given, 7, 7]).to(DEVICE)
        ADVANCE.form(form)(*state, *read, [wide[:, : len(given)]], ids(100).to(DEVICE), ids([EOS]).to(DEVICE))
        assert [t.tolist() for t in state] == [[window], [11], [rows], [0]]


@pytest.mark.parametrize("form", ["reference", "cpu", "triton"])
def test_a_sequence_that_is_longer_than_the_limit_has_no_drafts(form: str):
    """Of 12, 13 and 14 tokens behind the step, of which the limit is 13."""
    state = [t.to(DEVICE) for t in (ids(*[[1, 2, 3]] * 3), ids(10, 11, 12), ids(3, 3, 3), ids(0, 0, 0))]
    emitted, counts, drafts, lengths, ends = (
        t.to(DEVICE) for t in (ids(*[[5]] * 3), ids(1, 1, 1), ids(*[[8, 9]] * 3), ids(99, 99, 99), ids(*[[EOS]] * 3))
    )
    wanted = step.drafts_wanted(*state, emitted, counts, lengths, ends, max_context=13)
    assert (wanted > 0).tolist() == [True, True, False]
    ADVANCE.form(form)(*state, emitted, counts, [drafts], lengths, ends, max_context=13)
    assert [t.tolist() for t in state] == [[[5, 8, 9]] * 3, [11, 12, 13], [3, 3, 1], [0, 0, 0]]


@pytest.mark.parametrize("form", ["reference", "cpu", "triton"])
def test_a_sequence_has_no_more_drafts_than_it_is_to_have(form: str):
    state = [t.to(DEVICE) for t in (ids(*[[1, 2, 3]] * 3), ids(10, 11, 12), ids(3, 3, 3), ids(0, 0, 0))]
    given = [ids(*[[5]] * 3), ids(1, 1, 1), ids(*[[8, 9]] * 3), ids(99, 99, 99), ids(*[[EOS]] * 3), ids(0, 1, 7)]
    emitted, counts, drafts, *rest = (t.to(DEVICE) for t in given)
    ADVANCE.form(form)(*state, emitted, counts, [drafts], *rest)
    assert [t.tolist() for t in state] == [[[5, 8, 9]] * 3, [11, 12, 13], [1, 2, 3], [0, 0, 0]]


def test_more_drafts_than_the_window_has_room_for_are_refused():
    state = ids([1, 2, 3]), ids(10), ids(3), ids(0)
    words = r"next_window must be \[B, K \+ 1\] with B = 1 and K of at least 3, not \[1, 3\]"
    with pytest.raises(ValueError, match=words), FakeTensorMode(allow_non_fake_inputs=True):
        step.advance_(*state, ids([5, NONE, NONE]), ids(1), [ids([8, 9, 7])], ids(100), ids([EOS]))


def test_functions_that_write_say_what_nothing_may_read_afterwards():
    assert {f.__name__: final for f, final in step.FINAL_WRITES.items() if f.__module__.startswith(step.__name__)} == {
        "record_accepted_": (),
        "record_tokens_": (),
        "store_drafted_": ("draft_logits",),
        "scatter_state_": ("buffers",),
        "keep_confidence_": ("confidence",),
        "keep_point_mass_": ("point_mass",),
        "keep_hidden_": ("kept",),
        "keep_rows_": ("kept_tokens", "kept_hidden", "num_kept"),
        "propose_": ("draft_logits",),
        "advance_": ("next_window", "start", "num_rows", "num_forced"),
    }


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("seed", range(6))
def test_kernels_do_what_plain_pytorch_does(seed: int):
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    batch, width, count, num_eos = int(draw(1, 5)), int(draw(1, 9)), int(draw(0, 5)), int(draw(1, 4))
    slots = (draw(-9, 40, batch, width), draw(0, width + 1, batch), draw(-1, 9, batch, 3), draw(1, 40, batch))
    emitted, eos_ids, forced = draw(0, 8, batch, width), draw(-1, 8, batch, num_eos), draw(0, 3, batch)
    emitted[:, width // 2 :] = NONE
    cut = cut_at_eos(emitted, forced, eos_ids)
    state = (draw(0, 9, batch, count + 1), draw(0, 20, batch), draw(0, 5, batch), forced)
    given = (cut, (cut >= 0).sum(1))
    drafts = list(draw(-1, 9, batch, count).split(1 + seed % 2, dim=1))
    drafts = drafts[: len(drafts) - seed % 3 // 2]  # the last ones may be missing
    limits = (draw(5, 30, batch), eos_ids)

    def there(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.to(DEVICE, copy=True) for tensor in tensors]

    # Every kernel is launched before anything is compared: a test ends at its first difference, also where kernels are
    # only compiled.
    found = OPS["row_slots"].form("triton")(*there(slots), block_size=4)
    moved_state = there(state)
    ADVANCE.form("triton")(*moved_state, *there(given), there(drafts), *there(limits))
    ADVANCE.form("reference")(*state, *given, drafts, *limits)
    assert torch.equal(found.cpu(), OPS["row_slots"].form("reference")(*slots, block_size=4))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(moved_state, state, strict=True))


def test_the_ops_are_registered_as_they_behave():
    ops, checks = torch.ops.specgraph, ("test_schema", "test_faketensor")
    cases = step_cases()
    _, args, options = moved(cases["row_slots"], DEVICE)
    torch.library.opcheck(ops.row_slots, args, options, test_utils=checks)
    _, args, _ = moved(cases["advance_"], DEVICE)
    torch.library.opcheck(ops.advance, args, test_utils=checks)


class OnDevice(TorchDispatchMode):
    """Refuses what would make the host wait for a device, which tensors without data stand for.

    They refuse to be read themselves, and so do shapes that would depend on values.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert func is not torch.ops.aten.isin.Tensor_Tensor, "isin sorts if there are many"
        assert all(t.is_meta for t in tensors((args, kwargs, result))), f"{func} takes or makes a tensor of the host"
        return result


@pytest.mark.parametrize("name", step_cases())
def test_nothing_is_read_by_the_host_or_made_there(name: str):
    case = moved(step_cases()[name], "meta")
    with OnDevice():
        run_case(case)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[x > 0],
        lambda x: int(x.max()),
        lambda x: x + torch.tensor(1),
        lambda x: x[torch.tensor([0])],
        lambda x: torch.isin(x, x),
        lambda x: x.tolist(),
    ],
)
def test_reading_on_the_host_would_be_noticed(function):
    with OnDevice(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        function(torch.ones(3, device="meta"))
