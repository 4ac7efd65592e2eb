"""Rotary embeddings as a trace can hold them: frequencies of one length, and one row of positions.

transformers has two rope types whose frequencies change with the length of a sequence. ``longrope`` has two sets of
factors, and takes the long set for every token once a position of the call lies behind the original length of
pretraining. ``dynamic`` computes its base from the longest position of the call. Both look at values while they run,
which no graph can. Neither rotates the keys again that a cache already holds, so old keys and new queries would have
different frequencies. So a traced model has those of one length, that of the longest sequence which it is to run.

Text models of multimodal ones compute angles for three rows of positions (time, height and width in pictures), and take
some frequencies from each. For text, all rows are the same positions, so a traced model computes one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specgraph.compat import FakeTensor
from specgraph.ir.model_info import Rope


def length_dependent_rotary(model: nn.Module) -> list[nn.Module]:
    """The rotary embeddings whose frequencies change with the sequence length (dynamic, longrope)."""
    return [module for module in model.modules() if any(True for _ in _changing(module))]


def rope_of(model: PreTrainedModel, length: int | None) -> Rope | None:
    """How far a model with such embeddings reaches if it is traced for sequences of ``length``; None if it has none."""
    modules = length_dependent_rotary(model)
    if not modules:
        return None
    kinds = {kind for module in modules for kind in _rope_types(module).values()}
    original = min(_original(module, layer) for module in modules for layer in _changing(module))
    config: Any = model.config.get_text_config()
    # The formula of a dynamic base holds for every length; all others end with the positions that were trained.
    most = None if all("dynamic" in kind for kind in kinds) else getattr(config, "max_position_embeddings", None)
    changing = tuple(sorted(kind for kind in kinds if _changes(kind)))
    return Rope(changing, original, most, length if length is not None and length > original else None)


def fix_rotary(model: nn.Module, length: int | None) -> None:
    """Give the embeddings the frequencies that they have in a call whose longest sequence has ``length`` tokens.

    None stands for short sequences. ``model`` is a copy, whose modules are its own.
    """
    for module in length_dependent_rotary(model):
        rotary: Any = module
        for layer in _changing(module):
            setattr(rotary, f"{_prefix(layer)}inv_freq", _frequencies(module, layer, length))
        longest = length or min(_original(module, layer) for layer in _changing(module))
        # From here on transformers keeps the frequencies. What is asked above looks at the type that this replaces.
        per_layer_type = isinstance(rotary.rope_type, dict)
        rotary.rope_type = dict.fromkeys(rotary.rope_type, "default") if per_layer_type else "default"
        rotary.forward = _at_length(rotary.forward, longest)


def read_one_row(model: nn.Module) -> None:
    """Let embeddings for rows of positions compute their angles from one row, where the result is the same.

    ``model`` is a copy, whose modules are its own.
    """
    for owner in model.modules():
        rotary: Any = getattr(owner, "rotary_emb", None)
        if getattr(rotary, "mrope_section", None) and hasattr(rotary, "inv_freq") and _is_plain(rotary):
            seen: list[Any] = []
            owner.register_forward_pre_hook(functools.partial(_note_positions, seen), with_kwargs=True)
            rotary.forward = _of_one_row(rotary, seen)


def _note_positions(seen: list[Any], module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Note the positions that a model is called with, before it makes rows of them."""
    seen[:] = [kwargs.get("position_ids")]


def _of_one_row(rotary: Any, seen: list[Any]) -> Callable[..., Any]:
    """The forward of an embedding in a model that is called with positions ``[B, T]``."""
    forward = rotary.forward

    def of_one_row(x: Tensor, position_ids: Tensor) -> Any:
        known = seen and isinstance(seen[0], Tensor) and seen[0].dim() == 2
        return _angles(rotary, x, seen[0]) if known else forward(x, position_ids)

    return of_one_row


def _angles(rotary: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of positions ``[B, T]``, each frequency twice."""
    angles = positions[..., None].float() * rotary.inv_freq.float()
    cos, sin = (torch.cat((half, half), -1) * rotary.attention_scaling for half in (angles.cos(), angles.sin()))
    return cos.to(x.dtype), sin.to(x.dtype)


def _is_plain(rotary: Any) -> bool:
    """Whether an embedding, which expands one row of positions itself, gives the angles of that row, bit for bit."""
    x = rotary.inv_freq.new_empty(1)
    if x.is_meta or isinstance(x, FakeTensor):
        return False  # there are no numbers to compare
    positions = torch.arange(64, device=x.device).view(2, 32)
    given, plain = rotary(x, positions.unsqueeze(0)), _angles(rotary, x, positions)
    return all(map(torch.equal, given, plain))


def _rope_types(module: nn.Module) -> dict[str | None, str]:
    """The rope types of a rotary embedding by the type of layer, which is None if all layers share one."""
    types = getattr(module, "rope_type", None)
    if isinstance(types, dict):
        return {str(layer): str(kind) for layer, kind in types.items()}
    return {None: types} if isinstance(types, str) else {}


def _changes(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind


def _changing(module: nn.Module) -> Iterator[str | None]:
    """The types of layers whose frequencies change with the length."""
    return (layer for layer, kind in _rope_types(module).items() if _changes(kind))


def _prefix(layer: str | None) -> str:
    return "" if layer is None else f"{layer}_"


def _original(module: Any, layer: str | None) -> int:
    """The longest sequence that has the frequencies of short ones."""
    if "dynamic" in _rope_types(module)[layer]:
        return int(module.original_max_seq_len)
    parameters = module.config.rope_parameters
    return int((parameters if layer is None else parameters[layer])["original_max_position_embeddings"])


def _frequencies(module: Any, layer: str | None, length: int | None) -> Tensor:
    """The inverse frequencies of one type of layer, by transformers' own function of its rope type."""
    device = getattr(module, f"{_prefix(layer)}inv_freq").device
    if length is None or length <= _original(module, layer):
        return getattr(module, f"{_prefix(layer)}original_inv_freq").to(device)
    compute = ROPE_INIT_FUNCTIONS[_rope_types(module)[layer]]
    # A tensor, as transformers passes it: Python's numbers would round the base in another way.
    frequencies: Tensor
    frequencies, _ = compute(module.config, device, seq_len=torch.tensor(length, device=device), layer_type=layer)
    return frequencies


class _Longest(TorchFunctionMode):
    """Answers what the largest of some positions is.

    An embedding may ask for it by itself, as that of phimoe does for the scale of its cosines and sines.
    """

    def __init__(self, positions: Tensor, longest: int) -> None:
        super().__init__()
        self._positions, self._longest = positions, longest

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.max, Tensor.max) and len(args) == 1 and args[0] is self._positions and not kwargs:
            return torch.tensor(self._longest)
        return func(*args, **(kwargs or {}))


def _at_length(forward: Callable[..., Any], length: int) -> Callable[..., Any]:
    """The forward of a rotary embedding in calls whose longest sequence has ``length`` tokens."""

    def fixed(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        with _Longest(position_ids, length - 1):
            return forward(x, position_ids, *args, **kwargs)

    return fixed
