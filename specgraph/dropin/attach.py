"""``attach``: ``model.generate`` decodes through a compiled decoder, and returns what it returned before.

transformers' own ``generate`` still reads the arguments: it merges generation configs, counts lengths, finds pads, and
makes the logits processors and stopping criteria of a call. Then it hands over to a decoding method, which a caller may
name (``custom_generate``); here that is the decoder. So whatever transformers understands, or refuses, it still does,
and :mod:`specgraph.dropin.prepared` reads what it has prepared.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specgraph.compiler.compile import compile_speculative
from specgraph.config import ConfigLike, check_no_keys
from specgraph.drafters.base import DraftLike
from specgraph.dropin.prepared import NEUTRAL, Prepared, add_stop_strings, check_arguments, check_prepared, check_rope
from specgraph.errors import InputError
from specgraph.runtime.decoder import SpeculativeDecoder


def attach(
    model: PreTrainedModel, cfg: ConfigLike = None, *, draft: DraftLike | None = None, **others: Any
) -> SpeculativeDecoder:
    """Compile a model, and let its ``generate`` decode through the result, until :func:`detach`.

    ``model.generate(...)`` and what calls it, such as ``pipeline("text-generation", model=model)``, return what they
    returned before: a tensor, or transformers' output class. Greedy tokens are the same, unless two logits are as close
    as rounding. What the decoder cannot do is an :class:`InputError`. The model gets an attribute ``generate`` of its
    own; a copy of it, or what is pickled, has the method of its class.

    Args:
        model: the target, as for :func:`specgraph.compile_speculative`, like the other two.
        cfg: the configuration.
        draft: a draft model or head.
        others: there are none; the error says where a key of the configuration goes.

    Returns:
        The decoder, which can also be called by itself.

    Raises:
        InputError: the model is attached already, or has a dynamic rope and is to run behind its original length.
        SpecgraphError: it cannot be compiled; the model is as it was.
    """
    check_no_keys("attach", others)
    if _is_attached(model):
        raise InputError(f"This {type(model).__name__} is attached already; call specgraph.detach(model) first.")
    decoder = compile_speculative(model, cfg, draft=draft)
    check_rope(model, decoder)
    vars(model)["generate"] = Attached(model, decoder)
    return decoder


def detach(model: PreTrainedModel) -> None:
    """Let ``model.generate`` be transformers' own again; nothing happens if it is.

    Raises:
        InputError: ``model`` is no model of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        raise InputError(f"detach takes the model that attach was given, not {type(model).__name__}.")
    if _is_attached(model):
        del vars(model)["generate"]


def _is_attached(model: object) -> bool:
    return isinstance(model, PreTrainedModel) and isinstance(vars(model).get("generate"), Attached)


class Attached:
    """The replacement of ``model.generate``.

    Attributes:
        decoder: the compiled decoder of the model.
    """

    def __init__(self, model: PreTrainedModel, decoder: SpeculativeDecoder) -> None:
        self.decoder = decoder
        self._model = model
        original = _own_method(model)
        self.__doc__, self.__signature__ = original.__doc__, inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``model.generate(...)``, with the arguments that it has.

        A call that names a decoding method of its own (``custom_generate``) gets that one.

        Raises:
            InputError: the decoder does not do what is asked for; the message says what to do.
            ValueError: transformers refuses an argument.
        """
        original: Callable[..., Any] = _own_method(self._model)
        bound = self.__signature__.bind(*args, **kwargs)
        if bound.arguments.get("custom_generate") is not None:
            return original(*bound.args, **bound.kwargs)
        check_arguments(self._model, bound.arguments)
        # transformers hands these to its own decoding methods alone.
        streamer = bound.arguments.pop("streamer", None)
        add_stop_strings(self._model, bound.arguments)
        bound.arguments["custom_generate"] = functools.partial(_decode, self.decoder, streamer)
        return original(*bound.args, **bound.kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _own_method(memo.get(id(self._model), self._model))

    def __reduce__(self) -> Any:
        return _own_method, (self._model,)


def _own_method(model: PreTrainedModel) -> types.MethodType:
    return types.MethodType(type(model).generate, model)


def custom_generate(decoder: SpeculativeDecoder) -> Callable[..., Any]:
    """A decoding method for transformers' ``generate``: ``model.generate(..., custom_generate=this)``.

    transformers prepares the call as for its own methods, and the decoder decodes it. Greedy tokens are those of the
    model. A streamer is not among what transformers hands over; :func:`attach` takes one.

    Args:
        decoder: one that was compiled from the model.

    Raises:
        InputError: this is no decoder; or, when it is called, the model is not the one that the decoder was compiled
            from, or the decoder does not do what is asked for.
    """
    if not isinstance(decoder, SpeculativeDecoder):
        raise InputError(
            f"custom_generate takes a decoder, which compile_speculative(model) returns, not {type(decoder).__name__}."
        )
    return functools.partial(_decode_named, decoder)


def _decode_named(decoder: SpeculativeDecoder, model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> Any:
    """Like :func:`_decode`, for a caller's arguments that :func:`check_arguments` has not seen."""
    check_prepared(model, decoder, prepared)
    return _decode(decoder, None, model, input_ids, **prepared)


def _decode(
    decoder: SpeculativeDecoder, streamer: Any, model: PreTrainedModel, input_ids: Tensor, logits_processor: Any,
    stopping_criteria: Any, generation_config: Any, **prepared: Any,
) -> Any:  # fmt: skip
    """A decoding method for ``generate``: int64 ``[B, S]``, or its output class.

    Of what else transformers has ``prepared`` only the attention mask is of use, which is missing where nothing is
    padding. A cache and positions are for its own forward pass.
    """
    mask = prepared.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    call = Prepared(input_ids, mask, logits_processor, stopping_criteria, generation_config)
    call.check(model, decoder)
    # Ids outside of the vocabulary, such as -1, are a way to say that there is no such token.
    eos_ids, pads = ([t for t in ids if 0 <= t < decoder.vocab_size] for ids in (call.eos_ids, [call.pad_id]))
    options: dict[str, Any] = {
        **NEUTRAL, **call.sampling(), "max_new_tokens": call.max_new_tokens, "eos_token_id": eos_ids,
        "pad_token_id": pads[0] if pads else None, "stopping_criteria": call.host_criteria, "streamer": streamer,
        **call.output_options(),
    }  # fmt: skip
    return call.output(decoder.generate_as_transformers(input_ids, mask, **options))
