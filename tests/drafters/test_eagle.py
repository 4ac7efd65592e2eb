"""EAGLE-1 and EAGLE-2 as a chain: layouts, misfits, the formula, equal tokens, history, a dump, a bench, training.

The oracle of the detectors is the published formula in plain PyTorch, without a cache. Each planted bug, and what
caught it here (``test_planted_bugs_are_caught_but_not_by_tokens`` asserts hits and misses; tokens stay equal):

====================================  ===========  ======  ======
bug                                   fresh start  oracle  slots
====================================  ===========  ======  ======
noise off by one position             missed       caught  missed
window instead of emitted             missed       caught  missed
target hidden in the chain            missed       caught  missed
chained position off by one           caught       caught  caught
chained rows not written              missed       caught  caught
catch-up skips the last row           caught       caught  caught
rejected rows written                 missed       missed  caught
proposals from the row before         caught       caught  missed
====================================  ===========  ======  ======
"""

from __future__ import annotations

import copy
import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.drafters.base import DraftHead
from specgraph.drafters.eagle import Eagle, EagleDraftConfig, EagleDrafter
from specgraph.drafters.registry import open_checkpoint
from specgraph.errors import ConfigError
from tests.checkpoints.layouts import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, VOCAB, Written, llama_keys
from tests.checkpoints.running import info
from tests.decoding import CONFIG, compiled
from tests.detectors import NextLogits, caught_by, check_fresh_start, check_oracle, check_slots
from tests.harness import Run, drafting_stage, forced_run, real_run
from tests.models import double_model, exact_norms, ragged_prompts

pytestmark = pytest.mark.usefixtures("cached_traces")

PROMPTS = ragged_prompts((3, 9, 5))
LIMITS = (48, 41, 23)
EPS = 1e-5


@functools.cache
def target() -> PreTrainedModel:
    return double_model("llama", 0, num_hidden_layers=3, tie_word_embeddings=False)


# Layouts

SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
    "post_attention_layernorm": (HIDDEN,),
}  # fmt: skip
QKV = tuple(f"layers.0.self_attn.{name}_proj" for name in "qkv")


def written(*biases: str, layers: int = 1, embedding: bool = False, norms: bool = False, **config: Any) -> Written:
    """A random head as SafeAILab's files are; ``biases`` names the linears that have one."""
    shapes: dict[str, tuple[int, ...]] = {"fc": (HIDDEN, 2 * HIDDEN)}
    for index in range(layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in SHAPES.items()}
        shapes |= {f"layers.{index}.input_layernorm": (HIDDEN,)} if index else {}
        shapes |= {f"layers.{index}.self_attn.{name}_norm": (HEAD_DIM,) for name in ("q", "k") if norms}
    shapes |= {"embed_tokens": (VOCAB, HIDDEN)} if embedding else {}
    named = {f"{name}.weight": shape for name, shape in shapes.items()}
    named |= {f"{name}.bias": shapes[name][:1] for name in biases}
    generator = torch.Generator().manual_seed(4)
    # Nothing norms what is fed on: with larger weights a chain of drafts would grow beyond all bounds.
    tensors = {name: 0.15 * torch.randn(shape, generator=generator) + ("norm" in name) for name, shape in named.items()}
    keys = llama_keys(architectures=["LlamaForCausalLM"], num_hidden_layers=layers) | config
    return Written({key: value for key, value in keys.items() if value is not None}, tensors)


HEADS_WRITTEN: dict[str, tuple[Written, float]] = {
    "plain": (written(), 10000.0),
    "bias of fc": (written("fc", bias=False, rope_theta=500.0), 500.0),
    "biases, own embedding": (written("fc", *QKV, embedding=True, rope_parameters={"rope_theta": 50.0}), 50.0),
    "two layers": (written(layers=2, num_hidden_layers=32, bias=True, qkv_bias=True), 10000.0),
    "norms of queries and keys": (written(norms=True, model_type="qwen3", rope_theta=1e6), 1e6),
}
"""Heads and the base of their rotary embedding. What the configurations say of biases and depth is often wrong."""


def load(folder: Path, **options: Any) -> DraftHead:
    return EagleDrafter.load(open_checkpoint(folder), EagleDraftConfig(**options), target(), info(target()))


@functools.cache
def head(name: str) -> DraftHead:
    """One of ``HEADS_WRITTEN`` by way of its files, computing in float64 throughout."""
    with tempfile.TemporaryDirectory() as folder:
        made = load(HEADS_WRITTEN[name][0].save(Path(folder)))
    exact_norms(made.module)
    return made


def logits_of(module: Any, tokens: Sequence[int], hidden: Tensor) -> Tensor:
    """Logits ``[T, V]`` of rows that run ``tokens`` beside ``hidden`` ``[T, H]``."""
    rows = module(torch.tensor([tokens]), torch.arange(len(tokens))[None], hidden[None])
    logits: Tensor = module.predict(rows)[0][0]
    return logits


@torch.no_grad()
def example_rows() -> tuple[list[int], Tensor]:
    """Tokens behind the first, and the target's last hidden state of all but the last."""
    ids = ragged_prompts((8,), seed=5)[0]
    known = target()(input_ids=ids[None, :-1], output_hidden_states=True).hidden_states[-1][0]
    return ids[1:].tolist(), known


@torch.no_grad()
@pytest.mark.parametrize("container", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("name", HEADS_WRITTEN)
def test_a_layout_is_recognised_and_loaded(name: str, container: str, tmp_path: Path) -> None:
    given, theta = HEADS_WRITTEN[name]
    given.save(tmp_path)
    if container == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
        computed = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # some files have it
        torch.save({n: t.half() for n, t in given.tensors.items()} | computed, tmp_path / container)
    found = open_checkpoint(tmp_path)
    assert (found.kind, found.layout, found.algorithm, found.parallel) == ("eagle", "eagle", "eagle", False)
    loaded = load(tmp_path)
    assert (loaded.features, loaded.mask_token_id, loaded.parallel) == ((3,), None, False)
    module = loaded.module
    parameters = dict(module.named_parameters(remove_duplicate=False))
    assert parameters.keys() == given.tensors.keys() | {"embed_tokens.weight", "lm_head.weight"}
    rounded = {n: t if container == "model.safetensors" else t.half() for n, t in given.tensors.items()}
    assert all(torch.equal(parameters[name], tensor.double()) for name, tensor in rounded.items())
    assert module.config.rope_parameters["rope_theta"] == theta
    assert torch.equal(module.rotary.inv_freq, 1.0 / theta ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))
    assert module.lm_head.weight is target().get_output_embeddings().weight


def test_the_embedding_is_the_targets_own_only_if_it_is_equal(tmp_path: Path) -> None:
    own = target().get_input_embeddings().weight
    for name, change, shared in (("missing", None, True), ("equal", 0.0, True), ("moved", 1e-3, False)):
        given = written()
        if change is not None:
            given.tensors["embed_tokens.weight"] = own.detach().clone()
            given.tensors["embed_tokens.weight"][7, 3] += change
        loaded = load(given.save(tmp_path / name)).module.embed_tokens.weight
        assert (loaded is own) is shared
        assert torch.equal(loaded, given.tensors.get("embed_tokens.weight", own))


def test_options_say_where_they_come_from(tmp_path: Path) -> None:
    def options(given: Written, **changed: Any) -> dict[str, tuple[Any, str]]:
        checkpoint = open_checkpoint(given.save(tmp_path))
        return {c.name: (c.value, c.source) for c in EagleDrafter.choices(checkpoint, EagleDraftConfig(**changed), 3)}

    found = options(written("fc", layers=2, rope_parameters={"rope_theta": 7.0}, bias=False))
    assert found == {
        "biases": (True, "tensors"), "embed_tokens": ("the target's", "tensors"), "layer_type": ("llama", "tensors"),
        "lm_head": ("the target's", "tensors"), "num_layers": (2, "tensors"),
        "rope_theta": (7.0, "rope_parameters.rope_theta"),
    }  # fmt: skip
    assert options(written(rope_theta=8.0))["rope_theta"] == (8.0, "rope_theta")
    assert options(written())["rope_theta"] == (10000.0, "default")
    assert options(written(rope_theta=8.0), rope_theta=9.0)["rope_theta"] == (9.0, "draft.rope_theta")
    assert load(tmp_path, rope_theta=9.0).module.config.rope_parameters["rope_theta"] == 9.0


def _with(given: Written, **tensors: tuple[int, ...]) -> Written:
    named = {name.replace("__", "."): torch.zeros(shape) for name, shape in tensors.items()}
    return replace(given, tensors=given.tensors | named)


def _without(given: Written, name: str) -> Written:
    return replace(given, tensors={key: value for key, value in given.tensors.items() if key != name})


MISFITS: dict[str, tuple[Callable[[], Written], str]] = {
    "another target": (
        lambda: written(hidden_size=64, num_attention_heads=8),
        "does not fit: it has the hidden size 64, but the target Llama has 32",
    ),
    "sizes that contradict each other": (
        lambda: written(intermediate_size=40),
        r"mlp.gate_proj.weight has the shape \[48, 32\], but the target Llama and config.json need \[40, 32\]",
    ),
    "a features' projection": (
        lambda: _with(written(), fc__weight=(32, 96)),
        r"fc.weight has the shape \[32, 96\], but the target Llama and config.json need \[32, 64\]",
    ),
    "another vocabulary": (
        lambda: _with(written(), embed_tokens__weight=(99, 32)),
        r"embed_tokens.weight has the shape \[99, 32\], but the target Llama and config.json need \[101, 32\]",
    ),
    "a missing tensor": (
        lambda: _without(written(), "layers.0.mlp.up_proj.weight"),
        "lacks layers.0.mlp.up_proj.weight; download it again or correct its config.json",
    ),
    "no projection": (lambda: _without(written(), "fc.weight"), "lacks fc.weight; download it again or correct"),
    "a missing layer": (
        lambda: _with(written(), layers__2__mlp__up_proj__weight=(48, 32)),
        "lacks layers.1.self_attn.q_proj.weight, layers.1.self_attn.k_proj.weight, .* and 14 more;",
    ),
    "a last norm": (
        lambda: _with(written(), norm__weight=(32,)),
        "holds norm.weight, which an EAGLE head with its configuration does not use; correct the .* or remove them",
    ),
    "a bias of a norm": (
        lambda: _with(written(), layers__0__post_attention_layernorm__bias=(32,)),
        "holds layers.0.post_attention_layernorm.bias, which an EAGLE head",
    ),
    "a bias of another size": (
        lambda: _with(written(), fc__bias=(31,)),
        r"fc.bias has the shape \[31\], but the target Llama and config.json need \[32\]",
    ),
    "a rotary embedding that is unknown": (
        lambda: written(rope_scaling={"type": "dynamic", "factor": 2.0}),
        "has the rope_type 'dynamic', which specgraph does not run in a head; it runs default",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_misfits_get_one_sentence(case: str, tmp_path: Path) -> None:
    make, message = MISFITS[case]
    make().save(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda given: _with(_without(given, "fc.weight"), norm__weight=(32,)),
         r"is no draft that specgraph knows \(architectures \['LlamaModel'\], .*; it reads EAGLE-1 and EAGLE-2"),
        (lambda given: _with(given, hidden_norm__weight=(32,)), "is a DFlash head, which specgraph does not read"),
        (lambda given: replace(given, config=given.config | {"speculators_model_type": "dspark"}), "is a dspark head"),
        (lambda given: replace(given, config=given.config | {"speculators_model_type": "eagle"}),
         "is an EAGLE-1 head in the layout of speculators, which specgraph does not read; it reads EAGLE-1 and"),
        (lambda given: _with(given, layers__0__hidden_norm__weight=(32,)), None),
    ],
)  # fmt: skip
def test_other_heads_are_told_apart(change: Callable[[Written], Written], words: str | None, tmp_path: Path) -> None:
    change(written(architectures=["LlamaModel"])).save(tmp_path)
    if words is None:
        assert open_checkpoint(tmp_path).kind == "eagle3"
    else:
        with pytest.raises(ConfigError, match=words):
            open_checkpoint(tmp_path)


def test_a_causal_lm_is_no_head(tmp_path: Path) -> None:
    target().save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).kind == "draft_model"


# The published formula, in plain PyTorch


def formula(name: str, tokens: Sequence[int], hidden: Tensor) -> Tensor:
    """Rows ``[T, H]``: ``x = fc(cat(emb, h))``, then for every layer ``x += attn(x)`` and ``x += mlp(norm(x))``.

    Only layers behind the first have a norm in front of their attention.
    """
    given, theta = HEADS_WRITTEN[name]
    weights = {"embed_tokens.weight": target().get_input_embeddings().weight.detach()}
    weights |= {key: tensor.double() for key, tensor in given.tensors.items()}
    x = _linear(weights, "fc", torch.cat([weights["embed_tokens.weight"][list(tokens)], hidden], -1))
    for index in range(sum(key.endswith("o_proj.weight") for key in weights)):
        layer = {k.removeprefix(f"layers.{index}."): v for k, v in weights.items() if k.startswith(f"layers.{index}.")}
        x = x + _attention(layer, x if index == 0 else _norm(layer, "input_layernorm", x), theta)
        y = _norm(layer, "post_attention_layernorm", x)
        gate, up = (_linear(layer, f"mlp.{part}_proj", y) for part in ("gate", "up"))
        x = x + _linear(layer, "mlp.down_proj", gate / (1 + torch.exp(-gate)) * up)
    return x


def _linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def _norm(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight = weights.get(f"{name}.weight")
    return x if weight is None else weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def _attention(weights: dict[str, Tensor], x: Tensor, theta: float) -> Tensor:
    """Causal attention of 4 heads, two of which share keys and values."""
    length, parts = len(x), {}
    for part in "qkv":
        parts[part] = _linear(weights, f"self_attn.{part}_proj", x).view(length, -1, HEAD_DIM).transpose(0, 1)
    queries, keys = (_rotate(_norm(weights, f"self_attn.{part}_norm", parts[part]), theta) for part in "qk")
    keys, values = (each.repeat_interleave(HEADS // KV_HEADS, dim=0) for each in (keys, parts["v"]))
    scores = queries @ keys.transpose(1, 2) / math.sqrt(HEAD_DIM)
    hidden = torch.ones(length, length).triu(1).bool()
    mixed = scores.masked_fill(hidden, -math.inf).softmax(-1) @ values
    return _linear(weights, "self_attn.o_proj", mixed.transpose(0, 1).flatten(1))


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Pairs of elements turned by their position; the angles are float32, as transformers computes them."""
    angles = torch.arange(x.shape[1])[:, None] * (1.0 / theta ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    a, b, cos, sin = x[..., :4], x[..., 4:], angles.cos().double(), angles.sin().double()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def project(x: Tensor) -> Tensor:
    """The target's vocabulary projection."""
    weight: Tensor = target().get_output_embeddings().weight.detach()
    return x @ weight.T


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS_WRITTEN)
def test_forward_is_the_published_formula(name: str) -> None:
    tokens, known = example_rows()
    expected = project(formula(name, tokens, known))
    torch.testing.assert_close(logits_of(head(name).module, tokens, known), expected, rtol=0, atol=1e-5)


def _other_halves(module: Eagle) -> None:
    module.fc.weight.data = module.fc.weight.roll(HIDDEN, dims=1)


def _first_norm(module: Eagle) -> None:
    module.layers[0].input_layernorm = nn.RMSNorm(HIDDEN, EPS, dtype=torch.float64)


def _last_norm(module: Eagle) -> None:
    module.lm_head = nn.Sequential(nn.RMSNorm(HIDDEN, EPS, dtype=torch.float64), module.lm_head)  # type: ignore[assignment]


def _no_bias(module: Eagle) -> None:
    module.fc.bias = None


def _not_causal(module: Eagle) -> None:
    module.layers[0].self_attn.is_causal = False


@torch.no_grad()
@pytest.mark.parametrize("change", [_other_halves, _first_norm, _last_norm, _no_bias, _not_causal])
def test_other_formulas_are_told_apart(change: Callable[[Eagle], None]) -> None:
    tokens, known = example_rows()
    module = copy.deepcopy(head("bias of fc").module)
    change(module)
    expected = project(formula("bias of fc", tokens, known))
    assert (logits_of(module, tokens, known) - expected).abs().max() > 0.1


# The detectors


@functools.cache
def decoder(name: str, k: int, rule: str = "strict", bug: str | None = None) -> SpeculativeDecoder:
    order = ["expose_features", "insert_kv_cache", "insert_draft", *["plant_bug"] * (bug is not None), "insert_verify",
             "fuse_verify"]  # fmt: skip
    config = {
        **CONFIG,
        "draft": {"kind": "eagle", "num_speculative_tokens": k},
        "verify": {"rule": rule},
        "pipeline": {"order": order, "verify": False},
        "passes": {"plant_bug": {"_target_": "tests.harness.PlantBug", "bug": bug}} if bug else {},
    }
    return specgraph.compile_speculative(target(), config, draft=head(name))


@functools.cache
def forced(name: str, k: int, rule: str = "strict", bug: str | None = None) -> Run:
    return forced_run(drafting_stage(decoder(name, k, rule, bug)), PROMPTS, LIMITS, seed=0)


def oracle(name: str) -> NextLogits:
    """Next logits by the formula: every row again from the first token, no cache, no module of ours."""

    @torch.no_grad()
    def next_logits(accepted: Sequence[list[int]], drafted: Sequence[list[int]]) -> Tensor:
        return torch.stack(
            [project(behind(name, tuple(a), tuple(d))[-1]) for a, d in zip(accepted, drafted, strict=True)]
        )

    return next_logits


@functools.cache
def behind(name: str, accepted: tuple[int, ...], drafted: tuple[int, ...]) -> Tensor:
    """The target's hidden states of all accepted tokens but the last, and one row of the formula for every draft and
    for the next one: what the formula gives is fed on as it is.
    """
    if drafted:
        hidden = behind(name, accepted, drafted[:-1])
    else:
        known = target()(input_ids=torch.tensor([accepted[:-1]]), use_cache=False, output_hidden_states=True)
        hidden = known.hidden_states[-1][0]
    return torch.cat([hidden, formula(name, [*accepted[1:], *drafted], hidden)[-1:]])


cases = pytest.mark.parametrize(
    ("name", "k", "rule"),
    [("plain", k, "strict") for k in (1, 4, 7, 16)] + [(name, 4, "probabilistic") for name in HEADS_WRITTEN],
)


@cases
def test_drafts_do_not_depend_on_history(name: str, k: int, rule: str) -> None:
    run = forced(name, k, rule)
    assert run.program.drafter.shifted and not run.parallel
    check_fresh_start(run)


@cases
def test_drafts_are_those_of_the_formula_without_a_cache(name: str, k: int, rule: str) -> None:
    check_oracle(forced(name, k, rule), oracle(name), rule)


@cases
def test_only_own_and_real_slots_are_written(name: str, k: int, rule: str) -> None:
    check_slots(forced(name, k, rule))


@pytest.mark.parametrize("k", [4, 7])
def test_histories_accept_none_and_all_and_reach_the_end(k: int) -> None:
    run = forced("plain", k)
    assert {0, k} <= set(run.accept_counts)
    assert len(run.steps[-1].accepted[2]) == LIMITS[2]


@pytest.mark.parametrize("name", ["plain", "two layers"])
def test_rejected_rows_are_never_read(name: str) -> None:
    run = forced_run(drafting_stage(decoder(name, 4)), PROMPTS, LIMITS, seed=0, poison=True)
    check_oracle(run, oracle(name), "strict")


@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block"])
def test_real_decoding_passes_every_detector(rule: str) -> None:
    run = real_run(decoder("two layers", 4, rule), ragged_prompts((3, 17, 8)), (30, 41, 23))
    assert [len(tokens) for tokens in run.steps[-1].accepted] == [30, 41, 23]
    assert caught_by(run, oracle("two layers"), rule) == set()


BUGS: dict[str, set[str]] = {
    "noise off by one position": {"oracle"},
    "window instead of emitted, shifted": {"oracle"},
    "target hidden in the chain": {"oracle"},
    "chained position off by one": {"fresh start", "oracle", "slots"},
    "chained rows not written": {"oracle", "slots"},
    "catch-up skips the last row, shifted": {"fresh start", "oracle", "slots"},
    "rejected rows written, shifted": {"slots"},
    "proposals from the row before": {"fresh start", "oracle"},
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught_but_not_by_tokens(bug: str) -> None:
    assert caught_by(forced("plain", 4, bug=bug), oracle("plain"), "strict") == BUGS[bug]
    assert tokens_of(decoder("plain", 4, bug=bug)) == plain_tokens()


def tokens_of(tested: SpeculativeDecoder, **changed: Any) -> list[list[int]]:
    options: dict[str, Any] = {"temperature": [0.0, 0.8, 1.3], "seed": [11, -5, 7], **changed}
    out = tested.generate(PROMPTS, max_new_tokens=18, eos_token_id=[], **options)
    return [tokens.tolist() for tokens in out.new_tokens]


@functools.cache
def plain_tokens() -> list[list[int]]:
    return tokens_of(compiled(target(), "none", 1))
