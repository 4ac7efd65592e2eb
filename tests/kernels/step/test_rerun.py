"""Rows that every step runs again, on cases worked out by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels import step


def ids(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_kept_rows_come_first_and_what_they_are_is_the_same_for_tokens_and_hidden_states():
    assert step.behind_kept(ids([1, 2]), ids([3, 4, 5])).tolist() == [[1, 2, 3, 4, 5]]
    kept, rows = torch.zeros(2, 1, 4), torch.ones(2, 3, 4, dtype=torch.float64)
    assert step.behind_kept(kept, rows).dtype == torch.float32  # which the state has, and the next step reads
    assert step.behind_kept(kept, rows)[:, :, 0].tolist() == [[0, 1, 1, 1]] * 2


def test_rows_that_do_not_exist_have_no_position():
    positions = step.rerun_positions(ids(7, 1, 0), ids(2, 1, 0), torch.zeros(3, 5), kept=2)
    assert positions.tolist() == [[5, 6, 7, 8, 9], [-1, 0, 1, 2, 3], [-1, -1, 0, 1, 2]]


def test_kept_rows_count_only_for_sequences_that_emit():
    assert step.rerun_rows(ids(3, 1, 0), kept=2).tolist() == [5, 3, 0]


def test_every_module_reads_one_token_further_and_the_new_draft_last():
    tokens = ids([1, 2, 3, 9], [4, 5, 9, 9], [6, 7, 8, 9])
    shifted = step.next_module_tokens(tokens, ids(3, 2, 0), ids([70], [80], [90]))
    assert shifted[0, :3].tolist() == [2, 3, 70] and shifted[1, :2].tolist() == [5, 80]
    again = step.next_module_tokens(shifted, ids(3, 2, 0), ids([71], [81], [91]))
    assert again[0, :3].tolist() == [3, 70, 71] and again[1, :2].tolist() == [80, 81]


def test_the_last_accepted_rows_are_kept():
    kept, rows = ids([1, 2], [1, 2], [1, 2]), ids([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    step.keep_rows_(kept, rows, ids(3, 1, 0))
    assert kept.tolist() == [[4, 5], [2, 3], [1, 2]]
    hidden = torch.zeros(3, 2, 4)
    step.keep_rows_(hidden, rows.float()[:, :, None].expand(-1, -1, 4), ids(3, 1, 0))
    assert hidden[:, :, 3].tolist() == [[4, 5], [2, 3], [1, 2]]


def test_no_more_rows_are_kept_than_there_is_room_for():
    number = ids(0, 0, 1, 2)
    step.count_kept_(number, ids(1, 5, 1, 0), kept=2)
    assert number.tolist() == [1, 2, 2, 2]
