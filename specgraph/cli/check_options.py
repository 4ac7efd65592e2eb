"""Checks the options of ``generate`` by the decoder's own rules, before there is a decoder."""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch

from specgraph.cli.generation import given_options
from specgraph.cli.keys import GenerateConfig
from specgraph.runtime.arguments import OWN, STRUCTURE
from specgraph.runtime.defaults import GenerationDefaults
from specgraph.runtime.grammar import Grammars
from specgraph.runtime.reading import Reader
from specgraph.runtime.requests import Limits

_ENOUGH = 1 << 62
"""No length is refused yet."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


class _AnyModel:
    """Stands for a model that is not loaded yet: it asks for nothing, has an EOS, and nobody has changed it."""

    def __call__(self, *_: object) -> GenerationDefaults:
        return GenerationDefaults((0,), None, None, None, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)

    def check(self) -> None:
        """Nothing can be wrong with it."""

    def get(self, tokenizer: Any) -> Any:
        """The tokenizer that a caller gives."""
        return tokenizer


def decoder_options(options: GenerateConfig, tokenizer: Any) -> dict[str, Any]:
    """The arguments of the decoder that are set, except seeds."""
    given = {name: value for name, value in given_options(options).items() if name != "seed"}
    return given | ({"tokenizer": tokenizer} if not {"stop_strings", *STRUCTURE}.isdisjoint(given) else {})


def check_options(options: GenerateConfig, tokenizer: Any, vocab_size: int, count: int) -> None:
    """Refuse what the decoder would refuse of ``count`` prompts. What depends on the model's generation_config is
    checked when it is loaded.

    Raises:
        InputError: an option is out of range; the message says what is allowed.
    """
    given = decoder_options(options, tokenizer)
    own = {name: value for name, value in given.items() if name in OWN}
    others = {name: value for name, value in given.items() if name not in OWN}
    model = cast(Any, _AnyModel())
    limits, grammars = Limits(vocab_size, _ENOUGH), Grammars(vocab_size)
    reader = Reader(read_defaults=model, limits=limits, watch=model, tokenizers=model, grammars=grammars)
    sampling = dict.fromkeys(_SAMPLING)
    with warnings.catch_warnings(action="ignore"):  # the decoder gives them again, when it knows the model
        prompts = [torch.zeros(1, dtype=torch.int64)] * count
        reader.call(prompts, None, others, seed=options.seed, **{**sampling, **own})
