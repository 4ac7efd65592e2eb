"""Models in every scheme: what is recognised, what is merged, and tokens against those of the dequantised model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import specgraph
from specgraph.bench.models import random_head
from specgraph.config import load_config
from specgraph.errors import UnsupportedModelError
from specgraph.frontend.tracing import trace
from specgraph.ir import linear as linears
from specgraph.ir.linear import packed_tensors, scheme_of, stacks_of
from specgraph.ir.traffic import reads_of
from specgraph.kernels.packed import cpu
from specgraph.kernels.packed.format import Format
from specgraph.kernels.packed.formats import format_of
from specgraph.passes.few_rows import FewRows
from specgraph.passes.pipeline import run_passes
from tests.compiler.test_pipeline import first
from tests.decoding import CONFIG, assert_same_tokens, forward_greedy, in_a_stream_and_a_session
from tests.drafters.test_matrix import DRAFTERS
from tests.ir.test_linear import misses, up_to_end
from tests.kernels.packed.definition import FAULTS, PUBLISHED_FAULTS
from tests.models import make_model, ragged_prompts
from tests.once import once
from tests.pairwise import cover, product
from tests.schemes import models
from tests.schemes.models import FORMATS, SCHEMES, oracle, packed_experts, packed_layers, sizes

PROMPTS = ragged_prompts()
NEW_TOKENS = 12
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def quantised(
    architecture: str = "llama", scheme: str = "int4", dtype: torch.dtype = torch.float64, **options: Any
) -> PreTrainedModel:
    """A packed model, whose mixture has one layer. GPT-OSS has two in every scheme."""
    layers = {"qwen3_moe": 1}.get(architecture)
    return models.quantised(architecture, scheme, dtype, **{"layers": layers, **options})


@once
def dense(architecture: str = "llama", scheme: str = "int4", dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return oracle(quantised(architecture, scheme, dtype))


@once
def greedy(architecture: str = "llama", scheme: str = "int4", dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The tokens of the model with dense weights."""
    return [up_to_end(tokens) for tokens in forward_greedy(dense(architecture, scheme, dtype), PROMPTS, NEW_TOKENS)]


def decoder(
    model: PreTrainedModel, draft: str = "none", k: int = 3, lowering: str = "gpu", **extra: Any
) -> specgraph.SpeculativeDecoder:
    """A decoder whose draft model, if it has one, is packed in the format of the target."""
    options = {**({"kind": "none"} if draft == "none" else DRAFTERS[draft]), "num_speculative_tokens": k}
    if options["kind"] == "draft_model":
        scheme = next(name for name, form in FORMATS.items() if form in _formats(model))
        given: Any = quantised("llama", scheme, model.dtype, layers=1)
    else:
        given = random_head(model, load_config({"draft": options}).draft)
    config = {**CONFIG, "lowering": {"name": lowering}, "draft": options, **extra}
    return specgraph.compile_speculative(model, config, draft=given)


def _formats(model: PreTrainedModel) -> set[str]:
    return {module.format for module in (*packed_layers(model).values(), *packed_experts(model).values())}


def calls(made: specgraph.SpeculativeDecoder) -> list[linears.Linear]:
    """The linear layers of the target that are in a format."""
    graph = [*made.stages.values()][-1].modules.unchanged["target"].graph
    return [linear for linear in linears.linears(graph) if linear.scheme is not linears.DENSE]


# Tokens


AXES: dict[str, tuple[Any, ...]] = {
    "architecture": ("llama", "qwen3_moe", "gpt_oss"), "draft": ("ngram", "draft_model", "eagle3"),
    "scheme": tuple(SCHEMES), "dtype": (torch.float64, torch.float32), "k": (1, 3, 7),
    "lowering": ("inductor", "gpu"), "verify": (False, True),
}  # fmt: skip
"""Layers, experts, and experts that lie the other way with biases meet every scheme. Without drafts, the first two do
where drawn tokens are compared."""
OTHERS = [
    ("qwen3", "eagle3", "int4", torch.float64, 3, "gpu", True),
    ("gemma3_text", "draft_model", "fp8", torch.float32, 1, "inductor", True),
    ("deepseek_v3", "ngram", "mxfp4", torch.float64, 7, "gpu", False),
    ("qwen3_next", "none", "mxfp4", torch.float32, 3, "inductor", True),
]
"""Other attention and mixtures meet one; ``test_mtp.py`` decodes those of DeepSeek and Qwen3-Next in the others."""


def one_dtype(architecture: str, dtype: torch.dtype, **others: Any) -> bool:
    """Tracing takes most of the time, so each model has the dtype in which other tests of this file trace it."""
    own = torch.float32 if architecture == "gpt_oss" else torch.float64
    return dtype == own


@pytest.mark.parametrize([*AXES], [*cover(product(AXES, one_dtype), (0, 2)), *OTHERS])
def test_tokens_are_those_of_the_dequantised_model(
    architecture: str, draft: str, scheme: str, dtype: torch.dtype, k: int, lowering: str, verify: bool
) -> None:
    model = quantised(architecture, scheme, dtype)
    made = decoder(model, draft, k, lowering, pipeline={"verify": verify})
    found = calls(made)
    assert {linear.scheme.name for linear in found} == {FORMATS[scheme]}
    assert any(linear.expert_ids is not None for linear in found) == bool(packed_experts(model))
    assert any(linear.expert_ids is None for linear in found) == bool(packed_layers(model))
    tokens = made.generate(PROMPTS, max_new_tokens=NEW_TOKENS).new_tokens
    assert_same_tokens(dense(architecture, scheme, dtype), PROMPTS, tokens, greedy(architecture, scheme, dtype))


@pytest.mark.usefixtures("torch_compile")
@pytest.mark.parametrize(("architecture", "scheme"), [("llama", "int4"), ("qwen3_moe", "fp8"), ("gpt_oss", "mxfp4")])
def test_tokens_by_products_that_expand_numbers_on_a_cpu(
    architecture: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, product, names = quantised(architecture, scheme, torch.float32), cpu.product, set[str]()

    def counted(form: Format, x: Tensor, weight: list[Tensor]) -> Tensor:
        names.add(form.name)
        return product(form, x, weight)

    monkeypatch.setattr(cpu, "product", counted)
    made = decoder(model, "ngram", 3, "eager")
    tokens = made.generate(PROMPTS, max_new_tokens=NEW_TOKENS).new_tokens
    expected = greedy(architecture, scheme, torch.float32)
    assert_same_tokens(dense(architecture, scheme, torch.float32), PROMPTS, tokens, expected)
    assert names == {FORMATS[scheme]}


SAMPLING: dict[str, Any] = {"temperature": [0.0] * 3 + [0.8] * 3, "seed": [0, 0, 0, 11, -5, 1 << 40]}
FAMILIES = ["ngram", "draft_model", "eagle3", "medusa", "mtp, 1", "dflash"]
"""One drafter of those that read the same of a target; ``test_matrix.py`` has the others with dense ones."""
SAMPLED = {
    "draft": FAMILIES, "scheme": tuple(SCHEMES), "architecture": ("llama", "qwen3_moe"), "k": (1, 3, 7),
}  # fmt: skip


def scheme_of_drafter(draft: str, scheme: str, architecture: str, k: int) -> bool:
    """A draft model, which is packed itself, meets every scheme, and each other drafter one, since heads take seconds.

    The cover above has greedy tokens of three drafters in every scheme.
    """
    if draft == "draft_model":
        return True
    place = FAMILIES.index(draft)
    return architecture == "llama" and ([*SCHEMES][place % 3], SAMPLED["k"][place // 3 % 3]) == (scheme, k)


def sampled(made: specgraph.SpeculativeDecoder) -> list[Tensor]:
    return made.generate(PROMPTS * 2, max_new_tokens=NEW_TOKENS, **SAMPLING).new_tokens


@once
def sampled_alone(architecture: str, scheme: str) -> list[Tensor]:
    return sampled(decoder(quantised(architecture, scheme)))


@pytest.mark.parametrize([*SAMPLED], cover(product(SAMPLED, scheme_of_drafter), (0, 1)))
def test_seeded_tokens_are_those_of_plain_decoding(draft: str, scheme: str, architecture: str, k: int) -> None:
    """Sampled sequences beside greedy ones."""
    expected = sampled_alone(architecture, scheme)
    assert_same_tokens(dense(architecture, scheme), PROMPTS, expected[:3], greedy(architecture, scheme))
    assert any(not torch.equal(a, b) for a, b in zip(expected[3:], expected[:3], strict=True))
    found = sampled(decoder(quantised(architecture, scheme), draft, k))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def wide(**more: Any) -> PreTrainedModel:
    """A model in fp8 with several blocks in each weight, the last ones of which are not full."""
    shape: dict[str, Any] = {
        "hidden_size": 144,
        "head_dim": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 200,
        **more,
    }
    model = make_model("llama", seed=3, dtype=torch.float64, initializer_range=0.15, **shape)
    return specgraph.quantise(model, "fp8")


def test_tokens_of_weights_with_many_blocks() -> None:
    model = wide()
    dequantised = oracle(model)
    made = decoder(model, "ngram", pipeline={"verify": True})
    tokens = made.generate(PROMPTS, max_new_tokens=NEW_TOKENS).new_tokens
    expected = [up_to_end(tokens) for tokens in forward_greedy(dequantised, PROMPTS, NEW_TOKENS)]
    assert_same_tokens(dequantised, PROMPTS, tokens, expected)
    # Blocks end with queries and keys, which have 128 outputs, but not with the gate, which has 200.
    found = [str(linear.weight[0].target).rpartition("layers.0.")[2] for linear in calls(made)]
    assert found[:5] == [
        "self_attn.q_proj_k_proj_v_proj.weight", "self_attn.o_proj.weight", "mlp.gate_proj.weight",
        "mlp.up_proj.weight", "mlp.down_proj.weight",
    ]  # fmt: skip
    reason = "200 outputs do not end a block of 128, so that the next ones would get its scale"
    assert misses(made, "merge_linears") == {reason}


@once
def compiled_once(name: str) -> tuple[PreTrainedModel, Any]:
    scheme = next(scheme for scheme, form in FORMATS.items() if form == name)
    model = wide() if scheme == "fp8" else quantised("llama", scheme)
    return model, decoder(model)


@pytest.mark.parametrize(("name", "fault"), PUBLISHED_FAULTS)
def test_a_layer_that_reads_its_tensors_wrongly_gives_other_tokens(name: str, fault: str) -> None:
    """The comparison of tokens finds a fault in a single layer. Each layer has several groups or blocks."""
    model, made = compiled_once(name)
    layer: Any = model.model.layers[0].mlp.down_proj
    right = [part.detach().clone() for part in layer.weight_parts]
    expected = made.generate(PROMPTS, max_new_tokens=NEW_TOKENS).new_tokens
    try:
        for part, wrong in zip(layer.weight_parts, FAULTS[name][fault](*right), strict=True):
            part.data.copy_(wrong)
        found = made.generate(PROMPTS, max_new_tokens=NEW_TOKENS).new_tokens
    except specgraph.errors.NumericsError:
        return  # not a number, which is found, too
    finally:
        for part, old in zip(layer.weight_parts, right, strict=True):
            part.data.copy_(old)
    assert any(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@every_scheme
def test_the_model_itself_computes_the_same(scheme: str) -> None:
    """With biases."""
    prompt = PROMPTS[1][None]
    with torch.no_grad():
        found = quantised("qwen2", scheme)(prompt).logits
        torch.testing.assert_close(found, dense("qwen2", scheme)(prompt).logits, rtol=1e-12, atol=1e-12)


@every_scheme
def test_a_stream_a_session_and_scores(scheme: str) -> None:
    made = decoder(quantised("qwen3_moe", scheme), "ngram")
    expected = [tokens.tolist() for tokens in greedy("qwen3_moe", scheme)]
    streamed, stepped, _ = in_a_stream_and_a_session(made, PROMPTS, max_new_tokens=NEW_TOKENS)
    assert streamed == stepped == expected
    scored = made.score(PROMPTS).logprobs
    for prompt, found in zip(PROMPTS, scored, strict=True):
        with torch.no_grad():
            logits = dense("qwen3_moe", scheme)(prompt[None]).logits[0, :-1]
        wanted = logits.log_softmax(-1).gather(-1, prompt[1:, None])[:, 0]
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("architecture", "scheme", "dtype"),
    [("llama", "int4", torch.bfloat16), ("qwen3_moe", "mxfp4", torch.bfloat16), ("llama", "fp8", torch.bfloat16),
     ("qwen3_moe", "fp8", torch.float32)], ids=str,
)  # fmt: skip
def test_the_self_check_takes_it(architecture: str, scheme: str, dtype: torch.dtype) -> None:
    decoder(quantised(architecture, scheme, dtype), debug={"self_check": True})


@every_scheme
def test_a_model_that_is_cast_gives_the_same_tokens(scheme: str) -> None:
    model = quantised("llama", scheme, torch.float32)
    dequantised = oracle(model).double()
    tokens = decoder(copy.deepcopy(model).double(), "ngram").generate(PROMPTS, max_new_tokens=8).new_tokens
    expected = [up_to_end(tokens) for tokens in forward_greedy(dequantised, PROMPTS, 8)]
    assert_same_tokens(dequantised, PROMPTS, tokens, expected)


# Recognising a layer


class Foreign(nn.Module):
    """A layer or a mixture of experts of another package: the same names, all of them parameters."""

    def __init__(self, **tensors: Tensor | None) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))


def _own(module: nn.Module) -> dict[str, Tensor | None]:
    tensors: dict[str, Any] = {**module._parameters, **module._buffers}
    return {name: None if tensor is None else tensor.data for name, tensor in tensors.items()}


def foreign(scheme: str, **changed: Tensor | None) -> Foreign:
    layer = quantised("llama", scheme).model.layers[0].mlp.down_proj
    return Foreign(**{**_own(layer), **changed})


def foreign_stack(scheme: str, **changed: Tensor | None) -> Foreign:
    experts = quantised("qwen3_moe", scheme).model.layers[0].mlp.experts
    return Foreign(**{**_own(experts), **changed})


@every_scheme
def test_a_layer_of_another_package_is_recognised(scheme: str) -> None:
    layer = foreign(scheme)
    found, form = scheme_of(layer), format_of(FORMATS[scheme])
    assert found is not None and found[0].name == FORMATS[scheme]
    assert [id(part) for part in found[1]] == [id(layer.get_parameter(name)) for name in form.parts]
    parts = {id(part) for name, part in layer.named_parameters() if name in (*form.parts, *form.beside)}
    assert {id(part) for part in packed_tensors(layer)} == parts
    stacks = stacks_of(foreign_stack(scheme))
    assert {name: kind.name for name, (kind, _) in stacks.items()} == dict.fromkeys(
        ("gate_up_proj", "down_proj"), form.name
    )


INT, BYTE, FP8 = torch.int32, torch.uint8, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("scheme", "changed"),
    [
        ("int4", {"weight_packed": torch.zeros(32, 6, dtype=BYTE)}),
        ("int4", {"weight_packed": torch.zeros(31, 6, dtype=INT)}),
        ("int4", {"weight_packed": torch.zeros(2, 32, 6, dtype=INT)}),
        ("int4", {"weight_packed": None}),
        ("int4", {"weight_scale": torch.ones(32, 5)}),
        ("int4", {"weight_scale": torch.ones(32, 2, dtype=INT)}),
        ("int4", {"weight_scale": torch.ones(32)}),
        ("int4", {"weight_scale": None}),
        ("int4", {"weight_zero_point": torch.zeros(1, 2)}),
        ("int4", {"weight_g_idx": torch.zeros(32)}),
        ("mxfp4", {"weight_packed": torch.zeros(32, 6, dtype=INT)}),
        ("mxfp4", {"weight_scale": torch.ones(32, 2)}),
        ("mxfp4", {"weight_scale": torch.ones(32, 4, dtype=BYTE)}),  # groups of 16, as nvfp4 has them
        ("mxfp4", {"weight_global_scale": torch.ones(1)}),
        ("mxfp4", {"weight_shape": torch.ones(2)}),
        ("fp8", {"weight": torch.zeros(32, 48)}),
        ("fp8", {"weight": torch.zeros(32, 48).to(torch.float8_e5m2)}),
        ("fp8", {"weight_scale_inv": torch.ones(32, 1)}),
        ("fp8", {"weight_scale_inv": torch.ones(1, 1, dtype=BYTE)}),
        ("fp8", {"activation_scale": torch.ones(1)}),
        ("fp8", {"weight_scale_inv": None}),
    ],
    ids=str,
)  # fmt: skip
def test_a_layer_of_another_scheme_is_not(scheme: str, changed: dict[str, Tensor | None]) -> None:
    assert scheme_of(foreign(scheme, **changed)) is None


@pytest.mark.parametrize(
    ("scheme", "changed"),
    [
        ("int4", {"down_proj_packed": torch.zeros(4, 32, 3, dtype=BYTE)}),
        ("int4", {"down_proj_scale": torch.ones(3, 32, 3)}),
        ("mxfp4", {"down_proj_blocks": torch.zeros(4, 32, 1, 16, dtype=BYTE)}),  # as files have it
        ("mxfp4", {"down_proj_scales": None}),
        ("fp8", {"down_proj": torch.zeros(4, 32, 24)}),
        ("fp8", {"down_proj_scale_inv": torch.ones(4, 1, 2)}),
    ],
    ids=str,
)  # fmt: skip
def test_a_stack_of_another_scheme_is_not(scheme: str, changed: dict[str, Tensor | None]) -> None:
    assert [*stacks_of(foreign_stack(scheme, **changed))] == ["gate_up_proj"]


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_a_model_with_layers_of_another_package_is_compiled(scheme: str) -> None:
    model = quantised("llama", scheme)
    for name, layer in packed_layers(model).items():
        model.set_submodule(name, Foreign(**_own(layer)))
    found = decoder(model, "ngram", lowering="inductor").generate(PROMPTS, max_new_tokens=NEW_TOKENS).new_tokens
    assert_same_tokens(dense("llama", scheme), PROMPTS, found, greedy("llama", scheme))


@pytest.mark.parametrize(
    ("scheme", "message"),
    [("int4", r"q_proj.weight_packed is torch\.int32"), ("mxfp4", r"q_proj.weight_packed is torch\.uint8"),
     ("fp8", r"q_proj.weight is torch\.float8_e4m3fn")],
)  # fmt: skip
def test_a_layer_that_no_scheme_recognises_is_refused(scheme: str, message: str) -> None:
    model = quantised("llama", scheme)
    layer: Any = model.model.layers[1].self_attn.q_proj
    layer.weight_zero_point = nn.Parameter(torch.zeros(2, 32), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=message):
        specgraph.compile_speculative(model)


# Passes


@every_scheme
def test_layers_of_one_input_are_merged_and_take_in_what_stands_around(scheme: str) -> None:
    """fp8 quantises rows behind their norm, which it therefore does not take in, and its 32 outputs end no block."""
    made = decoder(quantised("llama", scheme))
    part, found = format_of(FORMATS[scheme]).parts[0], calls(made)
    names = [str(linear.weight[0].target).rpartition("layers.0.")[2] for linear in found if linear.expert_ids is None]
    if scheme == "fp8":
        wanted = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj"]
        assert "32 outputs do not end a block of 128, so that the next ones would get its scale" in misses(
            made, "merge_linears"
        )
    else:
        wanted = ["self_attn.q_proj_k_proj_v_proj", "self_attn.o_proj", "mlp.gate_proj_up_proj", "mlp.down_proj"]
        assert not misses(made, "merge_linears")
    assert names[: len(wanted)] == [f"{name}.{part}" for name in wanted]
    assert any(linear.epilogue.get("residual") is not None for linear in found)
    assert any(linear.epilogue.get("sum_sq") is not None for linear in found) == (scheme != "fp8")
    assert ("silu_mul" in {linear.epilogue.get("activation") for linear in found}) == (scheme != "fp8")


def test_groups_of_two_sizes_are_not_merged() -> None:
    model, other = quantised(), quantised(group_size=16)
    for layer, given in zip(model.model.layers, other.model.layers, strict=True):
        layer.self_attn.k_proj = given.self_attn.k_proj
    made = decoder(model)
    assert misses(made, "merge_linears") == {"their inputs are in 2 and 4 groups"}
    expected = [up_to_end(tokens) for tokens in forward_greedy(oracle(model), PROMPTS, 8)]
    assert_same_tokens(model, PROMPTS, made.generate(PROMPTS, max_new_tokens=8).new_tokens, expected)


@every_scheme
def test_a_dense_and_a_packed_layer_are_not_merged(scheme: str) -> None:
    model = make_model("llama", seed=3, **sizes("llama", scheme))
    ignore = ("lm_head", *(f"model.layers.{layer}.self_attn.v_proj" for layer in (0, 1)))
    made = decoder(specgraph.quantise(model, scheme, ignore=ignore, **SCHEMES[scheme]))
    mixed = f"linear layers that read it have weights of two schemes: {FORMATS[scheme]} and dense"
    assert mixed in misses(made, "merge_linears")


def test_two_formats_are_not_merged() -> None:
    model = quantised("llama", "mxfp4")
    for layer, given in zip(model.model.layers, quantised("llama", "int4").model.layers, strict=True):
        layer.self_attn.k_proj = given.self_attn.k_proj
    made = decoder(model)
    assert any("two schemes" in reason for reason in misses(made, "merge_linears"))
    expected = [up_to_end(tokens) for tokens in forward_greedy(oracle(model), PROMPTS, 8)]
    assert_same_tokens(model, PROMPTS, made.generate(PROMPTS, max_new_tokens=8).new_tokens, expected)


@every_scheme
def test_packed_bytes_count(scheme: str) -> None:
    """Those of experts for the rows that meet them: a row meets two of four."""
    model = quantised("qwen3_moe", scheme)
    reads = reads_of(trace(model).body).weights
    per_weight = {"int4": (4, 8, 32), "mxfp4": (4, 32, 8), "fp8": (8, None, 32)}[scheme]
    stacks = sum(_bits(4 * outputs, inputs, *per_weight, blocks=4) for outputs, inputs in _stack_sizes(model)) // 8
    layers = sum(_bits(x.out_features, x.in_features, *per_weight) for x in packed_layers(model).values()) // 8
    assert sum(size for size, share in reads if share == 0.5) == stacks
    assert sum(x.numel() * x.element_size() for x in packed_tensors(model)) == stacks + layers
    dense_bytes = sum(x.numel() * 8 for x in dense("qwen3_moe", scheme).parameters())
    assert layers <= sum(size for size, share in reads if share != 0.5) < dense_bytes


def _stack_sizes(model: PreTrainedModel) -> list[tuple[int, int]]:
    """The outputs and inputs of each matrix of the stacks of one mixture after another."""
    inner, hidden = model.config.moe_intermediate_size, model.config.hidden_size
    return [(2 * inner, hidden), (hidden, inner)] * len(packed_experts(model))


def _bits(outputs: int, inputs: int, bits: int, group: int | None, scale: int, blocks: int = 1) -> int:
    """The bits of numbers and scales. A weight in fp8 that is smaller than a block has one scale."""
    return outputs * inputs * bits + scale * (outputs * inputs // group if group else blocks)


@pytest.mark.parametrize(("architecture", "scheme"), [("llama", "int4"), ("qwen3_moe", "mxfp4"), ("qwen3_moe", "fp8")])
def test_a_draft_model_that_is_a_copy_shares_every_packed_tensor(architecture: str, scheme: str) -> None:
    model = quantised(architecture, scheme)
    made = specgraph.compile_speculative(model, {**CONFIG, "lowering": {"name": "eager"}}, draft=copy.deepcopy(model))
    (report,) = (report for report in made._reports if report.name == "share_weights")
    form, found = format_of(FORMATS[scheme]), {note.rsplit(" [", 1)[0] for note in report.result.notes}
    names = [f"{name}.{part}" for name in packed_layers(model) for part in form.parts]
    stacks = ("gate_up_proj", "down_proj")
    names += [f"{name}.{x}{part}" for name in packed_experts(model) for x in stacks for part in form.stack_parts]
    assert {f"draft.{name} -> target.{name}" for name in names} <= found


def few_rows(model: PreTrainedModel) -> tuple[int, set[str]]:
    """How many layers the pass for few rows replaced, and why it left others."""
    (report,) = run_passes(first(target=trace(model)), [FewRows()])[1]
    return report.result.matches, {miss.reason for miss in report.result.near_misses}


@pytest.mark.parametrize(("dtype", "matches"), [(torch.float32, 1), (torch.bfloat16, 0)])
def test_the_op_of_packed_layers_is_left_as_it_is(dtype: torch.dtype, matches: int) -> None:
    """It has a variant for CPUs. In float32 the projection onto the vocabulary is replaced."""
    assert few_rows(quantised("llama", "int4", dtype)) == (matches, set())


def test_a_weight_that_the_graph_computes_has_a_form_for_few_rows() -> None:
    """DeepSeek's router casts its weight."""
    matches, _ = few_rows(quantised("deepseek_v3", "int4", torch.float32))
    assert matches == 2  # the router of the second layer, and the projection onto the vocabulary
