"""How the weight of a linear layer is stored, and by which ops a product with it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Scheme:
    """How a weight is stored, and which ops compute with it.

    Every op takes the input first, which it calls ``x`` (``input`` in ATen), then the tensors of the weight, and it has
    an argument ``bias``. Two schemes are equal if they are one object.

    Attributes:
        name: for reports.
        traced: the op that a traced module calls, ``(x, *weight, bias=None)``.
        weight: the arguments that hold the tensors of the weight; one argument may be a list of them. Dimension 0 of
            the first tensor counts the outputs.
        lowered: the op with an epilogue, ``(x, *weight, bias, residual, sum_sq, *, norm_eps, activation, ...)`` as
            ``specgraph::linear`` has it; None if ``traced`` is what runs, and nothing is fused with it.
        with_norm: the same with the parts of the norm that reads the result, as ``specgraph::linear_norm``; or None.
        quantises_rows: whether the ops round their inputs to few bits, too. Such an op takes no ``sum_sq``, as it needs
            the rows behind their norm.
        few_rows: a form of ``traced`` for the few rows of a decode step on a CPU; or None.
        experts: the op whose argument ``expert_ids`` says for each row which matrix of a stack it meets,
            ``(x, *weight, bias, expert_ids, *, top_k, gate, pairs)`` as ``specgraph::expert_linear`` has it, the last
            two only if it takes in the function behind it; or None.
        strided: whether the ops are as fast with a weight whose rows do not follow each other in memory.
        options: arguments that every call of an op has, by which schemes with the same ops are told apart.
    """

    name: str
    traced: Any
    weight: tuple[str, ...] = ("weight",)
    lowered: Any = None
    with_norm: Any = None
    quantises_rows: bool = False
    few_rows: Callable[..., Tensor] | None = None
    experts: Any = None
    strided: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ops(self) -> tuple[Any, ...]:
        """All ops that it names."""
        named = self.traced, self.lowered, self.with_norm, self.few_rows, self.experts
        return tuple(op for op in named if op is not None)

    def wants_few_rows(self, dtype: torch.dtype) -> bool:
        """Whether products in ``dtype`` should have a form for few rows, so that one without it is worth a note."""
        return dtype == torch.float32

    def operands(self, weight: Sequence[Any]) -> tuple[Any, ...]:
        """The tensors of a weight, or the nodes that read them, as the ops take them behind ``x``."""
        return tuple(weight)

    def part(self, weight: Sequence[Tensor], begin: int, size: int, *, of_inputs: bool) -> tuple[Tensor, ...]:
        """The weight of ``size`` outputs from ``begin`` on, or of so many inputs, for all rows of the others.

        Products of such parts of inputs with the same parts of rows add up to the product of all. The tensors are views
        where they can be, and those of the weight itself if all parts have one in common. A scheme with more tensors
        than one matrix, or a stack of them, overrides this.

        Raises:
            ValueError: a part cannot begin or end there.
        """
        if len(weight) > 1:
            raise ValueError(f"{self.name} weights have {len(weight)} tensors, of which no parts are known")
        return (weight[0].narrow(-1 if of_inputs else -2, begin, size),)

    def in_gpu_order(self, weight: Sequence[Tensor]) -> tuple[Mapping[str, Any], tuple[Tensor, ...]] | None:
        """The tensors of a weight as kernels of GPUs take them best, and what calls of the ops have in :attr:`options`
        then; None if they stand so already, or in no other way.
        """
        return None

    @property
    def in_common(self) -> tuple[int, ...]:
        """The places among the tensors of a weight of those that merged weights have in common.

        They say something about the inputs, so that there is one of them, a copy, and not all one after the other.
        :meth:`why_not_merged` sees to it that they are equal.
        """
        return ()

    def why_not_merged(self, weights: Sequence[Sequence[Tensor]]) -> str | None:
        """Why weights cannot be joined tensor by tensor along dimension 0; None if they can.

        Each tensor but those of :attr:`in_common` has to have a row for every output. A scheme with a scale for each
        block of outputs, for example, overrides this, and allows what it can: weights whose blocks end with them.
        """
        if any(tensor.shape[:1] != weight[0].shape[:1] for weight in weights for tensor in weight):
            return f"a tensor of {self.name} weights does not have a row for every output"
        return self.why_not_alike(weights)

    def why_not_alike(self, weights: Sequence[Sequence[Tensor]]) -> str | None:
        """A reason if the tensors of weights differ in more than their number of rows."""
        kinds = {tuple((t.dtype, t.device, t.shape[1:]) for t in weight) for weight in weights}
        return "the weights differ in dtype or device" if len(kinds) > 1 else None

    def weight_of(self, module: nn.Module) -> tuple[Tensor, ...] | None:
        """The tensors of the weight if ``module`` is a linear layer of this scheme whose forward needs the hook of
        tracing; else None. A layer whose forward calls ``traced`` by itself, as that of ``nn.Linear``, needs none.
        """
        return None

    def stacks_of(self, module: nn.Module) -> dict[str, tuple[Tensor, ...]]:
        """The tensors of every stacked weight of a mixture of experts that is stored like this, by the name that
        transformers gives the weight (``gate_up_proj``, ``up_proj``, ``down_proj``). Plain stacks need not be named.
        """
        return {}
