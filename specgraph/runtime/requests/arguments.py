"""Which of transformers' arguments of ``generate`` the decoder takes, which change nothing here, and which it refuses.

Every attribute of transformers' ``GenerationConfig`` and every parameter of its ``generate`` stands in one of these
tables, and none in two, so that none is ignored in silence. A test compares them with the installed transformers.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple

from specgraph.errors import InputError
from specgraph.runtime.requests.logit_option_table import LOGIT_OPTIONS

OWN = frozenset({
    "input_ids", "attention_mask", "max_new_tokens", "eos_token_id", "temperature", "top_k", "top_p", "min_p", "seed",
    "return_logprobs", "stopping_criteria", "trace",
})  # fmt: skip
"""Parameters of ``decoder.generate`` itself."""
HONOURED = frozenset({
    "inputs", "generation_config", "do_sample", "max_length", "num_return_sequences", "streamer", "stop_strings",
    "tokenizer", "max_time", "pad_token_id", "return_dict_in_generate", "token_type_ids", "logits_processor",
    "prefix_allowed_tokens_fn", "output_scores", "output_logits", "renormalize_logits",
})  # fmt: skip
"""What else of transformers' arguments is honoured."""
PROCESSING = frozenset(LOGIT_OPTIONS)
"""What changes logits: transformers' arguments, and the penalties that it does not have."""
KINDS = frozenset({"json_schema", "regex", "grammar"})
"""What is not transformers': the structure that the output shall have. A sequence has one of them at most."""
STRUCTURE = KINDS | {"structure_after"}
"""The structure, and the boundary behind which it begins."""
WITHOUT_EFFECT = frozenset({
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "disable_compile", "compile_config",
    "continuous_batching_config", "prefill_chunk_size", "low_memory", "length_penalty", "early_stopping",
    "num_beam_groups", "bos_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config",
    "_commit_hash", "logits_to_keep", "is_assistant", "assistant_confidence_threshold", "assistant_ensemble_weight",
    "assistant_lookbehind", "target_lookbehind", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "max_matching_ngram_size", "speculation_type",
})  # fmt: skip
"""What is about transformers' own cache, beams or assistant, or only a name or a version that a configuration carries:
no token depends on it here."""


CHAT = "chat"
"""The name of the function that takes conversations."""
TAKEN = OWN | HONOURED | PROCESSING | STRUCTURE | WITHOUT_EFFECT
"""What ``generate`` takes."""
OF_ONE_SEQUENCE = PROCESSING | STRUCTURE | {
    "max_new_tokens", "eos_token_id", "temperature", "top_k", "top_p", "min_p", "seed", "tokenizer", "stop_strings",
    "max_time",
}  # fmt: skip
"""What ``Session.submit`` takes, which is not transformers': so it has no arguments without effect."""


class Refusal(NamedTuple):
    """An argument that is not honoured: which values ask for nothing, None among them, and why others are refused."""

    neutral: tuple[Any, ...]
    why: str


_UNSET = (None, False)
_REASONS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "tokens are chosen greedily or by sampling": {
        "num_beams": (None, 1), "diversity_penalty": (None, 0.0), "constraints": (None, []),
        "force_words_ids": (None, []), "penalty_alpha": (None, 0.0), "dola_layers": (None,),
    },
    "temperature, top_k, top_p and min_p are what shapes a distribution": {
        "typical_p": (None, 1.0), "epsilon_cutoff": (None, 0.0), "eta_cutoff": (None, 0.0), "top_h": (None,),
    },
    "the compiled step has no such processor": {
        "exponential_decay_length_penalty": (None,), "watermarking_config": (None,),
    },
    "logits that are NaN are an error": {"remove_invalid_values": _UNSET},
    "a prompt is continued as it is": {"token_healing": _UNSET},
    "there is no classifier-free guidance": {
        "guidance_scale": (None, 1.0), "negative_prompt_ids": (None,), "negative_prompt_attention_mask": (None,),
    },
    "the target is a decoder": {
        "encoder_repetition_penalty": (None, 1.0), "encoder_no_repeat_ngram_size": (None, 0),
        "encoder_outputs": (None,), "decoder_input_ids": (None,),
    },
    "drafts come from the draft that the model was compiled with": {
        "assistant_model": (None,), "assistant_tokenizer": (None,), "assistant_early_exit": (None,),
        "prompt_lookup_num_tokens": (None, 0), "use_mtp": _UNSET,
    },
    "a step keeps none of them": {"output_attentions": _UNSET, "output_hidden_states": _UNSET},
    "a decoder keeps its own cache, which also finds beginnings that it has seen before": {"past_key_values": (None,)},
    "a decoder keeps its own cache": {"cache_position": (None,)},
    "tokens are at consecutive positions": {"position_ids": (None,)},
    "prompts are token ids alone": dict.fromkeys(
        ("inputs_embeds", "pixel_values", "pixel_values_videos", "input_features", "image_grid_thw", "video_grid_thw"),
        (None,),
    ),
    "a decoder runs on one device": {"synced_gpus": _UNSET},
    "the decoder is what decodes": {"custom_generate": (None,)},
}  # fmt: skip
"""Why arguments are not honoured, and the values of each that ask for nothing."""
REFUSED = {name: Refusal(off, why) for why, names in _REASONS.items() for name, off in names.items()}
"""What is not honoured."""


def asks_for(name: str, value: Any) -> bool:
    """Whether ``value`` of a refused argument asks for anything."""
    neutral = REFUSED[name].neutral
    try:
        return not any(value is own or bool(value == own) for own in neutral)
    except (RuntimeError, TypeError, ValueError):  # a tensor equals no single value
        return True


def check_names(given: Mapping[str, Any], known: Set[str] = TAKEN, function: str = "generate") -> None:
    """Refuse arguments of ``function`` that are not ``known``, and those that are not honoured.

    Raises:
        InputError: names the argument, and says what is there instead.
    """
    for name, value in given.items():
        if name in REFUSED:
            if asks_for(name, value):
                raise InputError(f"{name}={_short(value)} is not supported ({REFUSED[name].why}); leave it out.")
        elif name not in known and name in TAKEN:
            raise InputError(f"{function} does not take {name}, which is for generate and stream; leave it out.")
        elif name not in known:
            raise InputError(f"There is no argument {name!r}; {_suggestion(name, known - WITHOUT_EFFECT, function)}")


def _suggestion(name: str, names: Iterable[str], function: str) -> str:
    close = difflib.get_close_matches(name, sorted(names), n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    if function == CHAT:
        return f"a variable of the chat template goes into chat_template_kwargs={{{name!r}: ...}}."
    return "help(decoder.generate) lists what there is."


def _short(value: Any) -> str:
    if isinstance(value, bool | int | float | str):
        return repr(value)
    return type(value).__name__
