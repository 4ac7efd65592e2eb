"""Sequences for tests of ops that change logits, and the contexts of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from specgraph.kernels.ops import Op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONG = 24
"""Tokens that the history has room for."""
Form = tuple[str, Callable[..., Tensor]]


def forms(op: Op) -> dict[str, Form]:
    """Every variant of an op, and the op itself, with the device that each runs on."""
    made: dict[str, Form] = {v.name: (DEVICE if v.name == "triton" else "cpu", op.form(v.name)) for v in op.variants}
    return made | {"op": (DEVICE, getattr(torch.ops.specgraph, op.name))}


def context(
    seed: int, *, rows: int = 3, width: int = 4, vocab: int = 19, dtype: torch.dtype = torch.float32, ids: int = 0
) -> dict[str, Tensor]:
    """Five sequences: at their beginning, generating, in a chunk of a prompt, at the end of one, and none.

    Tokens are below ``ids``, or some are outside of the vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randint(0, ids or vocab + 2, shape, generator=generator)

    return {
        "logits": (torch.randn(5, rows, vocab, generator=generator) * 4).to(dtype),
        "history": draw(7, LONG),
        "rows": torch.tensor([4, 0, 6, 2, -1]),
        "window": draw(5, width),
        "start": torch.tensor([0, 13, 5, 17, 0]),
        "num_forced": torch.tensor([0, 0, width - 1, 2, 0]),
    }


def contexts(given: dict[str, Any]) -> Iterator[tuple[int, int, list[int]]]:
    """Every sequence and row of logits, and the tokens before the one that the row gives."""
    count, width = given["logits"].shape[1], given["window"].shape[1]
    for b, row in enumerate(given["rows"].tolist()):
        start = int(given["start"][b]) if row >= 0 else 0
        first = min(int(given["num_forced"][b]), width - count)
        for r in range(count):
            yield (
                b, r,
                given["history"][max(row, 0), :start].tolist() + given["window"][b, : first + r + 1].tolist(),
            )  # fmt: skip


def run(form: Form, given: dict[str, Any]) -> Tensor:
    """What a form gives, on the CPU. Nothing that it is given is changed."""
    device, function = form
    moved = {name: part.to(device) if isinstance(part, Tensor) else part for name, part in given.items()}
    before = {name: part.clone() for name, part in moved.items() if isinstance(part, Tensor)}
    out = function(*moved.values())
    assert all(torch.equal(moved[name].nan_to_num(7.0), part.nan_to_num(7.0)) for name, part in before.items())
    return out.cpu()


def of_one(given: dict[str, Any], b: int) -> dict[str, Any]:
    """A call of one of the sequences alone."""
    whole = ("history", "width")
    return {name: part if part is None or name in whole else part[b : b + 1] for name, part in given.items()}
