"""specgraph: a compiler for speculative decoding.

Names are imported when they are first used, so that the command line's help does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specgraph.compile import compile_speculative
    from specgraph.decoder import SpeculativeDecoder
    from specgraph.dump import load_stage as load_dump
    from specgraph.errors import (
        ConfigError,
        InputError,
        NumericsError,
        PassError,
        SpecgraphError,
        SpecgraphWarning,
        UnsupportedModelError,
        VerificationError,
    )
    from specgraph.outputs import GenerateOutput, Stats, StreamChunk
    from specgraph.program import Program

__all__ = [
    "ConfigError",
    "GenerateOutput",
    "InputError",
    "NumericsError",
    "PassError",
    "Program",
    "SpecgraphError",
    "SpecgraphWarning",
    "SpeculativeDecoder",
    "Stats",
    "StreamChunk",
    "UnsupportedModelError",
    "VerificationError",
    "compile_speculative",
    "load_dump",
]

_HOMES = {
    "GenerateOutput": "outputs",
    "Program": "program",
    "SpeculativeDecoder": "decoder",
    "Stats": "outputs",
    "StreamChunk": "outputs",
    "compile_speculative": "compile",
    "load_dump": "dump",
}
_NAMES = {"load_dump": "load_stage"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"specgraph.{_HOMES.get(name, 'errors')}")
    return getattr(module, _NAMES.get(name, name))


def __dir__() -> list[str]:
    return [*globals(), *__all__]
