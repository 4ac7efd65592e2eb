"""Recurrent layers in training, where transformers computes them in plain PyTorch.

transformers solves the triangular system of a chunk of the gated delta rule row by row, in 63 updates of every layer,
and autograd goes back through each of them. One call solves it as well.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from specgraph.frontend.recurrent import recurrent_functions
from specgraph.ir.exporting import replaced_here
from specgraph.kernels.recurrent.arguments import GatedDeltaRule
from specgraph.kernels.recurrent.delta_rule_chunks import gated_delta_rule_chunks

_NAME = "torch_chunk_gated_delta_rule"


@contextlib.contextmanager
def fast_recurrence(model: nn.Module) -> Iterator[None]:
    """While the context lasts, gated delta rules of this thread solve a chunk at once.

    With the package ``flash-linear-attention``, whose kernels transformers takes, nothing changes.
    """
    with contextlib.ExitStack() as stack:
        if importlib.util.find_spec("fla") is None:
            for file, name in sorted(recurrent_functions(model)):
                if name == _NAME:
                    module = sys.modules[file]
                    stack.enter_context(replaced_here(module, name, _by_chunks(getattr(module, name))))
        yield


def _by_chunks(given: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' function, by chunks where it begins with a state of zero and keeps none."""

    def run(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *,
        use_qk_l2norm_in_kernel: bool = False, **others: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        options = {
            name: option for name, option in others.items() if name != "chunk_size" and option not in (None, False)
        }
        if options:
            return given(  # type: ignore[no-any-return]
                query, key, value, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **others
            )
        rows = GatedDeltaRule(
            query, key, value, g, beta, scale=query.shape[-1] ** -0.5, normalise=use_qk_l2norm_in_kernel
        )
        with torch.autocast(query.device.type, enabled=False):
            return gated_delta_rule_chunks(rows), None

    return run
