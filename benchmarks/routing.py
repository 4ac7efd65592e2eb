"""Says which experts the rows of a random gpt_oss model choose, and counts those that the rows of a step did choose.

In a model with random weights, the attention of every layer adds nearly the same vector to neighbouring rows, so their
experts repeat by accident, and the more so the deeper the layer. :func:`separate_rows` therefore lets the embedding of
a row's own token dominate. Then rows with different tokens choose independently and almost evenly.

:func:`set_routing` makes them repeat by the biases that the routers of gpt_oss have: the logits of a row are the sum of
a part of its own and of a part that all rows of a layer share. From the ratio of both follows the share of chosen
experts that are kept from one row to the next. The graphs of a step are the same for all biases.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specgraph.compat import TorchDispatchMode
from specgraph.schemes.random import STD

OWN_SHARE = 1 / 20
"""What the outputs of attention are multiplied by."""
_SAMPLES = 4096
_STRONGEST = 64.0


@torch.no_grad()
def separate_rows(model: PreTrainedModel) -> None:
    """Give embeddings a standard deviation of 1, and make what attention adds to a row small beside them, in place."""
    embedding: Any = model.get_input_embeddings()
    embedding.weight.mul_(1 / STD)
    for layer in _layers(model):
        layer.self_attn.o_proj.weight.mul_(OWN_SHARE)


@torch.no_grad()
def set_routing(model: PreTrainedModel, kept: float | None, seed: int = 2) -> None:
    """Set the biases of all routers, in place.

    Args:
        model: a gpt_oss model after :func:`separate_rows`.
        kept: the share of its experts that a row has in common with the row before; None for rows that choose
            independently, with biases of 0.
        seed: of the part that rows share, which is another one in each layer.

    Raises:
        ValueError: even independent rows share as much as ``kept``, or it is 1 or more.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in _layers(model):
        router = layer.mlp.router
        if kept is None:
            router.bias.zero_()
            continue
        strength = strength_for(kept, router.num_experts, router.top_k)
        own = float(router.weight.float().norm(dim=1).mean())  # inputs of a router have a mean square of 1
        router.bias.copy_(own * strength * torch.randn(router.num_experts, generator=generator))


@functools.cache
def strength_for(kept: float, experts: int, chosen: int) -> float:
    """The ratio of the shared part of logits to a row's own part for which neighbours share ``kept`` of their experts.

    Both parts are normal. The share is that of a simulation with ``_SAMPLES`` pairs of rows.

    Raises:
        ValueError: no ratio gives that share.
    """
    low, high = 0.0, _STRONGEST
    if not kept_at(low, experts, chosen) < kept < kept_at(high, experts, chosen):
        raise ValueError(
            f"a share of {kept:g} was asked for; with {chosen} of {experts} experts, independent rows share "
            f"{chosen / experts:.3f} of them, so give more than that and less than 1"
        )
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if kept_at(middle, experts, chosen) < kept else (low, middle)
    return low


def kept_at(strength: float, experts: int, chosen: int) -> float:
    """The share of ``chosen`` experts that two rows have in common, by simulation."""
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(2, _SAMPLES, experts, generator=generator)
    shared = strength * torch.randn(_SAMPLES, experts, generator=generator)
    return kept_share((own + shared).topk(chosen).indices.transpose(0, 1))


def kept_share(ids: Tensor) -> float:
    """The share of the experts of a row that the row before has, too, for ids ``[..., rows, chosen]``."""
    before, after = ids[..., :-1, :], ids[..., 1:, :]
    return float((after[..., :, None] == before[..., None, :]).any(-1).float().mean())


@dataclass(frozen=True)
class Chosen:
    """The experts that the rows of some steps chose, int64 ``[calls, rows, chosen]``: a call for each product."""

    ids: Tensor

    @property
    def distinct(self) -> float:
        """How many experts a layer read in a step, on average."""
        return sum(len(call.unique()) for call in self.ids) / len(self.ids)

    @property
    def kept(self) -> float:
        """The share of a row's experts that the row before has, too."""
        return kept_share(self.ids)


class NotedExperts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that notes which experts the products of experts were given, whichever op computes them.

    It does not see what a CUDA graph replays.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ids: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func.namespace == "specgraph":
            self._ids += (ids.clone() for ids in _expert_ids(func, args, given))
        return func(*args, **given)

    def of_rows(self, rows: int, chosen: int) -> Chosen:
        """The experts of the calls for so many rows, which leaves prompts out.

        Raises:
            RuntimeError: there was no such call.
        """
        found = [ids.view(rows, chosen) for ids in self._ids if ids.numel() == rows * chosen]
        if not found:
            sizes = sorted({ids.numel() for ids in self._ids})
            raise RuntimeError(f"no product of experts had {rows} rows of {chosen}; there were {sizes} ids")
        return Chosen(torch.stack(found).cpu())


def _expert_ids(func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Iterator[Tensor]:
    """The argument ``expert_ids`` of a call, if its op has one."""
    names = [argument.name for argument in func._schema.arguments]
    found = {**dict(zip(names, args, strict=False)), **given}.get("expert_ids")
    if found is not None:
        yield found


def _layers(model: PreTrainedModel) -> list[Any]:
    inner: Any = model.get_decoder()
    return list(inner.layers)
