"""Several GPUs that share one target: every bit is the same with and without drafts, in every company and every run."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import specgraph
from specgraph import ConfigError, InputError, NumericsError, SpeculativeDecoder
from specgraph.kernels.linear import all_reduce
from specgraph.kernels.peers import PeerGroup, exchanging, not_waiting
from tests.decoding import in_a_stream_and_a_session
from tests.models import make_model

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
MODELS = Path(__file__).parents[2] / "examples" / "models" / "tiny-math"
DEVICES = [torch.device("cuda", index) for index in range(2)]


def loaded_target() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.bfloat16).cuda()


@functools.cache
def target() -> Any:
    return loaded_target()


@functools.lru_cache(maxsize=4)
def decoder(kind: str, k: int = 1) -> SpeculativeDecoder:
    loaded = kind not in ("none", "ngram")
    draft: dict[str, Any] = {"num_speculative_tokens": k} | ({} if loaded else {"kind": kind})
    given = {"draft": draft, "parallel": {"tensor": 2}}
    return specgraph.compile_speculative(target(), given, draft=MODELS / kind if loaded else None)


def prompts(count: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = [3 + 5 * row for row in range(count)]
    return [torch.randint(5, target().config.vocab_size, (length,), generator=generator) for length in lengths]


Found = list[tuple[Tensor, Tensor]]


def run(own: SpeculativeDecoder, rows: list[int], temperature: float, new: int = 60) -> Found:
    out = own.generate(
        [prompts()[row] for row in rows], max_new_tokens=new, temperature=temperature, seed=rows, eos_token_id=[],
        return_logprobs=True,
    )  # fmt: skip
    assert out.logprobs is not None
    return list(zip(out.new_tokens, out.logprobs, strict=True))


def assert_equal_bits(found: Found, expected: Found) -> None:
    for row, (own, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(own[0], other[0]) and torch.equal(own[1], other[1]), row


@functools.cache
def plain(temperature: float) -> Found:
    return run(decoder("none"), list(range(64)), temperature)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sums_are_those_in_the_order_of_the_ranks_on_every_gpu(dtype: torch.dtype) -> None:
    """One launch after the other, and in graphs that are replayed; of one value, and of more than all programs take."""
    group = PeerGroup(DEVICES)
    for size in (1, 2049, 7 * 4096, 600_001):
        parts = [torch.randn(size, device=device, dtype=torch.float32).to(dtype) for device in DEVICES]
        outs: list[Tensor] = []
        graphs = []
        for rank, device in enumerate(DEVICES):
            with torch.cuda.device(device), exchanging(group):
                with not_waiting():  # kernels are loaded, for which a GPU that waits would have to end
                    parts[rank].copy_(torch.ops.specgraph.all_reduce_rank(parts[rank], rank=rank, world_size=2) / 1)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):  # the default one is the first GPU's
                    for _ in range(3):
                        outs.append(torch.ops.specgraph.all_reduce_rank(parts[rank], rank=rank, world_size=2))
                        parts[rank].copy_(outs[-1] / 2)
                graphs.append(graph)
        for _ in range(3):
            fresh = [part.clone() for part in parts]
            for device, graph in zip(DEVICES, graphs, strict=True):
                with torch.cuda.device(device):
                    graph.replay()
            for device in DEVICES:
                torch.cuda.synchronize(device)
            wanted = [part.to(DEVICES[0]) for part in fresh]
            for turn in range(3):
                expected = all_reduce.all_reduce_reference(all_reduce.AllReduce(wanted))
                assert torch.equal(outs[turn], expected) and torch.equal(outs[3 + turn].to(DEVICES[0]), expected)
                wanted = [expected / 2] * 2


def test_a_gpu_that_waits_in_vain_gives_nan_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "MOST_TRIES", 1000)
    group, x = PeerGroup(DEVICES), torch.ones(5000, device=DEVICES[0])
    with torch.cuda.device(0), exchanging(group):
        out = torch.ops.specgraph.all_reduce_rank(x, rank=0, world_size=2)
        assert bool(out.isnan().all()) and int(group.faults[0])
    with torch.cuda.device(1), exchanging(group):
        out = torch.ops.specgraph.all_reduce_rank(x.to(DEVICES[1]), rank=1, world_size=2)
        assert bool((out == 2).all()), "what the first one gave before it gave up"
        out = torch.ops.specgraph.all_reduce_rank(x.to(DEVICES[1]), rank=1, world_size=2)
        assert bool(out.isnan().all())


@pytest.mark.parametrize("width", [64, 4096, 2880])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_residuals_and_norms_behind_a_sum(width: int, rows: int) -> None:
    group = PeerGroup(DEVICES)
    parts = [torch.randn(rows, width, device=device).bfloat16() for device in DEVICES]
    residual, gain = (torch.randn(shape, device="cuda").bfloat16() for shape in ((rows, width), (width,)))
    # A copy between GPUs would wait for one that waits itself.
    given = [(parts[rank], gain.to(device), residual.to(device)) for rank, device in enumerate(DEVICES)]
    found, op = [], torch.ops.specgraph.all_reduce_rank_norm
    for waiting in (False, True):
        for rank, device in enumerate(DEVICES):
            with torch.cuda.device(device), exchanging(group), contextlib.nullcontext() if waiting else not_waiting():
                found.append(op(*given[rank], rank=rank, world_size=2, norm_offset=1.0))
    for device in DEVICES:
        torch.cuda.synchronize(device)
    exact = parts[0].double() + parts[1].to("cuda:0").double() + residual.double()
    for out, weighted, sum_sq in found[2:]:
        own = out.to("cuda:0")
        torch.testing.assert_close(own, exact.bfloat16(), rtol=2**-7, atol=0)  # of float32 sums, one step at ties
        assert torch.equal(weighted.to("cuda:0"), (own.float() * (gain.float() + 1)).bfloat16())
        wanted = own.double().square().view(rows, -1, 64).sum(-1)
        torch.testing.assert_close(sum_sq.to("cuda:0").double(), wanted, rtol=1e-6, atol=0)
    assert all(torch.equal(a, b.to("cuda:0")) for a, b in zip(*found[2:], strict=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("kind", "k", "rows"),
    [
        ("none", 1, [5]), ("none", 1, list(range(40, 48))), ("ngram", 4, list(range(64))), ("eagle3", 3, [7]),
        ("eagle3", 3, list(range(64))), ("eagle3", 7, list(range(16, 32))), ("peagle", 5, list(range(32))),
        ("mtp", 3, list(range(64))), ("dflash", 7, list(range(8))), ("eagle", 4, list(range(20, 30))),
    ],
)  # fmt: skip
def test_speculation_changes_no_bit(kind: str, k: int, rows: list[int], temperature: float) -> None:
    assert_equal_bits(run(decoder(kind, k), rows, temperature), [plain(temperature)[row] for row in rows])


def test_every_run_gives_the_same_bits() -> None:
    for _ in range(5):
        assert_equal_bits(run(decoder("none"), list(range(64)), 1.0), plain(1.0))


def test_prompts_may_be_cut_and_shared() -> None:
    rows = list(range(0, 64, 3))
    cut = specgraph.compile_speculative(
        target(), {"draft": {"kind": "none"}, "parallel": {"tensor": 2}, "cache": {"prefill_chunk": 37}}
    )
    for _ in range(2):  # the second time, pages are there
        assert_equal_bits(run(cut, rows, 0.0), [plain(0.0)[row] for row in rows])


def test_sessions_and_streams_give_the_same_tokens() -> None:
    expected = [tokens[:30].tolist() for tokens, _ in plain(0.0)]
    own = prompts()
    for kind, k in (("none", 1), ("eagle3", 3)):
        streamed, in_session, _ = in_a_stream_and_a_session(decoder(kind, k), own, max_new_tokens=30, eos_token_id=[])
        assert streamed == in_session == expected


def test_one_gpu_has_nearly_the_same_logprobs() -> None:
    """The sums over devices are rounded to bfloat16 first, so values differ by some of its steps."""
    alone = specgraph.compile_speculative(loaded_target(), "none")
    one, two = (run(own, [3], 0.0, new=1) for own in (alone, decoder("none")))
    assert torch.allclose(one[0][1], two[0][1], atol=0.1)


_LARGER: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
    "initializer_range": 0.05,
}  # fmt: skip
SHARED: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "int4": ("llama", "int4", {}), "fp8": ("llama", "fp8", {}), "mxfp4": ("llama", "mxfp4", {}),
    "int8": ("phi3", "int8_channel", {}), "experts": ("qwen3_moe", None, {"moe_intermediate_size": 384}),
    "int4 experts": ("qwen3_moe", "int4", {"moe_intermediate_size": 256}),
    "sorted experts": ("gpt_oss", "mxfp4", {"intermediate_size": 320}),  # parts of 160 end inside of a word of scales
    "recurrences": ("qwen3_5_text", None, {"linear_key_head_dim": 64, "linear_value_head_dim": 64}),
    "shared experts": ("qwen2_moe", "fp8", {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}),
    "latent attention": ("deepseek_v3", None, {
        "num_key_value_heads": 8, "head_dim": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64,
        "q_lora_rank": 256, "kv_lora_rank": 128, "moe_intermediate_size": 256,
    }),
    "norms over all heads": ("olmo2", None, {}),
    "norms over all heads, and experts": ("olmoe", "fp8", {"intermediate_size": 256}),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_packed_weights_and_experts_are_split(name: str) -> None:
    """The self-check compares with the model's own forward; drafts, company and another run change no bit."""
    architecture, scheme, sizes = SHARED[name]
    given: Any = make_model(architecture, dtype=torch.bfloat16, **{**_LARGER, **sizes})
    if scheme is not None:
        specgraph.quantise(given, scheme)
    parallel = {"tensor": 2, "devices": [*map(str, DEVICES)]}
    model = copy.deepcopy(given).cuda()
    plain, drafted, from_cpu = (
        specgraph.compile_speculative(own, {"draft": {"kind": kind, "num_speculative_tokens": 4}, "parallel": parallel})
        for own, kind in ((model, "none"), (model, "ngram"), (given, "none"))
    )
    splits = [note for note in plain._reports[1].result.notes if "columns" in note]
    assert len(splits) >= 2, plain.report()
    generator = torch.Generator().manual_seed(0)
    own = [torch.randint(3, 101, (3 + 3 * row,), generator=generator) for row in range(16)]
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.5, "eos_token_id": [], "return_logprobs": True}
    expected = [plain.generate([prompt], seed=[row], **options) for row, prompt in enumerate(own)]
    for decoder in (plain, drafted, drafted, from_cpu):
        out = decoder.generate(own, seed=list(range(16)), **options)
        for row, alone in enumerate(expected):
            assert torch.equal(out.new_tokens[row], alone.new_tokens[0]), row
            assert torch.equal(out.logprobs[row], alone.logprobs[0]), row


@pytest.mark.parametrize(("kind", "k"), [("none", 1), ("eagle3", 3)])
def test_the_host_takes_part_in_steps(kind: str, k: int) -> None:
    def even(batch: int, ids: Tensor) -> list[int]:
        return list(range(6 + int(ids[-1]) % 2, target().config.vocab_size, 2))

    given: dict[str, Any] = {
        "max_new_tokens": 40,
        "prefix_allowed_tokens_fn": even,
        "temperature": 1.0,
        "eos_token_id": [],
    }
    rows = range(0, 64, 5)
    expected = [decoder("none").generate([prompts()[row]], seed=[row], **given).new_tokens[0] for row in rows]
    found = decoder(kind, k).generate([prompts()[row] for row in rows], seed=list(rows), **given).new_tokens
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("logprobs", ["raw", "processed"])
def test_tokens_are_scored_with_the_bits_that_they_were_drawn_with(logprobs: str) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9} if logprobs == "processed" else {}
    rows = list(range(0, 64, 3))
    own = decoder("eagle3", 3)
    out = own.generate(
        [prompts()[row] for row in rows], max_new_tokens=40, seed=rows, eos_token_id=[], return_logprobs=logprobs,
        **{"temperature": 1.0, **options},
    )  # fmt: skip
    assert out.logprobs is not None
    for count in (len(rows), 5):  # in other company, too
        joined = [torch.cat([prompts()[row], new]) for row, new in zip(rows, out.new_tokens, strict=True)][:count]
        starts = [len(prompts()[row]) for row in rows][:count]
        scored = own.score(joined, start=starts, logprobs=logprobs, **options)
        assert all(map(torch.equal, scored.logprobs, out.logprobs))


def test_a_model_on_the_cpu_gets_to_each_gpu_in_part() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.bfloat16)
    size = sum(weight.nbytes for weight in model.parameters())
    given = {"draft": {"kind": "none"}, "parallel": {"tensor": 2, "devices": [str(device) for device in DEVICES]}}
    specgraph.compile_speculative(model, given)  # what libraries keep for themselves, such as the workspace of cuBLAS
    gc.collect()
    before = [torch.cuda.memory_allocated(device) for device in DEVICES]
    own = specgraph.compile_speculative(model, given)
    grown = [torch.cuda.memory_allocated(device) - first for device, first in zip(DEVICES, before, strict=True)]
    assert all(size / 2 < more < 0.9 * size for more in grown), (size, grown)
    assert "of a copy with its first 2 of 8 layers, on cuda:0" in own.report()
    rows = list(range(0, 64, 5))
    assert_equal_bits(run(own, rows, 1.0), [plain(1.0)[row] for row in rows])


def test_a_gpu_that_waited_in_vain_is_named_and_the_next_call_begins_anew() -> None:
    own = specgraph.compile_speculative(loaded_target(), {"draft": {"kind": "none"}, "parallel": {"tensor": 2}})
    rows = [3, 4]
    expected = run(own, rows, 0.0)
    space = own._runners.idle
    assert space is not None and isinstance(space.group, PeerGroup)
    space.group.faults[1].fill_(1)
    with pytest.raises(NumericsError, match="cuda:1 waited in vain for what another GPU of cuda:0, cuda:1 should"):
        run(own, rows, 0.0)
    assert_equal_bits(run(own, rows, 0.0), expected)


def test_what_is_not_known_yet_is_refused() -> None:
    with pytest.raises(ConfigError, match="asks for 8 GPUs, and there are"):
        specgraph.compile_speculative(target(), {"parallel": {"tensor": 8}})
    with pytest.raises(ConfigError, match="without CUDA graphs"):
        specgraph.compile_speculative(target(), {"parallel": {"tensor": 2}, "lowering": {"cuda_graph": False}})


def test_weights_that_are_written_later_are_noticed() -> None:
    model = loaded_target()
    own = specgraph.compile_speculative(model, {"draft": {"kind": "none"}, "parallel": {"tensor": 2}})
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2)
    with pytest.raises(InputError, match="compile the model again"):
        own.generate(prompts(1), max_new_tokens=2)


def test_logits_that_are_no_numbers_end_their_sequence_and_nothing_waits_in_vain() -> None:
    model = loaded_target()
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan  # and so a logit of every row, since the two are tied
    own = specgraph.compile_speculative(
        model, {"draft": {"kind": "none"}, "parallel": {"tensor": 2}, "debug": {"self_check": False}}
    )
    for _ in range(2):
        with pytest.raises(NumericsError, match="NaN in sequence 0"):
            own.generate([torch.tensor([7, 8])], max_new_tokens=2)
    space = own._runners.idle
    assert space is not None and space.group is not None
    assert not any(map(int, space.group.faults))
