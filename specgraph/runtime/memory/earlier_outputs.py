"""What a decoder has made for earlier requests, as a source of drafts for later ones."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from specgraph.ir.program import Program
from specgraph.kernels.state import EARLIER, SEPARATOR, buffers_of


class EarlierOutputs:
    """The last tokens of outputs, in the order in which these ended, with a separator behind each output.

    Requests of all sessions add to it, from any thread.
    """

    def __init__(self, program: Program) -> None:
        """``program`` says how many tokens it reads, none if it does not ask for them."""
        most = sum(int(buffer.shape[0]) for buffer in buffers_of(program.inputs.get(EARLIER, ())))
        self._tokens = deque([SEPARATOR] * most, most)
        self._lock = threading.Lock()

    def add(self, tokens: Iterable[int]) -> None:
        """An output has ended."""
        with self._lock:
            self._tokens.extend([*tokens, SEPARATOR])

    def forget(self) -> None:
        """There were no outputs."""
        with self._lock:
            self._tokens.extend([SEPARATOR] * len(self._tokens))

    def tokens(self) -> Tensor:
        """All of them, int64 ``[E]`` on the host, separators in front where there are fewer."""
        with self._lock:
            return torch.tensor([*self._tokens], dtype=torch.int64, device="cpu")
