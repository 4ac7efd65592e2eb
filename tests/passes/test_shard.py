"""Several devices that share a target give the tokens of one, and what they do not share is said."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from transformers import PreTrainedModel

import specgraph
from specgraph import ConfigError, InputError, NumericsError, PassError, SpeculativeDecoder
from specgraph.bench.models import random_head
from specgraph.compiler.build_passes import build_passes
from specgraph.compiler.compile import check_parallel, passes_of
from specgraph.compiler.numerics import compare_stages
from specgraph.config import load_config
from specgraph.drafters.none import NoDrafter
from specgraph.errors import VerificationError
from specgraph.frontend.first_program import first_program
from specgraph.frontend.tracing import trace
from specgraph.ir.graphs import DEVICE, arguments, calls, get_attribute
from specgraph.ir.linear import linears
from specgraph.ir.program import Program
from specgraph.ir.shapes import called
from specgraph.ir.state import allocate
from specgraph.ir.traffic import sent_bytes
from specgraph.ir.verifier import check_devices, verify_program
from specgraph.kernels.peers import ThreadGroup, exchanging
from specgraph.passes.base import PassResult
from specgraph.passes.common.one_rank import sort_weights
from specgraph.passes.expose_features import ExposeFeatures
from specgraph.passes.fuse_norm import FuseNorm
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.insert_recurrent_state import InsertRecurrentState
from specgraph.passes.lower_kernels import LowerKernels
from specgraph.passes.pipeline import run_passes
from specgraph.passes.shard import ALL_REDUCE, Shard, weights_on
from specgraph.schemes.layers import PackedExperts, PackedLinear
from tests.decoding import CONFIG, assert_same_tokens, compiled, in_a_stream_and_a_session, reference_greedy
from tests.models import ARCHITECTURES, double_model, make_model, ragged_prompts

PROMPTS = ragged_prompts()
NEW = 10
SPLIT = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neox", "gpt2", "starcoder2",
    "granite", "cohere", "smollm3", "glm4", "stablelm", "opt", "olmo2",
)  # fmt: skip
"""The dense architectures, all layers of which are split."""


def parallel(count: int) -> dict[str, Any]:
    return {"tensor": count, "devices": ["cpu"] * count}


SEVERAL_LAYERS = ("llama", "gemma2", "gpt2", "opt", "lfm2")
"""Of the others one layer shows how it is split, and tracing takes half the time."""


@functools.cache
def model(architecture: str = "llama") -> PreTrainedModel:
    one = {} if architecture in SEVERAL_LAYERS else {"num_hidden_layers": 1, "layer_types": None}
    own = double_model(architecture, 1, **one)
    for name, weight in own.named_parameters():
        if "q_norm" in name or "k_norm" in name:  # all ones would hide whose they are
            weight.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
    return own


@functools.cache
def decoder(architecture: str, kind: str, count: int) -> SpeculativeDecoder:
    given = {"parallel": parallel(count), "pipeline": {"verify": True}} if count > 1 else {}
    return compiled(model(architecture), kind, **given)


@functools.cache
def greedy(architecture: str) -> list[Tensor]:
    return reference_greedy(model(architecture), PROMPTS, NEW)


def sharded(count: int, rank: int | None = None, own: PreTrainedModel | None = None, **options: Any) -> Program:
    """The program of a model, else a llama, with ``count`` devices, or of one of them, and page pools, as verified."""
    target = trace(own or make_model("llama", dtype=torch.float64, **options))
    passes = [ExposeFeatures(), Shard(count, rank), InsertKVCache(4), InsertRecurrentState()]
    program = [*run_passes(first_program(target, NoDrafter()), passes)[0].values()][-1]
    verify_program(program)
    return program


@pytest.mark.parametrize("architecture", SPLIT)
def test_tokens_are_those_of_one_device_and_of_generate(architecture: str) -> None:
    both = architecture in ("llama", "gemma2", "gpt2", "olmo2")
    for count in (2, 4) if both else (2 + 2 * (SPLIT.index(architecture) % 2),):
        many = decoder(architecture, "none", count)
        assert_same_tokens(model(architecture), PROMPTS, many.generate(PROMPTS, max_new_tokens=NEW).new_tokens,
                           greedy(architecture))  # fmt: skip
        drawn = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.9, "seed": 7}
        one = decoder(architecture, "none", 1).generate(PROMPTS, **drawn).new_tokens
        assert_same_tokens(model(architecture), PROMPTS, many.generate(PROMPTS, **drawn).new_tokens, one)
        target = many.stages["shard"].modules.unchanged["target"]
        layers = model(architecture).config.num_hidden_layers
        sums = 2 + (architecture == "olmo2")  # attention, what follows it, and the norms of queries and keys
        assert len([*calls(target.graph, ALL_REDUCE)]) == sums * layers
        whole = [miss.where for miss in result(many).near_misses]
        assert whole and all("embed" in name or "lm_head" in name or "wpe" in name for name in whole)


def result(decoder: SpeculativeDecoder) -> PassResult:
    """What the pass says that it did."""
    return next(report.result for report in decoder._reports if report.name == "shard")


WIDE = {
    "num_attention_heads": 2,
    "head_dim": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "layer_types": None,
}
"""Sizes whose halves are whole blocks of 128."""
SORTED = {**WIDE, "hidden_size": 128}
ONE: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": None}
PACKED: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "int4": ("phi3", "int4", WIDE), "fp8": ("llama", "fp8", WIDE), "int8_channel": ("llama", "int8_channel", WIDE),
    "mixtral": ("mixtral", None, ONE), "gpt_oss": ("gpt_oss", None, ONE),
    "fp8 experts": ("qwen3_moe", "fp8", {**WIDE, "moe_intermediate_size": 256}),
    "sorted int4": ("llama", "int4", SORTED),
    "sorted experts": ("gpt_oss", "mxfp4", {**SORTED, "intermediate_size": 192}),
}  # fmt: skip
"""Models with packed weights or experts. Those of the last two stand in the order of a GPU; of the experts, a device
has 96 inputs, whose scales end inside of a word."""


@functools.cache
def packed(name: str) -> PreTrainedModel:
    architecture, scheme, sizes = PACKED[name.replace("published", "sorted")]
    own = make_model(architecture, dtype=torch.float64, **sizes)
    if scheme is not None:
        specgraph.quantise(own, scheme, group_size=32 if "int4" in scheme and sizes is not SORTED else None)
    for module in own.modules() if name.startswith("sorted") else ():
        if isinstance(module, PackedLinear | PackedExperts):
            module.arrange()
    return own


@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_and_experts_are_split(name: str) -> None:
    own = packed(name)
    many = compiled(own, "ngram", parallel=parallel(2), pipeline={"verify": True})
    one, both = (each.generate(PROMPTS, max_new_tokens=NEW).new_tokens for each in (compiled(own, "none"), many))
    assert_same_tokens(own, PROMPTS, both, one)
    whole = ("embed_tokens", "lm_head", "gate.weight", "router.weight")
    assert all(any(part in miss.where for part in whole) for miss in result(many).near_misses)
    named = {path: p for path, p in own.named_parameters() if p.dim() > 1 and not any(part in path for part in whole)}
    # A scale of one number for all inputs of a row is needed by every device that has some of these.
    once = sum(
        p.nbytes
        for path, p in named.items()
        if (p.shape[-1] == 1 and ("o_proj" in path or "down" in path)) or "down_proj_bias" in path
    )
    layers, shares = [*named.values()], weights_on(many.stages["shard"], 0)[0]
    total, parts = (sum(tensor.nbytes for tensor in tensors) for tensors in (layers, shares))
    assert (total - once) / 2 <= parts <= (total - once) / 2 * 1.02, "and words of scales, biases and sinks"


def test_groups_that_a_device_would_have_a_part_of_stay_whole() -> None:
    own = make_model("llama", dtype=torch.float64, **{**WIDE, "intermediate_size": 160})
    many = compiled(specgraph.quantise(own, "int4", group_size=32), "none", parallel=parallel(2))
    misses = {miss.where.rpartition("layers.0.")[2]: miss.reason for miss in result(many).near_misses}
    reason = "inputs 0 to 80 of 160 in int4 are no whole groups of 32"
    assert misses["mlp.down_proj.weight_packed"] == f"{reason} (2,560 bytes)"
    assert misses["mlp.up_proj.weight_scale"] == f"{reason} (640 bytes)"
    assert not any("attn" in name for name in misses)


def test_what_is_written_into_joined_parts_is_noticed() -> None:
    own = double_model("mixtral", 1, **ONE)
    many = compiled(own, "none", parallel=parallel(2))
    experts = own.model.layers[0].mlp.experts
    with torch.no_grad():
        experts.down_proj.mul_(2)
    found = many.generate(PROMPTS, max_new_tokens=NEW).new_tokens
    assert_same_tokens(own, PROMPTS, found, reference_greedy(own, PROMPTS, NEW))
    with torch.no_grad():
        experts.gate_up_proj.mul_(2)
    with pytest.raises(InputError, match=r"gate_up_proj, of which the decoder reads a copy, was written"):
        many.generate(PROMPTS, max_new_tokens=NEW)


DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {}, "draft_model": {}, "eagle": {}, "eagle3 parallel": {"parallel": True}, "medusa": {},
    "mtp": {"num_modules": 2, "family": "chained"}, "dspark": {},
}  # fmt: skip
"""The keys of ``draft``; heads are random. Of those that read the same of a target there is one."""


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_run_whole_on_every_device(name: str) -> None:
    draft = {"kind": name.split(maxsplit=1)[0], "num_speculative_tokens": 3, **DRAFTERS[name]}
    options = load_config({"draft": draft}).draft
    head = double_model("llama", 2) if name == "draft_model" else random_head(model(), options)
    rule = ("strict", "probabilistic")[[*DRAFTERS].index(name) % 2]
    one, many = (
        specgraph.compile_speculative(model(), {**CONFIG, "draft": draft, "verify": {"rule": rule}, **more}, draft=head)
        for more in ({}, {"parallel": parallel(2)})
    )
    for drawn in ({}, {"do_sample": True, "temperature": 0.8, "seed": 3}):
        a, b = (each.generate(PROMPTS, max_new_tokens=NEW, **drawn) for each in (one, many))
        assert_same_tokens(model(), PROMPTS, b.new_tokens, a.new_tokens)
        assert a.stats.acceptance_length == b.stats.acceptance_length
        if not drawn:
            assert_same_tokens(model(), PROMPTS, b.new_tokens, greedy("llama"))


def test_streams_sessions_prefixes_and_scores_are_those_of_one_device() -> None:
    cache = {"prefill_chunk": 7, "block_size": 4, "reuse_prefixes": True}
    many = compiled(model(), "ngram", parallel=parallel(2), cache=cache, max_batch_size=2)
    expected = [tokens.tolist() for tokens in greedy("llama")]
    streamed, in_session, _ = in_a_stream_and_a_session(many, PROMPTS, max_new_tokens=NEW)
    assert streamed == in_session == expected
    again, _, stats = in_a_stream_and_a_session(many, [PROMPTS[1]] * 3, max_new_tokens=NEW)
    assert again == [expected[1]] * 3 and stats.reused_tokens > 0
    whole = [torch.cat(pair) for pair in zip(PROMPTS, greedy("llama"), strict=True)]
    scores = [each.score(whole).logprobs for each in (decoder("llama", "none", 1), many)]
    for one, own in zip(*scores, strict=True):
        torch.testing.assert_close(own, one, rtol=1e-6, atol=1e-6)


def test_pools_have_the_key_heads_of_their_device() -> None:
    for count, heads in ((2, 1), (4, 1)):
        program = sharded(count)
        pools = program.inputs["target_caches"]
        assert isinstance(pools, tuple) and {pool.shape[2] for pool in pools} == {heads}  # type: ignore[union-attr]
        assert len(pools) == 2 * 2 * count, "keys and values of two layers"
    eight = sharded(2, num_attention_heads=8, num_key_value_heads=4)
    assert {pool.shape[2] for pool in eight.inputs["target_caches"]} == {2}  # type: ignore[union-attr]


ONE_KEY_HEAD: dict[str, tuple[dict[str, Any], set[str]]] = {
    "llama": ({"num_key_value_heads": 1}, {"k_proj.weight", "v_proj.weight"}),
    "gpt_bigcode": ({}, {"weight_every_outputs_32_40", "weight_every_outputs_40_48"}),  # beside queries in one weight
}


@pytest.mark.parametrize("architecture", ONE_KEY_HEAD)
def test_one_key_head_is_whole_on_every_device(architecture: str) -> None:
    sizes, whole = ONE_KEY_HEAD[architecture]
    own = double_model(architecture, 1, **sizes)
    many = compiled(own, "none", parallel=parallel(2))
    found = many.generate(PROMPTS, max_new_tokens=NEW).new_tokens
    assert_same_tokens(own, PROMPTS, found, reference_greedy(own, PROMPTS, NEW))
    missed = {miss.where.rpartition("attn.")[2] for miss in result(many).near_misses if "attn" in miss.where}
    assert missed == whole


OVER_ALL_HEADS = {"olmo2": ("eagle3", 4), "olmo3": ("ngram", 2), "olmoe": ("medusa", 2), "minimax_m2": ("eagle3", 4)}
"""A drafter, and a number of devices: there are two key heads, so that two of four devices have the same."""


@pytest.mark.parametrize("architecture", OVER_ALL_HEADS)
def test_norms_over_all_heads_are_sums_over_devices(architecture: str) -> None:
    own, (kind, count) = model(architecture), OVER_ALL_HEADS[architecture]
    head = random_head(own, load_config({"draft": {"kind": kind}}).draft)
    one, many = (compiled(own, kind, draft=head, **more) for more in ({}, {"parallel": parallel(count)}))
    found = many.generate(PROMPTS, max_new_tokens=NEW).new_tokens
    assert_same_tokens(own, PROMPTS, found, reference_greedy(own, PROMPTS, NEW))
    drawn = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.8, "seed": 3}
    assert_same_tokens(own, PROMPTS, *(each.generate(PROMPTS, **drawn).new_tokens for each in (many, one)))
    assert not any("attn" in miss.where for miss in result(many).near_misses)
    target = many.stages["shard"].modules.unchanged["target"]
    parts = {name: t.numel() for name, t in target.named_buffers() if "q_norm" in name or "k_norm" in name}
    assert sorted(parts.values()) == sorted([32 // count] * count + [max(16 // count, 8)] * count)
    of_norms, *others = calls(target.graph, ALL_REDUCE)
    assert of_norms.meta["val"].shape[-1] == 2 and len(others) == 2, "one number of the queries and one of the keys"


class Standardised(torch.nn.Module):
    """What takes the mean, then that of squares, and the sum of magnitudes, of all features."""

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True).sqrt() + x.abs().sum(-1, keepdim=True) + 1e-3)


@pytest.mark.parametrize(
    ("where", "count", "sums"),
    [
        (
            "mlp.act_fn",
            3,
            [1, 2, 32],
        ),  # the mean, those behind it, and the layer; three devices do not share four heads
        ("self_attn.k_norm", 4, [2, 2, 32, 32]),  # queries' squares with the mean; two devices have the same keys
    ],
)
def test_means_and_sums_that_wait_for_each_other_are_exchanged_apart(where: str, count: int, sums: list[int]) -> None:
    own = double_model("olmo2", 1, **ONE)
    own.model.layers[0].set_submodule(where, Standardised())
    many = compiled(own, "none", parallel=parallel(count))
    found = many.generate(PROMPTS, max_new_tokens=NEW).new_tokens
    assert_same_tokens(own, PROMPTS, found, reference_greedy(own, PROMPTS, NEW))
    target = many.stages["shard"].modules.unchanged["target"]
    assert [node.meta["val"].shape[-1] for node in calls(target.graph, ALL_REDUCE)] == sums


@pytest.mark.parametrize(("architecture", "count"), [("deepseek_v3", 4), ("deepseek_v2", 2)])
def test_heads_of_latent_attention_are_split(architecture: str, count: int) -> None:
    own = double_model(architecture, 1, **{**ARCHITECTURES["deepseek_v3"], **ONE})  # v2 rotates complex numbers
    many = compiled(own, "ngram", parallel=parallel(count), pipeline={"verify": True})
    found = many.generate(PROMPTS, max_new_tokens=NEW).new_tokens
    assert_same_tokens(own, PROMPTS, found, reference_greedy(own, PROMPTS, NEW))
    pools = many.stages["insert_kv_cache"].inputs["target_caches"]
    assert {pool.shape[2] for pool in pools} == {4 // count}  # type: ignore[union-attr]
    missed = {miss.where.rpartition("attn.")[2] for miss in result(many).near_misses if "attn" in miss.where}
    assert missed == {"q_a_proj.weight", "kv_a_proj_with_mqa.weight"}, "which all heads read"


@pytest.mark.parametrize("count", [2, 4])
def test_a_device_has_its_share_and_what_is_whole(count: int) -> None:
    program = sharded(count)
    keys = 2 * 16 * 32 / min(count, 2)  # there are two key heads, so that two of four devices have the same
    own = int(2 * 8 * (keys + (2 * 32 * 32 + 3 * 48 * 32) / count))  # two layers in float64
    small = (5 * 32 + 4) * 8  # norms, and rotary frequencies
    total = own + 2 * 101 * 32 * 8 + small  # the vocabulary is whole
    for device in range(count):
        shares, whole = weights_on(program, device)
        assert sum(tensor.nbytes for tensor in shares) == own
        assert sum(tensor.nbytes for tensor in whole) == total - own
    lines = [line for line in _notes(count) if line.startswith("device")]
    rest = f"{total:,} bytes of weights, {own:,} its own and {total - own:,} that every device has"
    assert lines == [f"device {device}: {rest}" for device in range(count)]


def _notes(count: int) -> tuple[str, ...]:
    return result(decoder("llama", "none", count)).notes


def test_every_split_is_reported() -> None:
    attention, mlp, *_ = _notes(2)
    layer = "model.layers.*."
    projections = ", ".join(f"{layer}self_attn.{name}_proj.weight" for name in "qkv")
    assert attention == f"2 x {layer}self_attn.o_proj.weight: columns; {projections}: rows"
    assert (
        mlp == f"2 x {layer}mlp.down_proj.weight: columns; {layer}mlp.gate_proj.weight, {layer}mlp.up_proj.weight: rows"
    )


def test_what_is_not_split_is_a_near_miss_with_its_reason_and_its_bytes() -> None:
    own = double_model("olmo2", 1)
    for layer in own.model.layers:
        layer.self_attn.q_norm = torch.nn.LayerNorm(32, dtype=torch.float64)  # an op, and not written out
    many = compiled(own, "none", parallel=parallel(2))
    found = many.generate(PROMPTS, max_new_tokens=NEW).new_tokens
    assert_same_tokens(own, PROMPTS, found, reference_greedy(own, PROMPTS, NEW))
    misses = {miss.where: miss.reason for miss in result(many).near_misses}
    reason = "is a norm over all of what would be cut (8,192 bytes)"
    assert misses["target.model.layers.1.self_attn.o_proj.weight"].endswith(reason)
    assert misses["target.model.layers.1.self_attn.q_proj.weight"].endswith(reason)
    assert not any("mlp" in name for name in misses)
    assert misses["lm_head.lm_head.weight"].endswith("are whole on every device (25,856 bytes)")
    three = make_model("llama", dtype=torch.float64)  # 4 heads, and 48 features between the linear layers
    misses = {miss.where: miss.reason for miss in result(compiled(three, "none", parallel=parallel(3))).near_misses}
    assert "inside of one of 4 heads" in misses["target.model.layers.0.self_attn.q_proj.weight"]
    assert not any("mlp" in name for name in misses)


def test_devices_read_the_weights_of_the_model_where_they_lie() -> None:
    own = double_model("llama", 3)
    many = compiled(own, "none", parallel=parallel(2))
    memory = {tensor.untyped_storage().data_ptr() for tensor in own.parameters()}
    program = many.stages["shard"]
    assert all(tensor.untyped_storage().data_ptr() in memory for tensor in weights_on(program, 1)[0])
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.copy_(parameter.flip(0))
    found = many.generate(PROMPTS, max_new_tokens=NEW).new_tokens
    assert_same_tokens(own, PROMPTS, found, reference_greedy(own, PROMPTS, NEW))


def test_a_dump_says_on_which_device_a_node_runs(tmp_path: Path) -> None:
    many = decoder("llama", "none", 2)
    folder = many.dump(tmp_path / "graphs")
    stage = folder / "03_insert_kv_cache"
    lines = (stage / "target.py").read_text().splitlines()
    (key_pool,) = (line for line in lines if line.strip().startswith("k_cache_1 ="))
    assert key_pool.endswith("# f64[N, 4, 1, 8], insert_kv_cache, device 1")
    sums = [line for line in lines if "= torch.ops.specgraph.all_reduce" in line]
    assert len(sums) == 4 and all(line.endswith("# f64[B, T, 32], shard") for line in sums)
    nodes = json.loads((stage / "nodes.json").read_text())["target"]
    devices = [node[DEVICE] for node in nodes if DEVICE in node]
    assert devices.count(0) == devices.count(1) > 0 and len(devices) < len(nodes)
    state = {"B": 1, "b": 1, "T": 3, "M": 2, "N": 2, "S": 8, "E": 1}
    window, results = torch.tensor([[5, 6, 7]]), []
    for loaded in (specgraph.load_dump(stage), many.stages["insert_kv_cache"]):
        given = allocate(loaded, state, torch.device("cpu"))
        given["block_table"].copy_(torch.arange(2)[None])
        given["num_rows"].fill_(3)
        given["max_length"].fill_(8)
        results.append(loaded.step()(window=window, **given))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("opt", 2),
        ("llama", 4),
        ("mixtral", 2),
        ("sorted experts", 2),
        ("qwen3_5_text", 2),
        ("deepseek_v3", 2),
        ("olmo2", 4),
        ("zamba2", 2),
    ],
)
def test_each_device_can_run_the_graph_of_its_own(name: str, count: int) -> None:
    """With the bits of the graph of all devices, and with pages and states for its own heads."""
    own = packed(name) if name in PACKED else make_model(name, dtype=torch.float64)
    program, sizes, window = sharded(count, own=own), {"B": 1, "b": 1, "M": 2, "N": 2}, torch.tensor([[5, 6, 7]])

    def run(program: Program) -> tuple[Tensor, Any]:
        given = allocate(program, sizes, torch.device("cpu"))
        given["block_table"].copy_(torch.arange(2)[None])
        given["num_rows"].fill_(3)
        given["max_length"].fill_(8)
        with torch.no_grad():
            return program.step()(window=window, **given), given

    def run_rank(own: Program) -> tuple[Tensor, Any]:
        assert not any(DEVICE in node.meta for node in own.modules.unchanged["target"].graph.nodes)
        with exchanging(group):
            return run(own)

    group, (logits, together) = ThreadGroup(count), run(program)
    ranks = [sharded(count, rank=rank, own=own) for rank in range(count)]
    size, layers = own.config.hidden_size * logits.element_size(), own.config.num_hidden_layers
    row = {  # behind attention and MLP, and means in float32: of queries and of keys, or of a mixer
        "olmo2": layers * (2 * size + 2 * 4), "zamba2": layers * (size + 4) + 2 * size + 2 * 48 * 8,
    }.get(name, layers * 2 * size)  # fmt: skip
    assert all(sent_bytes(each, 3) == 3 * row * (count - 1) for each in ranks)
    with ThreadPoolExecutor(count) as threads:
        results = list(threads.map(run_rank, ranks))
    assert all(torch.equal(own, logits) for own, _ in results)
    for index, pool in enumerate(together["target_caches"]):
        layer, device = divmod(index // 2, count)
        assert torch.equal(results[device][1]["target_caches"][2 * layer + index % 2], pool) and pool.any()
    written = [buffer for buffer in together.get("target_states", ())[1:] if buffer.any()]
    ranks_with_it = Counter(
        sum(any(torch.equal(buffer, each) for each in own["target_states"]) for _, own in results) for buffer in written
    )
    # Three convolutions of each layer and rank, and rows of a chunk; in zamba2, two convolutions of the only keys and
    # queries for both, and on each the same keys and what a scan without rates leaves of them.
    wanted = {"qwen3_5_text": {1: 2 * (3 + 4)}, "zamba2": {1: 2 * 2 * 3, 2: 2 * (2 + 2 * 2)}}
    assert ranks_with_it == wanted.get(name, {})


@pytest.mark.parametrize("name", ["sorted int4", "sorted experts"])
def test_weights_from_a_cpu_are_sorted_as_those_of_a_model_on_a_gpu(name: str) -> None:
    given, own = (sharded(2, rank=1, own=packed(each)) for each in (name.replace("sorted", "published"), name))
    sort_weights(given)
    verify_program(given)
    first, second = (program.modules.unchanged["target"] for program in (given, own))
    pairs = [*zip(linears(first.graph), linears(second.graph), strict=True)]
    assert sum(a.scheme.name.endswith("_arranged") for a, _ in pairs) >= 2
    for a, b in pairs:
        assert a.scheme is b.scheme and all(map(torch.equal, a.tensors(first), b.tensors(second)))
        values = [node.meta["val"] for node in a.constants if "val" in node.meta]
        assert [(value.shape, value.dtype) for value in values] == [(t.shape, t.dtype) for t in a.tensors(first)]


@pytest.mark.parametrize(
    "architecture", ["llama", "gemma2", "qwen2_moe", "qwen3_5_text", "deepseek_v3", "olmo2", "minimax_m2"]
)
def test_sums_take_in_the_residual_and_the_norm_behind_them(architecture: str) -> None:
    config = load_config({"lowering": {"name": "gpu", "cuda_graph": False}, "draft": {"kind": "none"}})
    passes = build_passes(config)
    passes.insert(1, Shard(2))
    own, group, cpu = make_model(architecture, seed=1), ThreadGroup(2), torch.device("cpu")
    target = trace(own)
    first = first_program(target, NoDrafter())

    def run(rank: int | None) -> Tensor:
        program = ranks[rank]
        given = allocate(program, {"B": 1, "b": 1, "M": 1, "N": 1, "S": 8, "E": 1}, cpu)
        given["num_rows"].fill_(3)
        given["max_length"].fill_(8)
        logits = program.one("logits")
        program.set_output(logits)
        with torch.no_grad(), exchanging(group) if rank is not None else contextlib.nullcontext():
            return program.step()(window=torch.tensor([[5, 6, 7]]), **given)

    plain = [each for each in build_passes(config) if not isinstance(each, LowerKernels)]
    ranks: dict[int | None, Program] = {None: [*run_passes(first, plain)[0].values()][-1]}
    before = [parameter.data_ptr() for parameter in own.parameters()]
    for rank in range(2):
        ranks[rank] = [*run_passes(first, passes_of(rank, cpu, passes))[0].values()][-1]
    assert [parameter.data_ptr() for parameter in own.parameters()] == before, "and other decoders read them there"
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(run, range(2)))
    torch.testing.assert_close(results[0], run(None), rtol=1e-4, atol=1e-5)
    assert torch.equal(*results)
    ops = Counter(called(node) for node in ranks[0].modules.unchanged["target"].graph.nodes)
    layers = target.info.num_layers
    # gemma and olmo norm what a layer gives before they add it, so there is nothing to take in.
    norms_first, over_all_heads = architecture in ("gemma2", "olmo2"), architecture in ("olmo2", "minimax_m2")
    taken = ("all_reduce_rank_norm", "all_reduce_rank")[norms_first]
    experts = [own for own in linears(ranks[0].modules.unchanged["target"].graph) if own.expert_ids is not None]
    assert [bool(own.epilogue["gate"]) for own in experts] == [True, False] * (len(experts) // 2)
    wanted = 2 * layers - 1 - len(experts) // 2  # a norm in front of experts is for their choice, too
    assert sum(count for name, count in ops.items() if name.endswith(f"{taken}.default")) >= wanted, ops
    sums = [node for node in ranks[0].modules.unchanged["target"].graph.nodes if "all_reduce_rank" in called(node)]
    residuals = [node for node in sums if arguments(node)["residual"] is not None]
    assert (len(sums), len(residuals)) == ((2 + over_all_heads) * layers, 0 if norms_first else 2 * layers)
    of_norms = {name.removeprefix("specgraph.").removesuffix(".default"): count for name, count in ops.items()}
    assert of_norms.get("mean_squares", 0) == layers * over_all_heads == of_norms.get("rms_norm_part", 0) / 2


def test_the_graph_of_one_device_does_not_run_alone() -> None:
    own, given = sharded(2, rank=1), {"window": torch.tensor([[5, 6, 7]])}
    state = allocate(own, {"B": 1, "b": 1, "M": 2, "N": 2}, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="one of several devices runs alone"):
        own.step()(**given, **state)


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_a_program_that_moves_to_another_device_takes_everything_with_it(architecture: str) -> None:
    target = trace(make_model(architecture, dtype=torch.float64))
    passes = [ExposeFeatures(), Shard(2, rank=1, device=torch.device("meta")), InsertKVCache(4)]
    program = [*run_passes(first_program(target, NoDrafter()), passes)[0].values()][-1]
    verify_program(program)
    assert program.target.device.type == "meta" and all(tensor.is_meta for tensor in program.tensors())
    nodes = [node for module in program.modules.unchanged.values() for node in module.graph.nodes]
    values = [value for node in nodes for value in [node.meta.get("val")] if isinstance(value, Tensor)]
    made_before = [value for value in values if value.device.type != "meta"]
    assert values and not made_before
    assert not any("cpu" in str(node.args) + str(node.kwargs) for node in nodes)


def drop_sum(target: fx.GraphModule) -> None:
    node = next(calls(target.graph, ALL_REDUCE))
    node.replace_all_uses_with(node.args[0][0])  # type: ignore[index,arg-type]
    target.graph.erase_node(node)


def same_part_twice(target: fx.GraphModule) -> None:
    node = next(calls(target.graph, ALL_REDUCE))
    node.args = ([node.args[0][0]] * 2,)  # type: ignore[index]


def drop_division(target: fx.GraphModule) -> None:
    """Add the means of devices, as if each had all heads."""
    for node in list(calls(target.graph, torch.ops.aten.div.Tensor)):
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]


def other_heads(name: str) -> Callable[[fx.GraphModule], None]:
    """Give devices each other's part of the last weight of a name."""

    def plant(target: fx.GraphModule) -> None:
        nodes = [node for node in target.graph.find_nodes(op="get_attr") if name in str(node.target)][-2:]
        first, second = (get_attribute(target, str(node.target)) for node in nodes)
        for node, tensor in zip(nodes, (second, first), strict=True):
            parent, _, leaf = str(node.target).rpartition(".")
            setattr(target.get_submodule(parent), leaf, tensor)

    return plant


def bias_by_each(target: fx.GraphModule) -> None:
    """Every device adds the bias of the second layer's last product, behind whose sum it is added once more."""
    node = [*calls(target.graph, ALL_REDUCE)][-1]
    (after,) = node.users
    for part in node.args[0]:  # type: ignore[union-attr]
        part.args = (*part.args, after.args[1])  # type: ignore[union-attr]


def bias_of_experts_by_each(target: fx.GraphModule) -> None:
    """Every device adds the biases of the experts' last product."""
    product, other = (own for own in linears(target.graph) if own.expert_ids is not None and "down" in str(own.weight))
    other.node.update_arg(2, product.bias)


FAULTS = {
    "no all-reduce": ("llama", drop_sum), "one part twice": ("llama", same_part_twice),
    "query heads": ("llama", other_heads("q_proj")), "key heads": ("llama", other_heads("k_proj")),
    "columns": ("llama", other_heads("down_proj")), "bias": ("opt", bias_by_each),
    "latent heads": ("deepseek_v3", other_heads("kv_b_proj")),
    "bias of experts": ("gpt_oss", bias_of_experts_by_each), "states": ("qwen3_5_text", other_heads("in_proj_b")),
    "channels": ("lfm2", other_heads("conv.conv")), "no sum of means": ("olmo2", drop_sum),
    "no division": ("olmo2", drop_division), "weights of norms": ("olmo2", other_heads("q_norm")),
    "the only keys": ("gpt_bigcode", other_heads("c_attn.weight_every")),
}  # fmt: skip


def planted(plant: Callable[[fx.GraphModule], None]) -> type[Shard]:
    class Planted(Shard):
        def apply(self, program: Program) -> PassResult:
            done = super().apply(program)
            plant(program.modules["target"])
            program.modules["target"].graph.lint()
            return done

    return Planted


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, plant = FAULTS[fault]
    target = first_program(trace(model(architecture)), NoDrafter(4))  # five rows are compared
    run_passes(target, [Shard(2)], [compare_stages])  # without a fault
    with pytest.raises(NumericsError, match="shard changed logits"):
        run_passes(target, [planted(plant)(2)], [compare_stages])
    monkeypatch.setattr("specgraph.compiler.selfcheck.Shard", planted(plant))
    with pytest.raises(specgraph.UnsupportedModelError, match="decodes differently"):
        compiled(model(architecture), "none", parallel=parallel(2), debug={"self_check": True})


@pytest.mark.parametrize("plant", [None, drop_division])
def test_a_norm_takes_in_the_sum_of_its_means_and_no_other_sum(plant: Callable[[fx.GraphModule], None] | None) -> None:
    shard = Shard if plant is None else planted(plant)
    target, group = trace(model("olmo2")), ThreadGroup(2)
    given = torch.tensor([[5, 6, 7]]), torch.arange(3)[None]
    done = [run_passes(first_program(target, NoDrafter()), [shard(2, rank), FuseNorm()]) for rank in range(2)]

    def run(rank: int) -> list[Tensor]:
        with torch.no_grad(), exchanging(group):
            return [done[rank][0][stage].modules["target"](*given)[-1] for stage in ("shard", "fuse_norm")]

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(run, range(2)))
    torch.testing.assert_close(results[0][1], results[0][0], rtol=1e-12, atol=1e-12)
    assert all(map(torch.equal, *results))
    stages, reports = done[0]
    names = [called(node) for node in stages["fuse_norm"].modules.unchanged["target"].graph.nodes]
    fused = [name.split(".")[1] for name in names if "rms_norm_part" in name or "mean_squares" in name]
    assert fused == (["mean_squares", "rms_norm_part", "rms_norm_part"] if plant is None else [])
    misses = [miss.reason for miss in reports[-1].result.near_misses]
    assert len(misses) == (0 if plant is None else 2)
    assert all(reason.endswith("is not the mean over the last dimension plus epsilon") for reason in misses)


@pytest.mark.parametrize("plant", [drop_sum, same_part_twice])
def test_the_verifier_finds_values_that_leave_their_device(plant: Callable[[fx.GraphModule], None]) -> None:
    stages, _ = run_passes(first_program(trace(model()), NoDrafter()), [planted(plant)(2)])
    with pytest.raises(VerificationError, match=r"another device|not one of each"):
        check_devices(stages["shard"])


def test_the_verifier_finds_a_device_that_reads_the_cache_of_another() -> None:
    program = sharded(2)
    attention = next(calls(program.modules["target"].graph, torch.ops.specgraph.paged_attention.default))
    other = next(node for node in attention.graph.nodes if node.name == "k_cache_1")
    other.append(attention)
    attention.update_arg(3, other)
    with pytest.raises(VerificationError, match=r"of device 0 reads a value of another device: .*1"):
        check_devices(program)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor": 0}, "parallel.tensor must be from 1 to 8, got 0"),
        ({"tensor": 9}, "parallel.tensor must be from 1 to 8, got 9"),
        ({"tensor": 2, "devices": ["cpu"]}, "names 1 devices, and parallel.tensor asks for 2; give as many"),
        ({"devices": ["cpu", "cpu"]}, "names 2 devices, and parallel.tensor asks for 1"),
        ({"tensor": 2, "devices": ["cuda:0", "cuda:99"]}, r"asks for \['cuda:0', 'cuda:99'\] GPUs, and there are"),
        ({"tensor": 2, "devices": ["cuda:0", "cuda:0"]}, "GPUs, each once, .* and not cuda:0, cuda:0"),
        ({"tensor": 2, "devices": ["cuda:0", "cpu"]}, "and not cuda:0, cpu"),
        ({"tensor": 7}, r"tensor=7 splits nothing of LlamaForCausalLM: .* of 4 heads .* Give a number of devices"),
    ],
)
def test_other_devices_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compiled(model(), "none", parallel=given)


HYBRID = {
    "qwen3_next": "", "qwen3_5_text": "", "kimi_linear": "_a_proj", "lfm2": "", "bamba": "", "zamba2": "", "mamba2": "",
}  # fmt: skip
"""By models with recurrent layers, what of these is whole: products in front of others. In zamba2, all heads share keys
and a norm, and in mamba2 a norm.
"""


@pytest.mark.parametrize("architecture", HYBRID)
def test_heads_and_channels_of_recurrent_layers_are_split(architecture: str) -> None:
    own, whole = double_model(architecture, 1), HYBRID[architecture]
    kind = "eagle3" if architecture == "qwen3_5_text" else "ngram"
    head = random_head(own, load_config({"draft": {"kind": kind}}).draft)
    many = compiled(own, kind, draft=head, parallel=parallel(2), pipeline={"verify": True})
    one = compiled(own, kind, draft=head, debug={"self_check": False})
    tokens = [each.generate(PROMPTS, max_new_tokens=NEW).new_tokens for each in (many, one)]
    assert_same_tokens(own, PROMPTS, *tokens)
    mixers = ("linear_attn", "mamba", "mixer", "self_attn")
    layers = [name for name, _ in own.named_parameters() if any(part in name for part in mixers)]
    missed = {miss.where.removeprefix("target.") for miss in result(many).near_misses}
    expected = {name for name in layers if own.get_parameter(name).dim() > 1 and whole and whole in name}
    assert {name for name in missed if name in layers} == expected
    state, alone = (
        [math.prod(buffer.shape[1:]) for buffer in each.stages["insert_recurrent_state"].inputs["target_states"][1:]]
        for each in (many, one)
    )
    twice = 2 * 384 * (architecture == "zamba2")  # of two layers, rows of the only keys are on both devices
    assert sum(state) == sum(alone) + twice and max(state) <= max(alone) // 2


@pytest.mark.parametrize("architecture", ["qwen2_moe", "glm4_moe", "falcon_h1"])
def test_one_sum_is_enough_for_two_results_that_are_added(architecture: str) -> None:
    target = first_program(trace(double_model(architecture, 1)), NoDrafter(4))
    stages, _ = run_passes(target, [Shard(2)], [compare_stages])
    graph = stages["shard"].modules.unchanged["target"].graph
    assert len([*calls(graph, ALL_REDUCE)]) == 2 * target.target.num_layers


def test_rows_that_one_scale_rounds_are_not_split() -> None:
    own = specgraph.quantise(make_model("llama"), "fp8_token")
    with pytest.raises(ConfigError, match=r"splits nothing of .*: fp8_token rounds a row of activations by one scale"):
        compiled(own, "none", parallel=parallel(2))


def test_kernels_and_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="with lowering=eager and kernels, which join layers of several devices"):
        compiled(model(), "none", parallel=parallel(2), lowering={"name": "eager", "kernels": True})
    config = specgraph.config.load_config({"parallel": {"tensor": 2}})
    with pytest.raises(ConfigError, match="for GPUs without CUDA graphs"):
        check_parallel(config, torch.device("cuda:0"))


def test_the_pass_comes_before_state_and_without_parallel_there_is_none() -> None:
    stages = [*decoder("llama", "none", 2).stages]
    assert stages.index("shard") + 1 == stages.index("insert_kv_cache")
    assert "shard" not in decoder("llama", "none", 1).stages
    with pytest.raises(PassError, match="put it before insert_kv_cache"):
        run_passes(first_program(trace(model()), NoDrafter()), [InsertKVCache(4), Shard(2)])
    order = ["expose_features", "shard", "insert_kv_cache", "insert_draft", "insert_verify"]
    named = compiled(model(), "none", pipeline={"order": order, "verify": True}, parallel=parallel(2))
    assert list(named.stages)[1:6] == order
    assert Shard().skipped == "one device runs the target (parallel.tensor=1)"


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_float32_runs_in_every_lowering_for_a_cpu(lowering: str) -> None:
    own = make_model("llama")
    many = compiled(own, "none", parallel=parallel(2), lowering={"name": lowering}, check_numerics=True)
    found = many.generate(PROMPTS, max_new_tokens=NEW).new_tokens
    assert_same_tokens(own, PROMPTS, found, reference_greedy(own, PROMPTS, NEW))
