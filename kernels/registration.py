"""How an op that has been defined gets its forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Form = Callable[..., Any]


def register(name: str, *, cpu: Form, cuda: Form, fake: Form) -> None:
    """Register the forms of ``specgraph::name``: the reference, that of a GPU, and the one that knows shapes only.

    The definition stays with ``torch.library.define`` at the head of the op's file, where its schema can be read.
    """
    torch.library.impl(f"specgraph::{name}", "cpu")(cpu)
    torch.library.impl(f"specgraph::{name}", "cuda")(cuda)
    torch.library.register_fake(f"specgraph::{name}")(fake)
