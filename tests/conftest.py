"""One thread per test process: small models run slower on two threads than on one, and results repeat."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

import specgraph.compile
from specgraph.tracing import TracedModel, trace

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cached_traces() -> Iterator[None]:
    """Trace every model object once per session: tracing is most of a compilation, and has tests of its own."""
    original = specgraph.compile.trace
    cache: dict[int, tuple[object, TracedModel]] = {}

    @functools.wraps(trace)
    def cached(model: object) -> TracedModel:
        if id(model) not in cache:
            cache[id(model)] = (model, original(model))  # type: ignore[arg-type]
        return cache[id(model)][1]

    specgraph.compile.trace = cached
    yield
    specgraph.compile.trace = original
