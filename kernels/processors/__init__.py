"""Functions of step graphs that change logits as a request asks for, before tokens are drawn from them."""

from __future__ import annotations

from collections.abc import Callable

from specgraph.kernels.processors.biases import add_biases
from specgraph.kernels.processors.forced import force_tokens
from specgraph.kernels.processors.ngrams import ban_ngrams
from specgraph.kernels.processors.penalties import penalise

PROCESSORS: dict[Callable[..., object], tuple[str, ...]] = {
    add_biases: ("bias_tokens", "bias_ends", "bias_values", "bias_until"),
    penalise: ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    ban_ngrams: ("no_repeat_ngram_size",),
    force_tokens: ("forced_bos_token_id", "forced_eos_token_id"),
}
"""Every such function, in the order in which a step calls them, and the parameters that are options of a request. Where
all of these are None, the function returns its first argument, the logits, as it is."""

__all__ = ["PROCESSORS", "add_biases", "ban_ngrams", "force_tokens", "penalise"]
