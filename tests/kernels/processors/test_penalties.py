"""Penalties on tokens that occur already: every form against the formulas, token by token in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.processors import penalties

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "reference": ("cpu", penalties.PENALISE.form("reference")),
    "triton": (DEVICE, penalties.PENALISE.form("triton")),
    "op": (DEVICE, torch.ops.specgraph.penalise),
}
LONG = 24
"""Tokens that the history has room for."""


def case(
    seed: int, *, rows: int = 3, width: int = 4, vocab: int = 19, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Five sequences: at their beginning, generating, in a chunk of a prompt, at the end of one, and none."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    return {
        "logits": (torch.randn(5, rows, vocab, generator=generator) * 4).to(dtype),
        "history": draw(vocab + 2, 7, LONG),
        "rows": torch.tensor([4, 0, 6, 2, -1]),
        "window": draw(vocab + 2, 5, width),
        "start": torch.tensor([0, 13, 5, 17, 9]),
        "num_forced": torch.tensor([0, 0, width - 1, 2, 0]),
        "prompt_length": torch.tensor([1, 6, 30, 20, 4]),
        "repetition_penalty": torch.tensor([1.5, 0.7, 1.0, 2.0, 1.3]),
        "frequency_penalty": torch.tensor([0.5, 0.25, -1.0, 0.0, 0.5]),
        "presence_penalty": torch.tensor([0.0, 1.5, 0.5, -0.25, 0.5]),
    }


def expected(given: dict[str, Any]) -> Tensor:
    """The formulas, float64 ``[B, R, V]``."""
    out = given["logits"].double().clone()
    count, width = out.shape[1], given["window"].shape[1]
    for b, row in enumerate(given["rows"].tolist()):
        start = int(given["start"][b]) if row >= 0 else 0
        first = min(int(given["num_forced"][b]), width - count)
        for r in range(count):
            tokens = given["history"][max(row, 0), :start].tolist() + given["window"][b, : first + r + 1].tolist()
            made = tokens[int(given["prompt_length"][b]) :]
            for token in range(out.shape[2]):
                out[b, r, token] = formula(float(out[b, r, token]), token, tokens, made, given, b)
    return out


def formula(x: float, token: int, tokens: list[int], made: list[int], given: dict[str, Any], b: int) -> float:
    if token in tokens and given["repetition_penalty"] is not None:
        penalty = float(given["repetition_penalty"][b])
        x = x * penalty if x < 0 else x / penalty
    if given["frequency_penalty"] is not None:
        x -= float(given["frequency_penalty"][b]) * made.count(token)
    if given["presence_penalty"] is not None:
        x -= float(given["presence_penalty"][b]) * (token in made)
    return x


def run(form: str, given: dict[str, Any]) -> Tensor:
    device, function = FORMS[form]
    moved = {name: None if part is None else part.to(device) for name, part in given.items()}
    history = moved["history"].clone()
    out = function(*moved.values())
    assert torch.equal(moved["history"], history), "nothing is written into the history"
    return out.cpu()


@pytest.fixture(params=[None, 16], ids=["one tile", "tiles of 16"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small tiles, a short sequence and a small vocabulary take several programs."""
    if request.param is not None:
        monkeypatch.setattr(penalties, "TILE", request.param)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 4), (4, 4), (2, 9)])
def test_every_form_computes_the_formulas(form: str, rows: int, width: int) -> None:
    given = case(rows + width, rows=rows, width=width)
    torch.testing.assert_close(run(form, given).double(), expected(given), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_has_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    given = case(1, dtype=dtype)
    actual = run("triton", given)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, run("reference", given))


def test_float64_stays_float64() -> None:
    given = case(2, dtype=torch.float64)
    torch.testing.assert_close(run("op", given), expected(given), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("off", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_a_penalty_may_be_left_out(form: str, off: str) -> None:
    given = {**case(3), off: None}
    torch.testing.assert_close(run(form, given).double(), expected(given), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_neutral_values_change_no_bit(form: str) -> None:
    given = case(4, dtype=torch.bfloat16)
    given["logits"][0, 0, :3] = torch.tensor([float("inf"), -float("inf"), -0.0])
    given |= {
        "repetition_penalty": torch.ones(5),
        "frequency_penalty": torch.zeros(5),
        "presence_penalty": torch.zeros(5),
    }
    assert torch.equal(run(form, given), given["logits"].float())


@pytest.mark.parametrize("form", FORMS)
def test_a_row_depends_on_its_own_sequence_and_the_drafts_before_it_alone(form: str) -> None:
    given = case(5, rows=4)
    whole = run(form, given)
    for b in range(5):
        alone = {name: part if name == "history" else part[b : b + 1] for name, part in given.items()}
        assert torch.equal(run(form, alone), whole[b : b + 1])
    given["window"][:, 3] += 1  # the last draft of windows whose four rows have logits
    assert torch.equal(run(form, given)[:2, :3], whole[:2, :3])
    given["history"][:, 17:] = 3  # behind every start
    assert torch.equal(run(form, given)[:2, :3], whole[:2, :3])


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_finite_stays(form: str, value: float) -> None:
    given = case(6)
    given["logits"][:] = value
    assert torch.equal(run(form, given).nan_to_num(nan=7.0), given["logits"].nan_to_num(nan=7.0))


def test_no_sequences_and_no_options() -> None:
    given = {name: part if name == "history" else part[:0] for name, part in case(7).items()}
    for form in FORMS:
        assert run(form, given).shape == (0, 3, 19)
    given = case(7)


def test_shapes_that_do_not_fit_are_refused() -> None:
    given = case(8)
    for name, value, message in (
        ("logits", given["logits"][0], "logits must be [B, R, V], not [3, 19]"),
        ("window", given["window"][:, :2], "there are 3 rows of logits for a window of 2 rows"),
        ("start", given["start"][:2], "start must be [B] = [5], not [2]"),
        (
            "presence_penalty",
            given["presence_penalty"][:2],
            "presence_penalty must be [B] = [5], not [2]",
        ),
    ):
        with pytest.raises(ValueError) as caught:
            torch.ops.specgraph.penalise(*{**given, name: value}.values())
        assert message in str(caught.value)


def test_the_op_is_sound() -> None:
    torch.library.opcheck(torch.ops.specgraph.penalise.default, tuple(case(9).values()))
