"""Writes programs as Python files that a person can read, and loads these files again to run them.

A dump has one numbered folder per stage. The folder holds ``step.py``, a file for each module, ``inputs.json``, which
describes the state that the step takes, ``weights.json``, which says what tensor each attribute is, and ``nodes.json``,
which lists the nodes of all graphs for programs that read a dump without running it: what each calls and reads, the
shape and the bytes of its value, and the pass that made it. Beside these folders, ``report.md`` is the report of the
compilation, and ``compilation.json`` has the same as plain values, with what a step must read. ``weights.safetensors``
holds the weights of all stages, and ``dump.json`` lists the files and marks the folder as a dump.

Nothing is traced again, and nothing is pickled. A file is the graph, node by node, so the same nodes run after loading
as before. State and caches are arguments of ``forward``.
"""

from specgraph.dump.files import FORMAT, MARKER, NODES, RECORD, WEIGHTS, check_folder, dump, stage_folder, weights_of
from specgraph.dump.load import LoadedStage, Module, load_stage
from specgraph.ir.source import class_name, render

load_dump = load_stage
"""The name of :func:`load_stage` in the package."""

__all__ = ["FORMAT", "MARKER", "NODES", "RECORD", "WEIGHTS", "LoadedStage", "Module", "check_folder", "class_name",
           "dump", "load_dump", "load_stage", "render", "stage_folder", "weights_of"]  # fmt: skip
