"""Make Triton's interpreter faster, and let it round to bfloat16 and sum products as a GPU does.

It is written for clarity: nearly all of its time is spent on the types around an operation and not on the operation.
A GPU rounds a conversion to the nearest bfloat16, where the interpreter cuts off the lower half of a float32. A GPU
sums a product of matrices in steps, and each row of it depends on that row alone, which the interpreter's library does
not promise. Nor does the interpreter multiply matrices of bfloat16, of which it takes the bits for numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def speed_up() -> None:
    """Change the interpreter of this process. Called once, before a kernel runs."""
    _patch_once_per_launch()
    _pass_on_arguments()
    _remember_types()
    _remember_sizes()
    _round_to_bfloat16()
    _sum_in_steps()
    # Without debug, the assertion that no integer overflows is dropped after all that it needs has been computed.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _patch_once_per_launch() -> None:
    """Let a launch replace the language once for every module whose functions take part in it.

    The interpreter replaces the functions of ``triton.language`` before it runs a kernel, and again whenever the kernel
    calls another ``@triton.jit`` function. From the second time on it finds them replaced already, after it has walked
    over every attribute of the language for about 2 ms, which was more than half of the time of the kernels in
    ``kernels/verify``.
    """
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_new(function: Callable[..., Any]) -> object:
        module = id(function.__globals__)
        if module in patched:
            return interpreter._LangPatchScope()
        patched.add(module)
        return patch(function)

    def launch_anew(self: object, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_new, launch_anew


def _pass_on_arguments() -> None:
    """Call a function of the language with the arguments that it was given, and not with a copy of each of its options.

    A check that the interpreter is at hand, which it is, stands around most functions.
    """
    checked = core.builtin(len).__code__

    def give(owner: object, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic, plain = interpreter.TritonSemantic(builder), member
        if getattr(member, "__code__", None) is checked:
            plain = member.__wrapped__

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return plain(*args, **options)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = give


def _remember_types() -> None:
    """Make the type of a block, of a shape and of NumPy's elements once, and not for each value: they never change."""
    block, of_tuple, numpy = core.block_type.__init__, core._type_for_tuple_values, interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    tuples: dict[Any, Any] = {}
    elements: dict[str, Any] = {}

    def make_block(self: Any, element: Any, shape: Sequence[Any]) -> None:
        key = (type(element), element.name, getattr(element, "address_space", None), _numbers(shape))
        if key[-1] is None:
            block(self, element, shape)
            return
        if key not in blocks:
            block(self, element, shape)
            sizes = core.tuple([core.constexpr(size) for size in self.shape])
            blocks[key] = {**self.__dict__, "sizes": sizes, "count": core.constexpr(math.prod(self.shape))}
        self.__dict__.update(blocks[key])

    def type_of_sizes(values: Sequence[Any], fields: Any = None) -> Any:
        key = _numbers(values) if fields is None else None
        if key is None:
            return of_tuple(values, fields)
        if key not in tuples:
            tuples[key] = of_tuple(values)
        return tuples[key]

    def numpy_type(given: Any) -> Any:
        element = given.element_ty if type(given) is core.block_type else given
        if element.name not in elements:
            elements[element.name] = numpy(element)
        return elements[element.name]

    core.block_type.__init__ = make_block
    core._type_for_tuple_values, interpreter._get_np_dtype = type_of_sizes, numpy_type


def _remember_sizes() -> None:
    """Make what a tensor says of its shape once for each type, and broadcast no tensors of one shape.

    Each operation makes a tensor, whose sizes are constants of the language, and compares those of its arguments.
    """
    broadcast, make = TritonSemantic.broadcast_impl_value, core.tensor.__init__
    of_one = {"sizes": core.tuple([]), "count": core.constexpr(1)}

    def make_tensor(self: Any, handle: Any, given: Any) -> None:
        known = given.__dict__ if type(given) is core.block_type else of_one
        if "sizes" not in known:  # a size that is no number
            make(self, handle, given)
            return
        self.handle, self.type, self.dtype = handle, given, given.scalar
        self.shape, self.numel = known["sizes"], known["count"]

    def broadcast_values(self: Any, left: Any, right: Any) -> Any:
        one, other = left.type, right.type
        blocks = type(one) is core.block_type, type(other) is core.block_type
        if blocks == (False, False) or (all(blocks) and one.shape.values == other.shape.values):
            return left, right
        return broadcast(self, left, right)

    core.tensor.__init__ = make_tensor
    TritonSemantic.broadcast_impl_value = broadcast_values


def _round_to_bfloat16() -> None:
    convert = interpreter._convert_float

    def nearest(values: Any, given: Any, wanted: Any, mode: Any) -> Any:
        if (given.name, wanted.name) == ("bf16", "fp32"):
            return np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << 16
        if (given.name, wanted.name) != ("fp32", "bf16"):
            return convert(values, given, wanted, mode)
        bits = np.ascontiguousarray(values).view(np.uint32)
        half = 0x7FFF + ((bits >> 16) & 1)  # to the even one of two that are equally near
        rounded = np.where(np.isnan(values), bits | 0x400000, bits + half) >> 16
        return rounded.astype(np.uint16)

    interpreter._convert_float = nearest


_STEP = 16
"""Terms of bfloat16 that one instruction of a GPU adds to a sum."""


def _sum_in_steps() -> None:
    """Let no row of a product depend on its place, and a product of bfloat16 add its terms in steps.

    So a kernel may give rows other places, and divide a product of bfloat16 among calls of ``tl.dot`` that continue
    each other's sums. Sums are taken in float64, of which another order changes no bit that is left in float32.
    """
    dot = interpreter.InterpreterBuilder.create_dot

    def in_steps(self: object, a: Any, b: Any, d: Any, *options: Any) -> Any:
        left, right, total = _float32(a), _float32(b), _float32(d)
        if left is None or right is None or total is None:
            return dot(self, a, b, d, *options)
        left, right = left.astype(np.float64), right.astype(np.float64)
        if a.dtype.scalar == core.float32:
            return interpreter.TensorHandle((left @ right).astype(np.float32) + total, d.dtype.scalar)
        for first in range(0, left.shape[-1], _STEP):
            part = left[..., first : first + _STEP] @ right[..., first : first + _STEP, :]
            total = (part + total).astype(np.float32)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = in_steps


def _float32(tile: Any) -> Any:
    """The numbers of a tile of float32, or of bfloat16, of which the interpreter keeps the bits; else None."""
    if tile.dtype.scalar == core.bfloat16:
        return (tile.data.astype(np.uint32) << 16).view(np.float32)
    return tile.data if tile.dtype.scalar == core.float32 else None


def _numbers(values: Sequence[Any]) -> tuple[Any, ...] | None:
    """A key for a sequence of numbers, which tells a constant of the language from a plain one; else None."""
    key = []
    for value in values:
        plain = value.value if type(value) is core.constexpr else value
        if type(plain) is not int:
            return None
        key.append(plain if plain is value else (plain,))
    return tuple(key)
