"""specgraph: a compiler for speculative decoding.

Names are imported when they are first used, so that the help of the command line does not wait for torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

_CLONE = Path(__file__).parents[1]
if importlib.util.find_spec("specgraph.conf") is None and (_CLONE / "conf" / "config.yaml").is_file():
    # Python runs in a clone, whose folder hides the installed package; conf, passes and kernels are beside it there.
    __path__.append(str(_CLONE))

if TYPE_CHECKING:
    from specgraph.compiler.compile import compile_speculative
    from specgraph.dropin.attach import attach, custom_generate, detach
    from specgraph.dump import load_stage as load_dump
    from specgraph.errors import (
        BusyError,
        ConfigError,
        InputError,
        NumericsError,
        PassError,
        SpecgraphError,
        SpecgraphWarning,
        UnknownStageError,
        UnsupportedModelError,
        VerificationError,
    )
    from specgraph.ir.program import Program
    from specgraph.runtime.decoder import SpeculativeDecoder
    from specgraph.runtime.outputs.output import GenerateOutput, Stream, StreamChunk
    from specgraph.runtime.outputs.stats import Room, SessionStats, Stats
    from specgraph.runtime.scoring import ScoreOutput
    from specgraph.runtime.session import Session

__all__ = [
    "BusyError",
    "ConfigError",
    "Event",
    "GenerateOutput",
    "InputError",
    "NumericsError",
    "PassError",
    "Program",
    "Room",
    "ScoreOutput",
    "Session",
    "SessionStats",
    "SpecgraphError",
    "SpecgraphWarning",
    "SpeculativeDecoder",
    "Stats",
    "Stream",
    "StreamChunk",
    "UnknownStageError",
    "UnsupportedModelError",
    "VerificationError",
    "attach",
    "compile_speculative",
    "custom_generate",
    "detach",
    "load_dump",
]

_HOMES = {
    "Event": "runtime.outputs.output",
    "GenerateOutput": "runtime.outputs.output",
    "Program": "ir.program",
    "Room": "runtime.outputs.stats",
    "ScoreOutput": "runtime.scoring",
    "Session": "runtime.session",
    "SessionStats": "runtime.outputs.stats",
    "SpeculativeDecoder": "runtime.decoder",
    "Stats": "runtime.outputs.stats",
    "Stream": "runtime.outputs.output",
    "StreamChunk": "runtime.outputs.output",
    "attach": "dropin.attach",
    "compile_speculative": "compiler.compile",
    "custom_generate": "dropin.attach",
    "detach": "dropin.attach",
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
