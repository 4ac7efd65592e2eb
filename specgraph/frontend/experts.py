"""How mixtures of experts are traced: by the op of their weights' scheme, whatever their class computes it with.

That is ``specgraph::expert_linear`` for plain stacks of matrices.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from specgraph.ir.linear import DENSE, stacks_of

HOOK = "specgraph"
"""The name of the hooks in transformers' registries."""


def experts_hook(self: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Called by a mixture of experts while it is traced. ``self`` is the module, as in transformers' interface.

    Takes ``[S, H]``, int64 ``[S, k]`` and ``[S, k]``; returns ``[S, H]``.
    """
    experts: Any = self
    rows, top_k = top_k_index.shape
    ids = top_k_index.reshape(-1)
    has_bias, transposed = getattr(experts, "has_bias", False), getattr(experts, "is_transposed", False)
    gated = getattr(experts, "has_gate", True)

    packed = stacks_of(self)

    def linear(x: Tensor, name: str, top_k: int = 1) -> Tensor:
        bias = getattr(experts, f"{name}_bias") if has_bias else None
        if name not in packed:
            return DENSE.experts(x, getattr(experts, name), bias, ids, transposed=transposed, top_k=top_k)
        scheme, weight = packed[name]
        return scheme.experts(x, *scheme.operands(weight), bias, ids, top_k=top_k, **scheme.options)

    inner = linear(hidden, "gate_up_proj" if gated else "up_proj", top_k)
    inner = experts._apply_gate(inner) if gated else experts.act_fn(inner)
    inner = linear(inner, "down_proj")
    if getattr(experts, "has_post_expert_norm", False):
        inner = experts.post_expert_norm(inner)
    return (inner * top_k_weights.reshape(-1, 1)).view(rows, top_k, -1).sum(dim=1).to(hidden.dtype)


def hook_experts(model: nn.Module) -> None:
    """Route experts whose class is not in transformers' interface, or whose weights are packed, to the hook.

    Those with plain weights are recognised by their form: the arguments, the weights, and the function that combines
    gate and input, of classes that are in the interface.
    """
    for module in model.modules():
        if _has_form(module) or stacks_of(module):
            experts: Any = module
            experts.forward = MethodType(experts_hook, experts)


def _has_form(module: nn.Module) -> bool:
    weights = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    stacked = all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in weights)
    if not stacked or not hasattr(module, "_apply_gate") or hasattr(module, "has_gate"):
        return False
    return [*inspect.signature(module.forward).parameters] == ["hidden_states", "top_k_index", "top_k_weights"]


ExpertsInterface.register(HOOK, experts_hook)
