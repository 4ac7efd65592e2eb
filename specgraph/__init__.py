"""specgraph: a compiler for speculative decoding.

Names are imported when they are first used, so that the help of the command line does not wait for torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

_CLONE = Path(__file__).parents[1]
if importlib.util.find_spec("specgraph.conf") is None and (_CLONE / "conf" / "config.yaml").is_file():
    # Python runs in a clone, whose folder hides the installed package; conf, passes and kernels are beside it there.
    __path__.append(str(_CLONE))

if TYPE_CHECKING:
    from specgraph.compiler.compile import compile_speculative as compile_speculative
    from specgraph.dropin.attach import attach as attach
    from specgraph.dropin.attach import custom_generate as custom_generate
    from specgraph.dropin.attach import detach as detach
    from specgraph.dump import load_dump as load_dump
    from specgraph.errors import BusyError as BusyError
    from specgraph.errors import ConfigError as ConfigError
    from specgraph.errors import InputError as InputError
    from specgraph.errors import NumericsError as NumericsError
    from specgraph.errors import PassError as PassError
    from specgraph.errors import SpecgraphError as SpecgraphError
    from specgraph.errors import SpecgraphWarning as SpecgraphWarning
    from specgraph.errors import UnknownStageError as UnknownStageError
    from specgraph.errors import UnsupportedModelError as UnsupportedModelError
    from specgraph.errors import VerificationError as VerificationError
    from specgraph.ir.program import Program as Program
    from specgraph.runtime.decoder import SpeculativeDecoder as SpeculativeDecoder
    from specgraph.runtime.outputs.output import Event as Event
    from specgraph.runtime.outputs.output import GenerateOutput as GenerateOutput
    from specgraph.runtime.outputs.output import Stream as Stream
    from specgraph.runtime.outputs.output import StreamChunk as StreamChunk
    from specgraph.runtime.outputs.stats import Capacity as Capacity
    from specgraph.runtime.outputs.stats import SessionStats as SessionStats
    from specgraph.runtime.outputs.stats import Stats as Stats
    from specgraph.runtime.scoring import ScoreOutput as ScoreOutput
    from specgraph.runtime.session import Session as Session
    from specgraph.schemes.load import load as load
    from specgraph.schemes.quantise import quantise as quantise

_HOMES = {
    "compiler.compile": ("compile_speculative",),
    "dropin.attach": ("attach", "custom_generate", "detach"),
    "dump": ("load_dump",),
    "errors": (
        "BusyError", "ConfigError", "InputError", "NumericsError", "PassError", "SpecgraphError", "SpecgraphWarning",
        "UnknownStageError", "UnsupportedModelError", "VerificationError",
    ),
    "ir.program": ("Program",),
    "runtime.decoder": ("SpeculativeDecoder",),
    "runtime.outputs.output": ("Event", "GenerateOutput", "Stream", "StreamChunk"),
    "runtime.outputs.stats": ("Capacity", "SessionStats", "Stats"),
    "runtime.scoring": ("ScoreOutput",),
    "runtime.session": ("Session",),
    "schemes.load": ("load",),
    "schemes.quantise": ("quantise",),
}  # fmt: skip
"""The names of the package, by the modules in which they are."""
__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    if name == "Room":
        warnings.warn("specgraph.Room is called Capacity now; use that name.", DeprecationWarning, stacklevel=2)
        name = "Capacity"
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"specgraph.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
