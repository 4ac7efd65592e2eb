"""Reads the call that transformers' ``generate`` has prepared for a decoding method, and refuses unsupported ones."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, generation
from transformers.generation import LogitsProcessor, StoppingCriteria

from specgraph.dropin.processors import OPTION_OF, read_processor, with_padded_ngrams
from specgraph.errors import InputError
from specgraph.runtime.decoder import SpeculativeDecoder
from specgraph.runtime.outputs.output import GenerateOutput
from specgraph.runtime.requests.arguments import OWN, PROCESSING, REFUSED, STRUCTURE, asks_for
from specgraph.runtime.requests.generation_config import check_config
from specgraph.runtime.requests.host_processors import read_processors
from specgraph.runtime.requests.logit_option_table import LOGIT_OPTIONS
from specgraph.runtime.requests.stopping import read_criteria, read_stop_strings, stop_criteria

WARPERS: dict[type[LogitsProcessor], str] = {
    generation.TemperatureLogitsWarper: "temperature",
    generation.TopKLogitsWarper: "top_k",
    generation.TopPLogitsWarper: "top_p",
    generation.MinPLogitsWarper: "min_p",
}
"""Processors that the decoder has itself, by the names of its options, in the order in which it applies them."""
_NO_EFFECT = (generation.LogitNormalization,)
"""Processors that change neither the largest score nor any probability."""
NEUTRAL: Mapping[str, Any] = {
    **{name: refusal.neutral[0] for name, refusal in REFUSED.items()},
    **{name: option.off for name, option in LOGIT_OPTIONS.items()},
    "num_return_sequences": 1, "stop_strings": (), "max_time": math.inf,
}  # fmt: skip
"""The options that transformers has applied before it calls a decoding method, at the values that switch them off. They
are passed to the decoder so that it does not take them from the model's configuration again."""
_NOT_HANDED_ON = (
    "assistant_model", "negative_prompt_ids", "negative_prompt_attention_mask", "synced_gpus", "past_key_values",
    "inputs_embeds", "position_ids", "token_healing",
)  # fmt: skip
"""Arguments of ``generate`` that cannot be honoured, and that a decoding method does not see."""
_OUTPUTS = frozenset({"output_attentions", "output_hidden_states"})
"""They ask for something only where the output is a class."""
_BY_PROCESSORS = frozenset({
    "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "exponential_decay_length_penalty", "remove_invalid_values",
})  # fmt: skip
"""Options for which transformers makes logits processors that look at one sequence and keep no state. They run on the
host."""
_PREPARED = frozenset({"past_key_values", "position_ids", "cache_position"})
"""Arguments that transformers hands to a decoding method whether or not a caller gave them."""
_IGNORED = frozenset({"input_ids", "attention_mask", "labels", "use_cache", "logits_to_keep", "return_dict"})
"""Arguments of a model's forward pass on which no token depends, or which the decoder reads."""


def check_arguments(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Refuse arguments of ``generate`` that a decoding method would not see; ``token_type_ids`` of no use are dropped.

    ``arguments`` are those of its signature, with the others under ``kwargs``.

    Raises:
        InputError: one of them is given.
    """
    others: dict[str, Any] = arguments.get("kwargs", {})
    _refuse(model, _NOT_HANDED_ON, others | arguments)
    check_config(arguments.get("generation_config"))
    read_processors(arguments.get("logits_processor"))
    read_criteria(arguments.get("stopping_criteria"))
    inputs, mask = arguments.get("inputs", others.get("input_ids")), others.get("attention_mask")
    # transformers drops a mask of ones before anybody looks at its shape.
    if isinstance(inputs, Tensor) and isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape != inputs.shape:
        raise InputError(f"attention_mask is {[*mask.shape]}, but must be {[*inputs.shape]} like the prompts.")
    forward = inspect.signature(model.forward).parameters
    known = _IGNORED | vars(GenerationConfig()).keys()
    for name, value in others.items():
        if name in forward and name not in known and value is not None:
            raise InputError(_refusal(model, f"{name}=", "the model was compiled without it"))
        if name in (OWN | PROCESSING | STRUCTURE) - known:
            raise InputError(f"{name} is an argument of the decoder alone; call generate of what attach has returned.")
    arguments["kwargs"] = {name: value for name, value in others.items() if name != "token_type_ids"}


def check_prepared(model: PreTrainedModel, decoder: SpeculativeDecoder, prepared: Mapping[str, Any]) -> None:
    """Refuse what a caller has given to transformers and what a decoder does not read, as far as it can be seen.

    ``prepared`` is what transformers would give to a forward pass. It makes a cache and positions where a caller gives
    none, so only those are refused that it would not have made.

    Raises:
        InputError: the decoder was compiled from another model, or something was given that it would ignore.
    """
    if decoder.model is not model:
        raise InputError(
            f"This decoder was compiled from another model than this {type(model).__name__}; give custom_generate a "
            "decoder that compile_speculative has made of it."
        )
    _refuse(model, REFUSED.keys() - _PREPARED, prepared)
    for name in ("past_key_values", "position_ids"):
        if not _is_fresh(name, prepared):
            raise InputError(_refusal(model, f"{name}=", REFUSED[name].why))


def _is_fresh(name: str, prepared: Mapping[str, Any]) -> bool:
    """Whether a cache is empty, or positions are those that follow from the mask."""
    given, mask = prepared.get(name), prepared.get("attention_mask")
    if given is None:
        return True
    if name == "past_key_values":
        return not hasattr(given, "get_seq_length") or int(given.get_seq_length()) == 0
    if mask is None:
        return bool((given == torch.arange(given.shape[-1], device=given.device)).all())
    return given.shape == mask.shape and bool((given == mask.cumsum(-1) - 1)[mask != 0].all())


def add_stop_strings(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Make a criterion of the stop strings of a call, of its configuration, or of the model's.

    transformers does so itself, but not for a decoding method of the caller's: it has lost the tokenizer by then.
    ``arguments`` are as for :func:`check_arguments`.

    Raises:
        InputError: there is no tokenizer, or they are no strings.
    """
    others, config = dict(arguments.get("kwargs", {})), arguments.get("generation_config")
    given = [others.get("stop_strings")] if "stop_strings" in others else [
        getattr(each, "stop_strings", None) for each in (config, model.generation_config)
    ]  # fmt: skip
    strings = next((each for each in given if each is not None), None)
    if strings is None:
        return
    criteria = [
        *(arguments.get("stopping_criteria") or []),
        *stop_criteria(read_stop_strings(strings), others.pop("tokenizer", None), None),
    ]
    if config is not None and config.stop_strings is not None:
        arguments["generation_config"] = config = copy.deepcopy(config)
        config.stop_strings = None
    others.pop("stop_strings", None)
    if getattr(model.generation_config, "stop_strings", None) is not None:
        others["stop_strings"] = None  # which counts before the model's
    arguments["stopping_criteria"], arguments["kwargs"] = generation.StoppingCriteriaList(criteria), others


def _refusal(model: object, what: str, why: str) -> str:
    name = type(model).__name__
    return f"An attached model does not take {what} ({why}); leave it out, or call {name}.generate(model, ...)."


def _refuse(model: object, names: Iterable[str], given: Mapping[str, Any]) -> None:
    """Refuse the first of ``names`` by which something is asked for; None asks for nothing."""
    for name in names:
        if asks_for(name, given.get(name)):
            raise InputError(_refusal(model, f"{name}=", REFUSED[name].why))


def check_rope(model: PreTrainedModel, decoder: SpeculativeDecoder, prompt: int | None = None) -> None:
    """Refuse calls in which transformers would take other rotary frequencies than the decoder has.

    transformers looks at the longest sequence of every forward pass. So frequencies of long sequences are right for all
    tokens where the longest ``prompt`` needs them already and they change no more; None asks about any prompt.

    Raises:
        InputError: says for which length the model has to be attached.
    """
    rope = decoder.limits.rope
    if rope is None or rope.length is None:
        return
    grows = any("dynamic" in kind for kind in rope.kinds)
    if not grows and (prompt is None or prompt > rope.original):
        return
    short = f"takes the rotary frequencies of short sequences for this call, whose longest prompt has {prompt} tokens"
    when = "computes its rotary frequencies anew with every token" if grows else short
    raise InputError(
        f"transformers {when}, and {type(model).__name__} was attached with max_length={rope.length}, for which it has "
        f"those of long sequences for every token; attach it with a max_length of at most {rope.original}, or call the "
        "decoder that compile_speculative returns."
    )


@dataclass(frozen=True)
class Prepared:
    """The arguments of a decoding method.

    Attributes:
        input_ids: int64 ``[B, S]``, prompts as given, a sequence for each that is to be returned.
        mask: ``[B, S]``, nonzero where they are not padding.
        processors: those of the call.
        criteria: when a sequence ends.
        config: the merged configuration.
    """

    input_ids: Tensor
    mask: Tensor
    processors: Sequence[LogitsProcessor]
    criteria: Sequence[StoppingCriteria]
    config: GenerationConfig

    @cached_property
    def padding(self) -> Tensor:
        """How much of each prompt is padding on its left, int64 ``[B]``."""
        real = (self.mask != 0).long().cpu()
        return real.argmax(1) if real.shape[1] else real.sum(1)

    @property
    def max_new_tokens(self) -> int:
        """Tokens that a sequence adds at most."""
        lengths = [c.max_length for c in self.criteria if isinstance(c, generation.MaxLengthCriteria)]
        return max(0, int(min(lengths)) - self.input_ids.shape[1])

    @property
    def eos_ids(self) -> list[int]:
        """The ids that end a sequence."""
        ends = [c.eos_token_id for c in self.criteria if isinstance(c, generation.EosTokenCriteria)]
        return sorted({int(token) for tokens in ends for token in tokens})

    @property
    def host_criteria(self) -> list[StoppingCriteria]:
        """Criteria that have to be asked for every token."""
        return [c for c in self.criteria if type(c) not in (generation.MaxLengthCriteria, generation.EosTokenCriteria)]

    @property
    def pad_id(self) -> int:
        """The id that fills up a sequence that has ended: the pad id, or else the first EOS id, as in transformers."""
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
        looked_at = REFUSED.keys() - _BY_PROCESSORS - (set() if self.config.return_dict_in_generate else _OUTPUTS)
        _refuse(model, sorted(looked_at), vars(self.config))
        longest = self.input_ids.shape[1] + self.max_new_tokens
        if longest > decoder.max_length:
            raise InputError(
                f"This call asks for up to {longest} tokens, but the model was attached for {decoder.max_length}; ask "
                f"for fewer, or {decoder.limits.how_to_lengthen('attach it')}."
            )
        check_rope(model, decoder, self.input_ids.shape[1] - int(self.padding.min()))

    def sampling(self) -> dict[str, Any]:
        """The decoder's options. A greedy choice is the same with and without those of sampling."""
        options: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        first, between, last = self._parts()
        if self.config.do_sample:
            options |= {"temperature": 1.0, **{WARPERS[type(p)]: getattr(p, WARPERS[type(p)]) for p in last}}
        for processor in first:
            options |= read_processor(processor, self) or {}
        if between and isinstance(between[-1], generation.PrefixConstrainedLogitsProcessor):
            # It looks at its place in the batch, and processors on the host see one sequence.
            options["prefix_allowed_tokens_fn"] = between.pop()._prefix_allowed_tokens_fn
        if any(isinstance(processor, generation.PrefixConstrainedLogitsProcessor) for processor in between):
            raise InputError("prefix_allowed_tokens_fn goes behind all other processors on the host; leave one out.")
        return with_padded_ngrams(options, self) | {"logits_processor": between}

    def output_options(self) -> dict[str, bool]:
        """The options of the decoder that ask for the logits which the output class has to contain."""
        names = ("output_scores", "output_logits")
        return {n: bool(self.config.return_dict_in_generate and getattr(self.config, n)) for n in names}

    def output(self, out: GenerateOutput) -> Any:
        """The return value of ``generate``: int64 ``[B, S + N]``, or the output class with it."""
        padded = torch.nn.utils.rnn.pad_sequence(out.new_tokens, batch_first=True, padding_value=self.pad_id)
        sequences = torch.cat([self.input_ids, padded.to(self.input_ids.device)], dim=1)
        if not self.config.return_dict_in_generate:
            return sequences
        return generation.GenerateDecoderOnlyOutput(sequences=sequences, scores=out.scores, logits=out.logits)

    def _parts(self) -> tuple[list[LogitsProcessor], list[Any], list[LogitsProcessor]]:
        """The processors: those that the step has in front, those for the host, and those that verification has.

        In each part they are in the order in which they are applied, so all of them are. Scores show what changes no
        token, such as a temperature before a greedy choice. Where they are wanted, the host applies that, too.
        """
        shown = self.output_options()["output_scores"]
        processors: list[Any] = read_processors([*self.processors])
        processors = [p for p in processors if shown or type(p) not in _NO_EFFECT]
        end = len(processors)
        while end and _is_plain(processors[end - 1]) and _in_order(processors[end - 1 :], WARPERS):
            end -= 1
        end = len(processors) if shown and not self.config.do_sample else end
        begin = 0
        while begin < end and read_processor(processors[begin], self) is not None:
            if not _in_order(processors[: begin + 1], OPTION_OF):
                break
            begin += 1
        between = processors[begin:end]
        return processors[:begin], between, processors[end:]


def _in_order(processors: Sequence[LogitsProcessor], known: Mapping[type[LogitsProcessor], object]) -> bool:
    """Whether processors are of different known classes, and in the order in which these stand."""
    order = list(known)
    places = [order.index(type(p)) for p in processors if type(p) in known]
    return len(places) == len(processors) and places == sorted({*places})


def _is_plain(processor: LogitsProcessor) -> bool:
    """Whether what it filters gets the probability 0, and nothing else is kept."""
    values: Mapping[str, Any] = vars(processor)
    keeps_more = values.get("min_tokens_to_keep", 1) > 1 and not isinstance(processor, generation.TopKLogitsWarper)
    return values.get("filter_value", -float("inf")) == -float("inf") and not keeps_more
