"""How modules go through ``torch.compile``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx._lazy_graph_module import _LazyGraphModule

from specgraph import kernels


class _OurOps(CustomGraphPass):
    """Changes nothing. It makes what Inductor finds in its caches depend on the sources of our ops.

    Compiled code calls an op with all arguments of its schema, and relies on the shapes and strides that its fake
    implementation gives. Inductor keeps such code on disk, and knows an op by its name alone. So without this, another
    version of specgraph would run code that was compiled for the ops of this one.
    """

    def __call__(self, graph: fx.Graph) -> None:
        pass

    def uuid(self) -> bytes:
        """Equal for equal sources."""
        return _digest()


@functools.cache
def _digest() -> bytes:
    folder = Path(kernels.__file__).parent
    digest: bytes = get_hash_for_files(tuple(str(path) for path in sorted(folder.rglob("*.py"))))
    return digest


def compile_module(module: nn.Module) -> Any:
    """``module`` compiled by Inductor, for sizes that may change, when it is first called.

    Calls do not look whether its weights are of the same shapes and dtypes as before, which takes some hundred guards:
    :class:`~specgraph.runtime.watch.Watch` has done so for the model, and no pass changes a module that runs.
    """
    if isinstance(module, fx.GraphModule):
        _LazyGraphModule.force_recompile(module)  # Dynamo cannot trace a forward that generates its own code
    options: dict[str, Any] = {
        "post_grad_custom_pre_pass": _OurOps(),
        "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe,
    }
    return torch.compile(module, dynamic=True, options=options)
