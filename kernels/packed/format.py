"""How a weight is stored in few bits: numbers, and scales that some of the numbers have in common.

An entry of the weight ``[O, I]`` is ``number[o, i] * scale[o // R, i // C]``, where ``R`` outputs and ``C`` inputs have
one scale. Every format says how numbers and scales are stored, and the ops ``specgraph::packed_linear`` and
``specgraph::packed_expert_linear`` compute with all of them. Tensors have the shapes, the dtypes and the order of
the published layout, so that they are taken from files as they are.

A stack of weights has a dimension for its experts in front of all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specgraph.kernels.checks import require


class Format:
    """How a weight is stored. A format is a file with a subclass and one object of it, which ``formats.py`` lists.

    Attributes:
        name: what the argument ``format`` of the ops is.
        parts: the names of its tensors in the module of a linear layer, numbers first, as the published layout has
            them.
        beside: the names of other tensors that such a module has, and that no product needs.
        stack_parts: what follows the name of a stack of experts in the names of its tensors.
        stored: the dtype of the stored numbers.
        per_element: how many numbers an element of that dtype holds.
        scale_dtypes: the dtypes that scales may have.
        quantises_rows: whether rows of activations are quantised, too, by :meth:`quantise_rows`.
        rounded_together: how many neighbouring inputs of a row of activations are rounded by a scale that their own
            largest magnitude decides; 0 stands for all of them.
        kinds: what each of the parts holds: ``numbers``, then ``scale``, ``global scale``, ``zero point``, ``group
            index`` or ``input scale``.
        of_matrix: the parts that files hold once for a matrix, ``[1]``. Modules have them for each output, ``[O, 1]``,
            so that matrices can be joined.
        shared: the kind of the tensor that has an element for several outputs, if one has (:meth:`outputs_together`).
        own_inputs: what each weight says by itself about its inputs in the last of its parts, so that several cannot
            be joined or stacked; empty if nothing.
        expanded: whether the kernels multiply numbers as they are stored. For other formats they take the whole weight
            in float32.
        cpu_product: the function of ``cpu.cpp`` that reads its numbers; None if there is none.
        named: whether a module is of this format only if its attribute ``format`` says so, since others have the same
            tensors.
    """

    name: str
    parts: tuple[str, ...]
    beside: tuple[str, ...] = ()
    stack_parts: tuple[str, ...]
    stored: torch.dtype
    per_element: int = 1
    scale_dtypes: tuple[torch.dtype, ...]
    quantises_rows: bool = False
    rounded_together: int = 1
    kinds: tuple[str, ...] = ("numbers", "scale")
    of_matrix: tuple[str, ...] = ()
    shared: str = "scale"
    own_inputs: str = ""
    expanded: bool = True
    cpu_product: str | None = None
    named: bool = False

    def numbers(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers ``[..., O, I]`` that are stored as ``[..., O, I / per_element]``, in a floating ``dtype``."""
        raise NotImplementedError

    def scales(self, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of stored scales, in a floating ``dtype``."""
        return scale.to(dtype)

    def block(self, inputs: int, scale: Tensor) -> tuple[int, int]:
        """How many outputs and how many inputs have one scale: a row of a group of inputs, unless overridden."""
        return 1, inputs // scale.shape[-1]

    def outputs_together(self, inputs: int, scale: Tensor) -> int:
        """How many neighbouring outputs have an element of some tensor in common."""
        return self.block(inputs, scale)[0]

    def inputs_together(self, inputs: int, scale: Tensor) -> int:
        """How many neighbouring inputs a part of a weight takes or leaves as a whole, so that no value changes.

        Groups are such, unless a scale for all inputs does for a part of them as well.
        """
        group = self.block(inputs, scale)[1] if scale.shape[-1] > 1 else 1
        return math.lcm(self.per_element, group, self.rounded_together)

    def part(self, weight: Sequence[Tensor], begin: int, size: int, *, of_inputs: bool) -> tuple[Tensor, ...]:
        """The weight of ``size`` outputs from ``begin`` on, or of so many inputs, for all rows of the others.

        Products of such parts of inputs with the same parts of rows add up to the product of all. The tensors show the
        memory of those of the weight wherever they can, and are these themselves if they say the same about all parts.

        Raises:
            ValueError: a part cannot begin or end there.
        """
        outputs, inputs = self.check(weight)
        count, what, dim = (inputs, "inputs", -1) if of_inputs else (outputs, "outputs", -2)
        require(
            not of_inputs or self.rounded_together > 0,
            lambda: f"{self.name} rounds a row of activations by one scale for all {inputs} inputs, which for some of "
            "them would be another one",
        )
        together = (self.inputs_together if of_inputs else self.outputs_together)(inputs, weight[1])
        end = begin + size
        require(
            begin % together == 0 and (end % together == 0 or end == count),
            lambda: f"{what} {begin} to {end} of {count} in {self.name} are no whole groups of {together}",
        )
        units = self._units(weight, inputs, of_inputs=of_inputs)
        parts = tuple(
            tensor.narrow(dim, begin // unit, -(-size // unit)) if unit else tensor
            for tensor, unit in zip(weight, units, strict=True)
        )
        self.check(parts)
        return parts

    def _units(self, weight: Sequence[Tensor], inputs: int, *, of_inputs: bool) -> list[int]:
        """How many inputs, or outputs, an element of each tensor is for; 0 if it is for all of them."""
        outputs, group = self.block(inputs, weight[1])
        if of_inputs:
            own = {"numbers": self.per_element, "scale": group, "zero point": group, "group index": 1}
            each = zip(self.kinds, weight, strict=True)
            return [own.get(kind, 0) if tensor.shape[-1] > 1 else 0 for kind, tensor in each]
        own = {"numbers": 1, "scale": outputs, "global scale": 1, "zero point": self.per_element}
        return [own.get(kind, 0) for kind in self.kinds]

    def check_scale(self, outputs: int, inputs: int, scale: Tensor) -> None:
        """Raise ValueError unless ``scale`` has the shape that a weight ``[outputs, inputs]`` needs."""
        _, (wanted, _), *_ = self.shapes(outputs, inputs, None, scale.dtype)
        require(
            self.why_not(outputs, inputs, None) is None and tuple(scale.shape[-2:]) == wanted,
            lambda: f"scale is {list(scale.shape)}; for [{outputs}, {inputs}] it must be {list(wanted)}",
        )

    def check(self, weight: Sequence[Tensor]) -> tuple[int, int]:
        """The numbers of outputs and of inputs of a weight.

        Raises:
            ValueError: the tensors are not those of this format, or do not belong together.
        """
        require(
            len(weight) == len(self.parts),
            lambda: f"{self.name} weights have {len(self.parts)} tensors, {', '.join(self.parts)}, not {len(weight)}",
        )
        stored, scale = weight[:2]
        require(
            stored.dtype == self.stored,
            lambda: f"the numbers of a weight in {self.name} are {stored.dtype}; they must be {self.stored}",
        )
        require(
            scale.dtype in self.scale_dtypes,
            lambda: f"scale is {scale.dtype}; it must be one of {', '.join(map(str, self.scale_dtypes))}",
        )
        require(
            stored.dim() >= 2 and scale.shape[:-2] == stored.shape[:-2] and scale.dim() == stored.dim(),
            lambda: f"numbers are {list(stored.shape)} and scales {list(scale.shape)}: they must agree in front",
        )
        outputs, inputs = stored.shape[-2], stored.shape[-1] * self.per_element
        self.check_scale(outputs, inputs, scale)
        return outputs, inputs

    def dequantise(self, weight: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The weight ``[..., O, I]``, with the products of numbers and scales in ``dtype``."""
        numbers, scale = self.numbers(weight[0], dtype), self.scales(weight[1], dtype)
        outputs, inputs = self.block(numbers.shape[-1], weight[1])
        if outputs > 1:
            scale = scale.repeat_interleave(outputs, -2)[..., : numbers.shape[-2], :]
        if inputs > 1:
            scale = scale.repeat_interleave(inputs, -1)[..., : numbers.shape[-1]]
        return numbers * scale

    def why_not(self, outputs: int, inputs: int, group_size: int | None) -> str | None:
        """Why a weight ``[outputs, inputs]`` cannot be stored, with so many inputs in a group; None if it can."""
        return None

    def shapes(
        self, outputs: int, inputs: int, group_size: int | None, dtype: torch.dtype
    ) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """The shapes and dtypes of the tensors of a weight ``[outputs, inputs]`` that had the ``dtype``."""
        raise NotImplementedError

    def stacked_shape(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that files give the stored numbers of a stack, which have the shape ``numbers`` here."""
        return numbers

    def quantise(self, weight: Tensor, group_size: int | None = None) -> tuple[Tensor, ...]:
        """Round a weight ``[..., O, I]`` to the nearest that the format can hold: the tensors of :attr:`parts`."""
        raise NotImplementedError

    def factors(self, weight: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The scales of a weight as the function of ``cpu.cpp`` takes them, and its zero points if there are any.

        They are in float32. Scales that are exponents of two may stay uint8.
        """
        return self.scales(weight[1], torch.float32), None

    def quantise_rows(self, x: Tensor, weight: Sequence[Tensor] = ()) -> Tensor:
        """Rows ``[..., I]`` as the format quantises activations, in the dtype of ``x`` promoted to float32 at least.

        ``weight`` is what they are multiplied with, which may say by which scale rows are rounded.
        """
        return x


def why_not_full(name: str, group: int, inputs: int, group_size: int | None) -> str | None:
    """Why so many inputs are no full groups of a format's own size, or another one is asked for; None if they are."""
    if group_size not in (None, group):
        return f"groups of {name} have {group} inputs, not {group_size}"
    return f"its {inputs} inputs are no multiple of {group}" if inputs % group else None


def kept(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the scales of a weight: its own, or float32 for float64."""
    return torch.float32 if dtype == torch.float64 else dtype


def nibbles(words: Tensor) -> Tensor:
    """The numbers of four bits, 0 to 15, of int32 or uint8 ``[..., W]``: ``[..., 8 * W]`` or ``[..., 2 * W]``.

    The first of a word is in its lowest bits.
    """
    return ((words[..., None] >> _shifts(words.dtype, words.device)) & 15).flatten(-2)


def join_nibbles(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`nibbles`: integers from 0 to 15 in int32 or uint8."""
    shifts = _shifts(dtype, codes.device)
    words = torch.unflatten(codes.to(dtype), -1, (-1, len(shifts))) << shifts
    return words.sum(-1, dtype=dtype)  # no two of them have a bit in common, so that the sum joins them


def _shifts(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(0, 8 * dtype.itemsize, 4, dtype=dtype, device=device)
