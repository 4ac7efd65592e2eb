"""A pytest plugin: compile the Triton kernels that tests launch, for a Hopper GPU that need not be there.

    TRITON_INTERPRET=0 python -m pytest -p tests.compile_only tests/kernels/verify

Nothing is launched, so that what tests compute is zeros and whether they pass is not looked at. The run fails if a
kernel does not compile. The interpreter, which the tests use otherwise, takes much that the compiler refuses: a
variable whose shape changes in a branch, for one.

Triton's front end, which refuses such things, takes a variant of a kernel if one of its arguments has a new type or
constant, or two of them have types or constants that have not met (:func:`_features`). Its back end, which takes most
of the time of a variant, compiles those with new types of the arguments or a new number of warps and stages; the others
differ from these in constants alone.
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
"""What the back end has compiled: a kernel, and the types of its arguments or the number of warps and stages."""
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


def _types(kinds: Iterable[Any]) -> Iterator[str]:
    """The types of arguments, of the elements where an argument is a tuple, and none for constants."""
    for kind in kinds:
        if isinstance(kind, tuple):
            yield from _types(kind)
        elif kind != "constexpr":
            yield kind


def _features(kernel: Any, signature: dict[str, str], constants: dict[Any, Any]) -> set[object]:
    """What the front end may take in another way: each type and constant of a variant, and every two of them.

    Of two numbers, it matters whether they are 0, 1 or larger: branches and shapes depend on that, and sizes by
    themselves.
    """
    found = [(place, repr(value)) for place, value in (*signature.items(), *constants.items())]
    kinds = [(place, "larger" if value.isdecimal() and value not in "01" else value) for place, value in found]
    return {(kernel, one) for one in found} | {(kernel, pair) for pair in itertools.combinations(kinds, 2)}


def _do_compile(kernel: Any, key: str, signature: dict[str, str], device: int, constants: Any, options: Any,
                *rest: Any) -> Any:  # fmt: skip
    if (kernel, key) in SEEN:
        return None
    SEEN.add((kernel, key))
    whole = {(kernel, tuple(_types(signature.values()))), (kernel, options.num_warps, options.num_stages)}
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
