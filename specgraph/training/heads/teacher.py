"""The frozen target as the compiler sees it: hidden states and logits from the graphs that decoding runs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specgraph.drafters.base import Drafter
from specgraph.drafters.none import NoDrafter
from specgraph.errors import ConfigError
from specgraph.frontend.first_program import first_program
from specgraph.frontend.tracing import trace
from specgraph.passes.expose_features import ExposeFeatures
from specgraph.passes.pipeline import run_passes


class Lesson(NamedTuple):
    """What the target says about a batch.

    ``features``: ``[B, S, Ht]`` for each layer; ``hidden``: ``[B, S, Ht]``, what its head reads; ``logits``:
    ``[B, S, V]``. In the target's dtype.
    """

    features: tuple[Tensor, ...]
    hidden: Tensor
    logits: Tensor


class Teacher:
    """A traced target with the hidden states ``hs[k]`` of ``layers`` exposed, without a cache."""

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...]) -> None:
        """Trace ``model``; its parameters are used, not copied.

        Raises:
            UnsupportedModelError: it cannot be traced.
            PassError: a layer does not exist.
        """
        stages, _ = run_passes(first_program(trace(model), NoDrafter()), [ExposeFeatures(layers)])
        program = stages[ExposeFeatures.name]
        program.set_output(*program.with_role("feature"), program.one("hidden"), program.one("logits"))
        self.device = program.target.device
        self.max_positions = program.target.max_positions
        self._step = program.step()

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Lesson:
        """Read ``tokens`` int64 ``[B, S]``. Padding on the right changes nothing before it."""
        *features, hidden, logits = self._step(window=tokens, start=tokens.new_zeros(len(tokens)))
        return Lesson(tuple(features), hidden, logits)


def feature_layers(given: list[int], num_layers: int, drafter: type[Drafter]) -> tuple[int, ...]:
    """The layers that were asked for, or those that heads of this drafter read.

    Raises:
        ConfigError: a layer does not exist, or they do not ascend.
    """
    if not given:
        return drafter.feature_layers(num_layers)
    if list(given) != sorted(set(given)) or given[0] < 0 or given[-1] > num_layers:
        raise ConfigError(
            f"head.feature_layers={list(given)}: give different indices in ascending order; this target has hs[0] to "
            f"hs[{num_layers}]."
        )
    return tuple(given)
