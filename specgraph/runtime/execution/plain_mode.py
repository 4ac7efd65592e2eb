"""The modes of PyTorch, such as autocast, in which a decoder runs, whatever its caller has entered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def plain_mode(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Neither autocast, nor inference mode, nor gradients: a caller's modes must not change tokens or the state.

    ``device`` is the current one inside: kernels are launched there, whichever GPU the caller has chosen. Nothing is
    entered where all of this is so already, since that takes a tenth as long.
    """
    changed = torch.is_inference_mode_enabled() or torch.is_grad_enabled() or torch.is_autocast_enabled(device.type)
    elsewhere = device.type == "cuda" and torch.cuda.current_device() != device.index
    return _entered_plain_mode(device) if changed or elsewhere else contextlib.nullcontext()


@contextlib.contextmanager
def _entered_plain_mode(device: torch.device) -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False), current(device):
        yield


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """``device`` as the current GPU, if it is one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
