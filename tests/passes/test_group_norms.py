"""Norms of heads become one op where nothing stands between them, and stay apart where something does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from specgraph.bench.models import random_head
from specgraph.drafters.dflash import DFlashDraftConfig
from specgraph.frontend.tracing import trace
from specgraph.passes.common import group_norms
from specgraph.passes.fuse_norm import FuseNorm
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.lower_kernels import LowerKernels
from specgraph.passes.merge_linears import MergeLinears
from tests.compiler.test_pipeline import first, last
from tests.decoding import compiled
from tests.models import make_model, ragged_prompts
from tests.passes.test_lower_kernels import LOWERING, ROTARY, run_both, targets

WIDTH, HIDDEN = 4, 8
X = torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Heads(nn.Module):
    """Projections to heads, each with its norm. Derived classes say in which order they run."""

    def __init__(self, *heads: int, widths: tuple[int, ...] = (), eps: tuple[float, ...] = ()) -> None:
        super().__init__()
        widths, eps = widths or (WIDTH,) * len(heads), eps or (1e-6,) * len(heads)
        sizes = list(zip(heads, widths, strict=True))
        self.projections = nn.ModuleList(nn.Linear(HIDDEN, count * width, bias=False) for count, width in sizes)
        self.norms = nn.ModuleList(Qwen3RMSNorm(width, e) for width, e in zip(widths, eps, strict=True))
        self.double()
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)

    def normed(self, index: int, x: Tensor) -> Tensor:
        norm: Any = self.norms[index]
        out: Tensor = norm(self.projections[index](x).unflatten(2, (-1, len(norm.weight)))).transpose(1, 2)
        return out

    def forward(self, x: Tensor) -> Tensor:
        """One after the other, as layers are written; only views read the norms before the end."""
        return torch.cat([self.normed(index, x).transpose(1, 2).flatten(2) for index in range(len(self.norms))], 2)


class Chained(Heads):
    def forward(self, x: Tensor) -> Tensor:
        """The second norm reads what the first gave."""
        first = self.normed(0, x)
        norm: Any = self.norms[1]
        out: Tensor = norm(first.transpose(1, 2)).transpose(1, 2)
        return torch.cat([first, out], 1)


class ReadBetween(Heads):
    def forward(self, x: Tensor) -> Tensor:
        """The second projection reads what the first norm gave."""
        first = self.normed(0, x)
        return torch.cat([first, self.normed(1, first.transpose(1, 2).flatten(2))], 1)


def lowered(module: nn.Module, *before: Any) -> tuple[list[str], dict[str, int]]:
    """The ops of the lowered module in their order, and their counts; it computes what it computed before."""
    program, expected, actual = run_both(module, X, [FuseNorm(), *before, LowerKernels()])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)  # transformers' norms compute in float32
    graph = program.modules["toy"].graph
    graph.lint()
    ops = [str(node.target).split(".") for node in graph.nodes if node.op == "call_function"]
    return [op[1] for op in ops if op[0] == "specgraph"], targets(program, "toy")


@pytest.mark.parametrize("before", [(), (MergeLinears(),)], ids=["apart", "merged"])
def test_norms_of_heads_are_one_op_behind_the_last_projection(before: tuple[Any, ...]) -> None:
    names, counts = lowered(Heads(4, 2, 2), *before)
    assert names == ["linear"] * (3 - 2 * len(before)) + ["rms_norms", "concat"]
    assert counts["specgraph.rms_norms"] == 1 and counts["specgraph.rms_norm"] == 0


@pytest.mark.parametrize("module", [Chained(2, 2), ReadBetween(2, 2)], ids=["chained", "read between"])
def test_a_norm_that_waits_for_another_stays_apart(module: nn.Module) -> None:
    _, counts = lowered(module)
    assert counts["specgraph.rms_norm"] == 2 and counts["specgraph.rms_norms"] == 0


@pytest.mark.parametrize("options", [{"widths": (4, 2)}, {"eps": (1e-6, 1e-5)}], ids=["width", "epsilon"])
def test_norms_that_differ_stay_apart(options: dict[str, Any]) -> None:
    _, counts = lowered(Heads(2, 2, **options))
    assert counts["specgraph.rms_norm"] == 2 and counts["specgraph.rms_norms"] == 0


def test_a_launch_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_norms, "MAX_NORMS", 2)
    _, counts = lowered(Heads(1, 2, 3, 1, 2))
    assert counts["specgraph.rms_norms"] == 2 and counts["specgraph.rms_norm"] == 1


def test_a_layer_of_a_target_has_one() -> None:
    model = make_model("qwen3", dtype=torch.float64)
    counts = targets(last(first(target=trace(model)), [InsertKVCache(4), *LOWERING]))
    layers = model.config.num_hidden_layers
    assert counts["specgraph.rms_norms"] == layers and counts[ROTARY] == layers
    assert counts["specgraph.rms_norm"] == 1  # the last one, whose rows are selected before they are projected


def test_a_block_drafter_has_one_for_its_context_and_one_in_each_layer() -> None:
    model, prompts = make_model("llama", dtype=torch.float64), ragged_prompts((3, 9))
    head, outs = random_head(model, DFlashDraftConfig(num_speculative_tokens=3)), {}
    for name in ("eager", "gpu"):
        decoder = compiled(model, "dflash", 3, head, lowering={"name": name})
        outs[name] = decoder.generate(prompts, max_new_tokens=10, temperature=1.0, seed=1).new_tokens
    assert all(map(torch.equal, outs["eager"], outs["gpu"]))
    stage = decoder.stages["lower_kernels"]
    assert targets(stage, "draft_context")["specgraph.rms_norms"] == 1
    block = targets(stage, "draft")
    assert block["specgraph.rms_norms"] == block["specgraph.paged_block_attention"] == len(head.module.layers)
    assert block["specgraph.embedding"] == 1 and targets(stage, "draft_features")["specgraph.concat"] == 1
