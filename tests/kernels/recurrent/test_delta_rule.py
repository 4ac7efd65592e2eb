"""The gated delta rule: what transformers computes, row after row, and from a state with cached rows in any history."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from specgraph.frontend.recurrent import mamba2_hook
from specgraph.kernels.recurrent.arguments import CHUNK, CachedDeltaRule, GatedDeltaRule
from specgraph.kernels.recurrent.delta_rule import CACHED_DELTA_RULE, gated_delta_rule_reference
from specgraph.kernels.state import RECURRENT
from tests.kernels.recurrent.histories import ALL, Memory, assert_near, device_of, history, run, unsettled

KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 40, 6
LENGTHS = {"reference": (1, 5, CHUNK, 3 * CHUNK + 5), "triton": (1, CHUNK, 2 * CHUNK + 9)}
LENGTHS["cpu"] = LENGTHS["reference"]
MORE = {"reference": 24, "triton": 9, "cpu": 24}
"""Prompts, and how much further every sequence is decoded, which is across a boundary; less in the interpreter."""
Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


STRONG = 300.0
"""Up to how much is forgotten in a row, as a logarithm: 16 rows of such gates leave the range of float32."""


def rows_of(length: int, seed: int, dtype: torch.dtype = torch.float64, *, channels: float | None = None) -> Rows:
    """Queries, keys, values, gates and rates of one sequence.

    A head has one gate, or with ``channels`` a gate for each of them: from weak ones to those that forget as much.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    gates = -torch.rand(length, HEADS, *([] if channels is None else [KEY]), generator=generator, dtype=dtype)
    if channels is not None:
        gates = gates * torch.logspace(-3, math.log10(channels), KEY, dtype=dtype)
    rates = torch.rand(length, HEADS, generator=generator, dtype=dtype)
    return normal(length, KEY_HEADS, KEY), normal(length, KEY_HEADS, KEY), normal(length, HEADS, VALUE), gates, rates


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("length", [1, 63, 130])
def test_without_corrections_it_is_the_scan_of_mamba_2(length: int, residual: bool) -> None:
    q, k, v, _, dt = (x.unsqueeze(0).float() for x in rows_of(length, 1))
    a, bias, d = -torch.arange(1.0, HEADS + 1), torch.linspace(-2, 1, HEADS), torch.linspace(0.5, 2, HEADS)
    given = {"D": d if residual else None, "dt_bias": bias, "dt_softplus": True, "dt_limit": (0.01, 1.0)}
    theirs = mamba2_chunk_scan(v, dt, a, k, q, chunk_size=16, **given)
    exact = {name: x.double() if isinstance(x, Tensor) else x for name, x in given.items()}
    ours = mamba2_hook(*(x.double() for x in (v, dt, a, k, q)), **exact)
    assert (theirs - ours).abs().max() <= 1e-5 * ours.abs().max()


SCALE = KEY**-0.5


def whole(rows: Rows, *, corrected: bool = True) -> Tensor:
    """The definition over a whole sequence."""
    given = [x.unsqueeze(0) for x in rows[: 4 + corrected]]
    return gated_delta_rule_reference(GatedDeltaRule(*given, scale=SCALE, normalise=True))[0]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("length", [1, 63, 130])
def test_it_is_the_function_of_transformers(length: int, normalise: bool) -> None:
    rows = [x.unsqueeze(0).float() for x in rows_of(length, 0)]
    q, k, v, gate, rate = rows
    if not normalise:
        k = k / 4  # longer keys would let the state grow without a bound
    for_heads = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in (q, k))  # which older releases do not do
    theirs, _ = torch_chunk_gated_delta_rule(*for_heads, v, gate, rate, use_qk_l2norm_in_kernel=normalise)
    given = (x.double() for x in (q, k, v, gate, rate))
    ours = gated_delta_rule_reference(GatedDeltaRule(*given, scale=SCALE, normalise=normalise))
    assert (theirs - ours).abs().max() <= 1e-5 * ours.abs().max()


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("length", [1, 64, 130])
@pytest.mark.parametrize(("strength", "tolerance"), [(1, 1e-5), (40, 1e-4)])
def test_by_chunks_it_is_its_definition(length: int, corrected: bool, strength: int, tolerance: float) -> None:
    """Strong gates add up to a thousand within a chunk, of which float32 keeps four digits behind the point."""
    given = [torch.stack(parts) for parts in zip(rows_of(length, 0), rows_of(length, 1), strict=True)]
    given[3] = given[3] * strength
    wanted = gated_delta_rule_reference(GatedDeltaRule(*given[: 4 + corrected], scale=SCALE, normalise=True))
    short = [x.float() for x in given[: 4 + corrected]]
    ours = torch.ops.specgraph.gated_delta_rule(*short, scale=SCALE, normalise=True)
    assert ours.dtype == torch.float32 and ours.is_contiguous()
    assert (ours - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize(
    ("function", "channels"),
    [
        (chunk_kimi_delta_attention, 0.5),
        (recurrent_kimi_delta_attention, 0.5),
        (recurrent_kimi_delta_attention, STRONG),
    ],
)
@pytest.mark.parametrize("length", [1, 63, 130])
def test_with_gates_per_channel_it_is_kimi_delta_attention(
    function: Callable[..., tuple[Tensor, None]], channels: float, length: int
) -> None:
    rows = [x.unsqueeze(0).float() for x in rows_of(length, 2, channels=channels)]
    for_heads = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in rows[:2])
    options = {"initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": True}
    theirs, _ = function(*for_heads, *rows[2:], **options)
    ours = whole(tuple(x[0].double() for x in rows))  # type: ignore[arg-type]
    assert (theirs[0] - ours).abs().max() <= 1e-5 * ours.abs().max()


def test_equal_gates_of_all_channels_are_a_gate_per_head() -> None:
    q, k, v, gate, rate = rows_of(40, 3)
    channels = gate.unsqueeze(-1).expand(-1, -1, KEY)
    torch.testing.assert_close(whole((q, k, v, channels, rate)), whole((q, k, v, gate, rate)), rtol=1e-12, atol=1e-12)


def state_of(rows: Rows, *, corrected: bool) -> Tensor:
    """The state behind all rows, by the definition."""
    _, k, v, gate, rate = rows
    k = (k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)).repeat_interleave(HEADS // KEY_HEADS, 1)
    state = torch.zeros(v.shape[1], KEY, VALUE, dtype=k.dtype)
    for key, value, log, b in zip(k, v, gate, rate, strict=True):
        state = state * log.exp().reshape(v.shape[1], -1, 1)
        update = b[:, None] * (value - torch.einsum("hkv,hk->hv", state, key)) if corrected else value
        state = state + torch.einsum("hk,hv->hkv", key, update)
    return state


FORMS = [*(("reference", torch.float64, 1e-10, accept) for accept in ("none", "all", "mixed", "drafts")),
         *((form, torch.float32, 1e-5, accept) for form in ("triton", "cpu") for accept in ("mixed", "drafts")),
]  # fmt: skip
"""A variant, what it is tested in, how near it is to the definition (of the largest value), and what is accepted."""
PLANS = [(0, True, None), (1, True, None), (3, True, None), (7, True, None), (3, False, None), (3, True, STRONG),
         (7, True, STRONG), (1, False, 0.5)]  # fmt: skip
"""K, whether rows correct, and gates per channel (:func:`rows_of`)."""


def decode(
    form: str, dtype: torch.dtype, k: int, accept: str, *, corrected: bool, channels: float | None = None,
    cuts: int = 0, own: slice = ALL, asked: torch.dtype | None = None, groups: int = KEY_HEADS,
) -> tuple[list[Tensor], Memory, list[Tensor]]:  # fmt: skip
    """What sequences emit under a history, by default all of them, what they share, and the buffers.

    ``asked`` is the dtype of queries and keys, by default that of all rows. ``groups`` of heads take part.
    """
    prompts, more, device = LENGTHS[form], MORE[form], device_of(form)
    given = [
        [x[:, : x.shape[1] * groups // KEY_HEADS] for x in rows_of(n + more, seed, channels=channels)]
        for seed, n in enumerate(prompts)
    ]
    dtypes = [asked or dtype] * 2 + [dtype] * 3
    inputs = [tuple(x.to(device, to) for x, to in zip(rows, dtypes, strict=True)) for rows in given][own]
    plans = [[*history(n + more, n, k, accept, seed + cuts)] for seed, n in enumerate(prompts)][own]
    memory = Memory([3, 0, 5, 2][: len(prompts)][own])
    one = [x[:1].unsqueeze(0) for x in inputs[0]]
    state = RECURRENT[torch.ops.specgraph.gated_delta_rule.default].buffers(one, unsettled(k, accept))
    buffers = [buffer.allocate({"B": 6}, device) for buffer in state]
    # Rows of nobody hold NaN, and so does what a sequence has not written yet.
    for buffer in buffers[1:]:
        buffer.fill_(torch.nan)
    buffers[0][[1, 4]] = torch.nan

    def call(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, rate: Tensor, span: Tensor) -> Tensor:
        run = CACHED_DELTA_RULE.form(form)
        return run(q, k, v, gate, *buffers, span.to(device), rate if corrected else None, scale=SCALE, normalise=True)

    return run(inputs, plans, memory, call, 0), memory, buffers


COVERED = [
    (*form, *plan)
    for form in FORMS
    for plan in PLANS
    if (form[0] != "cpu" or plan[2] is None)
    and ((form[0], form[3]) != ("triton", "drafts") or plan[0] == 3)
    and ((form[0], form[3]) != ("triton", "mixed") or plan not in (PLANS[1], PLANS[5]))
    and (form[0] != "reference" or form[3] == "mixed" or ("none", "all", "drafts")[PLANS.index(plan) % 3] == form[3])
]
"""On a CPU, gates per channel are computed by the reference. Of the many calls of a draft model, which take long in the
interpreter, there is one K. Other calls of every K and every kind of gate are there, but not all combinations. The
reference has every plan with mixed histories, and a third of them with each of the others."""


@pytest.mark.parametrize(("form", "dtype", "near", "accept", "k", "corrected", "channels"), COVERED)
def test_any_history_gives_what_the_definition_gives(
    form: str, dtype: torch.dtype, near: float, accept: str, k: int, corrected: bool, channels: float | None
) -> None:
    # Several groups of heads are those of one K, since the interpreter takes as long for each.
    groups = 1 if form == "triton" and (k, accept) != (3, "mixed") else KEY_HEADS
    outs, memory, buffers = decode(form, dtype, k, accept, corrected=corrected, channels=channels, groups=groups)
    for seed, (out, row, length) in enumerate(zip(outs, memory.rows.tolist(), LENGTHS[form], strict=True)):
        all_heads = rows_of(length + MORE[form], seed, channels=channels)
        rows: Any = tuple(x[:, : x.shape[1] * groups // KEY_HEADS] for x in all_heads)
        assert_near(out, whole(rows, corrected=corrected), near)
        settled = int(memory.settled[row])
        assert length <= settled <= length + MORE[form]
        begun: Any = tuple(x[: settled // CHUNK * CHUNK] for x in rows)
        assert_near(buffers[0][row], state_of(begun, corrected=corrected), near)
    assert buffers[0][[1, 4]].isnan().all()


@pytest.mark.parametrize(
    ("form", "corrected", "channels"),
    [*((form, corrected, None) for form in ("triton", "cpu") for corrected in (True, False)), ("triton", True, STRONG)],
)
def test_no_bit_depends_on_the_history(form: str, corrected: bool, channels: float | None) -> None:
    # Heads know nothing of each other, and fewer of them take less time in the interpreter.
    groups = 1 if form == "triton" else KEY_HEADS
    given: dict[str, Any] = {"corrected": corrected, "channels": channels, "groups": groups}
    wanted, _, _ = decode(form, torch.float32, 7, "all", **given)
    # A step of more rows than half a chunk runs the kernel for prompts, which gates per channel have for every step.
    # Kernels of other rules share what a history changes, so that fewer are enough for them in the interpreter.
    histories = [(0, "all"), (3, "mixed"), (9, "all"), (3, "drafts"), (1, "none")]
    fewer = {(True, None): 4, (False, None): 3, (True, STRONG): 2}[corrected, channels]
    for cuts, (k, accept) in enumerate(histories if form == "cpu" else histories[:fewer]):
        outs, _, _ = decode(form, torch.float32, k, accept, cuts=cuts, **given)
        assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))
    # A program of Triton's sees one sequence, but a library's product has all rows of a call.
    for number, own in enumerate(wanted if form == "cpu" else ()):
        one = slice(number, number + 1)
        (alone,), _, _ = decode(form, torch.float32, 3, "mixed", own=one, **given)
        assert torch.equal(alone, own)


@pytest.mark.parametrize("corrected", [True, False])
def test_no_bit_depends_on_the_history_of_rows_in_bfloat16(corrected: bool) -> None:
    """A step reads its state in parts, of which there are two here."""
    options: dict[str, Any] = {"corrected": corrected, "asked": torch.bfloat16, "groups": 1}
    wanted, _, _ = decode("triton", torch.float32, 9, "all", **options)
    for seed, out in enumerate(wanted):
        q, k, v, gate, rate = rows_of(LENGTHS["triton"][seed] + MORE["triton"], seed)
        rows = q.bfloat16().double(), k.bfloat16().double(), v, gate, rate
        assert_near(out, whole(rows, corrected=corrected)[:, : HEADS // KEY_HEADS], 1e-5)
    outs, _, _ = decode("triton", torch.float32, 3, "mixed", cuts=1, **options)
    assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))


@pytest.fixture
def whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads without padding, whose prompts have a loop for whole chunks, and one prompt with such chunks."""
    here = sys.modules[__name__]
    for name, value in {"KEY": 32, "VALUE": 32, "SCALE": 32**-0.5}.items():
        monkeypatch.setattr(here, name, value)
    monkeypatch.setitem(LENGTHS, "triton", (3 * CHUNK + 9,))


@pytest.mark.parametrize(
    ("corrected", "dtype"), [(True, torch.float32), (True, torch.bfloat16), (False, torch.bfloat16)]
)
@pytest.mark.usefixtures("whole_tiles")
def test_chunks_that_are_loaded_without_masks_have_the_same_bits(corrected: bool, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"corrected": corrected, "asked": torch.bfloat16, "groups": 1}
    (wanted,), _, _ = decode("triton", dtype, 7, "all", **options)
    (out,), _, _ = decode("triton", dtype, 3, "mixed", cuts=1, **options)
    assert torch.equal(out, wanted)
    rows = rows_of(LENGTHS["triton"][0] + MORE["triton"], 0)
    rounded = [x.to(to).double() for x, to in zip(rows, [torch.bfloat16] * 2 + [dtype] * 3, strict=True)]
    expected = whole(tuple(rounded), corrected=corrected)[:, : HEADS // KEY_HEADS]  # type: ignore[arg-type]
    assert_near(wanted.float(), expected, 1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.usefixtures("whole_tiles")
def test_values_that_cannot_be_loaded_in_pairs_have_the_same_bits() -> None:
    given = [x.unsqueeze(0).to(device_of("triton"), torch.bfloat16) for x in rows_of(3 * CHUNK, 0)]
    q, k, v, gate, rate = given
    apart = torch.nn.functional.pad(v, (1, 0))[..., 1:]  # each row begins at an odd place
    state = RECURRENT[torch.ops.specgraph.gated_delta_rule.default].buffers([x[:, :1] for x in given], 3)
    span = torch.tensor([[0, 0, 0, 3 * CHUNK, 3 * CHUNK]], device=v.device)
    found = []
    for values in (v, apart):
        buffers = [buffer.allocate({"B": 1}, v.device) for buffer in state]
        run = CACHED_DELTA_RULE.form("triton")
        found.append([run(q, k, values, gate, *buffers, span, rate, scale=SCALE, normalise=True), *buffers])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("corrected", [True, False])
def test_on_a_cpu_a_call_is_what_the_reference_gives(dtype: torch.dtype, near: float, corrected: bool) -> None:
    """A prompt over three chunks beside one of no rows, and a sequence that goes on."""
    given = [
        torch.stack([x.to(dtype) for x in parts]) for parts in zip(*(rows_of(37, i) for i in range(3)), strict=True)
    ]
    state = RECURRENT[torch.ops.specgraph.gated_delta_rule.default].buffers([x[:1, :1] for x in given], 3)
    found: dict[str, list[Tensor]] = {}
    for form in ("reference", "cpu"):
        buffers = [buffer.allocate({"B": 4}, "cpu") for buffer in state]
        for span in ([[2, 0, 0, 20, 20], [0, 0, 0, 0, 0], [3, 0, 0, 9, 9]],
                     [[2, 20, 20, 37, 36], [-1, 0, 0, 0, 0], [3, 9, 9, 2, 1]]):  # fmt: skip
            arguments = CachedDeltaRule(
                *given[:4], *buffers, torch.tensor(span), given[4] if corrected else None, scale=SCALE, normalise=True
            )
            run = CACHED_DELTA_RULE.variant(form).run
            found.setdefault(form, []).append(run(arguments))
        assert CACHED_DELTA_RULE.choose("cpu", arguments).name == "cpu"
        found[form] += [buffers[0], buffers[2][3, :11]]
    for actual, wanted in zip(found["cpu"], found["reference"], strict=True):
        assert actual.dtype == wanted.dtype
        assert_near(actual, wanted.double(), near)
    channels = dataclasses.replace(arguments, g=arguments.g.unsqueeze(-1).expand(-1, -1, -1, KEY))
    double = dataclasses.replace(arguments, v=arguments.v.double())
    assert [CACHED_DELTA_RULE.choose("cpu", other).name for other in (channels, double)] == ["reference"] * 2


def test_arguments_that_do_not_fit_are_refused() -> None:
    q, k, v, gate, rate = (x.unsqueeze(0) for x in rows_of(3, 0))
    op = torch.ops.specgraph.gated_delta_rule
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(ValueError, match="4 heads do not group over 3"):
            op(q[:, :, :1].expand(-1, -1, 3, -1), k[:, :, :1].expand(-1, -1, 3, -1), v, gate, rate, scale=1.0)
        with pytest.raises(ValueError, match=r"g must be \[B, T, H\] = \[1, 3, 4\], not \[1, 3, 3\]"):
            op(q, k, v, gate[..., :3], rate, scale=1.0)
        with pytest.raises(ValueError, match=r"g must be \[B, T, H, Dk\] = \[1, 3, 4, 40\], not \[1, 3, 4, 39\]"):
            op(q, k, v, gate.unsqueeze(-1).expand(-1, -1, -1, KEY - 1), rate, scale=1.0)
