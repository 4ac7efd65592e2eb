"""How recurrent layers are traced: as ops of :mod:`specgraph.kernels.recurrent`, in place of transformers' functions.

A recurrent layer of transformers calls a plain function of its own module, which stands for a kernel of another package
(``use_kernel_func_from_hub_with_fallback``), as ``causal_conv1d_fn`` or ``torch_chunk_gated_delta_rule``. Their few
names and their arguments are the whole interface. While a model is exported, hooks take their place, in the exporting
thread alone. An argument that a hook does not know is refused by its name.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from specgraph.errors import UnsupportedModelError
from specgraph.frontend.unknown import refuse_unknown
from specgraph.ir.exporting import replaced_here
from specgraph.ir.graphs import calls
from specgraph.kernels import catalogue  # noqa: F401  (registers the ops)
from specgraph.kernels.recurrent.arguments import exact

REPEAT = torch.ops.aten.repeat_interleave.self_int
_ACTIVATIONS = {None: "", "silu": "silu", "swish": "silu"}


def conv_hook(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
) -> Tensor:
    """Called for a causal convolution while a model is traced, with transformers' signature: ``[B, D, T]``."""
    refuse_unknown("A layer", "causal convolution", others)
    if activation not in _ACTIVATIONS:
        known = ", ".join(map(str, _ACTIVATIONS))
        raise UnsupportedModelError(
            f"A causal convolution is followed by {activation!r}, and specgraph knows {known}; it is refused."
        )
    return torch.ops.specgraph.causal_conv(hidden_states, weight, bias, activation=_ACTIVATIONS[activation])


def delta_rule_hook(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int | None = None,  # how transformers computes it, and not what
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """Called for a gated delta rule while a model is traced, with transformers' signature: ``[B, T, H, Dv]``."""
    state = {"initial_state": initial_state, "output_final_state": output_final_state or None}
    refuse_unknown("A layer", "gated delta rule", {**others, **state})
    options: dict[str, Any] = {"scale": query.shape[-1] ** -0.5, "normalise": use_qk_l2norm_in_kernel}
    return torch.ops.specgraph.gated_delta_rule(query, key, value, g, beta, **options), None


def mamba2_hook(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,  # how transformers computes it, and not what
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **others: Any,
) -> Tensor:
    """Called for the scan of Mamba-2 while a model is traced, with transformers' signature: ``[B, T, H, P]``.

    The state is ``S <- e^(A dt) S + B (dt x)^T``, so it is a gated delta rule that corrects nothing.
    """
    state = {"initial_states": initial_states, "return_final_states": return_final_states or None}
    refuse_unknown("A layer", "scan", {**others, **state})
    dtype = exact(hidden_states.dtype)
    step = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    step = torch.nn.functional.softplus(step) if dt_softplus else step
    step, x = step.clamp(*dt_limit).to(dtype), hidden_states.to(dtype)
    given = (C, B, x * step.unsqueeze(-1), A.to(dtype) * step)
    out: Tensor = torch.ops.specgraph.gated_delta_rule(*given, scale=1.0)
    return out if D is None else out + D.unsqueeze(-1) * x


def mamba_hook(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,  # how transformers computes it, and not what, as the next one
    use_associative_scan: bool = False,
    **others: Any,
) -> Tensor:
    """Called for the scan of Mamba while a model is traced, with transformers' signature: ``[B, D, T]``."""
    refuse_unknown("A layer", "scan", {**others, "return_last_state": return_last_state or None})
    dtype = exact(hidden_states.dtype)
    step = dt if delta_bias is None else dt + delta_bias.to(dt.dtype).unsqueeze(-1)
    step = torch.nn.functional.softplus(step) if delta_softplus else step
    x = hidden_states.to(dtype)
    out: Tensor = torch.ops.specgraph.selective_scan(x, step.to(dtype), A.to(dtype), B.to(dtype), C.to(dtype))
    out = out if D is None else out + x * D.to(dtype).unsqueeze(-1)
    out = out if z is None else out * torch.nn.functional.silu(z.to(dtype))
    return out.to(hidden_states.dtype)


HOOKS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": conv_hook,
    "torch_chunk_gated_delta_rule": delta_rule_hook,
    "chunk_kimi_delta_attention": delta_rule_hook,
    "mamba2_chunk_scan": mamba2_hook,
    "mamba_selective_scan": mamba_hook,
}
"""The replacements of transformers' functions, by the names that these have where models are defined."""


def recurrent_functions(model: nn.Module) -> set[tuple[str, str]]:
    """The functions that hooks take the place of, where the classes of a model are defined: their files and names."""
    files = {type(module).__module__ for module in model.modules()}
    return {(file, name) for file in files for name in HOOKS if hasattr(sys.modules.get(file), name)}


def take_groups(graph: fx.Graph) -> None:
    """Let gated delta rules read queries and keys that several heads share, where a model repeats them for each head.

    So do releases of transformers before 5.23. A state caches keys, and what is repeated would be cached as often.
    """
    for node in calls(graph, torch.ops.specgraph.gated_delta_rule.default):
        repeated = [x for x in node.args[:2] if isinstance(x, fx.Node) and x.target is REPEAT and not x.kwargs]
        heads = {x.args[1:] for x in repeated}
        if len(repeated) == 2 and len(heads) == 1 and heads.pop()[1:] in ((2,), (-2,)):
            node.args = (*(x.args[0] for x in repeated), *node.args[2:])
            for x in {*repeated}:
                if not x.users:
                    graph.erase_node(x)


_REPLACING = threading.RLock()
"""Two threads could not undo their replacements in the order in which they made them."""


@contextlib.contextmanager
def hooked_recurrence(model: nn.Module) -> Iterator[None]:
    """While the context lasts, recurrent layers of this thread call the hooks."""
    with _REPLACING, contextlib.ExitStack() as stack:
        for file, name in sorted(recurrent_functions(model)):
            stack.enter_context(replaced_here(sys.modules[file], name, HOOKS[name]))
        yield
