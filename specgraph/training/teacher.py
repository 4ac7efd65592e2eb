"""The frozen target, which gives hidden states and logits from the same traced graphs that decoding runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specgraph.drafters.heads import HeadDrafter
from specgraph.drafters.none import NoDrafter
from specgraph.errors import ConfigError
from specgraph.frontend.first_program import first_program
from specgraph.frontend.tracing import trace
from specgraph.passes.expose_features import ExposeFeatures
from specgraph.passes.pipeline import run_passes
from specgraph.training.updates import autocast_on


class Lesson(NamedTuple):
    """The target's results for a batch, in the target's dtype.

    ``features`` are the hidden states ``[B, S, Ht]`` of the chosen layers, ``hidden`` ``[B, S, Ht]`` is the input of
    the vocabulary projection, and ``project`` is that projection, from rows ``[R, Ht]`` to logits ``[R, V]`` with
    ``V = vocab_size``. The logits of a whole batch are never stored: for 64 answers of 512 tokens and a vocabulary of
    262,144, they would take 17 GB in bf16.
    """

    features: tuple[Tensor, ...]
    hidden: Tensor
    project: Callable[[Tensor], Tensor]
    vocab_size: int


class Teacher:
    """A traced target without a cache, which also returns the hidden states ``hs[k]`` for each k in ``layers``."""

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...]) -> None:
        """Trace ``model``. Its parameters are used and not copied.

        Raises:
            UnsupportedModelError: the model cannot be traced.
            PassError: one of ``layers`` does not exist.
        """
        stages, _ = run_passes(first_program(trace(model), NoDrafter()), [ExposeFeatures(layers)])
        program = stages[ExposeFeatures.name]
        program.set_output(*program.with_role("feature"), program.one("hidden"))
        program.graph.erase_node(program.one("logits"))
        self._projection = program.modules.unchanged["lm_head"]
        self.device, self._dtype = program.target.device, program.target.dtype
        self._vocab_size = program.target.vocab_size
        self._step = program.step()

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Lesson:
        """Run the target on ``tokens`` int64 ``[B, S]``. Padding on the right does not change the results before it."""
        *features, hidden = self._step(window=tokens, start=tokens.new_zeros(len(tokens)))
        return Lesson(tuple(features), hidden, self._project, self._vocab_size)

    def autocast(self) -> torch.autocast:
        """The context in which a head is trained beside this target."""
        return autocast_on(self.device, self._dtype)

    @torch.no_grad()
    def _project(self, hidden: Tensor) -> Tensor:
        """The target's logits ``[R, V]`` of rows ``[R, Ht]``, in its own dtype, also where the head autocasts."""
        with torch.autocast(hidden.device.type, enabled=False):
            logits: Tensor = self._projection(hidden[None])[0]
        return logits


def feature_layers(given: list[int], num_layers: int, drafter: type[HeadDrafter]) -> tuple[int, ...]:
    """The indices that were given or, if none were, those that heads of this drafter read.

    Raises:
        ConfigError: an index does not exist, or they are not in ascending order.
    """
    if not given:
        return drafter.feature_layers(num_layers)
    if list(given) != sorted(set(given)) or given[0] < 0 or given[-1] > num_layers:
        raise ConfigError(
            f"head.feature_layers={list(given)}: give different indices in ascending order; this target has hs[0] to "
            f"hs[{num_layers}]."
        )
    return tuple(given)
