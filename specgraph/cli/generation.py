"""The keys of ``generate`` that go to the decoder: all of its arguments that a command line can express.

What arguments there are is read from the tables of :mod:`specgraph.runtime.requests.arguments`, so a new one of the
decoder is a key here by itself. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specgraph.errors import ConfigError
from specgraph.runtime.requests.arguments import HONOURED, OWN, PROCESSING, REFUSED, STRUCTURE
from specgraph.runtime.requests.processing import Processing

_PYTHON = "it is an object of Python"
_PROMPTS = "prompt and prompts are the keys for this"
NO_KEYS = {
    "input_ids": _PROMPTS,
    "inputs": _PROMPTS,
    "attention_mask": _PROMPTS,
    "token_type_ids": _PROMPTS,
    "num_return_sequences": "every prompt has one answer; a file may repeat a prompt",
    "pad_token_id": "no padding is printed",
    "max_length": "this key is the decoder's longest sequence; max_new_tokens counts new tokens",
    "generation_config": "the model's counts, and every value of it has a key",
    "tokenizer": "it is the model's",
    "streamer": "stream is the key for this",
    "return_dict_in_generate": "format is the key for this",
    "return_logprobs": "no log-probabilities are printed",
    "stopping_criteria": _PYTHON,
    "logits_processor": _PYTHON,
    "prefix_allowed_tokens_fn": _PYTHON,
    "output_scores": "no scores are printed",
    "output_logits": "no logits are printed",
    "renormalize_logits": "no scores are printed",
    "trace": "this key names a file",
}
"""Arguments of the decoder that are no keys, and why."""
OTHER_KEYS = ("max_length", "trace")
"""Arguments in :data:`NO_KEYS` whose names are keys with another meaning, of the decoder's configuration or of the
command."""


@dataclass
class GenerationKeys:
    """The arguments with a type and a text of their own. Where one is null, the model's generation_config counts."""

    max_new_tokens: int | None = None
    """The most tokens to add; where this or one of the next keys is null, the model's generation_config counts."""
    do_sample: bool | None = None
    """false is greedy, whatever the temperature."""
    temperature: float | None = None
    """0 is greedy."""
    top_k: int | None = None
    """Keep the k most likely tokens; 0 is off."""
    top_p: float | None = None
    """Keep the smallest set of tokens with this probability; 1 is off."""
    min_p: float | None = None
    """Keep tokens with at least this share of the top probability; 0 is off."""
    eos_token_id: Any = None
    """The id of a token that ends a text, or a list of ids; [] is none."""
    stop_strings: Any = None
    """A text behind which the answer ends, or a list of texts: stop_strings=[Question,END]."""
    max_time: float | None = None
    """Seconds after which every text ends."""
    seed: int | None = None
    """The seed, which makes sampling repeatable for any batch size; null draws one."""


def refuse_arguments(overrides: Iterable[str]) -> None:
    """Refuse overrides of what is an argument of the decoder, or of transformers, and no key.

    Raises:
        ConfigError: names it, and says why there is no such key.
    """
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        why = NO_KEYS.get(key) or (REFUSED[key].why if key in REFUSED else None)
        if why is not None and key not in OTHER_KEYS:
            raise ConfigError(f"{key} is no key of generate ({why}); leave it out.")


def option_names() -> list[str]:
    """The names of the keys that go to the decoder, those of :class:`GenerationKeys` first."""
    first = [field.name for field in dataclasses.fields(GenerationKeys)]
    return [*first, *sorted((OWN | HONOURED | PROCESSING | STRUCTURE) - NO_KEYS.keys() - set(first))]


def _further_keys() -> type:
    """A dataclass of the decoder's arguments that :class:`GenerationKeys` lacks: a number, or any value."""
    numbers = {field.name for field in dataclasses.fields(Processing) if isinstance(field.default, float)}
    kinds = {name: (float | None) if name in numbers else Any for name in option_names()}
    written = {field.name for field in dataclasses.fields(GenerationKeys)}
    keys = [
        (name, kind, dataclasses.field(default=None, metadata={"text": _text(name)}))
        for name, kind in kinds.items()
        if name not in written
    ]
    return dataclasses.make_dataclass("FurtherKeys", keys)


def _text(name: str) -> str:
    """The help text of a key that is made from an argument of the decoder, from the docstring of its options."""
    pattern = rf"^ +{name}: (.+?)(?=^ +\w+: |^ *$|\Z)"
    if name == "structure_after":
        return "A text or a token id; json_schema, regex or grammar begins behind it, and what comes before is free."
    if name in STRUCTURE:
        return f"The {name.replace('_', ' ').replace('json', 'JSON')} that every text follows; needs llguidance."
    documented = re.search(pattern, Processing.__doc__ or "", re.DOTALL | re.MULTILINE)
    said = " ".join(documented[1].split()) if documented else "as this argument of decoder.generate."
    return f"{said[0].upper()}{said[1:]}"


if TYPE_CHECKING:

    @dataclass
    class FurtherKeys:
        """Made by :func:`_further_keys`."""
else:
    FurtherKeys = _further_keys()


def given_options(options: object) -> dict[str, Any]:
    """The options that are set, by the decoder's names. In stop strings, a backslash with an n is a new line."""
    values = {name: getattr(options, name) for name in option_names()}
    given = {name: value for name, value in values.items() if value is not None}
    if "stop_strings" in given:
        given["stop_strings"] = _lines(given["stop_strings"])
    return given


def _lines(value: Any) -> Any:
    return [_lines(item) for item in value] if isinstance(value, list) else str(value).replace("\\n", "\n")
