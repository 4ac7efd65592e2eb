"""``specgraph::expert_linear``: a linear layer whose weight is chosen per row, the two halves of a mixture of experts.

Tracing puts one before and one after the activation of every expert layer, so the activation itself stays plain ATen
and no model's gating has to be known here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels.sample import require

torch.library.define(
    "specgraph::expert_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor expert_ids, *, bool transposed=False) -> Tensor",
)


def expert_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor, *, transposed: bool = False
) -> Tensor:
    """``y[s] = weight[expert_ids[s]] @ x[s] + bias[expert_ids[s]]``.

    Args:
        x: ``[S, I]``.
        weight: ``[E, O, I]``, or ``[E, I, O]`` if ``transposed``.
        bias: ``[E, O]`` or None.
        expert_ids: int64 ``[S]`` in ``[0, E)``.

    Returns:
        ``[S, O]`` in the dtype of ``x``.
    """
    out = x.new_empty(x.shape[0], weight.shape[2] if transposed else weight.shape[1])
    for expert in sorted(set(expert_ids.tolist())):
        rows = expert_ids == expert
        matrix = weight[expert].T if transposed else weight[expert]
        out[rows] = torch.nn.functional.linear(x[rows], matrix, None if bias is None else bias[expert])
    return out


def _expert_linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor, *, transposed: bool = False
) -> Tensor:
    inner, outer = (weight.shape[1], weight.shape[2]) if transposed else (weight.shape[2], weight.shape[1])
    require(x.shape[1] == inner, lambda: f"x has {x.shape[1]} features, the experts take {inner}")
    require(expert_ids.shape == x.shape[:1], lambda: "expert_ids must give one expert per row of x")
    if bias is not None:
        require(bias.shape == (weight.shape[0], outer), lambda: "bias must be [E, O]")
    return x.new_empty(x.shape[0], outer)


torch.library.impl("specgraph::expert_linear", ("cpu", "cuda"))(expert_linear_reference)
torch.library.register_fake("specgraph::expert_linear")(_expert_linear_fake)
