"""Make Triton's interpreter faster without changing what it computes.

The interpreter replaces the functions of ``triton.language`` before it runs a kernel, and again whenever the kernel
calls another ``@triton.jit`` function. From the second time on it finds them replaced already, after it has walked over
every attribute of the language for about 2 ms, which was more than half of the time of the kernels in
``kernels/verify``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter


def patch_once_per_launch() -> None:
    """Let a launch replace the language once for every module whose functions take part in it."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_new(function: Callable[..., Any]) -> object:
        module = id(function.__globals__)
        if module in patched:
            return interpreter._LangPatchScope()
        patched.add(module)
        return patch(function)

    def launch_anew(self: object, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_new, launch_anew
