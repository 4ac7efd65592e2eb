"""Checks the options of ``generate`` by the decoder's own rules, before there is a decoder."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from specgraph.cli.generation import given_options
from specgraph.cli.keys import GenerateConfig
from specgraph.config.errors import did_you_mean
from specgraph.errors import ConfigError
from specgraph.runtime.requests.arguments import STRUCTURE
from specgraph.runtime.requests.generation_config import GenerationDefaults
from specgraph.runtime.requests.grammar import Grammars
from specgraph.runtime.requests.parser import RequestParser
from specgraph.runtime.requests.request import Limits

LOCAL, RAY = ENGINES = ("local", "ray")


class _AnyModel:
    """Stands for a model that is not loaded yet: its generation_config sets nothing but an EOS, and it is unchanged."""

    def __call__(self, *_: object) -> GenerationDefaults:
        return GenerationDefaults({"temperature": 1.0}, eos_ids=(0,))

    def check(self) -> None:
        """Nothing can be wrong with it."""

    def get(self, tokenizer: Any) -> Any:
        """The tokenizer that a caller gives."""
        return tokenizer


def decoder_options(options: GenerateConfig, tokenizer: Any) -> dict[str, Any]:
    """The arguments of the decoder that are set, except seeds."""
    given = {name: value for name, value in given_options(options).items() if name != "seed"}
    return given | ({"tokenizer": tokenizer} if not {"stop_strings", *STRUCTURE}.isdisjoint(given) else {})


def check_engine(options: GenerateConfig) -> None:
    """Refuse an engine that does not exist, and keys that are not for the one that is asked for.

    Raises:
        ConfigError: says what is allowed.
    """
    engine, workers = options.engine, options.workers
    if engine not in ENGINES:
        raise ConfigError(f"There is no engine={engine}{did_you_mean(engine, ENGINES)}; it is {' or '.join(ENGINES)}.")
    if engine == LOCAL and workers is not None:
        raise ConfigError(f"workers={workers} is for engine=ray; leave it out, or add that.")
    if workers is not None and workers < 1:
        raise ConfigError(f"workers must be at least 1, got {workers}.")
    refused = {"stream": options.stream, "compare": options.compare, "trace": options.trace, "plot": options.plot}
    for key in [key for key, value in refused.items() if value] if engine == RAY else []:
        raise ConfigError(f"{key} is not there with engine=ray, whose decoders are in other processes; leave it out.")


def check_options(options: GenerateConfig, limits: Limits, tokenizer: Any, prompts: Sequence[Tensor]) -> None:
    """Refuse what the decoder would refuse of ``prompts``, 1-D int64 token ids each.

    What depends on the model's generation_config is checked when it is loaded.

    Raises:
        InputError: an option is out of range, or a prompt leaves no room; the message says what is allowed.
    """
    model = cast(Any, _AnyModel())
    grammars = Grammars(limits.vocab_size)
    reader = RequestParser(read_defaults=model, limits=limits, guard=model, tokenizers=model, grammars=grammars)
    with warnings.catch_warnings(action="ignore"):  # the decoder gives them again, when it knows the model
        reader.call([*prompts], None, {**decoder_options(options, tokenizer), "seed": options.seed})
