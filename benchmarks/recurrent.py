"""Cases of recurrent ops: each with the arguments that a target gives it, behind a state and a few cached rows.

Which ops a target has, and their shapes, does not follow from its configuration in the same way for any two models. So
the target runs once with fake tensors, which takes seconds and no memory, and what it calls is noted. The buffers are
those that the op declares (:data:`~specgraph.kernels.state.RECURRENT`), and the bytes follow from them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig

from benchmarks.case import Case
from specgraph.bench.timing import Call
from specgraph.compat import FakeTensorMode, TorchDispatchMode
from specgraph.frontend.recurrent import HOOKS, hooked_recurrence
from specgraph.frontend.tracing import hooked
from specgraph.kernels.ops import find
from specgraph.kernels.recurrent.arguments import CHUNK
from specgraph.kernels.state import RECURRENT, Buffer

CACHED = (CHUNK - 1) // 2
"""The settled rows behind the last boundary of the state in a step: between two of them there are so many on average.
"""
Operands = Sequence[Tensor | None]


@dataclass(frozen=True)
class RecurrentCall:
    """How a target calls a recurrent op.

    Attributes:
        op: the op without memory, which stands in a traced model.
        operands: its arguments for one sequence, as fake tensors; None for those that are left out.
        options: its keywords.
    """

    op: Callable[..., Any]
    operands: tuple[Tensor | None, ...]
    options: Mapping[str, Any]

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for two calls which take the same time."""
        shapes = (None if x is None else (*x.shape, x.dtype) for x in self.operands)
        return self.op, *shapes, *sorted(self.options.items())


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that notes the calls of recurrent ops, each of those that are alike once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[object, RecurrentCall] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in RECURRENT:
            call = RecurrentCall(func, args, given)
            self.found.setdefault(call.key, call)
        return func(*args, **given)


def recurrent_calls(config: PretrainedConfig, dtype: torch.dtype) -> list[RecurrentCall]:
    """The distinct calls of recurrent ops in a causal LM of this configuration, in the order of its layers.

    Before transformers 5.23, models repeat keys for each head that shares them. The calls then have the repeated keys,
    though a compiled step leaves the repetition out.
    """
    text = config.get_text_config()
    if not _calls_hooked_functions(text):
        return []
    with FakeTensorMode(), torch.no_grad():
        model: Any = hooked(AutoModelForCausalLM.from_config(text, dtype=dtype))
        with hooked_recurrence(model), _Noting() as noting:
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    return [*noting.found.values()]


def _calls_hooked_functions(text: PretrainedConfig) -> bool:
    """Whether the file of a causal LM names a function that tracing replaces. So other models need not be built."""
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    source = sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(text)].__module__]
    return any(hasattr(source, name) for name in HOOKS)


def step_case(call: RecurrentCall, batch: int, rows: int, device: torch.device) -> Case:
    """A step with ``rows`` rows of each sequence, all but the first of them drafts. It folds nothing into a state."""
    where = f"batch {batch}, {rows} rows, {CACHED} behind a boundary"
    return _case(call, where, _Rows(batch, rows, CHUNK + CACHED, 1), device)


def prompt_case(call: RecurrentCall, rows: int, device: torch.device) -> Case:
    """A chunk of one sequence's prompt, which begins at a boundary of the state."""
    return _case(call, f"batch 1, {rows} rows of a prompt", _Rows(1, rows, CHUNK, rows), device)


@dataclass(frozen=True)
class _Rows:
    """The rows of a call: of so many sequences, behind ``begin`` settled ones, and how many of them are settled."""

    batch: int
    rows: int
    begin: int
    settled: int

    def span(self, device: torch.device) -> Tensor:
        """Int64 ``[batch, 5]``, see :class:`~specgraph.kernels.recurrent.span.RecurrentSpan`."""
        own = [[row, self.begin, self.begin, self.rows, self.settled] for row in range(self.batch)]
        return torch.tensor(own, device=device)

    @property
    def folds(self) -> bool:
        """Whether a boundary lies behind settled rows of the call, so that states are written."""
        return (self.begin + self.settled) // CHUNK > self.begin // CHUNK


def _case(call: RecurrentCall, where: str, given: _Rows, device: torch.device) -> Case:
    form, kind = RECURRENT[call.op], KINDS[call.op]
    buffers = form.buffers(cast(Sequence[Tensor], call.operands), given.rows - given.settled)
    known = _Rows(given.batch, given.begin, 0, given.begin)

    def bound(rows: _Rows, state: Sequence[Tensor], place: torch.device) -> tuple[Operands, Callable[[], Tensor]]:
        operands = kind.draw(call.operands, _Draw(rows.batch, rows.rows, place))
        arguments = form.arguments(operands, state, rows.span(place))
        return operands, lambda: form.op(*arguments, **call.options)

    def allocated(place: torch.device) -> list[Tensor]:
        return [buffer.allocate({"B": given.batch}, place) for buffer in buffers]

    def make() -> tuple[Call, dict[str, Call]]:
        state = allocated(device)
        bound(known, state, device)[1]()  # the op itself writes what it then finds in its buffers
        return bound(given, state, device)[1], {}

    declared = find(form.op)
    assert declared is not None, f"{form.op} is not declared"
    nowhere = torch.device("meta")
    operands, run = bound(given, allocated(nowhere), nowhere)
    moved = sum(x.nbytes for x in (*operands, run()) if x is not None) + given.batch * _kept_bytes(buffers, given)
    return Case(declared.name, f"{kind.words(call.operands)}, {where}", moved, make)


def _kept_bytes(buffers: Sequence[Buffer], given: _Rows) -> int:
    """The bytes that a call moves of the buffers of one sequence.

    It reads the state, and writes it if it folds rows. It reads the rows cached since the state's boundary, or as many
    as an op without a state needs, and writes its own, as far as there is room for them.
    """
    states = [buffer.row_bytes({}) for buffer in buffers if buffer.settled_rows is None]
    total = sum(states) * (1 + given.folds)
    for buffer in buffers:
        if buffer.settled_rows is not None:
            slots = int(buffer.shape[1])
            read = given.begin % CHUNK if states else min(buffer.settled_rows, given.begin)
            total += buffer.row_bytes({}) // slots * (read + min(given.rows, slots))
    return total


@dataclass(frozen=True)
class _Draw:
    """Random operands of so many sequences and rows, each in the shape and the dtype of one that a target gave."""

    batch: int
    rows: int
    device: torch.device

    def rows_first(self, like: Tensor) -> Tensor:
        """``[B, T, ...]``."""
        return torch.randn(self.batch, self.rows, *like.shape[2:], dtype=like.dtype, device=self.device)

    def rows_last(self, like: Tensor) -> Tensor:
        """``[B, D, T]``, of which the channels of a row lie together, as a product gives them."""
        shape = self.batch, self.rows, like.shape[1]
        rows = torch.randn(*shape, dtype=like.dtype, device=self.device)
        return rows.transpose(1, 2)

    def weight(self, like: Tensor) -> Tensor:
        """A weight, which has no rows."""
        scale: float = like.shape[-1] ** -0.5
        return torch.randn(*like.shape, dtype=like.dtype, device=self.device) * scale


@dataclass(frozen=True)
class Kind:
    """How a recurrent op is measured: a function that gives its sizes in words, and one that draws inputs."""

    words: Callable[[Operands], str]
    draw: Callable[[Operands, _Draw], Operands]


def _delta_rule_words(given: Operands) -> str:
    _, key, value, gate, rate = _tensors(given, 5)
    words = f"{value.shape[2]} heads of {key.shape[3]}x{value.shape[3]}"
    words += f", {key.shape[2]} of keys" if key.shape[2] != value.shape[2] else ""
    words += ", gates per channel" if gate.dim() == 4 else ""
    return words + ("" if rate is not None else ", no corrections")


def _draw_delta_rule(given: Operands, draw: _Draw) -> Operands:
    """Gates are below zero and rates between 0 and 1."""
    q, k, v, gate, rate = _tensors(given, 5)
    rates = None if rate is None else draw.rows_first(rate).sigmoid()
    return *(draw.rows_first(x) for x in (q, k, v)), -draw.rows_first(gate).abs(), rates


def _draw_conv(given: Operands, draw: _Draw) -> Operands:
    x, weight, bias = _tensors(given, 3)
    return draw.rows_last(x), draw.weight(weight), None if bias is None else draw.weight(bias)


def _draw_scan(given: Operands, draw: _Draw) -> Operands:
    """Steps are above zero and decay rates below."""
    x, dt, a, b, c = _tensors(given, 5)
    return draw.rows_last(x), draw.rows_last(dt).abs(), -draw.weight(a).abs(), draw.rows_last(b), draw.rows_last(c)


def _tensors(given: Operands, count: int) -> list[Any]:
    """The operands, with None for the last ones if they are left out."""
    return [*given, *[None] * (count - len(given))]


KINDS: dict[Callable[..., Any], Kind] = {
    torch.ops.specgraph.gated_delta_rule.default: Kind(_delta_rule_words, _draw_delta_rule),
    torch.ops.specgraph.causal_conv.default: Kind(
        lambda given: "{} channels, {} weights".format(*_tensors(given, 3)[1].shape), _draw_conv
    ),
    torch.ops.specgraph.selective_scan.default: Kind(
        lambda given: "{} channels of {}".format(*_tensors(given, 5)[2].shape), _draw_scan
    ),
}
"""By the op without memory, all of :data:`~specgraph.kernels.state.RECURRENT`."""
