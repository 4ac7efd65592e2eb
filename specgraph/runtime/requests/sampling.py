"""Turns the sampling arguments that a user passes into checked values, one of each per sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specgraph.errors import InputError
from specgraph.runtime.requests.values import (
    PerSequence,
    check_range,
    is_number,
    per_sequence,
    whole,
    without_tensors,
)

LOGPROBS = {False: "none", None: "none", True: "raw", "raw": "raw", "processed": "processed"}


CUTS: Mapping[str, float] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Options that cut a distribution off, and the values at which they do not."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one sequence are chosen."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @property
    def state(self) -> dict[str, list[float]]:
        """The inputs of a step that these options fill, by name. A step without a cut that is off is faster."""
        cuts = {name: [value] for name, off in CUTS.items() if (value := getattr(self, name)) != off}
        return {"temperature": [self.temperature], "seeds": [self.seed], **cuts}


def read_sampling(batch: int, asked: Mapping[str, Any]) -> list[Sampling]:
    """Checked sampling options of each sequence.

    ``seed``: None draws fresh seeds, a number gives sequence b hash(seed, b), a list is taken as it is.
    """
    off = {"temperature": 0.0, **CUTS}
    temperatures, ks, ps, mins = (per_sequence(name, asked.get(name), value, batch) for name, value in off.items())
    check_range("temperature", temperatures, "0 or more", 0, 1e30, above=False)
    check_range("top_k", ks, "0 (off) or a positive integer", 0, math.inf, above=False)
    check_range("top_p", ps, "in (0, 1]", 0, 1, above=True)
    check_range("min_p", mins, "in [0, 1]", 0, 1, above=False)
    whole_ks = [min(whole("top_k", k), 1 << 62) for k in ks]
    values = zip(temperatures, whole_ks, ps, mins, read_seeds(asked.get("seed"), batch), strict=True)
    # What truncates a distribution changes no greedy choice. Without it the step is shorter, and a trace says what the
    # target thinks of a token that top_k would have cut off.
    return [Sampling(float(t), k, float(p), float(m), s) if t else Sampling(seed=s) for t, k, p, m, s in values]


def read_seeds(seed: PerSequence, batch: int) -> list[int]:
    """64-bit seeds, one per sequence."""
    if seed is None:
        return [int(s) for s in torch.randint(-(1 << 62), 1 << 62, (batch,), device="cpu").tolist()]
    plain: Any = without_tensors(seed)
    if is_number(plain):
        return [hash_seed(whole("seed", plain), index) for index in range(batch)]
    return [_signed(whole("seed", value)) for value in per_sequence("seed", plain, 0, batch)]


def hash_seed(seed: int, index: int) -> int:
    """A 64-bit seed for sequence ``index``: two rounds of the splitmix64 finaliser (Steele et al. 2014)."""
    value = seed
    for word in (0x9E3779B97F4A7C15, (index + 1) * 0xD1B54A32D192ED03):
        value = (value + word) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return _signed(value)


def _signed(value: int) -> int:
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value


def read_logprobs(value: bool | str | None) -> str:
    """The mode of ``return_logprobs``."""
    if not isinstance(value, bool | str | type(None)) or value not in LOGPROBS:
        raise InputError(f"return_logprobs is False, True, 'raw' or 'processed', not {value!r}.")
    return LOGPROBS[value]
