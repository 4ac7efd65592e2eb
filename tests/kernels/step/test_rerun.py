"""Rows that every step runs again: cases worked out by hand, and the kernels beside plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specgraph.kernels import step
from specgraph.kernels.ops import OPS
from specgraph.kernels.step.rerun import KEEP_ROWS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ids(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def rows(*values: float) -> Tensor:
    """Hidden states ``[1, T, 4]``, one value for each row."""
    return torch.tensor(values)[None, :, None].expand(-1, -1, 4).contiguous()


def test_kept_rows_come_first() -> None:
    tokens, hidden, positions, num_rows, last = step.rerun(
        ids([1, 2]), rows(0.1, 0.2), ids(2), ids([3, 4, 5]), rows(0.3, 0.4, 0.5), ids(7), ids(2)
    )
    assert tokens.tolist() == [[1, 2, 3, 4, 5]] and torch.equal(hidden, rows(0.1, 0.2, 0.3, 0.4, 0.5))
    assert positions.tolist() == [[5, 6, 7, 8, 9]] and (num_rows.tolist(), last.tolist()) == ([4], [3])


@pytest.mark.parametrize(("start", "kept", "positions"), [(1, 1, [-1, 0, 1, 2]), (0, 0, [-1, -1, 0, 1])])
def test_rows_that_do_not_exist_have_no_position(start: int, kept: int, positions: list[int]) -> None:
    given = (ids([0, 1]), rows(0, 0.2), ids(kept), ids([3, 4]), rows(0.3, 0.4), ids(start), ids(1))
    assert step.rerun(*given)[2].tolist() == [positions]


def test_a_sequence_that_emits_nothing_has_no_rows_and_keeps_what_it_has() -> None:
    kept = ids([1, 2]), rows(0.1, 0.2), ids(1)
    again = step.rerun(*kept, ids([3]), rows(0.3), ids(1), ids(0))
    assert again[3].tolist() == [0]
    step.keep_rows_(*kept, again[0], again[1], ids(0))
    assert kept[0].tolist() == [[1, 2]] and torch.equal(kept[1], rows(0.1, 0.2)) and kept[2].tolist() == [1]


def test_every_module_reads_one_token_further_and_the_new_draft_last() -> None:
    tokens, num_rows = ids([1, 2, 3, 9], [4, 5, 9, 9], [6, 7, 8, 9]), ids(3, 2, 0)
    shifted = step.next_module_tokens(tokens, num_rows, ids([70], [80], [90]))
    assert shifted[0, :3].tolist() == [2, 3, 70] and shifted[1, :2].tolist() == [5, 80]
    again = step.next_module_tokens(shifted, num_rows, ids([71], [81], [91]))
    assert again[0, :3].tolist() == [3, 70, 71] and again[1, :2].tolist() == [80, 81]


@pytest.mark.parametrize(("emitted", "tokens", "count"), [(3, [4, 5], 2), (1, [2, 3], 2), (2, [3, 4], 2)])
def test_the_last_accepted_rows_are_kept(emitted: int, tokens: list[int], count: int) -> None:
    kept = ids([1, 2]), rows(1, 2), ids(1)
    step.keep_rows_(*kept, ids([1, 2, 3, 4, 5]), rows(1, 2, 3, 4, 5), ids(emitted))
    assert kept[0].tolist() == [tokens] and kept[1][0, :, 3].tolist() == tokens and kept[2].tolist() == [count]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_do_what_plain_pytorch_does(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    batch, kept, length, width = (int(draw(high, 1)) + 1 for high in (4, 3, 7, 1300))
    emitted, total = draw(length + 1, batch), kept + length
    state = (
        draw(99, batch, kept),
        torch.randn(batch, kept, width, generator=generator).to(dtype),
        draw(kept + 1, batch),
    )
    wide = torch.randn(batch, length, 2 * width, generator=generator).to(dtype)
    given = (*state, draw(99, batch, length), wide[:, :, :width], draw(50, batch), emitted)
    shifted = (draw(99, batch, total), draw(total + 1, batch), draw(99, batch, 1))
    own = [tensor.to(DEVICE, copy=True) for tensor in state]
    # Every kernel is launched before anything is compared: where kernels are only compiled, a test ends there.
    found = OPS["rerun"].form("triton")(*(tensor.to(DEVICE) for tensor in given))
    moved = OPS["next_module_tokens"].form("triton")(*(tensor.to(DEVICE) for tensor in shifted))
    KEEP_ROWS.form("triton")(*own, found[0], found[1], emitted.to(DEVICE))
    expected = OPS["rerun"].form("reference")(*given)
    KEEP_ROWS.form("reference")(*state, expected[0], expected[1], emitted)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(moved.cpu(), OPS["next_module_tokens"].form("reference")(*shifted))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(own, state, strict=True))


def test_the_ops_are_registered_as_they_behave() -> None:
    checks = ("test_schema", "test_faketensor")
    kept = ids([1, 2]), rows(0.1, 0.2), ids(2)
    given = (*kept, ids([3, 4, 5]), rows(0.3, 0.4, 0.5), ids(7), ids(2))
    torch.library.opcheck(torch.ops.specgraph.rerun, given, test_utils=checks)
    torch.library.opcheck(torch.ops.specgraph.next_module_tokens, (ids([1, 2]), ids(2), ids([3])), test_utils=checks)
    again = step.rerun(*given)
    torch.library.opcheck(torch.ops.specgraph.keep_rows, (*kept, again[0], again[1], ids(2)), test_utils=checks)


def test_a_hidden_state_of_another_dtype_is_refused() -> None:
    given = (ids([1]), rows(0.1), ids(1), ids([3]), rows(0.3).double(), ids(7), ids(1))
    given = tuple(tensor.to("meta") for tensor in given)
    with pytest.raises(ValueError, match=r"hidden is torch\.float64, and what is kept is torch\.float32"):
        step.rerun(*given)
