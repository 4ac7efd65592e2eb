"""Programs as Python files: written to be read, and loaded again to be run.

A dump is one numbered folder per stage with ``step.py``, a file per module, ``inputs.json`` (the state the step takes)
and ``weights.json`` (which tensor each attribute holds); beside them ``report.md``, the weights of all stages in one
``weights.safetensors``, and ``dump.json``, which lists the files and marks the folder as ours.

Nothing is traced again and nothing is pickled: a file is the graph, node by node, so what runs after loading is what
ran before. State and caches are arguments of ``forward``.
"""

from specgraph.dump.files import FORMAT, MARKER, WEIGHTS, dump, stage_folder, weights_of
from specgraph.dump.load import LoadedStage, Module, load_stage
from specgraph.ir.source import class_name, render

__all__ = ["FORMAT", "MARKER", "WEIGHTS", "LoadedStage", "Module", "class_name", "dump", "load_stage", "render",
           "stage_folder", "weights_of"]  # fmt: skip
