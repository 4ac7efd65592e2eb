"""Random heads with the shapes of those that were published for gpt-oss-120b, and the time of their calls.

- ``eagle3``: one layer whose MLP has 17,280 features, as in the configuration of nvidia/gpt-oss-120b-Eagle3, and a
  vocabulary of 32,000, as in the configuration of SpecForge for the 20b, whose layer is the same.
- ``peagle``: the four layers that the card of amazon/gpt-oss-120b-p-eagle names. It also names 1.7 billion parameters.
  With an embedding and a projection of the whole vocabulary, those are MLPs of 11,520 features. (With 17,280, they are
  a projection of some 131,000 tokens, which is as many bytes to read.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specgraph.bench.models import building
from specgraph.bench.timing import median_seconds
from specgraph.config import DraftConfig
from specgraph.config.drafters import drafter_options
from specgraph.drafters.base import DraftHead
from specgraph.drafters.eagle3 import Eagle3Drafter
from specgraph.drafters.plan import plain_layer
from specgraph.ir.program import TARGET_MODULES


@dataclass(frozen=True)
class HeadShape:
    """The shape of a head, whose attention is as wide as the target's.

    Attributes:
        layers: how many decoder layers it has.
        width: the features of their MLPs.
        vocabulary: how many tokens it can draft; None for all.
    """

    layers: int
    width: int
    vocabulary: int | None


SHAPES = {"eagle3": HeadShape(1, 17280, 32000), "peagle": HeadShape(4, 11520, None)}
"""The published shapes, by the name of the draft in ``conf/draft``."""
_SPREAD = 1.5
"""The standard deviation of what a layer makes of inputs with a standard deviation of 1.

With less, attention is nearly uniform, so that the rows of a parallel head, all of which read the mask token, would
draft the same token, and the target's rows would choose the same experts.
"""


def published_head(model: PreTrainedModel, draft: DraftConfig, shape: HeadShape, seed: int = 1) -> DraftHead:
    """A random EAGLE-3 or P-EAGLE head of a shape, on the target's device and in its dtype."""
    text: Any = model.config.get_text_config()
    device: torch.device = model.device
    with building(device, model.dtype, seed), torch.no_grad():
        plan = Eagle3Drafter.plan_random(model, drafter_options(draft))
        full = len(plan.embedding)
        count = shape.vocabulary or full
        vocabulary = torch.randperm(full)[:count].sort().values if count < full else None
        layers = plain_layer(text, full, count=shape.layers, intermediate_size=shape.width)
        plan = replace(plan, layers=layers, vocabulary=vocabulary)
        head = Eagle3Drafter.new_head("peagle" if getattr(draft, "parallel", None) else "eagle3", plan)
        for part in (head.module.fc, head.module.layers):  # all else is the target's own, or a copy of it
            for linear in (module for module in part.modules() if isinstance(module, nn.Linear)):
                linear.weight.normal_(std=_SPREAD / linear.in_features**0.5)
    head.module.eval().requires_grad_(False)
    return head


class DraftCalls:
    """The calls of a drafter's modules in one step, which can be repeated: its layers and its vocabulary projection.

    The small kernels between them, which choose tokens and lay rows out, are none of its modules.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def noted(self, step: nn.Module) -> Iterator[None]:
        """While the context lasts, note the calls of the latest run of ``step``."""
        handles = [
            module.register_forward_pre_hook(self._hook(name), with_kwargs=True)
            for name, module in step.named_children()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name == "target":  # which every step calls once, in front of the drafter
                self._calls.clear()
            elif name not in TARGET_MODULES:
                self._calls.append(lambda: module(*args, **kwargs))

        return note

    def seconds(self, device: torch.device, repeats: int) -> float:
        """The median time of all of them, one after the other; on a GPU in a CUDA graph.

        They write the same keys and values again that they have written.

        Raises:
            RuntimeError: none were noted.
        """
        if not self._calls:
            raise RuntimeError("no call of a drafter was noted; decode a few tokens inside of noted")

        @torch.no_grad()
        def run() -> None:
            for call in self._calls:
                call()

        return median_seconds(device, [run], repeats=repeats, warmup=2)
