"""Every name that specgraph uses of torch and transformers though it is private or undocumented there.

They are there in torch 2.11 to 2.13 and in transformers 5.17 to 5.23, which setup.cfg admits, unless a comment says
otherwise. Whoever admits another version looks here first.

Some attributes of public objects cannot come from here, and stand where they are used: ``OpOverload._schema``,
``Tensor._version``, the dictionaries ``_modules``, ``_parameters`` and ``_buffers`` of a module and its
``_non_persistent_buffers_set``, ``_is_impure`` of one in a graph, ``_erased`` of a node, ``torch.no_grad``'s ``prev``,
``_attn_implementation`` and ``_experts_implementation`` of a configuration, and of a model of transformers
``_is_hf_initialized``, ``_keep_in_fp32_modules`` (and ``_strict``), ``_keys_to_ignore_on_load_unexpected`` and
``_weight_conversions``. Kernels import nothing of ours, so ``kernels/`` names ``torch._ops.OpOverload`` and
``torch._check_value`` itself.
"""

# Every import is for other modules.
# ruff: noqa: F401

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

# Tells whether an op is defined by others that PyTorch calls in its place; and a context in which a subclass of Tensor
# runs functions as a plain tensor, and not by its own method again.
from torch._C import DisableTorchFunctionSubclass, DispatchKey

# The mode of fake tensors, since a second mode would refuse them.
from torch._guards import detect_fake_mode

# What traced nodes call. PyTorch documents these classes under the name of a private module.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

# Tensors that have shapes and no memory, as torch.export returns them, and the mode in which a graph runs on them.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# ``proxy.CapturedTraceback`` notes where a node comes from, where there is one. We note the lines of the model alone.
from torch.fx import proxy

# ``GraphModule`` generates its code at once. Most copies of a module are never called, and this one waits.
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule

# torch.fx replaces methods of ``torch.nn.Module`` for all threads. We limit that to the thread that exports.
from torch.fx._symbolic_trace import _Patcher as Patcher

# The name under which the source of a dump can call a function.
from torch.fx.node import _get_qualified_name as qualified_name

# Nested results as flat lists and back. There is no public module for it.
from torch.utils import _pytree as pytree

# Sees the ATen calls of a function that runs.
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    # The settings that switch off compilation, and the cache of fake tensors, which costs a quarter of an export and is
    # seldom hit.
    from torch._dynamo import config as dynamo_config

    # Held while a model is exported or a region compiled, since Dynamo might compile in another thread.
    from torch._dynamo.convert_frame import compile_lock

    # Where a symbolic size comes from, which a condition on it has to name.
    from torch._dynamo.source import ConstantSource

    # What Inductor asks for the mode of its inputs.
    from torch._guards import TracingContext, tracing

    # Compiles C++ while something else runs.
    from torch._inductor.async_compile import AsyncCompile

    # Compiles C++ for this CPU, once for each source, and loads it.
    from torch._inductor.codecache import CppCodeCache

    # Inductor as a function of a graph and its inputs, to which settings can be given.
    from torch._inductor.compile_fx import compile_fx

    # Makes the caches of Inductor depend on the sources of our ops.
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    # Notes for each node of an export what is known of its tensor, of which the ways in memory take 6% of the time.
    from torch.fx.experimental import proxy_tensor

    # The ATen calls of a function as a graph. The public ``make_fx`` of torch.fx.experimental is this one.
    from torch.fx.experimental.proxy_tensor import make_fx

    # Symbolic sizes, and whether a condition on them holds for certain.
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, statically_known_true

    # How the names in files become those of a model and the other way round, and the order in which they are taken.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import dot_natural_key, rename_source_key, revert_weight_conversion

    # Collects hidden states in another way while it takes the process to be compiling.
    from transformers.utils import output_capturing

# Copies tensors to others in few launches, where ``copy_`` takes one for each.
foreach_copy = torch._foreach_copy_

_LATE = {
    "AsyncCompile": "torch._inductor.async_compile",
    "CppCodeCache": "torch._inductor.codecache",
    "ConstantSource": "torch._dynamo.source",
    "CustomGraphPass": "torch._inductor.custom_graph_pass",
    "DimDynamic": "torch.fx.experimental.symbolic_shapes",
    "ShapeEnv": "torch.fx.experimental.symbolic_shapes",
    "TracingContext": "torch._guards",
    "compile_fx": "torch._inductor.compile_fx",
    "compile_lock": "torch._dynamo.convert_frame",
    "dot_natural_key": "transformers.core_model_loading",
    "dynamo_config": "torch._dynamo.config",
    "get_hash_for_files": "torch._inductor.custom_graph_pass",
    "get_model_conversion_mapping": "transformers.conversion_mapping",
    "make_fx": "torch.fx.experimental.proxy_tensor",
    "output_capturing": "transformers.utils.output_capturing",
    "proxy_tensor": "torch.fx.experimental.proxy_tensor",
    "rename_source_key": "transformers.core_model_loading",
    "revert_weight_conversion": "transformers.core_model_loading",
    "statically_known_true": "torch.fx.experimental.symbolic_shapes",
    "tracing": "torch._guards",
}
"""The modules of the names above that are imported when they are asked for. Most take a second."""

IN_C = "torch._C"
"""The module of PyTorch's classes whose state is in C++, where nobody can compare it."""


def __getattr__(name: str) -> Any:
    """A name that is imported late, or the module itself if it has that name."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LATE[name])
    return getattr(module, name, module)
