"""Which of transformers' arguments of ``generate`` the decoder takes, which change nothing here, and which it refuses.

Every attribute of transformers' ``GenerationConfig`` and every parameter of its ``generate`` stands in one of these
tables, so that none is ignored in silence. A test compares them with the installed transformers.
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
KNOWN = frozenset({
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
"""What is about transformers' own cache, beams or assistant: no token depends on it here."""


CHAT = "chat"
"""The name of the function that takes conversations."""
TAKEN = OWN | KNOWN | PROCESSING | STRUCTURE | WITHOUT_EFFECT
"""What ``generate`` takes."""
OF_ONE_SEQUENCE = PROCESSING | STRUCTURE | {
    "max_new_tokens", "eos_token_id", "temperature", "top_k", "top_p", "min_p", "seed", "tokenizer", "stop_strings",
    "max_time",
}  # fmt: skip
"""What ``submit`` takes."""


class Refusal(NamedTuple):
    """An argument that is not honoured: the values that ask for nothing, and why others are refused."""

    neutral: tuple[Any, ...]
    why: str


_BEAMS = "tokens are chosen greedily or by sampling"
_WARPERS = "temperature, top_k, top_p and min_p are what shapes a distribution"
_PROCESSORS = "the compiled step has no such processor"
_GUIDANCE = "there is no classifier-free guidance"
_DRAFTS = "drafts come from the draft that the model was compiled with"
_TOKENS = "prompts are token ids alone"
_STEP = "a step keeps none of them"
_DECODER = "the target is a decoder"
_UNSET = (None, False)
REFUSED: Mapping[str, Refusal] = {
    "num_beams": Refusal((None, 1), _BEAMS),
    "diversity_penalty": Refusal((None, 0.0), _BEAMS),
    "constraints": Refusal((None, []), _BEAMS),
    "force_words_ids": Refusal((None, []), _BEAMS),
    "penalty_alpha": Refusal((None, 0.0), _BEAMS),
    "dola_layers": Refusal((None,), _BEAMS),
    "typical_p": Refusal((None, 1.0), _WARPERS),
    "epsilon_cutoff": Refusal((None, 0.0), _WARPERS),
    "eta_cutoff": Refusal((None, 0.0), _WARPERS),
    "top_h": Refusal((None,), _WARPERS),
    "exponential_decay_length_penalty": Refusal((None,), _PROCESSORS),
    "remove_invalid_values": Refusal(_UNSET, "logits that are NaN are an error"),
    "watermarking_config": Refusal((None,), _PROCESSORS),
    "token_healing": Refusal(_UNSET, "a prompt is continued as it is"),
    "guidance_scale": Refusal((None, 1.0), _GUIDANCE),
    "negative_prompt_ids": Refusal((None,), _GUIDANCE),
    "negative_prompt_attention_mask": Refusal((None,), _GUIDANCE),
    "encoder_repetition_penalty": Refusal((None, 1.0), _DECODER),
    "encoder_no_repeat_ngram_size": Refusal((None, 0), _DECODER),
    "encoder_outputs": Refusal((None,), _DECODER),
    "decoder_input_ids": Refusal((None,), _DECODER),
    "assistant_model": Refusal((None,), _DRAFTS),
    "assistant_tokenizer": Refusal((None,), _DRAFTS),
    "assistant_early_exit": Refusal((None,), _DRAFTS),
    "prompt_lookup_num_tokens": Refusal((None, 0), _DRAFTS),
    "use_mtp": Refusal(_UNSET, _DRAFTS),
    "output_attentions": Refusal(_UNSET, _STEP),
    "output_hidden_states": Refusal(_UNSET, _STEP),
    "past_key_values": Refusal(
        (None,), "a decoder keeps its own cache, which also finds beginnings that it has seen before"
    ),
    "cache_position": Refusal((None,), "a decoder keeps its own cache"),
    "position_ids": Refusal((None,), "tokens are at consecutive positions"),
    "inputs_embeds": Refusal((None,), _TOKENS),
    "pixel_values": Refusal((None,), _TOKENS),
    "pixel_values_videos": Refusal((None,), _TOKENS),
    "input_features": Refusal((None,), _TOKENS),
    "image_grid_thw": Refusal((None,), _TOKENS),
    "video_grid_thw": Refusal((None,), _TOKENS),
    "synced_gpus": Refusal(_UNSET, "a decoder runs on one device"),
    "custom_generate": Refusal((None,), "the decoder is what decodes"),
}
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
