from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from specgraph.drafters.none import NoDrafter
from specgraph.errors import PassError
from specgraph.frontend.tracing import trace
from specgraph.ir.graphs import calls, new_module
from specgraph.ir.model_info import ModelInfo
from specgraph.ir.program import FIRST_FACTS, Program
from specgraph.ir.verifier import verify_program
from specgraph.kernels.state import Buffer, page_pool
from specgraph.kernels.step import row_positions
from specgraph.passes.base import Pass
from specgraph.passes.insert_kv_cache import InsertKVCache
from tests.compiler.test_pipeline import body, first, last, text
from tests.models import make_model
from tests.passes.test_lower_kernels import LOWERING

aten = torch.ops.aten
DIM, VOCAB = 4, 11


def toy(attentions: int = 1, layers: int = 1, max_positions: int | None = None, **options: Any) -> Program:
    """Embedding plus position, then ``attentions`` layers of attention with one head."""
    root, graph = nn.Module(), fx.Graph()
    generator = torch.Generator().manual_seed(0)
    root.register_buffer("embed", torch.randn(VOCAB, DIM, dtype=torch.float64, generator=generator))
    tokens, positions = graph.placeholder("tokens"), graph.placeholder("positions")
    x = graph.call_function(aten.embedding.default, (graph.get_attr("embed"), tokens))
    places = graph.call_function(aten.unsqueeze.default, (positions, -1))
    x = graph.call_function(aten.add.Tensor, (x, places), {"alpha": 0.1})
    for index in range(attentions):
        heads = graph.call_function(aten.unsqueeze.default, (x, 1))
        heads.meta["val"] = torch.empty(2, 1, 3, DIM, dtype=torch.float64, device="meta")
        kwargs = {"scale": 0.5, **options}
        attended = graph.call_function(torch.ops.specgraph.attention.default, (heads, heads, heads), kwargs)
        attended.meta["hidden_state"] = index
        x = graph.call_function(aten.squeeze.dim, (attended, 2))
    graph.output(x)
    info = ModelInfo("toy", VOCAB, layers, DIM, torch.float64, torch.device("cpu"), max_positions)
    modules = {"target": new_module(root, graph, "target")}
    program = Program(fx.Graph(), modules, {}, info, NoDrafter(), facts=FIRST_FACTS)
    window = program.placeholder("window", Buffer(("B", "T")))
    places = program.call(row_positions, program.placeholder("start", Buffer(("B",))), window, name="positions")
    call = program.call("target", tokens=window, positions=places, name="hidden", role="target")
    program.set_output(call)
    return program


def test_step_and_module_pass_the_state_and_attention_is_paged():
    program = last(toy(window=3), [InsertKVCache(8)])
    verify_program(program)
    assert text(body(program)) == text("""
        positions = row_positions(start, window)
        hidden = self.target(tokens=window, positions=positions, num_rows=num_rows, block_table=block_table,
            max_length=max_length, caches=target_caches)
        return hidden
    """)
    assert text(body(program, "target")) == text("""
        slots = row_slots(positions, num_rows, block_table, max_length, block_size=8)
        embedding_default = torch.ops.aten.embedding.default(self.embed, tokens)
        unsqueeze_default = torch.ops.aten.unsqueeze.default(positions, -1)
        add_tensor = torch.ops.aten.add.Tensor(embedding_default, unsqueeze_default, alpha=0.1)
        unsqueeze_default_1 = torch.ops.aten.unsqueeze.default(add_tensor, 1)
        k_cache_0 = caches[0]
        v_cache_0 = caches[1]
        paged_attention_default = torch.ops.specgraph.paged_attention.default(unsqueeze_default_1,
            unsqueeze_default_1, unsqueeze_default_1, k_cache_0, v_cache_0, slots, block_table, positions,
            scale=0.5, window=3)
        squeeze_dim = torch.ops.aten.squeeze.dim(paged_attention_default, 2)
        return squeeze_dim
    """)


def test_inputs_are_described():
    program = last(toy(2, layers=2), [InsertKVCache(8)])
    cache = page_pool(8, 1, DIM, dtype=torch.float64)
    assert list(program.inputs) == ["window", "start", "num_rows", "block_table", "max_length", "target_caches"]
    assert program.inputs["target_caches"] == (cache,) * 4
    assert program.inputs["block_table"] == Buffer(("B", "M"), fill=-1)
    assert program.block_size == 8
    assert "kv_cache" in program.facts


def test_only_lookups_are_kept_below_the_position_limit():
    target = last(toy(max_positions=5), [InsertKVCache()]).modules["target"].graph
    known = next(n for n in target.nodes if n.name == "known_positions")
    assert known.kwargs == {"min": 0, "max": 4} and [n.name for n in known.users] == ["unsqueeze_default"]
    positions = next(n for n in target.nodes if n.name == "positions")
    assert {n.name for n in positions.users} == {"slots", "known_positions", "paged_attention_default"}


def test_hidden_states_stay_marked():
    target = last(toy(2, layers=2), [InsertKVCache()]).modules["target"].graph
    paged = calls(target, torch.ops.specgraph.paged_attention.default)
    assert [n.meta["hidden_state"] for n in paged] == [0, 1]


@pytest.mark.parametrize(("attentions", "layers"), [(0, 1), (1, 2), (2, 1)])
def test_layers_without_attention_are_loud(attentions: int, layers: int):
    with pytest.raises(PassError, match=f"insert_kv_cache matched {attentions} places, expected {layers} "):
        last(toy(attentions, layers), [InsertKVCache()])


def test_it_cannot_run_twice():
    with pytest.raises(PassError, match=r"insert_kv_cache matched 0 places, expected 2 \(nothing came close\)"):
        last(first(), [InsertKVCache(), InsertKVCache()])


def test_a_draft_models_body_gets_a_cache_of_its_own():
    program = last(first("draft_model"), [InsertKVCache()])
    caches = [program.modules[n].graph.find_nodes(op="placeholder", target="caches") for n in ("target", "draft_body")]
    assert [len(node.meta["state"]) for (node,) in caches] == [4, 2]
    names = [n.name for n in program.modules["draft_body"].graph.nodes if n.op == "placeholder"]
    assert names == ["tokens", "positions", "num_rows", "block_table", "max_length", "caches"]
    assert "draft_caches" not in program.inputs


def paged_logits(program: Program, tokens: Tensor, size: int) -> Tensor:
    """All rows in chunks of ``size``, with scattered pages and NaN where nothing was written."""
    batch, length = tokens.shape
    blocks = -(-length // program.block_size)
    order = torch.randperm(batch * blocks + 1, generator=torch.Generator().manual_seed(3))
    state: dict[str, Any] = {
        "block_table": torch.nn.functional.pad(order[: batch * blocks].view(batch, blocks), (0, 1), value=-1),
        "max_length": torch.full((batch,), length),
        "target_caches": tuple(
            b.allocate({"N": batch * blocks + 1}, "cpu").fill_(torch.nan) for b in program.inputs["target_caches"]
        ),
    }
    step, parts = program.step(), []
    for start in range(0, length, size):
        count = min(size, length - start)
        window = torch.nn.functional.pad(tokens[:, start : start + count], (0, size - count))
        rows = {"start": torch.full((batch,), start), "num_rows": torch.full((batch,), count)}
        parts.append(step(window=window, **rows, **state)[:, :count])
    return torch.cat(parts, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 11, 16])
@pytest.mark.parametrize("window", [None, 4])
def test_paged_chunks_equal_the_dense_forward(size: int, window: int | None):
    program = toy(2, layers=2, window=window)
    tokens = torch.randint(VOCAB, (2, 11), generator=torch.Generator().manual_seed(1))
    expected = program.step()(window=tokens, start=torch.zeros(2, dtype=torch.int64))
    actual = paged_logits(last(program, [InsertKVCache(4)]), tokens, size)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@functools.cache
def real(architecture: str) -> Program:
    return first(target=trace(make_model(architecture, dtype=torch.float64)))


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss"])
def test_paged_chunks_equal_the_dense_forward_of_a_model(architecture: str):
    program = real(architecture)
    tokens = torch.randint(3, 101, (2, 13), generator=torch.Generator().manual_seed(1))
    after = last(program, [InsertKVCache(4)])
    with torch.no_grad():
        expected = program.step()(window=tokens, start=torch.zeros(2, dtype=torch.int64))
        for size in (1, 4, 6, 13):
            # Norms and rotary stay in float32 inside a float64 model.
            torch.testing.assert_close(paged_logits(after, tokens, size), expected, rtol=1e-6, atol=1e-6)


def run_window(program: Program, tokens: Tensor, lead: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """All rows of ``tokens`` ``[B, T]``, and the caches they leave; ``lead`` rows of the first sequence come before 0.

    The window is four rows wider than ``tokens``, wherever they lie in it.
    """
    batch, length, size = *tokens.shape, program.block_size
    leads = [lead] + [0] * (batch - 1)
    window = torch.full((batch, length + 4), 7)
    for row, begin in enumerate(leads):
        window[row, begin : begin + length] = tokens[row]
    pages = -(-length // size)
    state = {
        "window": window, "start": -torch.tensor(leads), "num_rows": torch.tensor(leads) + length,
        "max_length": torch.full((batch,), length), "block_table": torch.arange(batch * pages).flip(0).view(batch, -1),
    }  # fmt: skip
    device, buffers = program.target.device, program.inputs["target_caches"]
    caches = tuple(b.allocate({"N": batch * pages}, device).fill_(torch.nan) for b in buffers)
    with torch.no_grad():
        out = program.step()(target_caches=caches, **{name: tensor.to(device) for name, tensor in state.items()})
    return torch.stack([out[row, begin : begin + length] for row, begin in enumerate(leads)]), caches


def written(cache: Tensor) -> Tensor:
    """Which rows of a cache ``[N, block_size, H, D]`` that was full of NaN have been written: ``[N, block_size]``."""
    return ~cache.isnan().flatten(2).any(-1)


@pytest.mark.parametrize("lowering", [[], LOWERING], ids=["eager", "lowered"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "opt"])
def test_rows_before_the_first_position_write_and_change_nothing(architecture: str, lowering: list[Pass]):
    program = last(real(architecture), [InsertKVCache(4), *lowering])
    tokens = torch.randint(3, 101, (2, 3), generator=torch.Generator().manual_seed(1))
    expected, before = run_window(program, tokens, 0)
    for lead in (1, 4):
        found, caches = run_window(program, tokens, lead)
        # A linear layer of a CPU may round differently at another place of the window; tests/gpu compares bits.
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        for cache, other in zip(caches, before, strict=True):
            assert int(written(cache).sum()) == tokens.numel() and torch.equal(written(cache), written(other))
