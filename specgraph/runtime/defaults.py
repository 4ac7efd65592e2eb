"""What a model's ``generation_config`` asks for: honoured where it can be, refused by name where not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from specgraph.errors import UnsupportedModelError

# Name -> the values that leave decoding as it is. What is not here does not change the tokens.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None, []),
    "sequence_bias": (None, {}),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0.0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "top_h": (None,),
    "diversity_penalty": (None, 0.0),
    "guidance_scale": (None, 1.0),
    "dola_layers": (None,),
    "watermarking_config": (None,),
    "stop_strings": (None, []),
}


@dataclass(frozen=True)
class GenerationDefaults:
    """Values that ``generate`` uses for what its caller leaves out."""

    eos_ids: tuple[int, ...]
    pad_id: int | None
    max_new_tokens: int | None
    max_length: int | None
    """Length of prompt and continuation, where ``max_new_tokens`` is not set."""
    temperature: float
    top_k: int
    top_p: float
    min_p: float


def read_generation_config(model: PreTrainedModel) -> GenerationDefaults:
    """The defaults of a model.

    Sampling options count only where ``do_sample`` is set, as in transformers; else the default is greedy.

    Raises:
        UnsupportedModelError: the configuration asks for a logits processor that specgraph does not have.
    """
    config: Any = getattr(model, "generation_config", None) or GenerationConfig.from_model_config(model.config)
    wanted = {n: getattr(config, n, None) for n, off in _UNSUPPORTED.items() if getattr(config, n, None) not in off}
    if wanted:
        listed = ", ".join(f"{name}={value!r}" for name, value in wanted.items())
        raise UnsupportedModelError(
            f"{type(model).__name__}'s generation_config asks for {listed}, which specgraph does not support and will "
            f"not ignore. Set it off on model.generation_config if you can do without."
        )
    sample = bool(getattr(config, "do_sample", False))

    # What a sampling model's configuration leaves out has a default of transformers' own (top_k = 50, for one).
    common: dict[str, Any] = getattr(GenerationConfig, "_get_default_generation_params", dict)() if sample else {}

    def option(name: str, off: float) -> float:
        value = getattr(config, name, None) if sample else None
        value = common.get(name) if value is None else value
        return off if value is None else value

    temperature = option("temperature", 1.0 if sample else 0.0)
    new_tokens = getattr(config, "max_new_tokens", None)
    eos, text = config.eos_token_id, model.config.get_text_config()
    eos = eos if eos is not None else getattr(text, "eos_token_id", None)
    pad = config.pad_token_id if config.pad_token_id is not None else getattr(text, "pad_token_id", None)
    ids = () if eos is None else (int(eos),) if isinstance(eos, int) else tuple(int(e) for e in eos)
    return GenerationDefaults(
        eos_ids=ids,
        pad_id=pad,
        max_new_tokens=new_tokens,
        max_length=getattr(config, "max_length", None),
        temperature=float(temperature),
        top_k=int(option("top_k", 0)),
        top_p=float(option("top_p", 1.0)),
        min_p=float(option("min_p", 0.0)),
    )
