"""A pytest plugin: compile the Triton kernels that tests launch, for a Hopper GPU that need not be there.

    TRITON_INTERPRET=0 python -m pytest -p tests.compile_only tests/kernels/verify

Nothing is launched, so that what tests compute is zeros and whether they pass is not looked at. The run fails if a
kernel does not compile. The interpreter, which the tests use otherwise, takes much that the compiler refuses: a
variable whose shape changes in a branch, for one.

Triton's front end, which refuses such things, takes a variant of a kernel if one of its arguments has a new type or
kind of constant, or two of them have types or constants that have not met (:func:`_features`). Its back end, which
takes most of the time of a variant, compiles those with a new type of an argument, two types in one kernel that have
not met, or a new number of warps and stages (:func:`_layouts`).
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import pytest
import torch
import triton
from triton import knobs

from benchmarks.no_gpu import Hopper
from specgraph.kernels import launch

COMPILED: Counter[str] = Counter()
FAILED: dict[str, str] = {}
PHASES: Counter[str] = Counter()
"""How many variants the back end has compiled, the front end alone has taken, and neither was given."""
SEEN: set[object] = set()
"""The variants that tests have launched, by kernel and Triton's key."""
WHOLE: set[object] = set()
"""What the back end has compiled, as :func:`_layouts` has it."""
TAKEN: set[object] = set()
"""What the front end has taken, as :func:`_features` has it."""


class _Taken(Exception):
    """The front end has taken a kernel, and that is enough."""


def _compile(kernel: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
    name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
    try:
        _RUN(kernel, *args, grid=grid, warmup=True, **kwargs)
    except Exception:
        FAILED.setdefault(name, traceback.format_exc())
        raise
    COMPILED[name] += 1


_RUN = triton.JITFunction.run
_DO_COMPILE = triton.JITFunction._do_compile


def _layouts(kernel: Any, types: Iterable[tuple[object, str]], options: Any) -> set[object]:
    """What the back end may compile in another way: the type of each tensor, every two types, warps and stages.

    A type is that of a tensor's elements or of a number. Which arguments two types belong to matters to the front end,
    which has made the conversions between them.
    """
    types = list(types)
    tensors = {(kernel, place, kind) for place, kind in types if kind.startswith("*")}
    met = itertools.combinations_with_replacement(sorted({kind for _, kind in types}), 2)
    return tensors | {(kernel, pair) for pair in met} | {(kernel, options.num_warps, options.num_stages)}


def _types(kinds: Iterable[tuple[Any, Any]]) -> Iterator[tuple[object, str]]:
    """The types of arguments by their places, of the elements where an argument is a tuple, and none for constants."""
    for place, kind in kinds:
        if isinstance(kind, tuple):
            yield from _types(((place, index), inner) for index, inner in enumerate(kind))
        elif kind != "constexpr":
            yield place, kind


def _features(kernel: Any, signature: dict[str, str], constants: dict[Any, Any]) -> set[object]:
    """What the front end may take in another way: each type and constant of a variant, and every two of them.

    Of a number, it matters whether it is 0, 1, less than the 16 that a product of tiles needs, and a power of two as
    the sizes of tiles are; of two numbers, whether they are 0, 1 or larger, which branches depend on.
    """
    found = [(place, repr(value)) for place, value in (*signature.items(), *constants.items())]
    kinds = [(place, "larger" if value.isdecimal() and value not in "01" else value) for place, value in found]
    single = {(kernel, place, _kind(value)) for place, value in found}
    return single | {(kernel, pair) for pair in itertools.combinations(kinds, 2)}


def _kind(value: str) -> object:
    if not value.isdecimal() or value in "01":
        return value
    number = int(value)
    return number < 16, number.bit_count() == 1


def _do_compile(kernel: Any, key: str, signature: dict[str, str], device: int, constants: Any, options: Any,
                *rest: Any) -> Any:  # fmt: skip
    if (kernel, key) in SEEN:
        return None
    SEEN.add((kernel, key))
    whole = _layouts(kernel, _types(signature.items()), options)
    features = _features(kernel, signature, constants)
    given = (key, signature, device, constants, options, *rest)
    phase = "whole" if not whole <= WHOLE else "front end" if not features <= TAKEN else "neither"
    PHASES[phase] += 1
    WHOLE.update(whole)
    TAKEN.update(features)
    if phase == "whole":
        return _DO_COMPILE(kernel, *given)
    if phase == "front end":
        knobs.runtime.add_stages_inspection_hook = _front_end_alone
        try:
            return _DO_COMPILE(kernel, *given)  # what has no front end of its own is compiled
        except _Taken:
            pass
        finally:
            knobs.runtime.add_stages_inspection_hook = None
    return None


def _front_end_alone(backend: Any, stages: dict[str, Any], *rest: Any) -> None:
    """Let compiling end where the front end has made a module of Triton's IR and verified it, before any pass."""

    def taken(source: Any, metadata: Any) -> None:
        raise _Taken

    if "ttir" in stages:
        stages["ttir"] = taken


def pytest_configure() -> None:
    triton.runtime.driver.set_active(Hopper())
    triton.JITFunction.run, triton.JITFunction._do_compile = _compile, _do_compile
    launch._capability = lambda device: (9, 0)
    # What a kernel would have written is read as a length by some tests, and what memory held before may be any number.
    torch.empty, torch.empty_like, torch.Tensor.new_empty = torch.zeros, torch.zeros_like, torch.Tensor.new_zeros


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    with contextlib.suppress(Exception):  # of what has not been computed
        yield
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    for name, error in FAILED.items():
        print(f"\n{name} does not compile:\n{error}")
    print("\n{whole} variants compiled by the back end, {front end} more taken by the front end, {neither} by neither"
          .format_map(PHASES))  # fmt: skip
    print("compiled: " + ", ".join(f"{name} {count}" for name, count in sorted(COMPILED.items())))
    session.exitstatus = pytest.ExitCode.TESTS_FAILED if FAILED or not COMPILED else pytest.ExitCode.OK
