"""How an op is declared: once, with everything that is known about it.

An op's file writes its arguments as a dataclass, from which the schema of the ``torch.library`` op is derived. Every
implementation takes one object of that class, so that no other signature repeats the schema::

    @dataclass(slots=True)
    class RowMean:
        x: Tensor

    def _row_mean_fake(given: RowMean) -> Tensor: ...

    forms = triton_or_reference(row_mean_triton, row_mean_reference)
    ROW_MEAN = declare("row_mean", RowMean, _row_mean_fake, forms)
    row_mean = ROW_MEAN.function  # what graphs call, typed as RowMean is made

The class is not frozen, because an object of it is built at every call and freezing triples what that costs. What the
op returns is read from the annotation of ``fake``. :data:`OPS` answers what ops there are; a file declares its ops when
it is imported, and :mod:`specgraph.kernels.catalogue` imports them all.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
NAMESPACE = "specgraph"
DEVICES = ("cpu", "cuda")
"""The device types that every op has a variant for."""
VARIANTS = {
    "reference": DEVICES, "cpu": ("cpu",), "triton": ("cuda",), "hopper": ("cuda",), "hopper_wide": ("cuda",),
    "library": ("cuda",),
}
"""The names that variants may have, and the device types that each is for: plain PyTorch, one form for CPUs, one in
Triton, two for GPUs of compute capability 9.x alone, for few rows and for many, and one around a product of cuBLAS or
another library."""

_TYPES: dict[Any, str] = {
    Tensor: "Tensor", Tensor | None: "Tensor?", list[Tensor]: "Tensor[]", int: "int", int | None: "int?",
    float: "float", list[float]: "float[]", float | None: "float?", bool: "bool", str: "str", torch.dtype: "ScalarType",
}


@dataclass(frozen=True)
class Variant:
    """One implementation of an op.

    Attributes:
        name: one of :data:`VARIANTS`, which says for which devices it is.
        run: takes the op's arguments as one object; keywords behind it are for tests and tuning.
        batch_invariant: whether the bits of a row of the result are promised not to depend on the other rows, neither
            on their values nor on their number.
        covers: whether it computes these arguments, which is asked before anything runs; None if it computes all.
    """

    name: str
    run: Callable[..., Any]
    batch_invariant: bool
    covers: Callable[[Any], bool] | None = None

    def __post_init__(self) -> None:
        if self.name not in VARIANTS:
            raise ValueError(f"A variant is named one of {', '.join(VARIANTS)}, not {self.name!r}.")

    @property
    def devices(self) -> tuple[str, ...]:
        """The device types it is for."""
        return VARIANTS[self.name]


@dataclass(frozen=True)
class Op(Generic[P, R]):
    """An op of the namespace ``specgraph``.

    Attributes:
        name: without the namespace.
        arguments: a dataclass with a field for each argument; fields after a ``KW_ONLY`` are keywords of the op.
        fake: makes empty results of the right shapes and dtypes, and refuses arguments that do not fit.
        variants: in the order in which they are asked whether they cover given arguments.
        mutates: the arguments that are written in place.
    """

    name: str
    arguments: Callable[P, Any]
    fake: Callable[[Any], R]
    variants: tuple[Variant, ...]
    mutates: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = set(self.mutates) - {field.name for field in self.fields}
        if unknown:
            raise ValueError(f"{self.name} writes {', '.join(sorted(unknown))}, which is no argument of it.")
        for device in DEVICES:
            candidates = self.on(device)
            if not candidates or candidates[-1].covers is not None:
                raise ValueError(f"{self.name} needs a last variant for {device} that covers all arguments.")

    @property
    def fields(self) -> tuple[dataclasses.Field[Any], ...]:
        """The arguments, in order."""
        return dataclasses.fields(cast(Any, self.arguments))

    @functools.cached_property
    def function(self) -> Callable[P, R]:
        """The op as a function that step graphs call: typed, and documented by the text of its arguments.

        If the op writes arguments, the name of the function ends in an underscore.
        """

        name = self.name

        def call(*args: P.args, **keywords: P.kwargs) -> R:
            return getattr(torch.ops.specgraph, name)(*args, **keywords)

        call.__name__ = call.__qualname__ = f"{name}_" if self.mutates else name
        call.__module__, call.__doc__ = self.arguments.__module__, inspect.getdoc(self.arguments)
        call.__signature__ = inspect.signature(self.arguments)  # type: ignore[attr-defined]
        return call

    @functools.cached_property
    def schema(self) -> str:
        """What ``torch.library.define`` takes, without the name."""
        types, parts = get_type_hints(self.arguments), []
        for field in self.fields:
            if field.kw_only and "*" not in parts:
                parts.append("*")
            parts.append(self._parameter(field, types[field.name]))
        return f"({', '.join(parts)}) -> {_result(self.name, get_type_hints(self.fake)['return'])}"

    def _parameter(self, field: dataclasses.Field[Any], hint: Any) -> str:
        kind = _type(f"{self.name}.{field.name}", hint)
        if field.name in self.mutates:
            kind = kind.replace("Tensor", f"Tensor({chr(ord('a') + self.mutates.index(field.name))}!)")
        if field.default is dataclasses.MISSING:
            return f"{kind} {field.name}"
        default = f'"{field.default}"' if isinstance(field.default, str) else field.default
        return f"{kind} {field.name}={default}"

    def on(self, device: str) -> tuple[Variant, ...]:
        """The variants for a device type, in order."""
        return tuple(variant for variant in self.variants if device in variant.devices)

    def variant(self, name: str) -> Variant:
        """The variant of that name.

        Raises:
            ValueError: the op has no such variant.
        """
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise ValueError(f"{self.name} has the variants {', '.join(v.name for v in self.variants)}, not {name!r}.")

    def choose(self, device: str, given: Any) -> Variant:
        """The first variant for a device type that covers ``given``, an object of :attr:`arguments`."""
        return next(v for v in self.on(device) if v.covers is None or v.covers(given))

    def batch_invariant(self, device: str) -> bool:
        """Whether rows are independent of each other on a device type.

        That is the promise of the first variant. Arguments that only a later one covers, such as those in float64, have
        what that one promises.
        """
        return any(variant.batch_invariant for variant in self.on(device)[:1])

    def form(self, name: str, **tuning: Any) -> Callable[..., Any]:
        """One variant as a function of the op's own arguments, whatever the device and whatever it covers.

        For tests and measurements. ``tuning`` goes to the variant as it is.
        """
        run, arguments = self.variant(name).run, self.arguments
        return lambda *args, **keywords: run(arguments(*args, **keywords), **tuning)


OPS: dict[str, Op[..., Any]] = {}
"""Every op that has been declared, by name."""


def find(target: object) -> Op[..., Any] | None:
    """The declaration of an op as graphs call it, ``torch.ops.specgraph.name.default``; None for everything else."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != NAMESPACE:
        return None
    return OPS.get(target._opname)


def declare(
    name: str, arguments: Callable[P, Any], fake: Callable[[Any], R], variants: tuple[Variant, ...],
    mutates: tuple[str, ...] = (),
) -> Op[P, R]:
    """Make an :class:`Op` of these attributes, which ``torch.library`` and :data:`OPS` then know.

    Raises:
        ValueError: there is an op of that name, or an argument has a type that a schema cannot express.
    """
    if name in OPS:
        raise ValueError(f"An op {name} is declared already, with the arguments {OPS[name].schema}.")
    op, qualified = Op(name, arguments, fake, variants, mutates), f"{NAMESPACE}::{name}"
    torch.library.define(qualified, op.schema)
    for device in DEVICES:
        torch.library.impl(qualified, device)(_dispatcher(op, device))
    torch.library.register_fake(qualified)(_bound(fake, arguments))
    OPS[name] = op
    return op


def triton_or_reference(
    triton: Callable[..., Any], reference: Callable[..., Any], *, covers: Callable[[Any], bool] | None = None,
    moves_only: bool = False, cpu: Callable[..., Any] | None = None, cpu_covers: Callable[[Any], bool] | None = None,
) -> tuple[Variant, ...]:
    """The variants of most ops: a Triton form whose rows are independent of each other, and plain PyTorch.

    PyTorch promises such rows only to ops that move elements and compute with integers alone (``moves_only``). A form
    for CPUs promises what the reference promises.
    """
    forms = [Variant("triton", triton, True, covers), Variant("reference", reference, moves_only)]
    if cpu is not None:
        forms.insert(1, Variant("cpu", cpu, moves_only, cpu_covers))
    return tuple(forms)


def not_float64(name: str) -> Callable[[Any], bool]:
    """What covers all arguments whose tensor ``name`` is not in float64: that is for checking, by the definition."""
    return lambda given: bool(getattr(given, name).dtype != torch.float64)


def _dispatcher(op: Op[..., Any], device: str) -> Callable[..., Any]:
    """What PyTorch calls on a device type: the first variant that covers what is given."""
    candidates, arguments = op.on(device), op.arguments
    first = candidates[0]
    if first.covers is None:
        return _bound(first.run, arguments)

    def run(*args: Any, **keywords: Any) -> Any:
        given = arguments(*args, **keywords)
        for variant in candidates:
            if variant.covers is None or variant.covers(given):
                return variant.run(given)

    return run


def _bound(run: Callable[[Any], Any], arguments: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch leaves out trailing arguments that have their default, which the class fills in again."""
    return lambda *args, **keywords: run(arguments(*args, **keywords))


def _type(what: str, hint: Any) -> str:
    if hint not in _TYPES:
        allowed = ", ".join(_TYPES.values())
        raise ValueError(f"{what} is {hint}, which no schema expresses; allowed are the types of {allowed}.")
    return _TYPES[hint]


def _result(what: str, hint: Any) -> str:
    if hint is type(None):
        return "()"
    if get_origin(hint) is tuple:
        return f"({', '.join(_type(what, part) for part in get_args(hint))})"
    if isinstance(hint, type) and issubclass(hint, tuple):
        return f"({', '.join(_type(what, part) for part in get_type_hints(hint).values())})"
    return _type(what, hint)
