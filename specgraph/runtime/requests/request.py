"""A request: the prompt of one sequence with everything that was asked for it, checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specgraph.ir.model_info import Rope
from specgraph.runtime.requests.host_processors import HostProcessor
from specgraph.runtime.requests.processing import OPTION_STATE, Processing
from specgraph.runtime.requests.sampling import CUTS, Sampling

_OPTIONS = OPTION_STATE.union(CUTS)


@dataclass(frozen=True)
class Request:
    """One sequence to decode.

    Attributes:
        prompt: 1-D int64 on the CPU, without padding.
        limit: the length at which it ends at the latest, prompt included.
        sampling: how its tokens are drawn.
        eos_ids: the ids that end it.
        capped: whether it was to become longer than the decoder's ``max_length``.
        processing: what changes its logits.
        padded_prompt: the prompt with its padding, 1-D int64 on the CPU.
        host: what the host does with its logits in every step. They are of this request alone.
        forbidding: gives the names of the arguments that forbid tokens behind so many new ones; called only to explain
            an error.
        as_transformers: whether a greedy choice among no tokens is the first token, as in transformers, and no error.
    """

    prompt: Tensor
    limit: int
    sampling: Sampling
    eos_ids: tuple[int, ...] = ()
    capped: bool = False
    processing: Processing = field(default_factory=Processing)
    padded_prompt: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64, device="cpu"))
    host: tuple[HostProcessor, ...] = ()
    forbidding: Callable[[int], list[str]] = lambda count: []
    as_transformers: bool = False

    @functools.cached_property
    def initial_state(self) -> dict[str, Sequence[float]]:
        """The first values of the step's inputs that it fills, by name; options that are off are left out."""
        own = {"max_length": [self.limit], "prompt_length": [self.prompt.numel()], "eos_ids": self.eos_ids}
        return {**own, **self.sampling.state, **self.processing.state}

    def unused(self, *, always_draws: bool) -> frozenset[str]:
        """State that it can do without: options that are off, and its seed if no noise is drawn.

        ``always_draws``: the rule draws noise at temperature 0, too.
        """
        off = _OPTIONS.difference(self.initial_state)
        return off if always_draws or self.sampling.temperature > 0 else off | {"seeds"}

    @property
    def has_room(self) -> bool:
        """Whether it can grow by a token."""
        return self.limit > self.prompt.numel()

    @property
    def limit_reason(self) -> str:
        """The finish reason of a sequence that reaches its limit."""
        return "max_length" if self.capped else "length"


@dataclass(frozen=True)
class Limits:
    """What a decoder can take: ids below ``vocab_size``, and sequences of up to ``max_length`` tokens.

    ``model_max_length`` is the longest sequence for which the model can be compiled, if it is known, and ``rope`` says
    which rotary frequencies it has where these change with the length.
    """

    vocab_size: int
    max_length: int
    model_max_length: int | None = None
    rope: Rope | None = None

    def how_to_lengthen(self, verb: str = "compile") -> str:
        """What a caller can do whose sequences are longer, but for shortening them."""
        longest = self.model_max_length
        if longest is not None and self.max_length >= longest:
            return f"use a model that is right for more than {longest} positions"
        if longest is None and self.rope is None:
            return f"{verb} with a larger max_length if the model allows"
        what = "a larger max_length" if longest is None else f"a max_length of up to {longest}"
        if self.rope is None or self.rope.length is not None:
            return f"{verb} with {what}"
        return (
            f"{verb} with {what}; above {self.rope.original}, this model then has the rotary frequencies of long "
            "sequences for short ones, too"
        )
