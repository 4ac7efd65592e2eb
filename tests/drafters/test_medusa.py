"""Medusa: layouts, refusals, equal tokens, the detectors of ``tests.detectors``, the commands, training.

Each planted bug, and what caught it here (``test_planted_bugs_are_caught`` asserts the hits; tokens would stay equal):

==============================  ===========  ======  ======
bug                             fresh start  oracle  slots
==============================  ===========  ======  ======
noise off by one position       missed       caught  missed
proposals from the row before   caught       caught  missed
the last row of the window      caught       caught  missed
a hidden state too early        missed       caught  missed
heads one place on              missed       caught  missed
blocks without their residual   missed       caught  missed
raw logits kept (drawn rules)   missed       caught  missed
==============================  ===========  ======  ======

The drafter keeps nothing of its own, so that only a wrong row depends on what came before, and nothing can go wrong
about slots.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.drafters.base import DraftHead
from specgraph.drafters.medusa import Medusa, MedusaDrafter, ResidualBlock
from specgraph.drafters.registry import open_checkpoint
from specgraph.errors import ConfigError, PassError
from specgraph.ir.program import Program
from specgraph.runtime.outputs.output import GenerateOutput
from specgraph.training import HeadTrainConfig
from specgraph.training.chain import ChainLoss, counted_rows
from specgraph.training.config import ChainConfig, HeadConfig
from specgraph.training.data import Encoded, collate
from specgraph.training.head import build_head, start_from
from specgraph.training.measure import measure
from tests.decoding import CONFIG, reference_greedy
from tests.detectors import NextLogits
from tests.drafters.contract import Case, DraftContract, by_rule, planted
from tests.drafters.files_contract import FilesContract
from tests.drafters.training_contract import TEACHER, Trained, TrainingContract, small_target
from tests.dump.test_dump import assert_runs_alike
from tests.harness import Run, drafting_config
from tests.models import VOCAB, double_model, ragged_prompts

PROMPTS = ragged_prompts((3, 9, 5))
HEADS, SIZE, LAYERS, NEW_TOKENS = 5, 32, 2, 9
Tensors = dict[str, Tensor]


@functools.cache
def target() -> PreTrainedModel:
    return double_model("llama", 0)


def random_tensors(heads: int = HEADS, blocks: int = 1, rows: int = VOCAB, seed: int = 0) -> Tensors:
    """Random heads by the released names, large enough that a misplaced one shows."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    found: Tensors = {}
    for head in range(heads):
        for layer in range(blocks):
            found[f"{head}.{layer}.linear.weight"] = random(SIZE, SIZE)
            found[f"{head}.{layer}.linear.bias"] = random(SIZE)
        found[f"{head}.{blocks}.weight"] = random(rows, SIZE)
    return found


def formula(tensors: Tensors, head: int, hidden: Tensor) -> Tensor:
    """Logits ``[..., Vd]`` of one head from hidden states ``[..., H]``, written out."""
    layer = 0
    while f"{head}.{layer}.linear.weight" in tensors:
        z = hidden @ tensors[f"{head}.{layer}.linear.weight"].T
        z = z + tensors.get(f"{head}.{layer}.linear.bias", torch.zeros(()))
        hidden, layer = hidden + z / (1 + torch.exp(-z)), layer + 1
    return hidden @ tensors[f"{head}.{layer}.weight"].T


def as_module(tensors: Tensors, vocabulary: Tensor | None = None) -> DraftHead:
    """The same as a loaded head; its parameters have the released names."""
    heads, blocks = _counts(tensors)
    module = Medusa.of(heads, blocks, SIZE, tensors[f"0.{blocks}.weight"].shape[0]).double()
    module.load_state_dict(tensors)
    module.draft_to_target = vocabulary
    return DraftHead(module.eval().requires_grad_(False), (LAYERS,))


def _counts(tensors: Tensors) -> tuple[int, int]:
    places = [tuple(map(int, name.split(".")[:2])) for name in tensors]
    return max(places)[0] + 1, max(layer for _, layer in places)


@functools.cache
@torch.no_grad()
def last_hidden(*ids: int) -> Tensor:
    """What the target's vocabulary projection reads, ``[S, H]``."""
    out = target()(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    hidden: Tensor = out.hidden_states[-1][0]
    return hidden


# Layouts


def released(folder: Path, tensors: Tensors, name: str = "medusa_lm_head.pt") -> Path:
    """As FasterDecoding uploads them, with a configuration that counts wrong."""
    save = torch.save if name.endswith(".pt") else save_file
    return _written(folder, tensors, name, save, medusa_num_heads=2, medusa_num_layers=3)


def whole_model(folder: Path, tensors: Tensors) -> Path:
    """Inside of the files of a model, which is of no interest."""
    inside = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    own = {name: tensor.clone() for name, tensor in target().state_dict().items()}
    return _written(folder, own | inside, "model.safetensors", save_file, architectures=["LlamaForCausalLM"])


def repacked(folder: Path, tensors: Tensors, vocabulary: Tensor | None = None) -> Path:
    """``blocks`` and ``lm_heads``, with the keys that this form has."""
    named: Tensors = {} if vocabulary is None else {"token_map": vocabulary}
    for name, tensor in tensors.items():
        head, layer, *rest = name.split(".")
        named[f"blocks.{head}.layers.{layer}.{rest[1]}" if len(rest) == 2 else f"lm_heads.{head}.weight"] = tensor
    return _written(folder, named, "model.safetensors", save_file, num_heads=1, num_hidden_layers=9)


def _written(folder: Path, tensors: Tensors, name: str, save: Callable[..., Any], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"base_model_name_or_path": "base", **config}))
    save(tensors, folder / name)
    return folder


def load(path: Path, count: int = 99) -> DraftHead:
    return TestFiles.load(path, num_speculative_tokens=count)


LAYOUTS: dict[str, Callable[[Path, Tensors], Path]] = {
    "medusa_lm_head.pt": released,
    "safetensors": functools.partial(released, name="medusa_lm_head.safetensors"),
    "one file": lambda folder, tensors: released(folder, tensors) / "medusa_lm_head.pt",
    "inside a whole model": whole_model,
    "repacked": repacked,
}


@pytest.mark.parametrize("blocks", [0, 1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_logits_of_the_formula(layout: str, blocks: int, tmp_path: Path) -> None:
    tensors = random_tensors(blocks=blocks)
    path = LAYOUTS[layout](tmp_path, tensors)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.kind, checkpoint.algorithm) == ("medusa", "medusa")
    assert checkpoint.layout == ("repacked" if layout == "repacked" else "medusa")
    head = load(path)
    assert (len(head.module), head.features, head.parallel) == (HEADS, (LAYERS,), False)
    assert head.module.draft_to_target is None
    assert_formula(head, tensors)


def assert_formula(head: DraftHead, tensors: Tensors) -> None:
    hidden = torch.randn(2, 1, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for index, module in enumerate(head.module):
        torch.testing.assert_close(module(hidden), formula(tensors, index, hidden), rtol=0, atol=1e-12)


def test_heads_without_biases(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in random_tensors().items() if not name.endswith("bias")}
    assert_formula(load(repacked(tmp_path, tensors)), tensors)


def test_a_reduced_vocabulary_in_any_order(tmp_path: Path) -> None:
    tensors, ids = random_tensors(rows=40), torch.randperm(VOCAB)[:40]
    head = load(repacked(tmp_path / "a", tensors, ids))
    assert_formula(head, tensors)
    assert torch.equal(head.module.draft_to_target, ids)
    assert load(repacked(tmp_path / "b", random_tensors(), torch.arange(VOCAB))).module.draft_to_target is None


def test_only_the_heads_that_draft_are_read(tmp_path: Path) -> None:
    assert len(load(released(tmp_path, random_tensors()), 2).module) == 2
    tested = specgraph.compile_speculative(target(), {**CONFIG, "draft": {"num_speculative_tokens": 2}}, draft=tmp_path)
    graph = tested.stages["trace"].modules["draft"].graph
    weights = {str(node.target) for node in graph.find_nodes(op="get_attr")}
    assert {name.split(".")[1] for name in weights} == {"0", "1"}


Change = Callable[[Tensors], object]


def without(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names]


def replaced(name: str, value: Tensor) -> Change:
    return lambda tensors: tensors.update({name: value})


NARROW = torch.zeros(SIZE, 16)
CHANGED: dict[str, tuple[Callable[[Path, Tensors], Path], Change, str]] = {
    "no projection": (released, without("1.1.weight"), "lacks 1.1.weight; download it again"),
    "no projections": (
        released,
        without(*(f"{head}.1.weight" for head in range(HEADS))),
        "lacks 0.1.weight, 1.1.weight, 2.1.weight and 2 more;",
    ),
    "no block": (released, without("2.0.linear.weight"), "lacks 2.0.linear.weight;"),
    "no bias": (released, without("0.0.linear.bias"), "lacks 0.0.linear.bias;"),
    "no head": (
        repacked,
        without("3.0.linear.weight", "3.0.linear.bias", "3.1.weight"),
        "lacks blocks.3.layers.0.weight, blocks.3.layers.0.bias, lm_heads.3.weight;",
    ),
    "none of a head, in a whole model": (
        whole_model,
        without("0.0.linear.weight", "0.0.linear.bias"),
        "lacks medusa_head.0.0.linear.weight, medusa_head.0.0.linear.bias;",
    ),
    "width of a block": (
        released,
        replaced("1.0.linear.weight", NARROW),
        r"does not fit: 1.0.linear.weight has the shape \[32, 16\], but the target .* need \[32, 32\]",
    ),
    "vocabulary": (
        repacked,
        replaced("4.1.weight", torch.zeros(99, SIZE)),
        r"lm_heads.4.weight has the shape \[99, 32\], but .* need \[101, 32\]",
    ),
    "quantised": (
        whole_model,
        replaced("0.1.weight", torch.zeros(VOCAB, SIZE, dtype=torch.int8)),
        "medusa_head.0.1.weight of .* is torch.int8; convert it to bfloat16 or float32",
    ),
    "another tensor": (
        released,
        replaced("0.norm.weight", torch.ones(SIZE)),
        "holds 0.norm.weight, which a set of Medusa heads with its configuration does not use",
    ),
    "map outside of the vocabulary": (
        released,
        replaced("token_map", torch.arange(100, 100 + VOCAB)),
        "token_map of .* names the target id 101, outside the target's vocabulary of 101; .* another target",
    ),
    "map with a token twice": (
        released,
        replaced("token_map", torch.zeros(VOCAB, dtype=torch.int64)),
        "token_map of .* gives two draft ids the same target id",
    ),
    "map of numbers": (
        released,
        replaced("token_map", torch.zeros(VOCAB)),
        r"token_map of .* is torch.float32 \[101\]; it must be int64 \[Vd\]",
    ),
    "map of another size": (
        released,
        replaced("token_map", torch.arange(40)),
        r"0.1.weight has the shape \[101, 32\], but .* need \[40, 32\]",
    ),
    "no heads": (
        released,
        lambda tensors: (tensors.clear(), tensors.update({"lm_head.weight": torch.zeros(1)})),
        "holds no Medusa heads, whose tensors have names such as 0.0.linear.weight; give the path of the file",
    ),
}
"""Misfits: a layout, what is changed of the tensors, and what the sentence says."""


@pytest.mark.parametrize("loaded", [True, False])
def test_more_drafts_than_heads_are_refused(loaded: bool, tmp_path: Path) -> None:
    tensors = random_tensors(heads=2)
    draft: Any = as_module(tensors) if loaded else released(tmp_path, tensors)
    options = {"kind": "medusa", "num_speculative_tokens": 3}
    with pytest.raises(
        ConfigError, match=r"num_speculative_tokens is 3, but there are 2 Medusa heads, .* to 2 or less"
    ):
        specgraph.compile_speculative(target(), {**CONFIG, "draft": options}, draft=draft)


def test_what_is_unknown_is_told_that_medusa_heads_are_read(tmp_path: Path) -> None:
    _written(tmp_path, {"0.weight": torch.zeros(1)}, "model.safetensors", save_file)
    with pytest.raises(ConfigError, match=r"is no draft that specgraph knows .* it reads .*Medusa heads"):
        open_checkpoint(tmp_path)


def test_other_refusals() -> None:
    for options, draft, message in (
        ({}, None, r"The medusa drafter needs a head: pass draft=... or set draft.model to its folder"),
        (
            {},
            DraftHead(copy.deepcopy(as_module(random_tensors()).module).float(), (LAYERS,)),
            "The head is torch.float32",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            specgraph.compile_speculative(target(), {**CONFIG, "draft": {"kind": "medusa", **options}}, draft=draft)
    parallel = {**CONFIG, "passes": {"parallel_draft": {"enabled": True}}, "draft": {"kind": "medusa"}}
    with pytest.raises(PassError, match=r"medusa makes no chain of draft calls; set draft\.parallel=false"):
        specgraph.compile_speculative(target(), parallel, draft=as_module(random_tensors()))


# Decoders


@functools.cache
def greedy() -> list[list[int]]:
    """The prompts with the target's own continuation."""
    return [[*p.tolist(), *new.tolist()] for p, new in zip(PROMPTS, reference_greedy(target(), PROMPTS, NEW_TOKENS),
                                                           strict=True)]  # fmt: skip


@functools.cache
def memorised() -> Tensors:
    """Heads without blocks that know the greedy continuation of the prompts by heart: fewer rows than dimensions."""
    tensors: Tensors = {}
    for head in range(HEADS):
        rows, wanted = [], []
        for prompt, ids in zip(PROMPTS, greedy(), strict=True):
            following = ids[len(prompt) + 1 + head :]
            rows.append(last_hidden(*ids)[len(prompt) - 1 :][: len(following)])
            wanted += following
        fitted = torch.linalg.pinv(torch.cat(rows)) @ F.one_hot(torch.tensor(wanted), VOCAB).double()
        tensors[f"{head}.0.weight"] = 20 * fitted.T
    ties = random_tensors(blocks=0)  # between tokens that never follow
    return {name: tensor + 0.05 * ties[name] for name, tensor in tensors.items()}


VOCABULARY = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:60]
DRAFTS: dict[str, Callable[[], Tensors]] = {
    "no blocks": functools.partial(random_tensors, blocks=0),
    "one block": random_tensors,
    "two blocks": functools.partial(random_tensors, blocks=2),
    "reduced vocabulary": functools.partial(random_tensors, rows=60),
    "memorised": memorised,
}


@functools.cache
def tensors_of(name: str) -> Tensors:
    return DRAFTS[name]()


def _too_early(head: DraftHead, config: dict[str, Any]) -> tuple[DraftHead, dict[str, Any]]:
    return head, config | {"passes": {"expose_features": {"layers": [LAYERS - 1]}}}


def _one_place_on(head: DraftHead, config: dict[str, Any]) -> tuple[DraftHead, dict[str, Any]]:
    return DraftHead(Medusa([*head.module[1:], head.module[0]]), head.features), config


class _NoResidual(ResidualBlock):
    def forward(self, hidden: Tensor) -> Tensor:
        return F.silu(self.linear(hidden))


def _no_residual(head: DraftHead, config: dict[str, Any]) -> tuple[DraftHead, dict[str, Any]]:
    module = copy.deepcopy(head.module)
    for part in module.modules():
        if isinstance(part, ResidualBlock):
            part.__class__ = _NoResidual
    return DraftHead(module, head.features), config


OTHER_BUGS: dict[str, Callable[[DraftHead, dict[str, Any]], tuple[DraftHead, dict[str, Any]]]] = {
    "a hidden state too early": _too_early,
    "heads one place on": _one_place_on,
    "blocks without their residual": _no_residual,
}


def oracle(name: str) -> NextLogits:
    """Logits of the next draft by the formula, from the hidden state of the last token that the target has read."""
    tensors = tensors_of(name)

    @torch.no_grad()
    def next_logits(accepted: Sequence[list[int]], drafted: Sequence[list[int]]) -> Tensor:
        return torch.stack(
            [formula(tensors, len(d), last_hidden(*a[:-1])[-1]) for a, d in zip(accepted, drafted, strict=True)]
        )

    return next_logits


# The detectors


class TestDrafts(DraftContract):
    KIND = "medusa"
    target = staticmethod(target)
    oracle = staticmethod(oracle)
    CASES = (
        Case("one block", 1), Case("one block", 2), Case("one block", 4), Case("one block", HEADS),
        *(Case(name, 4, "probabilistic") for name in DRAFTS), Case("one block", 4, "block"),
        Case("memorised", 4, "block"),
    )  # fmt: skip
    REAL = (
        *by_rule("memorised", 4), Case("two blocks", 4), Case("reduced vocabulary", 4, "probabilistic"),
        Case("one block", 4, "block"),
    )  # fmt: skip
    SEEDED = (Case("one block", HEADS), Case("one block", 1), *(Case(name, 4) for name in DRAFTS))
    BUGS: ClassVar = planted(Case("one block", 4), {
        "noise off by one position": {"oracle"},
        "proposals from the row before": {"fresh start", "oracle"},
        "the last row of the window": {"fresh start", "oracle"},
        "a hidden state too early": {"oracle"},
        "heads one place on": {"oracle"},
        "blocks without their residual": {"oracle"},
    }) + planted(Case("one block", 4, "probabilistic"), {"raw logits kept": {"oracle"}})  # fmt: skip
    PROMPTS = REAL_PROMPTS = PROMPTS
    NEW_TOKENS = NEW_TOKENS

    @classmethod
    def draft(cls, name: str) -> DraftHead:
        return as_module(tensors_of(name), VOCABULARY if name == "reduced vocabulary" else None)

    @classmethod
    def compiled_with(cls, case: Case, bug: str | None) -> SpeculativeDecoder:
        """Bugs are also those of the head, or of a pass's options."""
        if bug not in OTHER_BUGS:
            return super().compiled_with(case, bug)
        config = drafting_config({"kind": "medusa", "num_speculative_tokens": case.k}, case.rule)
        head, config = OTHER_BUGS[bug](cls.draft(case.name), config)
        return specgraph.compile_speculative(target(), config, draft=head)

    def check_program(self, case: Case, program: Program) -> None:
        assert not program.drafter.shifted
        assert len(program.with_role("draft")) == len(program.with_role("drafts")) == 1

    def check_real(self, case: Case, run: Run) -> None:
        assert not run.parallel and ({0, 4} <= set(run.accept_counts) or case.name != "memorised")

    def check_greedy(self, case: Case, out: GenerateOutput) -> None:
        if case.name == "memorised":
            assert out.stats.emitted_per_step == [[5, 3]] * 3, "the first token comes with the prompt"


def test_an_eos_inside_of_accepted_drafts_ends_a_sequence() -> None:
    """The third token that the first step emits; everything behind it was drafted and accepted as well."""
    continued = [ids[len(prompt) :] for ids, prompt in zip(greedy(), PROMPTS, strict=True)]
    eos = continued[0][3]
    expected = [ids[: ids.index(eos) + 1] if eos in ids else ids for ids in continued]
    out = TestDrafts.decoder(Case("memorised", HEADS)).generate(PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_id=eos)
    assert [tokens.tolist() for tokens in out.new_tokens] == expected
    assert out.stats.emitted_per_step[0] == [len(expected[0]) - 1] and len(expected[0]) < HEADS + 1


# Files and commands


class TestFiles(FilesContract):
    DRAFTS = TestDrafts
    DRAFTER = MedusaDrafter
    MISFITS: ClassVar = {name: (functools.partial(tuple, case[:2]), case[2]) for name, case in CHANGED.items()}
    SAVED = ("no blocks", "one block", "two blocks", "reduced vocabulary")
    LAYOUT = "medusa"
    INSPECTED = (
        ["layout", "medusa"], ["algorithm", "medusa"], ["num_heads", "5", "tensors"], ["num_blocks", "1", "tensors"],
        ["token_map", "no", "tensors"], ["*.*.weight", "[101, 32]", "float32", "5", "64.6 kB"],
    )  # fmt: skip
    UNFIT = (
        lambda: double_model("llama", 0, vocab_size=90),
        "does not fit: 0.1.weight has the shape [101, 32], but the target LlamaForCausalLM and config.json need "
        "[90, 32].",
    )

    @classmethod
    def example(cls, folder: Path) -> Path:
        return released(folder, {name: tensor.float() for name, tensor in random_tensors().items()})

    @classmethod
    def load(cls, folder: Path, **options: Any) -> DraftHead:
        """All heads, if nothing else is said."""
        return super().load(folder, **{"num_speculative_tokens": HEADS, **options})

    @classmethod
    def write_misfit(cls, made: Any, folder: Path) -> Path:
        (layout, change), tensors = made, random_tensors()
        change(tensors)
        return layout(folder, tensors)

    @classmethod
    def stored(cls, name: str) -> set[str]:
        return {*tensors_of(name), *(["token_map"] if name == "reduced vocabulary" else [])}

    @classmethod
    def reported(cls, folder: Path) -> list[str]:
        return [f"- draft: medusa in the medusa layout, {folder}"]

    def check_bench(self, row: dict[str, Any]) -> None:
        """Every head's projection is its own and is read once a step."""
        assert row["draft_bytes"] == 2 * 4 * (64 * 64 + 64 + 512 * 64)


def test_the_report_and_the_dump_of_a_checkpoint(tmp_path: Path) -> None:
    config = {**CONFIG, "draft": {"num_speculative_tokens": 3}}
    tested = specgraph.compile_speculative(target(), config, draft=released(tmp_path / "head", random_tensors()))
    for text in ("drafted by medusa, K = 3", "1 draft calls per step", "there is no chain of calls of one drafter"):
        assert text in tested.report()
    name = [*tested.stages][-1]
    tested.dump(tmp_path / "graphs")
    (stage,) = (tmp_path / "graphs").glob(f"*_{name}")
    assert_runs_alike(specgraph.load_dump(stage), tested.stages[name])
    assert "self.heads[2][0].linear.weight" in (stage / "draft.py").read_text()


# Training

STEPS = 3
TEXTS = [Encoded([5, 9, 14, 7, 3, 8, 21, 6, 0], 4), Encoded([11, 2, 30, 4, 17, 9, 12], 2)]


@pytest.mark.parametrize("head", [{}, {"layers": 2}, {"draft_vocab_size": 40}])
def test_loss_equals_a_naive_one(head: dict[str, Any]) -> None:
    cfg = ChainConfig(steps=STEPS)
    made = build_head(target(), HeadTrainConfig(draft="medusa", head=HeadConfig(**head), chain=cfg), 1, TEXTS)
    module = made.module.double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    expected: list[list[Tensor]] = [[] for _ in range(STEPS)]
    for text in TEXTS:
        for step, losses in enumerate(naive_losses(dict(module.named_parameters()), module.draft_to_target, text)):
            expected[step] += losses
    means = torch.stack([torch.stack(losses).mean() for losses in expected])
    batch = collate(TEXTS, pad_id=1, question_weight=0.0)
    rows = counted_rows(batch.weights, cfg)
    actual = ChainLoss(made, STEPS)(batch.tokens, TEACHER(target(), made.features)(batch.tokens), rows)
    torch.testing.assert_close(actual, means, rtol=1e-6, atol=0)
    wanted = torch.autograd.grad(means.sum(), list(module.parameters()))
    for ours, theirs in zip(torch.autograd.grad(actual.sum(), list(module.parameters())), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


def naive_losses(tensors: Tensors, vocabulary: Tensor | None, text: Encoded) -> list[list[Tensor]]:
    """Per step the losses of one text, position by position."""
    hidden = last_hidden(*text.ids)
    said = target().get_output_embeddings()(hidden).detach()
    losses: list[list[Tensor]] = [[] for _ in range(STEPS)]
    for row in range(len(text.ids) - 2):
        for step in range(min(STEPS, len(text.ids) - 2 - row)):
            predicted = row + 2 + step
            wanted = said[predicted - 1]
            if predicted >= text.prompt_length and (vocabulary is None or wanted.argmax() in vocabulary):
                wanted = wanted if vocabulary is None else wanted[vocabulary]
                losses[step].append(F.cross_entropy(formula(tensors, step, hidden[row]), wanted.softmax(-1)))
    return losses


def test_measured_acceptance_is_that_of_the_decoder() -> None:
    """Both walk over the same text, in which every draft is right."""
    texts = [Encoded(ids, len(prompt)) for ids, prompt in zip(greedy(), PROMPTS, strict=True)]
    head = as_module(memorised())
    head.module.requires_grad_(True)
    found = measure(ChainLoss(head, HEADS), TEACHER(target(), (LAYERS,)), texts, ChainConfig(steps=HEADS), 4, 3)
    out = TestDrafts.decoder(Case("memorised", 4)).generate(PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_id=[])
    assert found.acceptance_length == pytest.approx(out.stats.acceptance_length) == 4.0


def test_a_new_head_starts_with_the_logits_of_the_target() -> None:
    made = build_head(target(), HeadTrainConfig(draft="medusa", chain=ChainConfig(steps=2)), 1, TEXTS)
    hidden = last_hidden(*greedy()[0]).float()
    projection: Any = target().get_output_embeddings()
    for head in made.module:
        assert torch.equal(head(hidden), F.linear(hidden, projection.weight.float()))
    assert all(parameter.requires_grad for parameter in made.module.parameters())


class TestTraining(TrainingContract):
    KIND = LAYOUT = "medusa"
    DRAFTER = MedusaDrafter
    K = 2
    CHOICES: ClassVar = {"num_heads": 2, "num_blocks": 1, "token_map": False}
    REFUSED = (
        ({"feature_layers": [1]}, "last hidden state, hs[2]; leave head.feature_layers out"),
        ({"feature_layers": [1, 2]}, "last hidden state, hs[2]; leave head.feature_layers out"),
    )  # a checkpoint says nothing about it

    def check_trained(self, trained: Trained, loaded: DraftHead) -> None:
        tensors = trained.checkpoint.tensors
        assert tensors.keys() == {f"{head}.{name}" for head in range(2)
                                  for name in ("0.linear.weight", "0.linear.bias", "1.weight")}  # fmt: skip
        measured = trained.report.progress.measured
        assert trained.report.algorithm == "medusa" and measured[-1][1] < measured[0][1]
        hidden = torch.randn(3, 1, SIZE, generator=torch.Generator().manual_seed(0))
        for ours, theirs in zip(loaded.module, copy.deepcopy(trained.saved.module).float(), strict=True):
            assert torch.equal(ours(hidden), theirs(hidden))
        fresh = build_head(small_target(), trained.config, 1, []).module
        start_from(fresh, str(trained.folder))
        for name, tensor in loaded.module.named_parameters():
            assert torch.equal(fresh.get_parameter(name), tensor.float())
