"""One thread per test process: small models run slower on two threads than on one, and results repeat.

On a CPU, decoders run eagerly, in examples as well, because compiling one takes seconds.

Without a GPU, Triton kernels run in Triton's interpreter, which must be chosen before triton is imported.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests compile hundreds of decoders for a few tokens each. Those that are about torch.compile switch it on.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import specgraph.compiler.compile
import specgraph.drafters.draft_model
import specgraph.drafters.mtp_graphs
import specgraph.drafters.shifted
import tests.interpreter

torch.set_num_threads(1)

if os.environ.get("TRITON_INTERPRET") == "1":
    tests.interpreter.speed_up()


SLOWEST = ("test_compile.py", "test_distribution.py", "test_architectures.py", "test_grammar.py", "test_k_by_load.py")
"""Files whose single tests take up to minutes. They run first: if one of them began last, the other processes would
have nothing left to do meanwhile."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first, the others in the order in which they were found."""
    items.sort(key=lambda item: SLOWEST.index(item.path.name) if item.path.name in SLOWEST else len(SLOWEST))


def pytest_collection_finish() -> None:
    """Leave what was imported out of the collections of garbage, and make them rarer.

    Graphs are made of many small objects, and a tenth to a fifth of the time of a compilation went to collections.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _once_per_object(function: Callable[..., Any]) -> Callable[..., Any]:
    """By the first argument, which goes with the same further ones in every call."""
    cache: dict[int, tuple[object, Any]] = {}

    @functools.wraps(function)
    def cached(argument: object, *rest: object) -> Any:
        if id(argument) not in cache:
            cache[id(argument)] = (argument, function(argument, *rest))
        return cache[id(argument)][1]

    return cached


@pytest.fixture
def torch_compile() -> Iterator[None]:
    """``torch.compile`` compiles, whatever the environment variable above says."""
    with torch._dynamo.config.patch(disable=False):
        yield


_TRACE = _once_per_object(specgraph.compiler.compile.trace)
_EXPORT = _once_per_object(specgraph.drafters.shifted.export_shifted)
_EXPORT_MODULE = _once_per_object(specgraph.drafters.mtp_graphs.export)


@pytest.fixture(scope="module")
def cached_traces() -> Iterator[None]:
    """Trace every model and head once per session, in the files that ask for it: it is most of a compilation, and has
    tests of its own.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specgraph.compiler.compile, "trace", _TRACE)
        patch.setattr(specgraph.drafters.draft_model, "trace", _TRACE)
        patch.setattr(specgraph.drafters.shifted, "export_shifted", _EXPORT)
        patch.setattr(specgraph.drafters.mtp_graphs, "export", _EXPORT_MODULE)
        yield
