"""A pytest plugin: compile the Triton kernels that tests launch, for a Hopper GPU that need not be there.

    TRITON_INTERPRET=0 python -m pytest -p tests.compile_only tests/kernels/verify

Nothing is launched, so that what tests compute is zeros and whether they pass is not looked at. The run fails if a
kernel does not compile. The interpreter, which the tests use otherwise, takes much that the compiler refuses: a
variable whose shape changes in a branch, for one.

Variants are compiled behind the last test: as few as have everything that any of them has. For Triton's front end,
which refuses such things, that is every type and kind of constant of an argument, and every two that meet in a variant
(:func:`_features`). For its back end, which takes most of the time of a variant, it is every type of an argument, every
two types in one kernel, and every number of warps and stages (:func:`_layouts`).
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple

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


class Variant(NamedTuple):
    """What tests have launched: the arguments of Triton's ``_do_compile``, and what :func:`_layouts` and
    :func:`_features` say of them."""

    given: tuple[Any, ...]
    layouts: set[object]
    features: set[object]


LAUNCHED: dict[Any, dict[str, Variant]] = {}
"""The variants of every kernel, by Triton's key."""


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


def _layouts(types: Iterable[tuple[object, str]], options: Any) -> set[object]:
    """What the back end may compile in another way: the type of each tensor, every two types, warps and stages.

    A type is that of a tensor's elements or of a number. Which arguments two types belong to matters to the front end,
    which has made the conversions between them.
    """
    types = list(types)
    tensors = {(place, kind) for place, kind in types if kind.startswith("*")}
    met = itertools.combinations_with_replacement(sorted({kind for _, kind in types}), 2)
    return {*tensors, *met, (options.num_warps, options.num_stages)}


def _types(kinds: Iterable[tuple[Any, Any]]) -> Iterator[tuple[object, str]]:
    """The types of arguments by their places, of the elements where an argument is a tuple, and none for constants."""
    for place, kind in kinds:
        if isinstance(kind, tuple):
            yield from _types(((place, index), inner) for index, inner in enumerate(kind))
        elif kind != "constexpr":
            yield place, kind


def _features(signature: dict[str, str], constants: dict[Any, Any]) -> set[object]:
    """What the front end may take in another way: each type and constant of a variant, and every two of them.

    Of a number, it matters whether it is 0, 1, less than the 16 that a product of tiles needs, and a power of two as
    the sizes of tiles are; of two numbers, whether they are 0, 1 or larger, which branches depend on.
    """
    found = [(place, repr(value)) for place, value in (*signature.items(), *constants.items())]
    kinds = [(place, "larger" if value.isdecimal() and value not in "01" else value) for place, value in found]
    return {(place, _kind(value)) for place, value in found} | {*itertools.combinations(kinds, 2)}


def _kind(value: str) -> object:
    if not value.isdecimal() or value in "01":
        return value
    number = int(value)
    return number < 16, number.bit_count() == 1


def _do_compile(kernel: Any, key: str, signature: dict[str, str], device: int, constants: Any, options: Any,
                *rest: Any) -> None:  # fmt: skip
    variants = LAUNCHED.setdefault(kernel, {})
    if key not in variants:
        layouts = _layouts(_types(signature.items()), options)
        given = (key, signature, device, constants, options, *rest)
        variants[key] = Variant(given, layouts, _features(signature, constants))


def _cover(needed: set[object], sets: dict[str, set[object]]) -> list[str]:
    """The keys of some of the sets, which have everything that is needed: the one with the most first."""
    missing, taken = set(needed), []
    while missing:
        best = max(sets, key=lambda key: len(sets[key] & missing))
        missing -= sets[best]
        taken.append(best)
    return taken


def _compile_all(kernel: Any, variants: dict[str, Variant]) -> None:
    layouts, features = ({key: variant[place] for key, variant in variants.items()} for place in (1, 2))
    whole = _cover(set().union(*layouts.values()), layouts)
    taken = set().union(*(features[key] for key in whole))
    alone = _cover(set().union(*features.values()) - taken, features)
    for key in whole:
        _DO_COMPILE(kernel, *variants[key].given)
    knobs.runtime.add_stages_inspection_hook = _front_end_alone
    try:
        for key in alone:
            with contextlib.suppress(_Taken):  # what has no front end of its own is compiled
                _DO_COMPILE(kernel, *variants[key].given)
    finally:
        knobs.runtime.add_stages_inspection_hook = None
    left = len(variants) - len(whole) - len(alone)
    PHASES.update({"whole": len(whole), "front end": len(alone), "neither": left})


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
    for kernel, variants in LAUNCHED.items():
        try:
            _compile_all(kernel, variants)
        except Exception:
            FAILED.setdefault(f"{kernel.fn.__module__}.{kernel.fn.__name__}", traceback.format_exc())
    for name, error in FAILED.items():
        print(f"\n{name} does not compile:\n{error}")
    print("\n{whole} variants compiled by the back end, {front end} more taken by the front end, {neither} by neither"
          .format_map(PHASES))  # fmt: skip
    print("compiled: " + ", ".join(f"{name} {count}" for name, count in sorted(COMPILED.items())))
    session.exitstatus = pytest.ExitCode.TESTS_FAILED if FAILED or not COMPILED else pytest.ExitCode.OK
