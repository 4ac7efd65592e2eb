"""Reads the map from a reduced draft vocabulary to the target's, stored as offsets or as the target ids themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.checkpoints.loading import HeadLoader
from specgraph.errors import ConfigError


def read_vocabulary(loader: HeadLoader, size: int) -> Tensor | None:
    """int64 ``[Vd]``, the target id of every draft id, or None if the two are the same.

    Args:
        loader: the checkpoint, in which ``d2t`` holds the target id minus the draft id, and ``t2d`` marks the target
            ids that can be drafted.
        size: ``Vd``, the number of draft ids.

    Raises:
        ConfigError: ``d2t`` is missing or damaged, or made for another target.
    """
    vocab = loader.info.vocab_size
    if "d2t" not in loader.stored:
        if size != vocab:
            raise loader.unfit(f"it has no d2t and a draft vocabulary of {size}", f"has a vocabulary of {vocab}")
        return None
    ids = torch.arange(size) + _integers(loader, "d2t", size)
    checked = _checked(loader, "d2t", ids)
    _cross_check(loader, ids)
    return checked


def read_target_ids(loader: HeadLoader, name: str) -> Tensor | None:
    """As :func:`read_vocabulary`, for a checkpoint whose tensor ``name`` holds the target ids themselves."""
    return _checked(loader, name, _integers(loader, name))


def _integers(loader: HeadLoader, name: str, size: int | None = None) -> Tensor:
    """A tensor of the file as int64. It must have an integer dtype and the shape ``[size]``."""
    stored = loader.stored[name]
    fits = len(stored.shape) == 1 if size is None else stored.shape == (size,)
    if not fits or stored.dtype.is_floating_point or stored.dtype == torch.bool:
        needed = "[Vd]" if size is None else [size]
        raise ConfigError(
            f"{name} of {loader.checkpoint.path} is {stored.dtype} {list(stored.shape)}; it must be int64 {needed}."
        )
    return stored.read().to(torch.int64)


def _checked(loader: HeadLoader, name: str, ids: Tensor) -> Tensor | None:
    """``ids`` on the target's device, or None if every draft id equals its target id."""
    info, path = loader.info, loader.checkpoint.path
    outside = ids[(ids < 0) | (ids >= info.vocab_size)]
    if len(outside):
        raise ConfigError(
            f"{name} of {path} names the target id {int(outside[0])}, outside the target's vocabulary of "
            f"{info.vocab_size}; the head was made for another target."
        )
    if len(set(ids.tolist())) != len(ids):
        raise ConfigError(f"{name} of {path} gives two draft ids the same target id; the file is damaged.")
    return None if torch.equal(ids, torch.arange(info.vocab_size)) else ids.to(info.device)


def _cross_check(loader: HeadLoader, ids: Tensor) -> None:
    """Refuse a ``t2d`` that does not mark exactly the target ids that ``d2t`` names."""
    stored = loader.stored
    if "t2d" in stored:
        marked = stored["t2d"].read().flatten().to(torch.bool).nonzero().flatten()
        if not torch.equal(marked, ids.sort().values):
            raise ConfigError(
                f"t2d and d2t of {loader.checkpoint.path} name different target ids; the file is damaged."
            )
