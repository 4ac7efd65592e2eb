"""Reads the map from a reduced draft vocabulary to the target's."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.checkpoints.loading import HeadLoader
from specgraph.errors import ConfigError


def read_vocabulary(loader: HeadLoader, size: int) -> Tensor | None:
    """int64 ``[Vd]``, the target id of every draft id, or None if they are the same.

    Args:
        loader: the checkpoint; ``d2t`` holds the difference of the two ids, ``t2d`` marks the target ids.
        size: ``Vd``.

    Raises:
        ConfigError: ``d2t`` is missing or damaged, or made for another target.
    """
    vocab, path, stored = loader.target.info.vocab_size, loader.checkpoint.path, loader.stored
    if "d2t" not in stored:
        if size != vocab:
            raise loader.unfit(f"it has no d2t and a draft vocabulary of {size}", f"has a vocabulary of {vocab}")
        return None
    offsets = stored["d2t"]
    if offsets.shape != (size,) or offsets.dtype.is_floating_point or offsets.dtype == torch.bool:
        raise ConfigError(f"d2t of {path} is {offsets.dtype} {list(offsets.shape)}; it is int64 {[size]}.")
    ids = torch.arange(size) + offsets.read().to(torch.int64)
    outside = ids[(ids < 0) | (ids >= vocab)]
    if len(outside):
        raise ConfigError(
            f"d2t of {path} names the target id {int(outside[0])}, outside the target's vocabulary of {vocab}; "
            "the head was made for another target."
        )
    if len(set(ids.tolist())) != size:
        raise ConfigError(f"d2t of {path} gives two draft ids the same target id; the file is damaged.")
    _cross_check(loader, ids)
    return None if size == vocab and not offsets.read().any() else ids.to(loader.target.info.device)


def _cross_check(loader: HeadLoader, ids: Tensor) -> None:
    """``t2d``, where there is one, must mark exactly the ids that ``d2t`` names."""
    stored = loader.stored
    if "t2d" in stored:
        marked = stored["t2d"].read().flatten().to(torch.bool).nonzero().flatten()
        if not torch.equal(marked, ids.sort().values):
            raise ConfigError(
                f"t2d and d2t of {loader.checkpoint.path} name different target ids; the file is damaged."
            )
