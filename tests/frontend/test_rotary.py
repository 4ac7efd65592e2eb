"""Rotary embeddings for rows of positions compute one row, with the same bits, and no others are touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from specgraph.frontend.rotary import read_one_row
from specgraph.frontend.tracing import trace
from specgraph.passes.fuse_rotary_cache import FuseRotaryCache
from specgraph.passes.lower_kernels import LowerKernels
from tests.models import make_model
from tests.passes.test_lower_kernels import run_both, targets

POSITIONS = torch.tensor([[0, 1, 2, 3, 99], [131071, 4, 5, 4096, 7]])


class Angles(nn.Module):
    """Qwen3.5's angles, for the three rows of positions that its text model makes of one."""

    def __init__(self, dtype: torch.dtype, sections: list[int]) -> None:
        super().__init__()
        rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "mrope_section": sections}
        config = AutoConfig.for_model("qwen3_5_text", head_dim=2 * 2 * sum(sections), rope_parameters=rope)
        self.rotary_emb: Any = Qwen3_5TextRotaryEmbedding(config)
        self.dtype = dtype

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = position_ids.unsqueeze(0).expand(4, position_ids.shape[0], -1)[1:]
        angles: tuple[Tensor, Tensor] = self.rotary_emb(torch.empty(1, dtype=self.dtype), rows)
        return angles


class Model(nn.Module):
    """A model calls its text model by keywords."""

    def __init__(self, text: nn.Module) -> None:
        super().__init__()
        self.text = text

    def forward(self, x: Tensor) -> Any:
        return self.text(position_ids=x)


@pytest.mark.parametrize("sections", [[2, 1, 1], [11, 11, 10]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_angles_of_three_equal_rows_become_one_op_of_the_same_bits(dtype: torch.dtype, sections: list[int]) -> None:
    expected = Angles(dtype, sections)(POSITIONS)
    module = Model(Angles(dtype, sections))
    read_one_row(module)
    with torch.no_grad():
        program, traced, actual = run_both(module, POSITIONS, [FuseRotaryCache(), LowerKernels()])
    counts = targets(program, "toy")
    assert counts["specgraph.rotary_angles"] == 1
    assert not counts.keys() & {"aten.cos", "aten.select_scatter", "aten.copy", "specgraph.concat"}
    for a, b, c in zip(actual, traced, expected, strict=True):
        assert a.dtype == dtype and a.shape == c.shape == (2, 5, 2 * sum(sections))
        assert torch.equal(a, c) and torch.equal(b, c)


def test_rows_that_are_given_are_read() -> None:
    text = Angles(torch.float32, [2, 1, 1])
    expected = text.rotary_emb(torch.empty(1), torch.stack([POSITIONS, POSITIONS + 1, POSITIONS + 2]))
    read_one_row(Model(text))
    actual = text.rotary_emb(torch.empty(1), torch.stack([POSITIONS, POSITIONS + 1, POSITIONS + 2]))
    assert all(map(torch.equal, actual, expected))


def test_an_embedding_that_gives_other_angles_stays() -> None:
    text = Angles(torch.float32, [2, 1, 1])
    text.rotary_emb.attention_scaling = 1.0
    text.rotary_emb.recomposition_frequencies = lambda freq: torch.cat((freq[0], freq[1] / 2), dim=-1)
    expected = text(position_ids=POSITIONS)
    read_one_row(Model(text))
    assert all(map(torch.equal, text(position_ids=POSITIONS), expected))


def test_a_traced_model_computes_one_row() -> None:
    graph = trace(make_model("qwen3_5_text")).body.graph
    names = {str(node.target) for node in graph.nodes}
    assert "aten.cos.default" in names and not any("scatter" in name for name in names)
