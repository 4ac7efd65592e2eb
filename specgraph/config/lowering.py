"""Chooses the lowering that ``lowering=auto`` stands for on a device, with the reason."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from specgraph.config.schema import Config, LoweringConfig

if TYPE_CHECKING:
    import torch

DISABLED = "TORCH_COMPILE_DISABLE"
"""PyTorch's own switch, an environment variable: with the value 1 ``torch.compile`` compiles nothing."""


def settle_lowering(config: Config, device: torch.device | str, dtype: torch.dtype | None = None) -> Config:
    """A copy in which all keys of ``lowering`` have the values that hold for a target on ``device``."""
    given = config.lowering
    name, _ = choose_lowering(given.name, device, dtype)
    captured = name == "gpu" and _is_fast(device, dtype)
    settled = LoweringConfig(
        name=name,
        kernels=name == "gpu" if given.kernels is None else given.kernels,
        remainder=given.remainder or ("inductor" if name == "inductor" else "eager"),
        cuda_graph=captured if given.cuda_graph is None else given.cuda_graph,
    )
    return dataclasses.replace(config, lowering=settled)


def choose_lowering(name: str, device: torch.device | str, dtype: torch.dtype | None = None) -> tuple[str, str]:
    """The lowering that ``name`` stands for, and the reason in words.

    In float64, which is used for checks, ``auto`` means eager, because the kernels leave that dtype to the reference.
    """
    if name != "auto":
        return name, f"lowering={name} was asked for"
    if str(dtype) == "torch.float64":
        return "eager", "float64 is for checking"
    if _is_fast(device, dtype):
        return "gpu", "the target is on a GPU"
    missing = missing_for_inductor()
    return ("eager", missing) if missing is not None else ("inductor", f"there is a C++ compiler, {compiler()}")


def missing_for_inductor() -> str | None:
    """The reason why ``torch.compile`` cannot compile for a CPU on this machine; None if it can."""
    if os.environ.get(DISABLED) == "1":
        return f"{DISABLED}=1 switches torch.compile off"
    if shutil.which(compiler()) is None:
        return f"there is no C++ compiler ({compiler()}); install one, or name one in the environment variable CXX"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return f"a C++ compiler needs Python.h, which is not in {headers}; install the headers of Python (python3-dev)"
    return None


def compiler() -> str:
    """The C++ compiler that Inductor calls."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def _is_fast(device: torch.device | str, dtype: torch.dtype | None) -> bool:
    return str(device).startswith("cuda") and str(dtype) != "torch.float64"
