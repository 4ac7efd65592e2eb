"""Checks which attention mask each layer of a model gets, and that it is the causal window that the layer names.

A traced graph holds no masks: every attention call in it is causal, with or without a sliding window. So the masks that
a model builds are checked before it is exported. In one small forward pass, transformers' ``AttentionMaskInterface``
returns masks that remember the function from which they were built, and every attention call notes the mask that it
gets. A model may also build masks that reach no attention call; these do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function, sdpa_mask

from specgraph.compat import DisableTorchFunctionSubclass
from specgraph.errors import UnsupportedModelError
from specgraph.ir.exporting import own_copy
from specgraph.ir.tensors import view_of

MaskFunction = Callable[..., Any]
"""A function of int64 tensors (batch, head, query, key) that says whether a query position may see a key position."""

_UNLIMITED = 1 << 24
"""The position up to which masks are checked if a model does not say how many positions it knows."""


class BuiltMask(Tensor):
    """A boolean mask ``[B, 1, Q, S]`` of transformers that remembers the function from which it was built.

    Some operations return all of its elements unchanged, in the same place and shape, such as a slice up to the number
    of keys or a conversion to the dtype it has. They return this same object. Every other operation returns a plain
    tensor, so a mask that a model has altered or combined with another one is no longer recognised.
    """

    function: MaskFunction
    version: int

    @classmethod
    def build(cls, function: MaskFunction, *args: Any, **kwargs: Any) -> BuiltMask:
        """The mask that transformers builds from these arguments for its attention implementation ``sdpa``."""
        kept = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        with torch.inference_mode(False):  # tensors made in inference mode do not count writes
            mask: BuiltMask = sdpa_mask(*args, mask_function=function, **kept).as_subclass(cls)
        mask.function, mask.version = function, mask._version
        return mask

    @property
    def is_altered(self) -> bool:
        """Whether an operation has written into the mask."""
        return self._version != self.version

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` on plain tensors, and return the mask itself if the result has all of its elements."""
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if not args or not isinstance(args[0], BuiltMask) or not isinstance(result, Tensor):
                return result
            whole = func is not Tensor.__getitem__ or _is_whole(args[1], args[0].shape)
            return args[0] if whole and view_of(result) == view_of(args[0]) else result


def _is_whole(index: Any, shape: torch.Size) -> bool:
    """Whether every slice of an index ends at a size of the tensor.

    A slice that ends at a fixed larger number would cut a longer mask, although it returns all of this one.
    """
    slices = [part for part in (index if isinstance(index, tuple) else (index,)) if isinstance(part, slice)]
    return all(part.start in (None, 0) and (part.stop is None or part.stop in shape) for part in slices)


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one attention call: a mask or None, and a sliding window or None."""

    mask: Tensor | None
    window: int | None


_noted: ContextVar[list[AttentionCall] | None] = ContextVar("noted", default=None)


@contextmanager
def _noting() -> Iterator[list[AttentionCall]]:
    calls: list[AttentionCall] = []
    token = _noted.set(calls)
    try:
        yield calls
    finally:
        _noted.reset(token)


def mask_hook(*args: Any, mask_function: MaskFunction = causal_mask_function, **kwargs: Any) -> Tensor | None:
    """Called by a model to build a mask, with transformers' signature. Returns None while the model is exported."""
    return None if _noted.get() is None else BuiltMask.build(mask_function, *args, **kwargs)


def note_attention(mask: Tensor | None, window: int | None) -> bool:
    """Note what an attention call was given. Returns False if nothing is being noted, as while a model is exported."""
    calls = _noted.get()
    if calls is not None:
        calls.append(AttentionCall(mask, window))
    return calls is not None


_FAILURES = (TypeError, AttributeError, ValueError, KeyError, IndexError, RuntimeError)
"""The errors of a model's forward pass on arguments for which it was not made."""


def attention_calls(model: PreTrainedModel, plain: PreTrainedModel) -> list[AttentionCall]:
    """The attention calls of one small forward pass of a hooked model, in order. ``plain`` is the same without hooks.

    Raises:
        UnsupportedModelError: the forward fails on a mask of the attention interface, or without hooks as well.
    """
    tokens = torch.zeros(1, 3, dtype=torch.int64, device=next(model.parameters()).device)
    with _noting() as calls:
        try:
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
        except _FAILURES as error:
            _check_runs(plain, tokens)
            raise UnsupportedModelError(
                f"{type(model).__name__} does not run with its masks left to the attention interface, so it builds or "
                f"reads them by itself: {str(error).strip().splitlines()[0]}"
            ) from error
    return calls


def _check_runs(model: PreTrainedModel, tokens: Tensor) -> None:
    """Refuse a model whose forward pass fails by itself, which then has nothing to do with hooks."""
    try:
        own_copy(model, shared=nn.Parameter).eval()(input_ids=tokens, use_cache=False)
    except _FAILURES as error:
        dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
        mixed = f" Its weights are {' and '.join(dtypes)}; convert them to one dtype." if len(dtypes) > 1 else ""
        raise UnsupportedModelError(
            f"{type(model).__name__}'s own forward pass fails on {tokens.numel()} tokens: "
            f"{str(error).strip().splitlines()[0].rstrip('.')}.{mixed}"
        ) from error


def check_masks(calls: Sequence[AttentionCall], name: str, max_positions: int | None = None) -> None:
    """Check that every attention call gets the mask of the causal window that it names, or no mask if it names none.

    Positions from ``max_positions`` on do not matter, because no token has them.

    Raises:
        UnsupportedModelError: names the model ``name`` and the layer.
    """
    limit = max([call.window + 8 for call in calls if call.window is not None] + [max_positions or _UNLIMITED])
    right: set[tuple[int, int | None]] = set()
    for layer, call in enumerate(calls):
        if isinstance(call.mask, BuiltMask) and not call.mask.is_altered:
            if (id(call.mask), call.window) not in right and not _is_window(call.mask.function, call.window, limit):
                raise _wrong_mask(name, layer, call.window)
            right.add((id(call.mask), call.window))
        elif call.mask is not None:
            raise UnsupportedModelError(
                f"{name} alters the attention mask of layer {layer}, or builds it by itself, so specgraph cannot tell "
                "which keys a token sees. Only masks that transformers' masking_utils builds work, passed on as they "
                "are."
            )
        elif call.window is not None:
            raise _wrong_mask(name, layer, call.window)


def _wrong_mask(name: str, layer: int, window: int | None) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} gives layer {layer} an attention mask that is not the causal window its attention names ({window}), "
        "so decoding it with a KV cache would be wrong."
    )


def _is_window(function: MaskFunction, window: int | None, limit: int) -> bool:
    """Whether a mask function equals the causal window, tested around all of its edges up to position ``limit``."""
    zero = torch.tensor(0)
    edges = [e for e in (window, limit // 2, limit - 1) if e is not None]
    for q in sorted({max(0, min(limit - 1, e + d)) for e in edges for d in (-1, 0, 1)}):
        keys = {q - 1, q, q + 1, 0, q // 2} | ({q - window - 1, q - window, q - window + 1} if window else set())
        for k in (k for k in keys if 0 <= k < limit):
            expected = k <= q and (window is None or q - k < window)
            if bool(function(zero, zero, torch.tensor(q), torch.tensor(k))) != expected:
                return False
    return True
