"""Checks of arguments that the ops of several rooms share."""

from __future__ import annotations

from collections.abc import Callable

import torch


def require(condition: bool, message: Callable[[], str]) -> None:
    """Raise ``ValueError`` with ``message()`` unless ``condition`` holds. The condition may be of symbolic shapes."""
    torch._check_value(condition, message)  # type: ignore[no-untyped-call]


def check_shapes(given: object, **shapes: str) -> None:
    """Raise ``ValueError`` unless arguments have the shapes that are written: ``x="B T H", weight="H"``.

    A dimension is a name, a number, or ``*`` for any size, and ``...`` in front stands for any dimensions. What has a
    name first says how large it is. An argument is a tensor, several of them, or None, which fits.
    """
    sizes: dict[str, int] = {}
    for name, text in shapes.items():
        value, dims = getattr(given, name), text.split()
        for part in value if isinstance(value, list) else [value]:
            if part is not None:
                _check_shape(name, part.shape, dims, sizes)


def _check_shape(name: str, shape: torch.Size, dims: list[str], sizes: dict[str, int]) -> None:
    def message() -> str:
        known = [str(sizes.get(dim, dim)) for dim in dims]
        numbers = f" = [{', '.join(known)}]" if known != dims else ""
        return f"{name} must be [{', '.join(dims)}]{numbers}, not {list(shape)}"

    given = shape[len(shape) - len(dims) + 1 :] if dims[0] == "..." and len(shape) >= len(dims) - 1 else shape
    wanted = dims[1:] if dims[0] == "..." else dims
    require(len(given) == len(wanted), message)
    for dim, size in zip(wanted, given, strict=True):
        fits = dim == "*" or sizes.setdefault(dim, int(dim) if dim.isdigit() else size) == size
        if fits is not True:  # as a number is, and no symbol
            require(fits, message)
