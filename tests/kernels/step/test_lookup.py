"""The functions that look the history up, and that choose between finds and other drafts: cases worked out by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels import step

NONE = -1


def ids(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_accepted_tokens_are_recorded_behind_the_first_of_the_window() -> None:
    history = torch.full((4, 6), 50)
    window, emitted = ids([1, 9, 9], [2, 9, 9], [3, 9, 9]), ids([4, 5, NONE], [6, 7, 8], [NONE, NONE, NONE])
    step.record_accepted_(history, window, emitted, ids(1, 3, 2), ids(2, 3, 0), ids(3, 0, 1))
    assert history.tolist() == [[50, 50, 50, 2, 6, 7], [50] * 6, [50] * 6, [50, 1, 4, 5, 50, 50]]


def test_what_is_no_sequence_records_nothing() -> None:
    history = torch.full((2, 4), 50)
    step.record_accepted_(history, ids([1], [2]), ids([3], [4]), ids(0, 0), ids(1, 1), ids(NONE, 1))
    assert history.tolist() == [[50] * 4, [2, 4, 50, 50]]


def test_a_sequence_takes_all_of_its_drafts_from_one_side() -> None:
    found = ids([4, NONE, NONE], [NONE, NONE, NONE], [1, 2, 3])
    others = (ids([7], [8], [9]), ids([70, 71], [80, 81], [90, 91]))
    assert step.prefer_found(found, *others).tolist() == [[4, NONE, NONE], [8, 80, 81], [1, 2, 3]]
    assert step.any_found(found).tolist() == [True, False, True]


def test_a_sequence_that_is_too_long_takes_no_others() -> None:
    """Three tokens are allowed, so that the last one is at position 2."""
    found, others = ids([4, NONE], [NONE, NONE], [NONE, NONE], [NONE, NONE]), ids([7, 7], [8, 8], [9, 9], [6, 6])
    chosen = step.prefer_found(found, others, last=ids(9, 2, 3, 4), max_context=3)
    assert chosen.tolist() == [[4, NONE], [8, 8], [NONE, NONE], [NONE, NONE]]


def test_suffixes_are_looked_up_in_the_row_of_each_sequence() -> None:
    history = ids([7, 7, 7, 7], [1, 2, 1, 50])
    drafts = step.suffix_lookup(
        history, ids(1, NONE), ids(3, 4), num_speculative_tokens=2, max_match=4, min_match=1, max_spec_factor=2.0,
        max_spec_offset=0.0, min_token_prob=0.1,
    )  # fmt: skip
    assert drafts.tolist() == [[2, 1], [NONE, NONE]]
