"""The modules of a model whose weights are packed: linear layers, and mixtures of experts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specgraph.frontend.experts import experts_hook
from specgraph.ir.packed import STACKS
from specgraph.kernels.packed.arranged import Arranged
from specgraph.kernels.packed.format import Format
from specgraph.kernels.packed.formats import ARRANGED, arranged_of, format_of
from specgraph.kernels.packed.linear import packed_linear


class Packed(nn.Module):
    """A module with a packed weight, whose stored numbers stay as they are when the module is cast.

    So do scales of a matrix or of activations: one of them, rounded, would change all of a product, and that of NVFP4
    may be larger than float16 has numbers.

    Attributes:
        format: the name of the format, in :data:`~specgraph.kernels.packed.formats.FORMATS`.
    """

    format: str

    def _places(self, form: Format) -> list[tuple[str, ...]]:
        """The names that the tensors of each weight have in a format, in whichever order the weights stand."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        form = format_of(self.format)
        if isinstance(form, Arranged):
            for names, published in zip(self._places(form), self._places(form.published), strict=True):
                if f"{prefix}{names[0]}" in destination:
                    parts = form.restore([destination.pop(f"{prefix}{name}").detach() for name in names])
                    destination.update(zip((f"{prefix}{name}" for name in published), parts, strict=True))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        form = format_of(self.format)
        if isinstance(form, Arranged):
            for names, published in zip(self._places(form), self._places(form.published), strict=True):
                there = all(f"{prefix}{name}" in state_dict for name in published)
                if there and names[0] in self._parameters:
                    parts = form.arrange([state_dict.pop(f"{prefix}{name}") for name in published])
                    state_dict.update(zip((f"{prefix}{name}" for name in names), parts, strict=True))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Packed:
        form = format_of(self.format)
        kinds = zip((*form.parts, *form.stack_parts), form.kinds * 2, strict=True)
        single = tuple(part for part, kind in kinds if kind.endswith(" scale"))
        kept = {id(tensor) for name, tensor in self._parameters.items() if name.endswith(single)}

        def apply(tensor: Tensor) -> Tensor:
            made, keeps = fn(tensor), tensor.dtype == form.stored or id(tensor) in kept
            return tensor.to(made.device) if keeps and made.dtype != tensor.dtype else made

        return super()._apply(apply, recurse)  # type: ignore[no-untyped-call]


class PackedLinear(Packed):
    """A linear layer whose weight is packed. Its tensors have the names, dtypes and shapes of the published layout.

    Its forward calls the op ``specgraph::packed_linear``, so that a model with such layers runs in transformers, too.
    Gradients do not pass through it.

    Attributes:
        in_features: ``I``.
        out_features: ``O``.
        bias: ``[O]`` or None.
    """

    def __init__(self, form: Format, weight: Sequence[Tensor], bias: Tensor | None = None) -> None:
        super().__init__()
        self.format = form.name
        self.out_features, self.in_features = form.check(weight)
        for name, tensor in zip(form.parts, weight, strict=True):
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        for name in form.beside:
            shape = torch.tensor([self.out_features, self.in_features], device=weight[0].device)
            self.register_buffer(name, shape)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def quantised(cls, layer: nn.Linear, form: Format, group_size: int | None = None) -> PackedLinear:
        """The layer with its weight rounded as the format rounds, and the same bias."""
        bias = None if layer.bias is None else layer.bias.detach()
        return cls(form, form.quantise(layer.weight.detach(), group_size), bias)

    @classmethod
    def empty_as(cls, layer: nn.Linear, form: Format, group_size: int | None = None) -> PackedLinear:
        """A layer whose tensors have the shapes that those of ``layer`` would have, on its device."""
        shapes = form.shapes(layer.out_features, layer.in_features, group_size, layer.weight.dtype)
        weight = [torch.empty(shape, dtype=dtype, device=layer.weight.device) for shape, dtype in shapes]
        return cls(form, weight, None if layer.bias is None else layer.bias.detach())

    @property
    def weight_parts(self) -> list[Tensor]:
        """The tensors of the weight, numbers first."""
        return self._weight()[1]

    def _weight(self) -> tuple[str, list[Tensor]]:
        """The name of the format, and its tensors."""
        held: Any = self._parameters  # read once: another thread may arrange the layer meanwhile
        form = format_of(self.format)
        known = (form, ARRANGED.get(form.name), getattr(form, "published", None))
        form = next(form for form in known if form is not None and form.parts[0] in held)
        return form.name, [held[name] for name in form.parts]

    @torch.no_grad()
    def arrange(self) -> None:
        """Sort the numbers as matrix instructions of a GPU take them, if the format has such an order.

        The parameter is replaced by another one with another name, by which its order is known. A state dict has the
        published order and name. Other threads may call the layer meanwhile.
        """
        form, weight = format_of(self.format), self.weight_parts
        arranged = arranged_of(self.format, weight)
        if arranged is None:
            return
        replaced = dict(zip(form.parts, zip(arranged.parts, _arranged(arranged, weight), strict=True), strict=True))
        self._parameters = dict(replaced.get(name, (name, value)) for name, value in self._parameters.items())
        self.format = arranged.name

    def _places(self, form: Format) -> list[tuple[str, ...]]:
        return [form.parts]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key in (f"{prefix}{name}" for name in format_of(self.format).of_matrix):
            destination[key] = destination[key][0]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for key in (f"{prefix}{name}" for name in format_of(self.format).of_matrix):
            if key in state_dict and state_dict[key].shape == (1,):
                state_dict[key] = state_dict[key].expand(self.out_features, 1)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``."""
        form, weight = self._weight()
        return packed_linear(x, weight, self.bias, format=form)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight ``[O, I]``, with products in ``dtype``."""
        form, weight = self._weight()
        return format_of(form).dequantise([part.detach() for part in weight], dtype)

    def extra_repr(self) -> str:
        """What is printed between the brackets of the layer."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"format={self.format}"
        )


class PackedExperts(Packed):
    """What a mixture of experts with packed stacks is beside its own class, whose gate and activation it keeps.

    A stack ``gate_up_proj`` is replaced by tensors whose names begin with it, as the published layout names them, and
    every matrix in it has its outputs first.
    """

    forward = experts_hook

    @torch.no_grad()
    def arrange(self) -> None:
        """As :meth:`PackedLinear.arrange`, if all stacks can be sorted, one stack after the other."""
        form = self._published()
        todo = [published for published in self._places(form) if published[0] in self._parameters]
        arranged = arranged_of(form.name, *([self.get_parameter(name) for name in published] for published in todo))
        if arranged is None:
            return
        self.format = arranged.name
        for names, published in zip(self._places(arranged), self._places(form), strict=True):
            if published in todo:
                self._arrange_stack(arranged, names, published)

    def _arrange_stack(self, form: Arranged, names: Sequence[str], published: Sequence[str]) -> None:
        """Sort one stack. Nothing here holds it in the published order when this returns."""
        held: Any = self._parameters
        made = dict(zip(names, _arranged(form, [held[name] for name in published]), strict=True))
        # Another thread that runs the model finds the stack in one of both orders at any time, as it looks for the
        # published one first.
        self._parameters = held | made
        gone = set(published) - made.keys()
        self._parameters = {name: value for name, value in (held | made).items() if name not in gone}

    def dense_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes that the stacks would have if they were not packed, by their names."""
        form = self._published()
        found: dict[str, tuple[int, ...]] = {}
        for names in self._places(format_of(self.format)):
            experts, outputs, words = self.get_parameter(names[0]).shape
            matrix = outputs, words * form.per_element
            stack = names[0].removesuffix(format_of(self.format).stack_parts[0])
            found[stack] = (experts, *(matrix[::-1] if getattr(self, "is_transposed", False) else matrix))
        return found

    def _published(self) -> Format:
        """The format as files have it."""
        form = format_of(self.format)
        return form.published if isinstance(form, Arranged) else form

    def _places(self, form: Format) -> list[tuple[str, ...]]:
        published = self._published()
        orders = published, ARRANGED.get(published.name, published)
        held = [s for s in STACKS if any(f"{s}{order.stack_parts[0]}" in self._parameters for order in orders)]
        return [tuple(f"{stack}{part}" for part in form.stack_parts) for stack in held]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        form = self._published()
        for key in (f"{prefix}{names[0]}" for names in self._places(form)):
            destination[key] = destination[key].view(form.stacked_shape(tuple(destination[key].shape)))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for key in (f"{prefix}{names[0]}" for names in self._places(self._published())):
            if key in state_dict and state_dict[key].dim() == 4:  # as files have the numbers
                state_dict[key] = state_dict[key].flatten(-2)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def stacks(module: nn.Module) -> Iterator[str]:
    """The names of the stacked weights that a mixture of experts holds; nothing if it is none."""
    for name in STACKS:
        weight = module._parameters.get(name)
        if weight is not None and weight.dim() == 3 and weight.is_floating_point() and weight.dtype.itemsize > 1:
            yield name


def dense_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the parameters that a module has, or would have if none of its weights were packed."""
    found = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    for path, layer in module.named_modules():
        if isinstance(layer, PackedLinear):
            weights: dict[str, tuple[int, ...]] = {"weight": (layer.out_features, layer.in_features)}
        elif isinstance(layer, PackedExperts):
            weights = layer.dense_shapes()
        else:
            continue
        for names in layer._places(format_of(layer.format)):
            for name in names:
                del found[f"{path}.{name}"]
        found |= {f"{path}.{name}": shape for name, shape in weights.items()}
    return found


@torch.no_grad()
def quantise_experts(module: nn.Module, form: Format, group_size: int | None = None) -> None:
    """Round the stacks of a mixture of experts, in place. One matrix at a time is rounded."""
    for name in [*stacks(module)]:
        stack = module.get_parameter(name).detach()
        if getattr(module, "is_transposed", False):
            stack = stack.transpose(1, 2)
        set_stack(module, name, form, (form.quantise(matrix, group_size) for matrix in stack))


def set_stack(module: nn.Module, name: str, form: Format, matrices: Iterable[Sequence[Tensor]]) -> None:
    """Replace a stack of a mixture of experts by packed matrices, each given by its tensors."""
    _replace(module, name, form, [torch.stack(parts) for parts in zip(*matrices, strict=True)])


def empty_experts(module: nn.Module, form: Format, group_size: int | None = None) -> None:
    """Replace the stacks of a mixture of experts by packed ones that are empty, on the device of the module."""
    for name in [*stacks(module)]:
        stack = module.get_parameter(name)
        shapes = form.shapes(*stack_features(module, name), group_size, stack.dtype)
        weight = [torch.empty((len(stack), *shape), dtype=dtype, device=stack.device) for shape, dtype in shapes]
        _replace(module, name, form, weight)


def stack_features(module: nn.Module, name: str) -> tuple[int, int]:
    """The outputs and the inputs of each matrix of a stack."""
    outputs, inputs = module.get_parameter(name).shape[1:]
    return (inputs, outputs) if getattr(module, "is_transposed", False) else (outputs, inputs)


def _replace(module: Any, name: str, form: Format, weight: Sequence[Tensor]) -> None:
    delattr(module, name)
    for part, tensor in zip(form.stack_parts, weight, strict=True):
        module.register_parameter(f"{name}{part}", nn.Parameter(tensor, requires_grad=False))
    module.format = form.name
    if not isinstance(module, PackedExperts):
        kind: Any = type(module)
        module.__class__ = _packed_class(kind)


@functools.cache
def _packed_class(kind: Any) -> type[nn.Module]:
    return type(f"Packed{kind.__name__}", (PackedExperts, kind), {"__doc__": PackedExperts.__doc__})


def arrange_weights(model: nn.Module) -> None:
    """Sort the packed weights of a model for the GPU that it is on, one after the other; nothing on a CPU."""
    for module in model.modules():
        if isinstance(module, PackedLinear | PackedExperts) and next(module.parameters()).device.type == "cuda":
            module.arrange()


def _arranged(form: Arranged, weight: Sequence[Any]) -> list[Any]:
    """The parameters of a weight in the order of a GPU. Modules that share the weight share them, too."""
    made = getattr(weight[0], "arranged", None)
    if made is None or made[0] is not weight[1]:
        parts = zip(form.arrange(weight), weight, strict=True)
        made = weight[0].arranged = weight[1], [
            given if part is given else nn.Parameter(part, requires_grad=False) for part, given in parts
        ]  # fmt: skip
    return made[1]
