"""What a model's ``generation_config`` asks for: honoured where it can be, refused by name where not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from specgraph.errors import InputError, UnsupportedModelError
from specgraph.runtime.requests.arguments import PROCESSING, REFUSED, asks_for
from specgraph.runtime.requests.sampling import CUTS
from specgraph.runtime.requests.values import read_flag, read_token_ids, whole

FLAGS = ("output_scores", "output_logits", "renormalize_logits")
"""Whether the output has scores, and logits, and whether scores are log-probabilities."""


SAMPLING = ("temperature", *CUTS)
"""What shapes a distribution. A configuration has a say in it only where it says to sample."""
_HONOURED = frozenset({"max_new_tokens", "max_length", "num_return_sequences", "stop_strings", "max_time"})
"""What else of a configuration is a default, as it is."""


@dataclass(frozen=True)
class GenerationDefaults:
    """What ``generate`` uses for what its caller leaves out.

    Attributes:
        values: by the names of the arguments. They are checked as a caller's are, where they are used.
        eos_ids: the ids that end a sequence, which are no arguments of a caller until they are known to be ids.
        pad_id: what stands behind a sequence that has ended.
        do_sample: whether a configuration, or the caller, says to sample.
        unsampled: sampling options of a caller's configuration that have no effect, since nothing says whether to
            sample.
    """

    values: Mapping[str, Any]
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    do_sample: bool = False
    unsampled: Mapping[str, Any] = field(default_factory=dict)


def read_generation_config(
    model: PreTrainedModel, given: GenerationConfig | None = None, do_sample: bool | None = None,
    overridden: Collection[str] = (),
) -> GenerationDefaults:  # fmt: skip
    """The defaults of a model, as its ``generation_config`` is now, or of a configuration that is ``given``.

    What the given one leaves out is the model's, as in transformers. Sampling options count only where ``do_sample`` is
    set, as in transformers; else the default is greedy.

    Args:
        model: the target.
        given: a caller's configuration.
        do_sample: a caller's choice, which counts before those of the configurations.
        overridden: names that a caller gives as arguments, so that the configuration does not count.

    Raises:
        UnsupportedModelError: the model's configuration asks for something that specgraph does not have.
        InputError: so does the given one, or it is no configuration.
    """
    check_config(given)
    own: Any = getattr(model, "generation_config", None) or GenerationConfig.from_model_config(model.config)
    values = _values(own) | ({} if given is None else _values(given))
    wanted = [n for n in REFUSED if n in values and n not in overridden and asks_for(n, values[n])]
    if wanted:
        listed = ", ".join(f"{name}={values[name]!r}" for name in wanted)
        whose = f"{type(model).__name__}'s generation_config" if given is None else "This generation_config"
        raise (UnsupportedModelError if given is None else InputError)(
            f"{whose} asks for {listed}, which specgraph does not support and will not ignore. Set it off on "
            f"{'model.' if given is None else 'the '}generation_config if you can do without."
        )
    sample = bool(read_flag("do_sample", values.get("do_sample")) if do_sample is None else do_sample)
    defaults = {name: value for name, value in values.items() if name in _HONOURED | PROCESSING}
    defaults |= {name: read_flag(name, values.get(name)) for name in FLAGS}
    if sample:
        # What a sampling model's configuration leaves out has a default of transformers' own (top_k = 50, for one).
        common: dict[str, Any] = getattr(GenerationConfig, "_get_default_generation_params", dict)()
        sampling = {"temperature": 1.0, **common, **values}
        defaults |= {name: sampling[name] for name in SAMPLING if name in sampling}
    text: Any = model.config.get_text_config()
    eos, pad = (values.get(n, getattr(text, n, None)) for n in ("eos_token_id", "pad_token_id"))
    return GenerationDefaults(
        defaults,
        eos_ids=() if eos is None else tuple(read_token_ids("eos_token_id", eos)),
        pad_id=None if pad is None else whole("pad_token_id", pad),
        do_sample=sample,
        unsampled={} if sample or given is None or given.do_sample is not None else _differing(own, given),
    )


def _differing(own: GenerationConfig, given: GenerationConfig) -> dict[str, Any]:
    """The sampling options of a caller's configuration that are not those of the model's, of which it may be a copy."""
    values = {name: getattr(given, name, None) for name in SAMPLING}
    return {name: value for name, value in values.items() if value is not None and value != getattr(own, name, None)}


def check_config(given: object) -> None:
    """Refuse a caller's configuration that is none."""
    if given is not None and not isinstance(given, GenerationConfig):
        raise InputError(f"generation_config is a GenerationConfig of transformers, not {type(given).__name__}.")


def _values(config: GenerationConfig) -> dict[str, Any]:
    """What a configuration sets."""
    return {name: value for name, value in vars(config).items() if value is not None}
