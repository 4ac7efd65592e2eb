"""Rotations of the first values of a head, and of its halves apart, become part of the attention; no others do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_neox import modeling_gpt_neox

from specgraph.compiler.numerics import observe
from specgraph.frontend.tracing import trace
from specgraph.ir.verifier import verify_program
from specgraph.passes.fuse_rotary_cache import FuseRotaryCache
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.insert_recurrent_state import InsertRecurrentState
from specgraph.passes.pipeline import run_passes
from tests.compiler.test_pipeline import first, last
from tests.decoding import compiled
from tests.models import make_model, ragged_prompts
from tests.passes.test_lower_kernels import LOWERING, ROTARY, targets

DIM, TURNED = 8, 4
Rotation = Callable[[Tensor, Tensor, Tensor], Tensor]


def rotate_half(x: Tensor) -> Tensor:
    middle = x.shape[-1] // 2
    return torch.cat((-x[..., middle:], x[..., :middle]), -1)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def of_the_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    n = cos.shape[-1]
    return torch.cat((turned(x[..., :n], cos, sin), x[..., n:]), -1)


def rewritten(
    monkeypatch: pytest.MonkeyPatch, q: Rotation, k: Rotation, width: int = TURNED, once: bool = False
) -> tuple[Counter[str], list[str]]:
    """The calls of a model with these rotations after the pass, and the reasons of its near misses.

    What the model computes stays the same. Rotations get every angle ``once`` or, as llama's do, for both halves.
    """

    def rotate(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        n = width // 2 if once else width
        cos, sin = cos[..., :n].unsqueeze(1), sin[..., :n].unsqueeze(1)
        return q(queries, cos, sin), k(keys, cos, sin)

    monkeypatch.setattr(modeling_gpt_neox, "apply_rotary_pos_emb", rotate)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": width / DIM}
    model = make_model("gpt_neox", num_hidden_layers=1, rope_parameters=rope)
    stages, reports = run_passes(first(target=trace(model)), [InsertKVCache(4), FuseRotaryCache()])
    expected, found = (observe(stages[name]) for name in ("insert_kv_cache", "fuse_rotary_cache"))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
    return targets(stages["fuse_rotary_cache"]), [miss.reason for miss in reports[-1].result.near_misses]


@pytest.mark.parametrize("width", [2, TURNED, DIM])
def test_rotated_first_values_go_into_the_attention(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, reasons = rewritten(monkeypatch, of_the_first, of_the_first, width)
    assert not reasons and counts[ROTARY] == 1
    assert not counts.keys() & {"specgraph.paged_attention", "aten.cat", "aten.neg", "aten.slice.Tensor"}


def apart(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As gpt_oss rotates."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def sliced(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., : cos.shape[-1]], x[..., cos.shape[-1] : 2 * cos.shape[-1]]
    return torch.cat((cos * a - sin * b, sin * a + cos * b), -1)


def some_apart(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((apart(x[..., :TURNED], cos, sin), x[..., TURNED:]), -1)


@pytest.mark.parametrize(("rotation", "width"), [(apart, DIM), (sliced, DIM), (some_apart, TURNED)])
def test_halves_that_are_rotated_apart_go_into_the_attention(
    rotation: Rotation, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, reasons = rewritten(monkeypatch, rotation, rotation, width, once=True)
    assert not reasons and counts[ROTARY] == 1 and counts["aten.cat"] == 2  # each angle twice
    assert not counts.keys() & {"specgraph.paged_attention", "aten.mul.Tensor", "aten.sub.Tensor"}


TURNS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "the other way": lambda a, b, cos, sin: (a * cos + b * sin, b * cos - a * sin),
    "exchanged": lambda a, b, cos, sin: (b * cos - a * sin, a * cos + b * sin),
    "one angle": lambda a, b, cos, sin: (a * cos - b * sin, b * cos + a * cos),
    "one half": lambda a, b, cos, sin: (a * cos - b * sin, b * cos + b * sin),
    "no product": lambda a, b, cos, sin: (a * cos - b, b * cos + a * sin),
}


@pytest.mark.parametrize("planted", TURNS)
def test_other_turns_of_halves_are_left_and_named(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.cat(TURNS[planted](*x.chunk(2, -1), cos, sin), -1)

    counts, (reason,) = rewritten(monkeypatch, apart, wrong, DIM, once=True)
    assert counts["specgraph.paged_attention"] == 1 and ROTARY not in counts
    assert "is not a rotation by halves" in reason or "does not begin with rotated values" in reason


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    part = x[..., :TURNED]
    pairs = torch.stack((-part[..., 1::2], part[..., 0::2]), -1).flatten(-2)
    return torch.cat((part * cos + pairs * sin, x[..., TURNED:]), -1)


def narrow(cos: Tensor) -> Tensor:
    return cos.squeeze(1)[..., :1].unsqueeze(1)


PLANTED: dict[str, tuple[Rotation, str]] = {
    "the others first": (
        lambda x, cos, sin: torch.cat((x[..., TURNED:], turned(x[..., :TURNED], cos, sin)), -1),
        "does not begin with rotated values",
    ),
    "the last values": (
        lambda x, cos, sin: torch.cat((turned(x[..., TURNED:], cos, sin), x[..., :TURNED]), -1),
        "does not put the values of a head back in their places",
    ),
    "values twice": (
        lambda x, cos, sin: torch.cat((turned(x[..., :TURNED], cos, sin), x[..., TURNED - 1 : -1]), -1),
        "does not put the values of a head back in their places",
    ),
    "of another tensor": (
        lambda x, cos, sin: torch.cat((turned(x[..., :TURNED], cos, sin), (2 * x)[..., TURNED:]), -1),
        "does not join rotated values and others of the same heads",
    ),
    "one angle for all": (
        lambda x, cos, sin: torch.cat((turned(x[..., :TURNED], narrow(cos), sin), x[..., TURNED:]), -1),
        "does not have an angle for each value that is rotated",
    ),
    "interleaved": (interleaved, "is not a rotation by halves"),
    "scaled": (lambda x, cos, sin: 2 * of_the_first(x, cos, sin), "is not rotated"),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("side", ["queries", "keys"])
def test_other_partial_rotations_are_left_and_named(planted: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rotation, reason = PLANTED[planted]
    pair = (rotation, of_the_first) if side == "queries" else (of_the_first, rotation)
    counts, reasons = rewritten(monkeypatch, *pair)
    assert counts["specgraph.paged_attention"] == 1 and ROTARY not in counts
    assert len(reasons) == 1 and reason in reasons[0]


def of_two(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((turned(x[..., :2], cos[..., :2], sin[..., :2]), x[..., 2:]), -1)


def of_three(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((turned(x[..., :3], cos[..., :3], sin[..., :3]), x[..., 3:]), -1)


@pytest.mark.parametrize(("q", "k", "reason"), [
    (of_the_first, of_two, "does not give every head the same angles"),
    (of_three, of_three, "is not a rotation by halves"),
], ids=["different numbers", "an odd number"])  # fmt: skip
def test_other_widths_are_left_and_named(
    q: Rotation, k: Rotation, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, reasons = rewritten(monkeypatch, q, k)
    assert counts["specgraph.paged_attention"] == 1 and reason in reasons[0]


MODELS = {
    "phi": 2, "phi3": 2, "gpt_neox": 2, "stablelm": 2, "glm4_moe": 2, "qwen3_next": 1, "qwen3_5_text": 1, "bamba": 1,
    "mimo_v2_flash": 2, "step_text": 2, "gpt_oss": 2,
}  # fmt: skip
"""Models that rotate a part of each head, or its halves apart, and how many layers with attention they have."""


@pytest.mark.parametrize("architecture", MODELS)
def test_models_of_other_rotations_have_them_in_the_attention(architecture: str) -> None:
    program = last(first(target=trace(make_model(architecture))), [InsertKVCache(4), InsertRecurrentState(), *LOWERING])
    verify_program(program)
    counts = targets(program)
    assert counts[ROTARY] == MODELS[architecture] and not counts["specgraph.paged_attention"]
    assert counts["specgraph.rotary_angles"] > 0 and not counts["aten.cos"]


@pytest.mark.parametrize("architecture", ["glm4", "cohere"])
def test_interleaved_rotations_are_left_and_named(architecture: str) -> None:
    _, reports = run_passes(first(target=trace(make_model(architecture))), [InsertKVCache(4), FuseRotaryCache()])
    reasons = [miss.reason for miss in reports[-1].result.near_misses]
    assert len(reasons) == 2 and all("is not a rotation by halves" in reason for reason in reasons)


@pytest.mark.parametrize("architecture", ["gpt_neox", "glm4_moe", "qwen3_next", "qwen3_5_text", "gpt_oss"])
def test_a_lowered_decoder_gives_the_tokens_of_the_plain_one(architecture: str) -> None:
    model, prompts = make_model(architecture, dtype=torch.float64), ragged_prompts((3, 9))
    eager, lowered = (compiled(model, k=2, lowering={"name": name}) for name in ("eager", "gpu"))
    outs = [d.generate(prompts, max_new_tokens=10, temperature=1.0, seed=1) for d in (eager, lowered)]
    assert all(map(torch.equal, outs[0].new_tokens, outs[1].new_tokens))
    assert targets(lowered.stages["lower_kernels"])[ROTARY] > 0
