"""One thread per test process: small models run slower on two threads than on one, and results repeat.

On a CPU, decoders run eagerly, in examples as well, because compiling one takes seconds. ``test_inductor.py`` compiles
one of each kind, and CI runs the demo, which compiles.

Without a GPU, Triton kernels run in Triton's interpreter, which must be chosen before triton is imported.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Hashable, Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests compile hundreds of decoders for a few tokens each. Those that are about torch.compile switch it on.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import tests.interpreter
from specgraph.config.groups import conf_files
from specgraph.ir import kept

torch.set_num_threads(1)

if os.environ.get("TRITON_INTERPRET") == "1":
    tests.interpreter.speed_up()


SLOWEST = ("test_compile.py", "test_distribution.py", "test_architectures.py", "test_grammar.py", "test_k_by_load.py")
"""Files whose single tests take up to minutes. They run first: if one of them began last, the other processes would
have nothing left to do meanwhile."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first, the others in the order in which they were found."""
    items.sort(key=lambda item: SLOWEST.index(item.path.name) if item.path.name in SLOWEST else len(SLOWEST))


def pytest_collectstart() -> None:
    """Collect no garbage while files are imported, since what they make stays: that took a fifth of this time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what was imported out of the collections of garbage, and make them rarer.

    Graphs are made of many small objects, and a tenth to a fifth of the time of a compilation went to collections.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


def pytest_sessionfinish() -> None:
    """pytest collects garbage five times at the end, and what tests keep, such as traces, is a great deal by then."""
    gc.freeze()


@pytest.fixture
def torch_compile() -> Iterator[None]:
    """``torch.compile`` compiles, whatever the environment variable above says."""
    with torch._dynamo.config.patch(disable=False):
        yield


kept.MAX_EXPORTS = 1 << 20
"""Tests compile equal models again and again, and need every export as long as they last. What exports is imported
behind this."""


importlib.import_module("specgraph.drafters.dflash").RANDOM_LAYERS = 2
"""Random block heads have five layers, as published ones do, of which each takes a tenth of a second to export, for
every K. Two tell all that five do."""


class _Hashed:
    """The key of an export, which has thousands of names, with its hash, which each of several look-ups asks for."""

    def __init__(self, key: Hashable) -> None:
        self.key, self.hash = key, hash(key)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and self.hash == other.hash and self.key == other.key


_key_of = kept.key_of
kept.key_of = lambda module, *rest: _Hashed(_key_of(module, *rest))


compose = importlib.import_module("specgraph.config.compose")  # its package has a function of this name
_defaults_list = compose._defaults_list
_LISTS: dict[Hashable, Any] = {}


def _kept_list(repository: Any, overrides: list[Any]) -> Any:
    """Which files of ``conf`` are merged for equal choices. Hydra takes a third of a composition to find that."""
    others = {path: keys for path, keys in repository.files.items() if path != compose.GIVEN}
    if others.keys() != conf_files().keys() or any(keys is not conf_files()[path] for path, keys in others.items()):
        return _defaults_list(repository, overrides)
    key = repr(repository.files[compose.GIVEN]), *((line.input_line, line.key_or_group) for line in overrides)
    if key not in _LISTS:
        _LISTS[key] = _defaults_list(repository, overrides)
    return _LISTS[key]


compose._defaults_list = _kept_list
