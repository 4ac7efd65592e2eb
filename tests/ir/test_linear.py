"""A toy scheme, in this file alone: int8 with a scale per output, weights only. It runs through every pass.

Its model holds integers and scales that are powers of two times a small number, so float64 computes the same products
whether a weight was dequantised before or in the op, and tokens must be those of the dequantised model.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

import specgraph
from specgraph.errors import UnsupportedModelError
from specgraph.frontend.tracing import trace
from specgraph.ir import kept
from specgraph.ir import linear as linears
from specgraph.ir.linear import DENSE, describe
from specgraph.ir.scheme import Scheme
from specgraph.ir.traffic import reads_of
from specgraph.kernels.linear.experts import EXPERT_LINEAR
from specgraph.kernels.ops import Variant, declare
from specgraph.passes.few_rows import FewRows
from specgraph.passes.pipeline import run_passes
from tests.compiler.test_pipeline import first
from tests.decoding import CONFIG, assert_same_tokens, forward_greedy
from tests.models import make_head, make_model, ragged_prompts
from tests.pairwise import cover, product

END = 2
"""The token that ends a sequence of the tiny models."""

STACKS = ("gate_up_proj", "down_proj")
"""The stacked weights of a mixture of experts."""

# The scheme


class Int8Layer(nn.Module):
    """A linear layer as a quantiser leaves it in a model: packed tensors, and a forward that unpacks them."""

    def __init__(self, layer: nn.Linear, scale_dtype: torch.dtype) -> None:
        super().__init__()
        matrix = layer.weight.detach()
        scale = (matrix.abs().amax(1) / 127).to(scale_dtype)
        packed = (matrix / scale[:, None].to(matrix.dtype)).round().clamp(-127, 127).to(torch.int8)
        self.packed, self.scale = (nn.Parameter(part, requires_grad=False) for part in (packed, scale))
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.packed.to(x.dtype) * self.scale.to(x.dtype)[:, None], self.bias)


@dataclass(slots=True)
class Int8Linear:
    x: Tensor
    packed: Tensor
    scale: Tensor
    bias: Tensor | None = None


def dequantised(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.to(dtype) * scale.to(dtype)[:, None]


def _int8_reference(given: Int8Linear) -> Tensor:
    weight = dequantised(given.packed, given.scale, given.x.dtype)
    return functional.linear(given.x, weight, given.bias)


def _int8_fake(given: Int8Linear) -> Tensor:
    return given.x.new_empty((*given.x.shape[:-1], given.packed.shape[0]))


declare("toy_int8_linear", Int8Linear, _int8_fake, (Variant("reference", _int8_reference, batch_invariant=True),))


class Int8Experts(nn.Module):
    """A mixture of experts as a quantiser leaves it: packed stacks, and a forward of its own."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts = [experts]  # not a submodule
        for name in STACKS:
            layers = [Int8Layer(as_linear(matrix), torch.float32) for matrix in getattr(experts, name)]
            for part in ("packed", "scale"):
                stack = torch.stack([getattr(layer, part).detach() for layer in layers])
                self.register_parameter(f"{name}_{part}", nn.Parameter(stack, requires_grad=False))

    def _apply_gate(self, inner: Tensor) -> Tensor:
        return self.experts[0]._apply_gate(inner)

    def stack(self, name: str) -> tuple[Tensor, Tensor]:
        return self.get_parameter(f"{name}_packed"), self.get_parameter(f"{name}_scale")

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.dequantised()(hidden, top_k_index, top_k_weights)

    def dequantised(self) -> nn.Module:
        experts = copy.deepcopy(self.experts[0])
        for name in STACKS:
            packed, scale = self.stack(name)
            getattr(experts, name).data = packed.double() * scale.double()[..., None]
        return experts


@dataclass(slots=True)
class Int8ExpertLinear:
    x: Tensor
    packed: Tensor
    scale: Tensor
    bias: Tensor | None
    expert_ids: Tensor
    _: KW_ONLY
    top_k: int = 1


def _int8_experts_reference(given: Int8ExpertLinear) -> Tensor:
    weight = given.packed.to(given.x.dtype) * given.scale.to(given.x.dtype)[..., None]
    return EXPERT_LINEAR.form("reference")(given.x, weight, given.bias, given.expert_ids, top_k=given.top_k)


def _int8_experts_fake(given: Int8ExpertLinear) -> Tensor:
    return given.x.new_empty(given.expert_ids.shape[0], given.packed.shape[1])


declare(
    "toy_int8_experts", Int8ExpertLinear, _int8_experts_fake,
    (Variant("reference", _int8_experts_reference, batch_invariant=True),),
)  # fmt: skip


class Int8(Scheme):
    def weight_of(self, module: nn.Module) -> tuple[Tensor, ...] | None:
        return (module.packed, module.scale) if isinstance(module, Int8Layer) else None

    def stacks_of(self, module: nn.Module) -> dict[str, tuple[Tensor, ...]]:
        return {name: module.stack(name) for name in STACKS} if isinstance(module, Int8Experts) else {}


INT8 = Int8(
    "int8", torch.ops.specgraph.toy_int8_linear.default, ("packed", "scale"),
    experts=torch.ops.specgraph.toy_int8_experts.default,
)  # fmt: skip


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheme is known, and exports of its layers are kept, though their code is not of a trusted package."""
    monkeypatch.setattr(linears, "SCHEMES", [DENSE, INT8])
    for name in ("TRUSTED", "_LIBRARIES"):
        monkeypatch.setattr(kept, name, getattr(kept, name) | {"tests"})


# Models


def _replace(model: nn.Module, kind: type[nn.Module], make: Any, names: Sequence[str]) -> None:
    for name, layer in list(model.named_modules()):
        if isinstance(layer, kind) and name.endswith(tuple(names)):
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, make(layer))


@functools.cache
def _dense(seed: int, layers: int) -> PreTrainedModel:
    return make_model("llama", seed=seed, dtype=torch.float64, num_hidden_layers=layers)


def quantised(
    names: Sequence[str] = ("_proj",), scale_dtype: torch.dtype = torch.bfloat16, seed: int = 3, layers: int = 2
) -> PreTrainedModel:
    """A float64 llama whose layers ``names`` are packed."""
    model = copy.deepcopy(_dense(seed, layers))
    _replace(model, nn.Linear, lambda layer: Int8Layer(layer, scale_dtype), names)
    return model


def oracle(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with dequantised weights."""
    model = copy.deepcopy(model)

    def dense(layer: Int8Layer) -> nn.Linear:
        weight = dequantised(layer.packed, layer.scale, torch.float64)
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.float64)
        made.weight.data = weight
        return made

    _replace(model, Int8Layer, dense, ("",))
    return model


def as_linear(matrix: Tensor) -> nn.Linear:
    made = nn.Linear(*reversed(matrix.shape), bias=False, dtype=matrix.dtype)
    made.weight.data = matrix.detach()
    return made


def quantised_mixture() -> PreTrainedModel:
    """A float64 mixture of experts whose stacks are packed, and its attention, too."""
    model = make_model("qwen3_moe", seed=3, dtype=torch.float64)
    _replace(model, nn.Linear, lambda layer: Int8Layer(layer, torch.float32), ("_proj",))
    _replace(model, type(model.model.layers[0].mlp.experts), Int8Experts, ("experts",))
    return model


def dense_mixture(model: PreTrainedModel) -> PreTrainedModel:
    model = oracle(model)
    _replace(model, Int8Experts, Int8Experts.dequantised, ("experts",))
    return model


@pytest.fixture(params=["inductor", "gpu"])
def lowering(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def compiled(model: PreTrainedModel, lowering: str, given: Any = None, **extra: Any) -> specgraph.SpeculativeDecoder:
    config = {**CONFIG, "lowering": {"name": lowering}, "pipeline": {"verify": True}, **extra}
    return specgraph.compile_speculative(model, config, draft=given)


def int8_calls(decoder: specgraph.SpeculativeDecoder, module: str) -> list[linears.Linear]:
    graph = list(decoder.stages.values())[-1].modules.unchanged[module].graph
    return [linear for linear in linears.linears(graph) if linear.scheme is INT8]


def misses(decoder: specgraph.SpeculativeDecoder, name: str) -> set[str]:
    (report,) = (report for report in decoder._reports if report.name == name)
    return {miss.reason for miss in report.result.near_misses}


# What must hold


AXES = {"draft": ("none", "ngram", "draft_model", "eagle3"), "scale_dtype": (torch.bfloat16, torch.float32),
        "lowering": ("gpu", "inductor")}  # fmt: skip


@pytest.mark.parametrize([*AXES], cover(product(AXES), (0, 1)), indirect=["lowering"])
def test_tokens_are_those_of_the_dequantised_model(draft: str, scale_dtype: torch.dtype, lowering: str) -> None:
    model = quantised(scale_dtype=scale_dtype)
    given: Any = {"draft_model": lambda: quantised(layers=1), "eagle3": lambda: make_head(oracle(model))}.get(draft)
    given = given() if given else None
    chosen = {} if given is not None else {"draft": {"kind": draft}}
    decoder = compiled(model, lowering, given, **chosen)
    prompts = ragged_prompts()
    found = decoder.generate(prompts, max_new_tokens=12).new_tokens
    expected = forward_greedy(oracle(model), prompts, 12)
    assert_same_tokens(model, prompts, found, [up_to_end(tokens) for tokens in expected])


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_packed_experts_give_the_tokens_of_the_dequantised_model(draft: str, lowering: str) -> None:
    model, prompts = quantised_mixture(), ragged_prompts()
    decoder = compiled(model, lowering, draft={"kind": draft}, debug={"self_check": True})
    calls = [linear for linear in int8_calls(decoder, "target") if linear.expert_ids is not None]
    assert [len(linear.weight) for linear in calls] == [2] * 2 * model.config.num_hidden_layers
    expected = forward_greedy(dense_mixture(model), prompts, 12)
    found = decoder.generate(prompts, max_new_tokens=12).new_tokens
    assert_same_tokens(dense_mixture(model), prompts, found, [up_to_end(tokens) for tokens in expected])


def up_to_end(tokens: Tensor) -> Tensor:
    """The tokens up to the first that ends a sequence."""
    return tokens[: 1 + next((place for place, token in enumerate(tokens.tolist()) if token == END), len(tokens))]


def test_the_self_check_and_the_dump_take_it(lowering: str, tmp_path: Path) -> None:
    model = quantised()
    config = {"debug": {"self_check": True, "dump_dir": str(tmp_path / "dump")}, "draft": {"kind": "none"}}
    compiled(model, lowering, **config)
    texts = [path.read_text() for path in (tmp_path / "dump").rglob("target.py")]
    assert any("toy_int8_linear" in text for text in texts)


def test_packed_linears_of_one_input_are_merged() -> None:
    model = quantised()
    decoder = compiled(model, "gpu", draft={"kind": "none"})
    found = int8_calls(decoder, "target")
    assert [str(linear.weight[0].target).rpartition("layers.0.")[2] for linear in found[:4]] == [
        "self_attn.q_proj_k_proj_v_proj.packed", "self_attn.o_proj.packed", "mlp.gate_proj_up_proj.packed",
        "mlp.down_proj.packed",
    ]  # fmt: skip
    attention: Any = model.model.layers[0].self_attn
    for part in ("packed", "scale"):  # the model's own tensors are views of the merged ones
        storages = {getattr(attention, f"{x}_proj").get_parameter(part).untyped_storage().data_ptr() for x in "qkv"}
        assert len(storages) == 1
    assert misses(decoder, "lower_kernels") == {"no op of int8 weights takes in the nodes around it"}
    assert not misses(decoder, "merge_linears")


def test_a_dense_and_a_packed_linear_are_not_merged() -> None:
    decoder = compiled(quantised(("q_proj", "k_proj")), "gpu", draft={"kind": "none"})
    assert [len(linear.weight) for linear in int8_calls(decoder, "target")] == [2, 2]
    mixed = "linear layers that read it have weights of two schemes: int8 and dense"
    assert misses(decoder, "merge_linears") == {mixed}


def test_scales_of_two_dtypes_are_not_merged() -> None:
    model = quantised(("q_proj", "v_proj"))
    _replace(model, nn.Linear, lambda layer: Int8Layer(layer, torch.float32), ("k_proj",))
    decoder = compiled(model, "gpu", draft={"kind": "none"})
    assert "the weights differ in dtype or device" in misses(decoder, "merge_linears")


@pytest.mark.parametrize("shape", [(), (1,), (2,)], ids=["scalar", "one", "blocks"])
def test_scales_of_several_outputs_are_not_merged(shape: tuple[int, ...]) -> None:
    """Joined, they would say of no output which scale it has."""
    weights = [(torch.ones(8, 4, dtype=torch.int8), torch.ones(shape)) for _ in range(2)]
    assert INT8.why_not_merged(weights) == "a tensor of int8 weights does not have a row for every output"
    weights = [(packed, torch.ones(8)) for packed, _ in weights]
    assert INT8.why_not_merged(weights) is None


def test_packed_bytes_count() -> None:
    model = quantised()
    weights = sum(size for size, _ in reads_of(trace(model).body).weights)
    expected = sum(p.numel() * p.element_size() for name, p in model.model.named_parameters() if "embed" not in name)
    constant = sum(b.numel() * b.element_size() for b in model.model.buffers())
    assert expected <= weights <= expected + constant


def test_packed_bytes_of_experts_count_for_the_rows_that_meet_them() -> None:
    """A row meets two of four experts."""
    model = quantised_mixture()
    stacks = [part for layer in model.model.layers for name in STACKS for part in layer.mlp.experts.stack(name)]
    reads = reads_of(trace(model).body).weights
    assert sum(size for size, share in reads if share == 0.5) == sum(x.numel() * x.element_size() for x in stacks)


def test_equal_packed_weights_are_shared() -> None:
    """A draft model that is the target's copy takes all its tensors, packed ones and scales."""
    model = quantised()
    decoder = compiled(model, "eager", copy.deepcopy(model))
    (report,) = (report for report in decoder._reports if report.name == "share_weights")
    shared = " ".join(report.result.notes)
    assert shared.count(".packed ->") == shared.count(".scale ->") == 2 * 7


def test_there_is_no_form_for_few_rows() -> None:
    model = quantised().float()
    program = first(target=trace(model))
    reports = run_passes(program, [FewRows()])[1]
    assert {miss.reason for miss in reports[0].result.near_misses} == {"int8 has no such product"}
    assert reports[0].result.matches == 1  # the projection onto the vocabulary


@pytest.mark.parametrize("make", [quantised, quantised_mixture])
def test_a_packed_model_of_no_known_scheme_is_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "SCHEMES", [DENSE])
    with pytest.raises(UnsupportedModelError, match=r"packed is torch\.int8"):
        specgraph.compile_speculative(make())


def test_a_node_is_described_by_the_names_of_its_arguments() -> None:
    body = trace(quantised()).body
    found = list(linears.linears(body.graph))
    assert [linear.scheme.name for linear in found] == ["int8"] * 14
    assert all(linear.features[1] == linear.tensors(body)[0].shape[0] for linear in found)
    assert describe(body.graph.output_node()) is None
