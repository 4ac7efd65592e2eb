"""Every layout: written, recognised, loaded, and its forward pass compared with a step-by-step reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraph.drafters.registry import open_checkpoint
from tests.checkpoints import layouts
from tests.checkpoints.layouts import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MASK, Written
from tests.checkpoints.reference import Reference, llama3_rope, plain_rope
from tests.checkpoints.running import draft, load, target

TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
"""transformers norms and rotates in float32, whatever the model's dtype is."""

Rope = Callable[[int], float]
LLAMA3 = layouts.nvidia().config["rope_scaling"]
CASES: dict[str, tuple[Callable[[], Written], str, str, Rope, dict[str, bool]]] = {
    "eagle": (layouts.eagle, "eagle", "eagle3", plain_rope(5e5, HEAD_DIM), {}),
    "specforge": (layouts.specforge, "specforge", "eagle3", plain_rope(2e4, HEAD_DIM), {}),
    "specforge, parallel": (layouts.specforge_parallel, "specforge", "peagle", plain_rope(2e4, HEAD_DIM), {}),
    "nvidia": (layouts.nvidia, "nvidia", "eagle3", llama3_rope(3e4, HEAD_DIM, LLAMA3), {"norm_before_residual": True}),
    "nvidia, last hidden state": (
        layouts.nvidia_last_hidden_state,
        "nvidia",
        "eagle3",
        llama3_rope(3e4, HEAD_DIM, LLAMA3),
        {"norm_before_residual": True},
    ),
    "speculators": (layouts.speculators, "speculators", "eagle3", plain_rope(1e6, HEAD_DIM), {}),
    "speculators, qwen3": (
        lambda: layouts.speculators(
            qk_norms=True, layers=2, fc_norm=True, norm_before_residual=True, norm_output=True, seed=4
        ),
        "speculators",
        "eagle3",
        plain_rope(1e6, HEAD_DIM),
        {"norm_before_residual": True, "norm_output": True},
    ),
    "speculators, peagle": (
        lambda: layouts.speculators("peagle", norm_before_fc=True, seed=5),
        "speculators",
        "peagle",
        plain_rope(1e6, HEAD_DIM),
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_forward_is_that_of_the_reference(case: str, tmp_path: Path) -> None:
    make, layout, algorithm, rope, flags = CASES[case]
    written = make()
    checkpoint = open_checkpoint(written.save(tmp_path / "head"))
    parallel = algorithm == "peagle"
    assert (checkpoint.kind, checkpoint.layout, checkpoint.algorithm) == ("eagle3", layout, algorithm)
    assert (checkpoint.parallel, checkpoint.mask_token_id) == (parallel, MASK if parallel else None)
    head = load(tmp_path / "head")
    assert (head.features, head.parallel, head.mask_token_id) == (written.features, parallel, checkpoint.mask_token_id)
    assert {p.dtype for p in head.module.parameters()} == {torch.float64}
    tokens, features = _inputs(len(written.features))
    reference = _reference(written, rope, flags)
    found = draft(head, tokens, features, 4, parallel=parallel)
    expected = reference.draft(tokens, [list(row) for row in features], 4, MASK if parallel else None)
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], **TOLERANCE)


def _inputs(count: int) -> tuple[list[int], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = 2 * torch.randn(5, count, HIDDEN, generator=generator, dtype=torch.float64)
    return torch.randint(0, layouts.VOCAB, (5,), generator=generator).tolist(), features


def _reference(written: Written, rope: Rope, flags: dict[str, Any]) -> Reference:
    model: Any = target()
    tensors = {"embed_tokens.weight": model.model.embed_tokens.weight.detach(), **written.tensors}
    return Reference(tensors, HEADS, KV_HEADS, HEAD_DIM, 1e-5, rope, **flags)
