"""The stages of a compilation by name, and what is said of a name that none of them has."""

from __future__ import annotations

from specgraph.config.errors import did_you_mean
from specgraph.errors import UnknownStageError
from specgraph.ir.program import Program


class Stages(dict[str, Program]):
    """Programs by the names of their stages, in the order of the passes: a dictionary whose ``[]`` helps with names."""

    def __missing__(self, name: object) -> Program:
        raise UnknownStageError(f"There is no stage {name!r}{did_you_mean(name, self)}; there are {', '.join(self)}.")
