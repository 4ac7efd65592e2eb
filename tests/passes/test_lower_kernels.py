"""The passes from ATen to our ops, one after the other, on whole models and on tiny written graphs.

One pass has one test file, and this pass has the most rewrites.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from transformers import AutoModelForCausalLM

import specgraph
from specgraph.compiler.numerics import observe
from specgraph.drafters.none import NoDrafter
from specgraph.errors import ConfigError, PassError
from specgraph.frontend.tracing import trace
from specgraph.ir.exporting import export_module
from specgraph.ir.model_info import ModelInfo
from specgraph.ir.program import FIRST_FACTS, Program
from specgraph.ir.verifier import verify_program
from specgraph.passes import lower_kernels
from specgraph.passes.capture_cuda_graph import CaptureCudaGraph
from specgraph.passes.fuse_norm import FuseNorm
from specgraph.passes.fuse_rotary_cache import FuseRotaryCache
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.lower_kernels import LowerKernels
from specgraph.passes.merge_linears import MergeLinears, merge_storage
from specgraph.passes.pipeline import run_passes
from specgraph.runtime.execution.workspace import bucket
from specgraph.runtime.memory.sizes import StateSizes, largest
from tests.compiler.test_pipeline import body, first, last
from tests.decoding import CONFIG, compiled
from tests.models import make_head, make_model, ragged_prompts

ROTARY = "specgraph.paged_attention, rotary"
LOWERING = [FuseNorm(), MergeLinears(), FuseRotaryCache(), LowerKernels()]


def targets(program: Program, module: str = "target") -> Counter[str]:
    """How often each op is called, and how often ``paged_attention`` of rows that it rotates, as :data:`ROTARY`."""
    nodes = [node for node in program.modules[module].graph.nodes if node.op == "call_function"]
    rotary = [n for n in nodes if n.target is torch.ops.specgraph.paged_attention.default and n.kwargs.get("cos")]
    counts = Counter(str(node.target).removesuffix(".default") for node in nodes if node not in rotary)
    return counts + Counter({ROTARY: len(rotary)})


def toy(module: nn.Module, *args: Tensor) -> Program:
    """A program of one traced module, which is not called."""
    graph_module = export_module(module, args, {"x": {0: torch.export.Dim("rows", min=1)}}, "toy")
    info = ModelInfo("toy", 7, 1, 4, args[0].dtype, torch.device("cpu"), None)
    drafter = NoDrafter()
    return Program(fx.Graph(), {"toy": graph_module}, {}, info, drafter, facts=FIRST_FACTS | {"kv_cache"})


def run_both(module: nn.Module, x: Tensor, passes: list[Any]) -> tuple[Program, Tensor, Tensor]:
    """The lowered program, what the module gives for ``x``, and what the lowered one gives."""
    program = last(toy(module.eval(), x), passes)
    with torch.no_grad():
        return program, module(x), program.modules["toy"](x)


@pytest.mark.parametrize("architecture", ["gemma2", "cohere", "gpt2", "mixtral", "opt", "mamba"])
def test_a_lowered_decoder_gives_the_tokens_of_the_plain_one(architecture: str) -> None:
    model, prompts = make_model(architecture, dtype=torch.float64), ragged_prompts((3, 9))
    eager, lowered = (compiled(model, k=2, lowering={"name": name}) for name in ("eager", "gpu"))
    outs = [d.generate(prompts, max_new_tokens=10, temperature=1.0, seed=1) for d in (eager, lowered)]
    assert all(map(torch.equal, outs[0].new_tokens, outs[1].new_tokens))
    counts = targets(lowered.stages["lower_kernels"])
    assert counts["specgraph.linear"] > 0 and counts["aten.linear"] == 0


def test_a_llama_layer_is_five_calls_and_a_norm_costs_none() -> None:
    program = last(first(), [InsertKVCache(4), *LOWERING])
    verify_program(program)
    counts = targets(program)
    # Each o begins the norm of its MLP, each down that of the next layer; the first one follows no linear.
    assert (counts["specgraph.linear"], counts["specgraph.linear_norm"], counts["specgraph.norm_parts"]) == (5, 3, 1)
    assert counts[ROTARY] == 2
    # Only the last norm is left whole: its rows are selected before the vocabulary projection reads them.
    assert counts["specgraph.rms_norm"] == 1 and not any(name.startswith("aten.mean") for name in counts)
    lines = [line for line in body(program, "target") if "specgraph.linear" in line]
    assert ["silu_mul" in line for line in lines] == [False, False, True, False] * 2
    assert ["linear_norm" in line for line in lines] == [False, True, False, True, False, True, False, False]


def test_lowering_stays_within_rounding() -> None:
    program = last(first(), [InsertKVCache(4)])
    expected = observe(program)
    for pass_ in LOWERING:
        program = last(program, [pass_])
        actual = observe(program)
        for name, value in expected.items():
            assert float((actual[name] - value).norm() / value.norm()) < 1e-6, (pass_.name, name)


# merge_linears


def test_merged_parameters_are_views_and_the_model_still_works() -> None:
    model = make_model("llama", dtype=torch.float64)
    tokens = torch.arange(12).view(2, 6)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        expected = model(tokens).logits
        program = last(first(target=trace(model)), [MergeLinears()])
        assert torch.equal(model(tokens).logits, expected)
    layer = model.model.layers[0]
    storages = {p.untyped_storage().data_ptr() for p in (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight)}
    assert len(storages) == 1
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in program.modules["target"].parameters()
    }
    held |= {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(held.values()) == sum(p.numel() * 8 for p in model.parameters())


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_lowered_model_can_still_be_saved(architecture: str, tmp_path: Path) -> None:
    model = make_model(architecture, num_hidden_layers=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    compiled(model, lowering={"name": "gpu"})
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in before.items())
    file_size = (tmp_path / "model.safetensors").stat().st_size
    assert file_size < 1.1 * sum(p.numel() * p.element_size() for p in model.parameters())


def test_a_second_decoder_finds_them_merged() -> None:
    model = make_model("llama", dtype=torch.float64)
    found = [last(first(target=trace(model)), [MergeLinears()]) for _ in range(2)]
    merged = [[t for n, t in p.modules["target"].named_parameters() if "q_proj_k_proj_v_proj" in n] for p in found]
    assert [t.data_ptr() for t in merged[0]] == [t.data_ptr() for t in merged[1]] and len(merged[0]) == 2


def test_tensors_that_are_apart_are_copied_once() -> None:
    parts = [nn.Parameter(torch.randn(n, 3)) for n in (2, 4)]
    values = [p.detach().clone() for p in parts]
    merged = merge_storage(list(parts))
    assert torch.equal(merged, torch.cat(values)) and all(map(torch.equal, parts, values))
    assert merge_storage(list(parts)).data_ptr() == merged.data_ptr()
    assert merge_storage(list(reversed(parts))).data_ptr() != merged.data_ptr()


class Pair(nn.Module):
    """Two linears of one input; ``tied`` makes them the same weight."""

    def __init__(self, tied: bool = False, biases: tuple[bool, bool] = (False, False)) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(6, 4, bias=bias) for bias in biases)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x).relu()


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"tied": True}, "read elsewhere"), ({"biases": (True, False)}, "some have a bias and some have none")],
)
def test_what_cannot_be_one_is_left_and_named(options: dict[str, Any], reason: str) -> None:
    program = toy(Pair(**options), torch.randn(5, 6))
    stages, reports = run_passes(program, [MergeLinears()])
    assert reports[0].result.matches == 0
    assert reason in reports[0].result.near_misses[0].reason
    assert targets(stages["merge_linears"], "toy")["aten.linear"] == 2


class Sum(nn.Module):
    """The sum of several linears of one input."""

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([linear(x) * factor for factor, linear in enumerate(self.linears, 2)]).sum(0)


def test_weights_of_two_modules_lie_once_in_memory_and_each_merges_what_follows_each_other() -> None:
    q, *others = (nn.Linear(6, 4, bias=True).double() for _ in range(5))
    k, v, other_k, other_v = others
    context, block, reverse = Sum(k, v, other_k, other_v), Sum(q, k, v), Sum(other_v, other_k)
    x = torch.randn(5, 6).double()
    program, expected = toy(context, x), [module(x) for module in (context, block, reverse)]
    program.modules.update(block=toy(block, x).modules["toy"], reverse=toy(reverse, x).modules["toy"])
    stages, reports = run_passes(program, [MergeLinears()])
    merged = stages["merge_linears"]
    counts = [targets(merged, name)["aten.linear"] for name in ("toy", "block", "reverse")]
    assert (reports[0].result.matches, counts) == (2, [1, 2, 2])
    assert [(miss.where, miss.reason) for miss in reports[0].result.near_misses] == [
        ("reverse.linear", "a weight is read elsewhere, too")
    ]
    for name, before in zip(("toy", "block", "reverse"), expected, strict=True):
        torch.testing.assert_close(merged.modules[name](x), before, rtol=0, atol=1e-14)
    assert len({linear.weight.untyped_storage().data_ptr() for linear in others}) == 1


def test_a_draft_moves_no_weight_of_the_target() -> None:
    """Other decoders of the model, whose drafts are others, read it where it was."""
    vocabulary, selector, other = (nn.Linear(6, 4).double() for _ in range(3))
    block, x, place = Sum(vocabulary, selector, other), torch.randn(5, 6).double(), vocabulary.weight.data_ptr()
    program, expected = toy(block, x), block(x)
    program.modules["lm_head"] = toy(Sum(vocabulary), x).modules["toy"]
    stages, _ = run_passes(program, [MergeLinears()])
    assert vocabulary.weight.data_ptr() == place
    assert targets(stages["merge_linears"], "toy")["aten.linear"] == 2
    torch.testing.assert_close(stages["merge_linears"].modules["toy"](x), expected, rtol=0, atol=1e-14)


class _JoinedRows(nn.Module):
    """Two linears of one input, and a view of the first that joins its rows with its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.other = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.heads(x).view(x.shape[0], x.shape[1], 2, 4).view(-1, 4), self.other(x)


def test_a_part_is_copied_where_a_view_joins_its_rows() -> None:
    module, x = _JoinedRows(), torch.randn(3, 5, 8)
    program, wanted, found = run_both(module, x, [MergeLinears()])
    assert targets(program, "toy")["aten.linear"] == 1
    torch.testing.assert_close(found, wanted)


def test_biases_are_merged_with_their_weights() -> None:
    program, expected, actual = run_both(
        Pair(biases=(True, True)).double(), torch.randn(5, 6).double(), [MergeLinears()]
    )
    assert targets(program, "toy")["aten.linear"] == 1
    torch.testing.assert_close(actual, expected)


# fuse_norm


class Norm(nn.Module):
    """A norm as models spell it."""

    def __init__(self, form: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.form, self.weight = form, nn.Parameter(torch.randn(8).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        if self.form == "llama":
            return self.weight * normed.to(x.dtype)
        if self.form == "gemma":
            return (normed * (1.0 + self.weight.float())).type_as(x)
        if self.form == "olmo":
            return (self.weight * normed).to(x.dtype)
        if self.form == "bare":
            return normed.to(x.dtype)
        if self.form == "other dimension":
            return (wide * torch.rsqrt(wide.pow(2).mean(0, keepdim=True) + 1e-5)).to(x.dtype)
        return wide.to(x.dtype) * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5).to(x.dtype)


@pytest.mark.parametrize(
    ("form", "dtype"), itertools.product(["llama", "gemma", "olmo", "bare"], [torch.bfloat16, torch.float32])
)
def test_every_spelling_of_a_norm_becomes_one_op(form: str, dtype: torch.dtype) -> None:
    program, expected, actual = run_both(Norm(form, dtype), torch.randn(5, 8).to(dtype), [FuseNorm()])
    assert targets(program, "toy") == {"specgraph.rms_norm": 1}
    assert actual.dtype == expected.dtype
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    assert error < (1e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize(
    ("form", "reason"),
    [("other dimension", "not the mean over the last dimension"), ("rounded", "does not scale what was squared")],
)
def test_what_is_no_norm_is_left_and_named(form: str, reason: str) -> None:
    _, reports = run_passes(toy(Norm(form, torch.bfloat16), torch.randn(5, 8).bfloat16()), [FuseNorm()])
    (miss,) = reports[0].result.near_misses
    assert reason in miss.reason


# lower_kernels


class Around(nn.Module):
    """A linear and what surrounds it."""

    def __init__(self, tail: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.tail, self.linear = tail, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(x, self.linear(x))


@pytest.mark.parametrize(
    ("tail", "ops"),
    [
        (lambda x, y: x + y, {"specgraph.linear": 1}),
        (lambda x, y: y + x, {"specgraph.linear": 1}),
        (lambda x, y: nn.functional.silu(y), {"specgraph.linear": 1}),
        (lambda x, y: x + nn.functional.gelu(y, approximate="tanh"), {"specgraph.linear": 1}),
        (lambda x, y: nn.functional.gelu(y) * y, {"specgraph.linear": 1, "aten.gelu": 1, "aten.mul.Tensor": 1}),
        (lambda x, y: y + x[:1], {"specgraph.linear": 1, "aten.slice.Tensor": 1, "aten.add.Tensor": 1}),
        (lambda x, y: y + y, {"specgraph.linear": 1, "aten.add.Tensor": 1}),
        (lambda x, y: torch.add(y, x, alpha=2), {"specgraph.linear": 1, "aten.add.Tensor": 1}),
    ],
)
def test_a_linear_takes_along_what_it_can(tail: Callable[[Tensor, Tensor], Tensor], ops: dict[str, int]) -> None:
    program, expected, actual = run_both(Around(tail).double(), torch.randn(5, 8).double(), [LowerKernels()])
    assert targets(program, "toy") == ops
    torch.testing.assert_close(actual, expected)


class Cast(nn.Module):
    """A weight as it is stored, and one that is computed in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.stored, self.wide = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.stored(x), self.wide.to(x.dtype))


def test_a_weight_that_is_computed_is_not_read_ahead() -> None:
    program, expected, actual = run_both(Cast(), torch.randn(5, 8), [LowerKernels()])
    linears = [node for node in program.modules["toy"].graph.nodes if node.name.startswith("linear")]
    assert [node.kwargs.get("constant_weight", True) for node in linears] == [True, False]
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_gates_of_other_activations_compile(activation: str) -> None:
    program = last(first(target=trace(make_model("llama", hidden_act=activation))), [InsertKVCache(4), *LOWERING])
    verify_program(program)
    counts = targets(program)
    linears = counts["specgraph.linear"] + counts["specgraph.linear_norm"]
    assert linears == 8 and (activation == "gelu" or counts["aten.mul.Tensor"] >= 2)


class Reductions(nn.Module):
    """Sums whose order a library may choose by the number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        terms = x.view(x.shape[0], 4, 2).sum(1)
        outer = (x[:, :1].unsqueeze(1) @ x[:, None]).squeeze(1)
        return nn.functional.layer_norm(x, (8,)) + x.mean(-1, keepdim=True) + terms.repeat(1, 4) + outer


def test_reductions_get_an_order_of_their_own() -> None:
    program, expected, actual = run_both(Reductions().double(), torch.randn(5, 8).double(), [LowerKernels()])
    counts = targets(program, "toy")
    assert counts["specgraph.layer_norm"] == counts["specgraph.row_mean"] == 1
    assert not any(
        name.split(".")[1] in ("sum", "mean", "layer_norm", "matmul") for name in counts if name.startswith("aten")
    )
    torch.testing.assert_close(actual, expected)


class Counts(nn.Module):
    """Sums that are no sums of floats, or of which the dtype matters."""

    def forward(self, x: Tensor) -> Tensor:
        positive = (x.view(x.shape[0], 4, 2) > 0).sum(1)
        return torch.cat([positive.to(x.dtype), x.mean(-1, keepdim=True, dtype=torch.float64).to(x.dtype)], -1)


def test_only_sums_of_floats_are_written_out() -> None:
    with pytest.raises(PassError, match=r"toy\.mean"):
        last(toy(Counts(), torch.randn(5, 8)), [LowerKernels()])


class SumOfMany(nn.Module):
    """A sum in half precision, which is rounded once, and one of truth values, which counts them."""

    def forward(self, x: Tensor) -> Tensor:
        terms = x.view(x.shape[0], 8, 1)
        return terms.sum(1) + (terms > 9).sum(1)


def test_sums_in_half_precision_are_rounded_once() -> None:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    program, expected, actual = run_both(SumOfMany(), x, [LowerKernels()])
    exact = x.double().sum(1, keepdim=True)
    assert float((actual.double() - exact).norm()) <= 1.01 * float((expected.double() - exact).norm())
    assert torch.equal(program.modules["toy"](x + 20), SumOfMany()(x + 20))


class Spread(nn.Module):
    """A reduction with two results."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, -1, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + 1e-5)


def test_nodes_of_several_results_are_looked_at() -> None:
    with pytest.raises(PassError, match=r"var_mean.*numerics=bitwise"):
        last(toy(Spread(), torch.randn(5, 8)), [LowerKernels()])


class Product(nn.Module):
    """A product of two activations."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.sin().T


def test_bitwise_refuses_what_it_cannot_promise_and_fast_takes_it() -> None:
    x = torch.randn(5, 8)
    with pytest.raises(PassError, match=r"toy\.matmul .*numerics=bitwise rules out; compile with numerics=fast"):
        last(toy(Product(), x), [LowerKernels()])
    assert targets(last(toy(Product(), x), [LowerKernels(numerics="fast")]), "toy")["aten.matmul"] == 1


class Aliases(nn.Module):
    """Ops that PyTorch writes in others: two names of ``cat``, and what is row-wise without being listed."""

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.concat([x, torch.concatenate([x, x], -1)], -1)
        return torch.hstack([joined, torch.ops.aten.special_softmax(x, -1)])


def test_an_alias_is_what_it_calls() -> None:
    program, expected, actual = run_both(Aliases(), torch.randn(5, 8), [LowerKernels()])
    assert {"aten.concat", "aten.concatenate", "aten.hstack"} <= targets(program, "toy").keys()
    assert torch.equal(expected, actual)


class HiddenProduct(nn.Module):
    """A product of two activations by another name."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("id,jd->ij", x, x.sin())


def test_an_alias_of_what_is_refused_is_refused() -> None:
    with pytest.raises(PassError, match=r"toy\.einsum .*numerics=bitwise rules out"):
        last(toy(HiddenProduct(), torch.randn(5, 8)), [LowerKernels()])


def by_row(x: Tensor) -> Tensor:
    return x.relu().softmax(-1).flip(1)


def across_rows(x: Tensor) -> Tensor:
    return x @ x.sin().T


def with_call(function: Callable[[Tensor], Tensor]) -> Program:
    """A program of a module that calls a function which is no op."""
    program = toy(Around(lambda x, y: y), torch.randn(5, 8))
    graph = program.modules["toy"].graph
    (value,) = graph.output_node().all_input_nodes
    with graph.inserting_after(value):
        call = graph.call_function(function, (value,))
    call.meta["val"] = function(value.meta["val"])
    graph.output_node().replace_input_with(value, call)
    return program


def test_a_function_is_judged_by_the_ops_that_it_calls() -> None:
    assert targets(last(with_call(by_row), [LowerKernels()]), "toy")
    with pytest.raises(PassError, match=r"toy\.across_rows .*numerics=bitwise rules out"):
        last(with_call(across_rows), [LowerKernels()])


@pytest.mark.parametrize("numerics", ["bitwise", "fast"])
@pytest.mark.parametrize("gluon", [True, False])
def test_a_gpu_whose_triton_is_another_is_told(gluon: bool, numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_kernels, "is_hopper", lambda device: True)
    monkeypatch.setattr(lower_kernels, "runs_gluon", lambda device: gluon)
    program = toy(Around(lambda x, y: y), torch.randn(5, 8))
    notes = LowerKernels(numerics=numerics).apply(program).notes
    told = [note for note in notes if "the Gluon kernel, which needs Triton 3.6; this is " in note]
    assert len(told) == (not gluon)


def test_an_unknown_kind_of_numerics_is_refused() -> None:
    with pytest.raises(ConfigError, match="bitwise, fast, not 'exact'"):
        LowerKernels(numerics="exact")


@pytest.mark.parametrize(
    "architecture", ["phi", "gpt_neox", "glm4", "qwen2_moe", "qwen3_moe", "phimoe", "deepseek_v3", "gpt_oss"]
)
def test_other_architectures_have_a_bitwise_form_as_well(architecture: str) -> None:
    """In the dtype in which ``test_fuse_routing.py`` traces those with mixtures, which takes most of the time."""
    program = last(first(target=trace(make_model(architecture, dtype=torch.bfloat16))), [InsertKVCache(4), *LOWERING])
    assert targets(program)["specgraph.linear"] > 0


# The whole of it, and what a CPU refuses


def test_a_head_is_lowered_with_its_target() -> None:
    model, prompts = make_model("llama", dtype=torch.float64), ragged_prompts((3, 9))
    head = make_head(model)
    decoders = [compiled(model, "eagle3", 3, head, lowering={"name": name}) for name in ("eager", "gpu")]
    eager, lowered = (decoder.generate(prompts, max_new_tokens=10) for decoder in decoders)
    assert all(map(torch.equal, eager.new_tokens, lowered.new_tokens))
    assert eager.stats.emitted_per_step == lowered.stats.emitted_per_step
    assert not any(name.startswith("aten.rsqrt") for name in targets(decoders[1].stages["lower_kernels"], "draft"))


def test_a_cpu_replays_no_graph() -> None:
    with pytest.raises(PassError, match="the target is on cpu, and only a GPU replays graphs"):
        compiled(make_model("llama", num_hidden_layers=1), lowering={"name": "gpu", "cuda_graph": True})
    assert CaptureCudaGraph(enabled=False).skipped == "no CUDA graph is asked for"


@pytest.mark.parametrize("batch", range(1, 21))
def test_every_batch_size_has_a_bucket_and_the_largest_is_one(batch: int) -> None:
    sizes = StateSizes(batch, 5, 5 * batch, 77)
    rounded = bucket(sizes, 20, 16)
    assert largest([sizes, rounded]) == rounded
    assert rounded.rows <= 20 and rounded.num_pages <= sizes.num_pages * 33 / 32 + 1
    assert bucket(StateSizes(20, 5, 5 * batch, 77), 20, 16).rows == 20


@pytest.mark.parametrize("parallel", [False, True])
def test_a_head_drafts_with_few_launches(parallel: bool) -> None:
    model = make_model("llama", dtype=torch.float64)
    draft = {"kind": "eagle3", "num_speculative_tokens": 3, "parallel": parallel}
    configs = [{**CONFIG, "draft": draft, "lowering": {"name": name}} for name in ("eager", "gpu")]
    decoders = [specgraph.compile_speculative(model, config, draft=make_head(model)) for config in configs]
    prompts = ragged_prompts((3, 9))
    outs = [d.generate(prompts, max_new_tokens=12, temperature=1.0, seed=1) for d in decoders]
    assert all(map(torch.equal, outs[0].new_tokens, outs[1].new_tokens))
    assert outs[0].stats.acceptance_length == outs[1].stats.acceptance_length
    nodes = decoders[1].stages["lower_kernels"].modules["draft"].graph.nodes
    counts = [str(node.target).removesuffix(".default") for node in nodes if node.op.startswith("call")]
    assert counts.count("specgraph.rms_norm_pair") == counts.count("specgraph.rotary_angles") == 1
    assert not {"aten.cat", "aten.add.Tensor", "aten.embedding", "aten.cos", "specgraph.rms_norm"} & set(counts)
