"""Reads what transformers' ``generate`` has prepared for a decoding method, and refuses what there is no way to do."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    LogitNormalization,
    LogitsProcessor,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specgraph.errors import InputError
from specgraph.runtime.decoder import SpeculativeDecoder

WARPERS: dict[type[LogitsProcessor], str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
"""Processors that the decoder has itself, by the names of its options, in the order in which it applies them."""
_NO_EFFECT = (LogitNormalization,)
"""Processors that change neither the largest score nor any probability."""
_REFUSED = {
    "assistant_model": "drafts come from the draft that the model was attached with",
    "prefix_allowed_tokens_fn": "tokens cannot be constrained",
    "negative_prompt_ids": "there is no classifier-free guidance",
    "negative_prompt_attention_mask": "there is no classifier-free guidance",
    "synced_gpus": "a decoder runs on one device",
    "past_key_values": "a decoder keeps its own cache, which also finds beginnings that it has seen before",
    "inputs_embeds": "prompts are token ids",
    "position_ids": "tokens are at consecutive positions",
}
"""Arguments of ``generate`` that cannot be honoured, and why."""
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def check_arguments(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Refuse arguments of ``generate`` that a decoding method would not see; ``token_type_ids`` of no use are dropped.

    ``arguments`` are those of its signature, with the others under ``kwargs``.

    Raises:
        InputError: one of them is given.
    """
    others: dict[str, Any] = arguments.get("kwargs", {})
    for name, why in _REFUSED.items():
        given = arguments.get(name, others.get(name))
        if given is not None and given is not False:
            raise InputError(_refusal(model, f"{name}=", why))
    if "token_type_ids" in others:
        if "token_type_ids" in inspect.signature(model.forward).parameters:
            raise InputError(_refusal(model, "token_type_ids=", "the model was compiled without them"))
        arguments["kwargs"] = {name: value for name, value in others.items() if name != "token_type_ids"}


def add_stop_strings(arguments: dict[str, Any]) -> None:
    """Make a criterion of the stop strings of a call.

    transformers does so itself, but not for a decoding method of the caller's: it has lost the tokenizer by then.
    ``arguments`` are as for :func:`check_arguments`.

    Raises:
        InputError: there is no tokenizer.
    """
    others, config = dict(arguments.get("kwargs", {})), arguments.get("generation_config")
    tokenizer, strings = others.pop("tokenizer", None), others.pop("stop_strings", None)
    if strings is None and config is not None and config.stop_strings is not None:
        strings = config.stop_strings
        arguments["generation_config"] = config = copy.deepcopy(config)
        config.stop_strings = None
    if strings is None:
        return
    if tokenizer is None:
        raise InputError("stop_strings needs the model's tokenizer; pass it as tokenizer=.")
    criterion = StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)
    arguments["stopping_criteria"] = StoppingCriteriaList([*(arguments.get("stopping_criteria") or []), criterion])
    arguments["kwargs"] = others


def _refusal(model: object, what: str, why: str) -> str:
    name = type(model).__name__
    return f"An attached model does not take {what} ({why}); leave it out, or call {name}.generate(model, ...)."


@dataclass(frozen=True)
class Prepared:
    """What a decoding method is given.

    Attributes:
        input_ids: int64 ``[B, S]``, prompts as given, a sequence for each that is to be returned.
        processors: those of the call.
        criteria: when a sequence ends.
        config: the merged configuration.
    """

    input_ids: Tensor
    processors: Sequence[LogitsProcessor]
    criteria: Sequence[StoppingCriteria]
    config: GenerationConfig

    @property
    def max_new_tokens(self) -> int:
        """Tokens that a sequence adds at most."""
        lengths = [criterion.max_length for criterion in self.criteria if isinstance(criterion, MaxLengthCriteria)]
        return max(0, int(min(lengths)) - self.input_ids.shape[1])

    @property
    def eos_ids(self) -> list[int]:
        """The ids that end a sequence."""
        ends = [criterion for criterion in self.criteria if isinstance(criterion, EosTokenCriteria)]
        return sorted({int(token) for criterion in ends for token in criterion.eos_token_id})

    @property
    def host_criteria(self) -> list[StoppingCriteria]:
        """Criteria that have to be asked for every token."""
        return [c for c in self.criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]

    @property
    def pad_id(self) -> int:
        """What stands behind a sequence that has ended; the first EOS id where there is none, as in transformers."""
        pad: int | None = self.config.pad_token_id
        eos: Any = self.config.eos_token_id
        return int(pad) if pad is not None else int((eos if isinstance(eos, list | tuple) else [eos or 0])[0])

    def check(self, model: PreTrainedModel, decoder: SpeculativeDecoder) -> None:
        """Refuse what the decoder does not do.

        Raises:
            InputError: says what, and how to do without it.
        """
        mode = self.config.get_generation_mode().value
        if mode not in ("greedy_search", "sample"):
            raise InputError(_refusal(model, mode.replace("_", " "), "it decodes greedily, or by sampling"))
        names = [type(processor).__name__ for processor in self._foreign_processors()]
        if names:
            raise InputError(_refusal(model, " and ".join(names), "there is nothing of that kind in the compiled step"))
        wanted = [name for name in _OUTPUTS if self.config.return_dict_in_generate and getattr(self.config, name)]
        if wanted:
            raise InputError(_refusal(model, " and ".join(wanted), "a step keeps none of them"))
        longest = self.input_ids.shape[1] + self.max_new_tokens
        if longest > decoder.max_length:
            raise InputError(
                f"This call asks for up to {longest} tokens, but the model was attached for {decoder.max_length}; ask "
                "for fewer, or attach it with a larger max_length if it allows."
            )

    def sampling(self) -> dict[str, float]:
        """The decoder's options. A greedy choice is the same with and without them."""
        options = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        if self.config.do_sample:
            own = {WARPERS[type(p)]: p for p in self.processors if type(p) in WARPERS}
            options |= {"temperature": 1.0, **{name: getattr(processor, name) for name, processor in own.items()}}
        return options

    def output(self, new_tokens: Sequence[Tensor]) -> Any:
        """What ``generate`` returns: int64 ``[B, S + N]``, or the output class with it."""
        padded = torch.nn.utils.rnn.pad_sequence(list(new_tokens), batch_first=True, padding_value=self.pad_id)
        sequences = torch.cat([self.input_ids, padded.to(self.input_ids)], dim=1)
        return GenerateDecoderOnlyOutput(sequences=sequences) if self.config.return_dict_in_generate else sequences

    def _foreign_processors(self) -> Iterator[LogitsProcessor]:
        """Those that the decoder does not have, or has in another order."""
        last, order = -1, list(WARPERS)
        for processor in self.processors:
            if type(processor) in WARPERS and _is_plain(processor):
                place = order.index(type(processor))
                if not self.config.do_sample or place > last:
                    last = place
                    continue
            if type(processor) not in _NO_EFFECT:
                yield processor


def _is_plain(processor: LogitsProcessor) -> bool:
    """Whether what it filters gets the probability 0, and nothing else is kept."""
    values: Mapping[str, Any] = vars(processor)
    keeps_more = values.get("min_tokens_to_keep", 1) > 1 and not isinstance(processor, TopKLogitsWarper)
    return values.get("filter_value", -float("inf")) == -float("inf") and not keeps_more
