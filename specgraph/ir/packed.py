"""Schemes for packed weights: one for each format, recognised by the tensors that a module of a model holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import specgraph.kernels.packed.experts
import specgraph.kernels.packed.linear  # noqa: F401  (both register ops)
from specgraph.ir.compiling import compile_library
from specgraph.ir.scheme import Scheme
from specgraph.ir.tensors import equal_tensors
from specgraph.kernels.packed.cpu import Compiler
from specgraph.kernels.packed.format import Format
from specgraph.kernels.packed.formats import arranged_of

Compiler.load = staticmethod(compile_library)
STACKS = ("gate_up_proj", "up_proj", "down_proj")
"""The stacked weights of a mixture of experts, as transformers names them."""


@dataclass(frozen=True, eq=False)
class Packed(Scheme):
    """A format of :mod:`specgraph.kernels.packed`, with which all passes can do what they do with dense weights.

    Attributes:
        form: the format.
    """

    form: Format = None  # type: ignore[assignment]  # which follows arguments that have defaults

    def operands(self, weight: Sequence[object]) -> tuple[object, ...]:
        """One list of all tensors."""
        return (list(weight),)

    def wants_few_rows(self, dtype: torch.dtype) -> bool:
        """Not at all: the op itself has a variant for CPUs."""
        return False

    def part(self, weight: Sequence[Tensor], begin: int, size: int, *, of_inputs: bool) -> tuple[Tensor, ...]:
        """As the format cuts it, between groups."""
        return self.form.part(weight, begin, size, of_inputs=of_inputs)

    def in_gpu_order(self, weight: Sequence[Tensor]) -> tuple[Mapping[str, Any], tuple[Tensor, ...]] | None:
        """With numbers sorted, where a format for that is known and takes the weight."""
        arranged = arranged_of(self.form.name, weight)
        return None if arranged is None else ({"format": arranged.name}, arranged.arrange(weight))

    def weight_of(self, module: nn.Module) -> tuple[Tensor, ...] | None:
        """The tensors of every module that holds those of the format, and else at most a bias.

        Modules of other packages are recognised, too, since only what they hold is looked at.
        """
        if not self._may_be(module):
            return None
        held = _held(module)
        weight = [held.pop(name, None) for name in self.form.parts]
        if not held.keys() <= {"bias", *self.form.beside}:
            return None
        return self._fitting(weight, 2)

    def stacks_of(self, module: nn.Module) -> dict[str, tuple[Tensor, ...]]:
        """The stacks that a mixture of experts holds in this format."""
        if not self._may_be(module):
            return {}
        held = _held(module)
        found = {
            name: self._fitting([held.get(f"{name}{part}") for part in self.form.stack_parts], 3) for name in STACKS
        }
        return {name: weight for name, weight in found.items() if weight is not None}

    def _may_be(self, module: nn.Module) -> bool:
        """Whether the module says that it is of this format where its tensors do not tell."""
        return not self.form.named or getattr(module, "format", None) == self.form.name

    def _fitting(self, weight: Sequence[Tensor | None], dims: int) -> tuple[Tensor, ...] | None:
        """The tensors if all are there and belong together."""
        there = [part for part in weight if part is not None]
        if len(there) < len(weight) or there[0].dim() != dims:
            return None
        try:
            self.form.check(there)
        except ValueError:
            return None
        return tuple(there)

    @property
    def in_common(self) -> tuple[int, ...]:
        """The last one, if it says something about inputs."""
        return (len(self.form.parts) - 1,) if self.form.own_inputs else ()

    def why_not_merged(self, weights: Sequence[Sequence[Tensor]]) -> str | None:
        """Joined weights have as many groups of inputs, and blocks of outputs end with each of them but the last.

        What they say about their inputs is the same.
        """
        if self.form.own_inputs:
            own = [weight[-1] for weight in weights]
            if not all(equal_tensors(own[0], other) for other in own[1:]):
                return f"each of them says {self.form.own_inputs}, and not all of them the same"
            weights = [weight[:-1] for weight in weights]
        first, scale = weights[0][:2]
        outputs = self.form.outputs_together(first.shape[1] * self.form.per_element, scale)
        groups = sorted({scale.shape[1] for _, scale, *_ in weights})
        if len(groups) > 1:
            return f"their inputs are in {' and '.join(map(str, groups))} groups"
        if outputs == 1:
            return super().why_not_merged(weights)
        ragged = [len(stored) for stored, *_ in weights[:-1] if len(stored) % outputs]
        if ragged:
            shared = self.form.shared
            return f"{ragged[0]} outputs do not end a block of {outputs}, so that the next ones would get its {shared}"
        return self.why_not_alike(weights)


def packed(form: Format) -> Packed:
    """The scheme of a format."""
    ops = torch.ops.specgraph
    return Packed(
        form.name, ops.packed_linear.default, lowered=ops.packed_linear.default,
        with_norm=ops.packed_linear_norm.default, quantises_rows=form.quantises_rows,
        experts=ops.packed_expert_linear.default, strided=False, options={"format": form.name}, form=form,
    )  # fmt: skip


def _held(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module itself."""
    return {
        name: value for tensors in (module._parameters, module._buffers) for name, value in tensors.items()
        if value is not None
    }  # fmt: skip
