"""DSpark heads: layouts, misfits, the formula, another implementation, equal tokens, history, files.

What DSpark shares with DFlash is tested in ``test_dflash``. The oracle of the detectors is the published formula in
plain PyTorch, without a cache, which is given the drafts before each one. Each planted bug, and what caught it here
(``test_planted_bugs_are_caught`` asserts the hits; tokens would stay equal):

==================================  ===========  ======  ===========
bug                                 fresh start  oracle  confidence
==================================  ===========  ======  ===========
the anchor before every draft       missed       caught  missed
the state of the row before         missed       caught  missed
every row is the first one          missed       caught  missed
noise off by one position           missed       caught  missed
confidence of the draft itself      missed       missed  caught
confidence of inactive rows kept    caught       missed  caught
==================================  ===========  ======  ===========
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import specgraph
from specgraph.drafters import dspark
from specgraph.drafters.base import DraftHead
from specgraph.drafters.dspark import DSparkDraftConfig, DSparkDrafter
from specgraph.drafters.dspark_module import DSpark
from specgraph.drafters.registry import open_checkpoint
from specgraph.errors import ConfigError
from specgraph.ir.graphs import calls
from specgraph.ir.program import Program
from specgraph.kernels.step import keep_confidence_
from specgraph.runtime.outputs.output import GenerateOutput
from tests import harness
from tests.checkpoints.layouts import HIDDEN, Written
from tests.checkpoints.running import info
from tests.decoding import CONFIG
from tests.detectors import NextLogits
from tests.drafters import test_dflash, test_dflash_others
from tests.drafters.contract import Case, Planted, by_rule
from tests.drafters.dflash_formula import all_rows, context_of, target
from tests.drafters.dspark_formula import (
    BLOCK,
    RANK,
    SPARKS,
    deepspec,
    refined,
    without,
)
from tests.drafters.files_contract import FilesContract, check_parameters
from tests.harness import Run, drafting_stage
from tests.models import exact_norms, make_model

REFINEMENTS = functools.cache(dspark.export_refinements)
PROMPTS = test_dflash.TestDrafts.PROMPTS


@pytest.fixture(autouse=True)
def cached_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export every head once for each K."""
    monkeypatch.setattr(dspark, "export_block", test_dflash.EXPORT)
    monkeypatch.setattr(dspark, "export_refinements", REFINEMENTS)


# Layouts


@functools.cache
def head(name: str) -> DraftHead:
    """One of ``SPARKS`` by way of its files, computing in float64 throughout."""
    return TestFiles.exact(SPARKS[name].written.save)


@pytest.mark.parametrize("name", SPARKS)
def test_a_layout_is_recognised_and_loaded(name: str, tmp_path: Path) -> None:
    given = SPARKS[name]
    found = open_checkpoint(given.written.save(tmp_path / "given"))
    layout = "speculators" if "speculators" in name else "deepspec"
    assert (found.kind, found.layout, found.algorithm) == ("dspark", layout, "dspark")
    loaded = TestFiles.load(tmp_path / "given")
    module: DSpark = loaded.module
    assert (loaded.features, module.config.sample_from_anchor) == ((1, 3), given.shifted)
    check_parameters(module, given.written.tensors)


def test_options_say_where_they_come_from(tmp_path: Path) -> None:
    def options(given: Written) -> dict[str, tuple[Any, str]]:
        return TestFiles.choices(given.save(tmp_path))

    found = options(SPARKS["deepspec"].written)
    assert found["markov_rank"] == (RANK, "config.json") and found["markov_head_type"] == ("vanilla", "config.json")
    assert found["feature_layers"] == ("hs[1], hs[3]", "target_layer_ids")
    assert found["sample_from_anchor"] == (True, "default")
    assert found["confidence_head_with_markov"] == (True, "config.json")
    silent = replace(SPARKS["deepspec"].written, config={
        key: value for key, value in SPARKS["deepspec"].written.config.items()
        if not key.startswith(("markov", "confidence", "enable", "architectures"))
    })  # fmt: skip
    found = options(silent)
    assert found["markov_rank"] == (RANK, "tensors") and found["markov_head_type"] == ("vanilla", "default")
    assert found["enable_confidence_head"] == (True, "default")
    found = options(deepspec(SPARKS["deepspec"].written.tensors, target_layer_ids=[-1, 2]))
    assert found["feature_layers"] == ("hs[0], hs[3]", "target_layer_ids")


def _rank_of_another_head() -> Written:
    return deepspec(SPARKS["deepspec"].written.tensors, markov_rank=RANK + 1)


MISFITS: dict[str, tuple[Callable[[], Written], str]] = {
    "another rank": (
        _rank_of_another_head,
        r"markov_head.markov_w1.weight has the shape \[101, 12\], but the target Llama and config.json need "
        r"\[101, 13\]",
    ),
    "no embedding of the Markov head": (
        lambda: without(SPARKS["deepspec"].written, "markov_head.markov_w1.weight"),
        "lacks markov_head.markov_w1.weight; download it again or correct its config.json",
    ),
    "too few tokens": (
        lambda: replace(SPARKS["deepspec"].written, tensors={
            **SPARKS["deepspec"].written.tensors, "markov_head.markov_w1.weight": torch.zeros(60, RANK)}),
        "markov_head.markov_w1.weight has 60 rows, but the target Llama has a vocabulary of 101",
    ),
    "another kind than its tensors": (
        lambda: deepspec(SPARKS["gated"].written.tensors, "vanilla", draft_vocab_size=60),
        "holds markov_head.gate_proj.bias, markov_head.gate_proj.weight, which a DSpark head with its configuration",
    ),
    "an unknown kind": (
        lambda: deepspec(SPARKS["deepspec"].written.tensors, "lstm"),
        "markov_head_type of .* is 'lstm'; specgraph runs vanilla, gated, rnn",
    ),
    "a negative rank": (
        lambda: deepspec(SPARKS["deepspec"].written.tensors, markov_rank=-1),
        "markov_rank of .* is -1; it must be an integer of 0 or more",
    ),
    "no Markov head to read": (
        lambda: deepspec(SPARKS["confidence alone"].written.tensors, None, confidence_head_with_markov=True),
        r"has confidence_head_with_markov, but no Markov head \(markov_rank is 0\); correct its config.json",
    ),
    "top tokens only": (
        lambda: deepspec(SPARKS["deepspec"].written.tensors, dspark_draft_topk=20),
        "has dspark_draft_topk=20, a variant of DSpark that specgraph does not run; it runs heads with "
        "dspark_draft_topk=0",
    ),
}  # fmt: skip


# The detectors


@functools.cache
def rows_behind(name: str, accepted: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        given = SPARKS[name]
        return all_rows(given, context_of(accepted), accepted[-1], BLOCK - (not given.shifted))


def oracle(name: str) -> NextLogits:
    """Next logits by the formula: context, block and corrections again from the first token."""

    def logits(accepted: Sequence[list[int]], drafted: Sequence[list[int]]) -> Tensor:
        pairs = zip(accepted, drafted, strict=True)
        return torch.stack([refined(name, rows_behind(name, tuple(known)), [known[-1], *drafts])[0][-1]
                            for known, drafts in pairs])  # fmt: skip

    return logits


def check_confidence(run: Run, name: str) -> None:
    """What is kept are the estimates for the drafts of the next window, and nothing where there was no step yet."""
    for at, step in enumerate(run.steps):
        for row, accepted in enumerate(step.accepted):
            kept, drafts = step.kept["confidence"][row], step.drafts[row].tolist()
            if not any(each.num_emitted[row] for each in run.steps[: at + 1]):
                expected = torch.zeros(run.k)
            else:
                before = [accepted[-1], *drafts[:-1]]
                estimates = refined(name, rows_behind(name, tuple(accepted)), before)[1]
                assert estimates is not None
                expected = estimates.float()
            torch.testing.assert_close(kept, expected, rtol=0.0, atol=1e-7, msg=f"step {at}, sequence {row}")


def _inputs(module: str, name: str, change: Callable[[Any, list[Any]], Any]) -> Callable[[Program], int]:
    """Another input of every call of a module but the first: ``change`` gets the call and all of them."""

    def plant(program: Program) -> int:
        found = list(calls(program.graph, module))
        for node in found[1:]:
            node.kwargs = {**node.kwargs, name: change(node, found)}
        return len(found) - 1

    return plant


def _of_itself(program: Program) -> int:
    (node,) = calls(program.graph, torch.cat)
    (estimates,) = calls(program.graph, dspark.CONFIDENCE)
    with program.graph.inserting_before(estimates):
        moved = program.graph.call_function(torch.roll, (node, -1), {"dims": 1})
    estimates.kwargs = {**estimates.kwargs, "tokens": moved}
    return 1


def _always_kept(confidence: Tensor, estimates: Tensor, num_emitted: Tensor) -> None:
    confidence.copy_(estimates)


def _keep(program: Program) -> int:
    (node,) = calls(program.graph, keep_confidence_)
    node.target = _always_kept
    return 1


BUGS: dict[str, tuple[str, Callable[[Program], int], set[str]]] = {
    "the anchor before every draft": (
        "deepspec", _inputs(dspark.MARKOV, "tokens", lambda node, all_: all_[0].kwargs["tokens"]), {"oracle"},
    ),
    "the state of the row before": (
        "speculators, recurrent, not from the anchor",
        _inputs(dspark.MARKOV, "state", lambda node, all_: all_[0].kwargs["state"]), {"oracle"},
    ),
    "every row is the first one": (
        "deepspec", _inputs(dspark.MARKOV, "logits", lambda node, all_: all_[0].kwargs["logits"]), {"oracle"},
    ),
    "noise off by one position": ("deepspec", harness.BUGS["noise off by one position"], {"oracle"}),
    "confidence of the draft itself": ("deepspec", _of_itself, {"confidence"}),
    "confidence of inactive rows kept": ("deepspec", _keep, {"fresh start", "confidence"}),
}  # fmt: skip


class PlantBug(harness.PlantBug):
    """Breaks the drafter on purpose, with a bug of this file."""

    bugs: ClassVar = {name: bug[1] for name, bug in BUGS.items()}


class TestDrafts(test_dflash.TestDrafts):
    KIND = "dspark"
    draft = staticmethod(head)
    oracle = staticmethod(oracle)
    CASES = (
        Case("deepspec", 1), Case("deepspec", 3), Case("deepspec", 7, "probabilistic"), Case("gated", 3, "block"),
        Case("recurrent", 7), Case("confidence alone", 3, "probabilistic"), Case("speculators, gated, sliding", 7),
        Case("speculators, recurrent, not from the anchor", 3),
        Case("speculators, recurrent, not from the anchor", 3, "probabilistic"),
    )  # fmt: skip
    REAL = by_rule("recurrent", 7)
    SEEDED = (Case("deepspec", 3), Case("deepspec", 1), Case("recurrent", 7))
    POISONED = (Case("deepspec", 3), Case("speculators, gated, sliding", 7))
    BUGS = tuple(Planted(bug, Case(name, 3), caught) for bug, (name, _, caught) in BUGS.items())
    BUG_PASS = PlantBug

    @classmethod
    def detectors(cls, run: Run, case: Case) -> dict[str, Callable[[], None]]:
        """With one for the estimates, if the head makes any."""
        found = super().detectors(run, case)
        assert ("confidence" in run.steps[-1].kept) == (head(case.name).module.confidence_head is not None)
        return found | (
            {"confidence": lambda: check_confidence(run, case.name)} if "confidence" in run.steps[-1].kept else {}
        )

    def check_greedy(self, case: Case, out: GenerateOutput) -> None:
        assert out.stats.confidence_per_position == []


# Another implementation


@pytest.mark.parametrize("name", [name for name in SPARKS if "speculators" in name])
def test_logits_and_confidence_are_those_of_speculators(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("speculators", reason="make installs it")
    features, tokens = test_dflash_others.example()
    block = [5, 60, 17, 99, 3, 42, 8]
    logits, estimates = _theirs(name, features, tokens, block, tmp_path, monkeypatch)
    rows = all_rows(SPARKS[name], features, tokens[-1], len(logits))
    found, thought = refined(name, rows, [tokens[-1], *block][: len(logits)])
    assert thought is not None
    torch.testing.assert_close(found, logits, **test_dflash_others.CLOSE)
    torch.testing.assert_close(thought, torch.sigmoid(estimates), **test_dflash_others.CLOSE)


@torch.no_grad()
def _theirs(
    name: str, features: Tensor, tokens: list[int], block: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """Logits and logits of confidence of the rows behind the last of ``tokens``, if ``block`` is what follows."""
    from speculators.models.dflash import core
    from speculators.models.dspark import DSparkSpeculatorConfig
    from speculators.models.dspark import core as spark

    given = SPARKS[name].written
    target().save_pretrained(folder)
    config: Any = DSparkSpeculatorConfig(**given.config, speculators_config={
        "algorithm": "dspark", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK}],
        "verifier": {"name_or_path": str(folder), "architectures": ["LlamaForCausalLM"]},
    })  # fmt: skip
    config.transformer_layer_config._attn_implementation = "sdpa"
    model: Any = spark.DSparkDraftModel(config)
    own = {"embed_tokens.weight": target().get_input_embeddings().weight,
           "lm_head.weight": target().get_output_embeddings().weight}  # fmt: skip
    left, unknown = model.load_state_dict({**own, **given.tensors}, strict=False)
    assert not unknown and all(key.startswith("verifier_") for key in left)
    model = model.double().eval()
    exact_norms(model)
    last, size = len(tokens) - 1, len(tokens) + BLOCK
    seen: dict[str, Any] = {}

    def watch(logits: Tensor, targets: Tensor, confidence: Tensor, *rest: Any, **options: Any) -> Any:
        seen.update(logits=logits, confidence=confidence)
        return torch.zeros(()), {}

    monkeypatch.setattr(core, "select_anchors", lambda *_: (torch.tensor([last]), torch.tensor([True])))
    monkeypatch.setattr(spark, "compute_metrics", watch)
    padded = torch.full((1, size, features.shape[1]), 99.0, dtype=torch.float64)
    padded[0, :last] = features
    ids = torch.zeros(1, size, dtype=torch.int64)
    ids[0, : last + 1 + len(block)] = torch.tensor(tokens + block)[:size]
    model.forward(
        hidden_states=padded, input_ids=ids, loss_mask=torch.ones(1, size), document_ids=torch.zeros_like(ids),
        verifier_last_hidden_states=torch.zeros(1, size, HIDDEN, dtype=torch.float64), max_anchors=1,
    )  # fmt: skip
    first = not SPARKS[name].shifted
    return seen["logits"][0, first:], seen["confidence"][0, first:]


# What a user sees


def test_the_confidence_of_every_verified_draft_is_reported() -> None:
    out = TestDrafts.decoder(Case("deepspec", 3)).generate(PROMPTS, max_new_tokens=12, eos_token_id=[])
    for prompt, new, counts, steps in zip(PROMPTS, out.new_tokens, out.stats.emitted_per_step, out.stats.confidence,
                                          strict=True):  # fmt: skip
        assert len(steps) == len(counts)
        known = [*prompt.tolist(), int(new[0])]
        for count, found in zip(counts, steps, strict=True):
            rows, drafts = rows_behind("deepspec", tuple(known)), [known[-1]]
            for _ in range(3):
                logits, estimates = refined("deepspec", rows, drafts)
                drafts.append(int(logits[-1].argmax()))
            assert estimates is not None and found == pytest.approx(estimates.tolist(), abs=1e-6)
            known += new[len(known) - len(prompt) :][:count].tolist()
    every = torch.tensor([step for steps in out.stats.confidence for step in steps])
    assert out.stats.confidence_per_position == pytest.approx(every.cumprod(1).mean(0).tolist(), abs=1e-6)


def test_the_graph_has_one_block_and_a_correction_for_each_draft() -> None:
    program = drafting_stage(TestDrafts.decoder(Case("recurrent", 7)))
    assert len(program.with_role("draft")) == 1
    assert len(list(calls(program.graph, dspark.MARKOV))) == 7 and dspark.CONFIDENCE not in program.modules
    program = drafting_stage(TestDrafts.decoder(Case("confidence alone", 3, "probabilistic")))
    assert dspark.MARKOV not in program.modules and len(list(calls(program.graph, dspark.CONFIDENCE))) == 1
    assert len(program.with_role("drafts")) == 1


def test_a_block_longer_than_those_of_the_training_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"trained on blocks of {BLOCK} tokens; set it to {BLOCK} or less"):
        DSparkDrafter.bind(head("deepspec"), DSparkDraftConfig(num_speculative_tokens=BLOCK + 1), None)


class TestFiles(FilesContract):
    DRAFTS = TestDrafts
    DRAFTER = DSparkDrafter
    MISFITS = MISFITS
    SAVED = tuple(name for name in SPARKS if "sliding" not in name)
    """The layout of DeepSpec cannot express windows that are counted from the anchor."""
    LAYOUT = "deepspec"
    INSPECTED = (["layout", "deepspec"], ["markov_head_type", "gated", "config.json"])
    UNFIT = (lambda: make_model("llama"), "of a target with 2 layers")

    @classmethod
    def example(cls, folder: Path) -> Path:
        return SPARKS["gated"].written.save(folder)

    @classmethod
    def stored(cls, name: str) -> set[str]:
        return {*SPARKS[name].written.tensors} - {"t2d"}

    def check_saved(self, again: DraftHead, given: DraftHead) -> None:
        found, expected = ({key: value for key, value in vars(each.module.config).items() if key != "layers"}
                           for each in (again, given))  # fmt: skip
        assert found == expected

    @classmethod
    def reported(cls, folder: Path) -> list[str]:
        return super().reported(folder)[:2]  # the projection is its own


def test_a_head_is_lowered_with_its_target(tmp_path: Path) -> None:
    """Drafts and confidence stay the same."""
    model = make_model("llama", dtype=torch.float64, num_hidden_layers=4)
    for name in ("deepspec", "recurrent"):
        checkpoint = open_checkpoint(SPARKS[name].written.save(tmp_path / name))
        made = DSparkDrafter.load(checkpoint, DSparkDraftConfig(), model, info(model))
        config = {**CONFIG, "draft": {"kind": "dspark", "num_speculative_tokens": 3}}
        decoders = [specgraph.compile_speculative(model, {**config, "lowering": {"name": lowering}}, draft=made)
                    for lowering in ("eager", "gpu")]  # fmt: skip
        eager, lowered = (each.generate(PROMPTS, max_new_tokens=14, temperature=[0.0, 0.8, 1.3], seed=[1, 2, 3],
                                        eos_token_id=[]) for each in decoders)  # fmt: skip
        assert all(map(torch.equal, eager.new_tokens, lowered.new_tokens))
        assert eager.stats.emitted_per_step == lowered.stats.emitted_per_step
        found, expected = (torch.tensor(each.stats.confidence_per_position) for each in (lowered, eager))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        modules = decoders[1].stages["index_rows"].modules
        parts = [modules[part] for part in (dspark.MARKOV, dspark.CONFIDENCE) if part in modules]
        found_ops = [str(node.target) for part in parts for node in part.graph.nodes]
        assert sum(op.startswith("specgraph.linear") for op in found_ops) == 2
