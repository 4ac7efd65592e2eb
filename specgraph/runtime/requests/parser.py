"""Reads the arguments of ``generate``, ``stream`` and ``submit`` with a model's defaults."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from specgraph.errors import InputError, warn_caller
from specgraph.runtime.model_guard import ModelGuard
from specgraph.runtime.requests.arguments import OF_ONE_SEQUENCE, OWN, STRUCTURE, check_names
from specgraph.runtime.requests.generation_config import FLAGS, SAMPLING, GenerationDefaults
from specgraph.runtime.requests.grammar import Grammars, StructureOptions, read_structures
from specgraph.runtime.requests.host_processors import Allowed, HostProcessor, PythonProcessors, read_processors
from specgraph.runtime.requests.limits import read_eos, read_limits
from specgraph.runtime.requests.logit_options import LogitOptions, read_logit_options
from specgraph.runtime.requests.prompts import check_prompts, read_ids, read_prompts
from specgraph.runtime.requests.recorder import Recorder, Wanted
from specgraph.runtime.requests.request import Limits, Request
from specgraph.runtime.requests.sampling import CUTS, Sampling, read_logprobs, read_sampling
from specgraph.runtime.requests.stopping import Criterion, read_criteria, read_stop_strings, stop_criteria
from specgraph.runtime.requests.text import Tokenizers, check_tokenizer
from specgraph.runtime.requests.values import (
    PerSequence,
    check_function,
    check_ids,
    per_sequence,
    read_flag,
    whole,
)
from specgraph.specialise.mode import Mode


@dataclass(frozen=True)
class GenerateCall:
    """What a call of ``generate`` or ``stream`` asks for.

    Attributes:
        requests: its sequences.
        left_padding: how many ids stand before each prompt as it was given; the output keeps them.
        pad_id: what stands behind a sequence that has ended.
        device: where prompts were, and where the output goes.
        mode: what its steps give: the kind of log-probabilities, and whether they say what happens to drafts.
        criteria: what else than EOS and length ends them, asked on the host.
        stop_strings: the texts behind which some of these criteria end a sequence.
        streamer: one of transformers' streamers, or None.
        wanted: which logits the output has.
    """

    requests: list[Request]
    left_padding: list[int]
    pad_id: int
    device: torch.device
    mode: Mode
    criteria: Sequence[Criterion]
    stop_strings: Sequence[str]
    streamer: Any
    wanted: Wanted


@dataclass(frozen=True)
class RequestParser:
    """What holds where a caller says nothing, what a decoder can take, and whether it can run at all.

    Attributes:
        read_defaults: gives the model's, as they are when it is called.
        limits: the decoder's.
        guard: says whether the model is still the one that was compiled.
        tokenizers: the model's.
        grammars: what compiles them.
        reads_token_types: whether the model's forward pass takes ``token_type_ids``, which the compiled one does not.
        always_reads_seeds: whether a seed also has an effect on a greedy sequence, as under the rule ``synthetic``,
            which draws whether a draft is accepted.
    """

    read_defaults: Callable[..., GenerationDefaults]
    limits: Limits
    guard: ModelGuard
    tokenizers: Tokenizers
    grammars: Grammars
    reads_token_types: bool = False
    always_reads_seeds: bool = False

    def call(
        self, input_ids: Any, attention_mask: Any, options: Mapping[str, Any], *, seeded: bool = True,
        as_transformers: bool = False,
    ) -> GenerateCall:  # fmt: skip
        """A checked call of ``generate`` with these ``options``, of which one that is None was not given. ``seeded``
        says whether the seed is the caller's, who is then warned where it has no effect.

        ``as_transformers``: what happens where no token is left is what transformers does.

        Raises:
            InputError: an argument is out of range, unknown or not supported, or the model was changed since it was
                compiled; the message says what is allowed.
        """
        self.guard.check()
        input_ids, attention_mask, options = unpack(input_ids, attention_mask, options)
        check_names(options)
        if input_ids is None:
            raise InputError("There is no prompt; give input_ids, as [B, S] or as a list of 1-D tensors.")
        given = {name: value for name, value in options.items() if value is not None}
        self._check_unused(given)
        do_sample = read_flag("do_sample", given.get("do_sample"))
        defaults = self.read_defaults(given.get("generation_config"), do_sample, options.keys())
        asked = {**defaults.values, **given}
        copies = _copies(asked)
        count = _count(input_ids) * copies
        eos_ids = read_eos(given.get("eos_token_id"), defaults.eos_ids, self.limits.vocab_size, count)
        pad_id = _pad_id(given.get("pad_token_id"), defaults, eos_ids, self.limits.vocab_size)
        known_pad = pad_id if "pad_token_id" in given else defaults.pad_id
        prompts = read_prompts(input_ids, attention_mask, known_pad, sum(eos_ids, ()))
        check_prompts(prompts, self.limits)
        prompts = prompts.repeat(copies)
        ends = read_limits(prompts, given, defaults.values, self.limits)
        sampling = self._sampling(given, defaults, count, seeded=seeded)
        greedy = [own.temperature == 0 for own in sampling]
        if copies > 1 and all(greedy):
            raise InputError(
                f"num_return_sequences={copies} would give equal sequences, since decoding is greedy; pass "
                "do_sample=True or a temperature, or leave it out."
            )
        structures, vocab_size = read_structures(given, count), self.limits.vocab_size
        each = zip(read_logit_options(asked, count, vocab_size), prompts.given, prompts.prompts, ends, eos_ids,
                   structures, strict=True)  # fmt: skip
        options_of = [
            LogitOptions(values, own.numel(), end.limit - prompt.numel(), eos, structure is not None)
            for values, own, prompt, end, eos, structure in each
        ]
        processing = [
            own.processing(place, vocab_size, may_forbid_all=as_transformers) for place, own in enumerate(options_of)
        ]
        hosts = self._hosts(asked, options_of, structures, forces=as_transformers)
        requests = [
            Request(
                prompts.prompts[place], ends[place].limit, sampling[place], eos_ids[place], ends[place].capped,
                processing[place], prompts.given[place], hosts[place],
                functools.partial(_forbidding, options_of[place], asked), as_transformers and greedy[place],
            )
            for place in range(count)
        ]  # fmt: skip
        device = input_ids.device if isinstance(input_ids, Tensor) else torch.device("cpu")
        logprobs, traced = read_logprobs(given.get("return_logprobs")), bool(read_flag("trace", given.get("trace")))
        mode, strings = Mode(logprobs, traced=traced), read_stop_strings(asked.get("stop_strings"))
        criteria = [
            *read_criteria(given.get("stopping_criteria")),
            *stop_criteria(strings, asked.get("tokenizer"), asked.get("max_time")),
        ]
        streamer, wanted = _streamer(given.get("streamer")), read_wanted(asked)
        return GenerateCall(requests, prompts.left_padding, pad_id, device, mode, criteria, strings, streamer, wanted)

    def stream(self, input_ids: Any, attention_mask: Any, options: Mapping[str, Any]) -> GenerateCall:
        """A checked call of ``stream``, whose chunks have no scores; see :meth:`call`."""
        for name in ("output_scores", "output_logits"):
            if options.get(name):
                raise InputError(f"stream does not take {name}, because its chunks have none; call generate.")
        return self.call(input_ids, attention_mask, options)

    def one(self, prompt: Tensor | Sequence[int], options: Mapping[str, Any]) -> GenerateCall:
        """A checked call of ``submit``, whose seed is used as it is.

        Raises:
            InputError: as for :meth:`call`.
        """
        check_names(options, OF_ONE_SEQUENCE, "submit")
        seed = options.get("seed")
        return self.call([_one_prompt(prompt)], None, {**options, "seed": None if seed is None else [seed]})

    def _sampling(
        self, given: Mapping[str, Any], defaults: GenerationDefaults, count: int, *, seeded: bool
    ) -> list[Sampling]:
        """How the tokens of each sequence are chosen. Warns of what has no effect on a greedy choice."""
        do_sample, asked = given.get("do_sample"), {**defaults.values, **given}
        sampling = read_sampling(count, asked if do_sample is not False else asked | {"temperature": 0.0})
        greedy = [own.temperature == 0 for own in sampling]
        undecided = do_sample is None and "temperature" not in given
        if all(greedy) and undecided:
            own = {name: given[name] for name in SAMPLING if name in given}
            idle_seed = given.get("seed") if seeded and not self.always_reads_seeds else None
            _warn_greedy({**defaults.unsampled, **own, "seed": idle_seed}, count)
        if (do_sample or (undecided and defaults.do_sample)) and any(greedy):
            raise InputError("do_sample=True needs a temperature above 0; leave do_sample out to decode greedily.")
        return sampling

    def _hosts(
        self, asked: Mapping[str, Any], options: Sequence[LogitOptions], structures: Sequence[StructureOptions | None],
        *, forces: bool,
    ) -> list[tuple[HostProcessor, ...]]:  # fmt: skip
        """What the host does with the logits of each sequence: processors, then structure, then keeping them.

        ``forces``: see :class:`~specgraph.runtime.requests.host_processors.Allowed`.
        """
        functions, allowed = read_processors(asked.get("logits_processor")), asked.get("prefix_allowed_tokens_fn")
        if allowed is not None:
            takes = ("the place of a sequence", "its tokens")
            check_function("prefix_allowed_tokens_fn", "a function of a place and tokens", allowed, *takes)
        wanted = read_wanted(asked)
        tokenizer = functools.partial(self.tokenizers.get, asked.get("tokenizer"))
        ends, minimums = [sequence.eos_ids for sequence in options], [sequence.minimum for sequence in options]
        hosts = []
        for place, grammar in enumerate(self.grammars.read(structures, tokenizer, ends, minimums)):
            several = [*options[place].forced_end(), *functions]
            own: list[HostProcessor] = [PythonProcessors(several)] if several else []
            own += [Allowed(allowed, place, forces=forces)] if allowed is not None else []
            own += [grammar] if grammar is not None else []
            own += [Recorder(wanted)] if wanted.scores or wanted.logits else []
            hosts.append(tuple(own))
        return hosts

    def _check_unused(self, given: Mapping[str, Any]) -> None:
        """Refuse wrong values also where nothing reads them."""
        if self.reads_token_types and "token_type_ids" in given:
            raise InputError("token_type_ids is not supported (the model was compiled without them); leave it out.")
        if "tokenizer" in given:
            check_tokenizer(given["tokenizer"])
        read_flag("return_dict_in_generate", given.get("return_dict_in_generate"))


def _forbidding(options: LogitOptions, asked: Mapping[str, Any], count: int) -> list[str]:
    """The arguments that forbid tokens behind the first ``count`` new ones of a sequence."""
    found = options.forbidding(count)
    found += ["logits_processor"] if read_processors(asked.get("logits_processor")) else []
    found += ["prefix_allowed_tokens_fn"] if "prefix_allowed_tokens_fn" in asked else []
    return found + [name for name in sorted(STRUCTURE) if options.structured and name in asked]


def unpack(input_ids: Any, attention_mask: Any, others: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Prompts, their mask and all other arguments, from what a tokenizer gives and where transformers has its own.

    A tokenizer's output may stand for the prompts, ``inputs`` is another name for them, and a configuration may come
    second, as in transformers.

    Raises:
        InputError: there are two kinds of prompts, or of configurations, or arguments stand among the prompts.
    """
    others = dict(others)
    if isinstance(attention_mask, GenerationConfig):
        if others.get("generation_config") is not None:
            raise InputError(
                "generation_config is given twice, the second argument is one, too; leave one of them out."
            )
        others["generation_config"], attention_mask = attention_mask, None
    inputs = others.pop("inputs", None)
    if input_ids is not None and inputs is not None:
        raise InputError("input_ids and inputs are two names of the same argument; give one of them.")
    input_ids = inputs if input_ids is None else input_ids
    if isinstance(input_ids, Mapping):  # a tokenizer's BatchEncoding is one
        encoded = dict(input_ids)
        input_ids = encoded.pop("input_ids", None)
        given = encoded.pop("attention_mask", None)
        attention_mask = given if attention_mask is None else attention_mask
        if own := sorted(OWN & encoded.keys()):
            raise InputError(f"The mapping of prompts has {', '.join(own)}; give {own[0]}= as an argument of its own.")
        others = encoded | others
    return _tensor(input_ids), _tensor(attention_mask), others


def _tensor(value: Any) -> Any:
    """An array of numbers as a tensor; anything else as it is."""
    return torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" else value


def _count(input_ids: Any) -> int:
    """The number of prompts; what is no list of prompts is refused where they are read."""
    is_list = isinstance(input_ids, Tensor) and not input_ids.is_nested and input_ids.dim() > 0
    sized = isinstance(input_ids, Sequence) or is_list
    return len(input_ids) if sized else 0


def _one_prompt(prompt: Any) -> Tensor:
    if isinstance(prompt, Tensor) and prompt.dim() != 1:
        raise InputError(f"A prompt is a 1-D tensor or a list of token ids, not a tensor of {prompt.dim()} dims.")
    return read_ids(prompt)


def _copies(asked: Mapping[str, Any]) -> int:
    copies = whole("num_return_sequences", asked.get("num_return_sequences", 1))
    if copies < 1:
        raise InputError(f"num_return_sequences must be at least 1, got {copies}.")
    return copies


def _pad_id(given: Any, defaults: GenerationDefaults, eos_ids: Sequence[tuple[int, ...]], vocab_size: int) -> int:
    """What stands behind a sequence that has ended: the pad id, else the first EOS, as in transformers."""
    if given is None:
        return defaults.pad_id if defaults.pad_id is not None else (*(eos_ids[0] if eos_ids else ()), 0)[0]
    pad_id = whole("pad_token_id", given.item() if isinstance(given, Tensor) and given.numel() == 1 else given)
    check_ids("pad_token_id", [pad_id], vocab_size)
    return pad_id


def _warn_greedy(asked: Mapping[str, PerSequence], batch: int) -> None:
    """Warn of sampling options that a caller gave without saying whether to sample, where decoding is greedy."""
    unused = {"temperature": 1.0, **CUTS}
    values = {name: per_sequence(name, asked.get(name), off, batch) for name, off in unused.items()}
    idle = [name for name, each in values.items() if any(value != unused[name] for value in each)]
    idle += [] if asked["seed"] is None else ["seed"]
    if idle:
        verb, them = ("has", "it") if len(idle) == 1 else ("have", "them")
        warn_caller(
            f"{' and '.join(idle)} {verb} no effect, because decoding is greedy where neither a temperature nor "
            f"do_sample=True is given; give one of these to sample, temperature=0 to say that greedy is meant, or "
            f"leave {them} out."
        )


def read_wanted(asked: Mapping[str, Any]) -> Wanted:
    """Which logits the output shall have."""
    return Wanted(*(bool(read_flag(name, asked.get(name))) for name in FLAGS))


def _streamer(given: Any) -> Any:
    if given is not None and not (callable(getattr(given, "put", None)) and callable(getattr(given, "end", None))):
        raise InputError(f"streamer has put() and end(), as transformers' streamers have; {given!r} has not.")
    return given
