"""DFlash heads: layouts, misfits, the formula, other implementations, equal tokens, history, a dump, a bench.

The oracle of the detectors is the published formula in plain PyTorch, without a cache. Each planted bug, and what
caught it here (``test_planted_bugs_are_caught`` asserts the hits; tokens would stay equal):

====================================  ===========  ======  ======
bug                                   fresh start  oracle  slots
====================================  ===========  ======  ======
noise off by one position             missed       caught  missed
features in another order             missed       caught  missed
another mask token                    missed       caught  missed
block one position late               missed       caught  missed
context one row short                 caught       caught  caught
context one position late             missed       caught  caught
rejected rows kept                    caught       missed  caught
the token before the anchor           caught       caught  missed
====================================  ===========  ======  ======
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
from specgraph.drafters import dflash
from specgraph.drafters.base import DraftHead
from specgraph.drafters.dflash import DFlashDraftConfig, DFlashDrafter
from specgraph.drafters.dflash_loading import default_features
from specgraph.drafters.dflash_module import BlockMask, DFlash
from specgraph.drafters.registry import open_checkpoint
from specgraph.errors import ConfigError
from specgraph.ir.graphs import calls
from specgraph.ir.program import Program
from specgraph.ir.traffic import reads_of
from specgraph.kernels.step.block import block_rows
from tests import harness
from tests.checkpoints.layouts import VOCAB, Written
from tests.checkpoints.running import info
from tests.decoding import CONFIG
from tests.detectors import NextLogits, check_oracle
from tests.drafters.contract import CachedDraftContract, Case, by_rule, planted
from tests.drafters.dflash_formula import (
    BLOCK,
    GIVEN,
    MASK,
    WINDOW,
    block_logits,
    speculators,
    target,
    tensors,
    z_lab,
)
from tests.drafters.files_contract import FilesContract, check_parameters
from tests.harness import Run, drafting_config, drafting_stage, forced_run, slots_of
from tests.models import make_model

EXPORT = functools.cache(dflash.export_block)


@pytest.fixture(autouse=True)
def cached_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export every head once for each K: it is most of what is left of a compilation."""
    monkeypatch.setattr(dflash, "export_block", EXPORT)


# Layouts


def save(name: str, folder: Path) -> Path:
    given = GIVEN[name]
    given.written.save(folder)
    if given.mask_embedding is not None:
        torch.save({"embedding": given.mask_embedding, "mask_token_id": MASK}, folder / "mask_embedding.pt")
    return folder


@functools.cache
def head(name: str) -> DraftHead:
    """One of ``GIVEN`` by way of its files, computing in float64 throughout."""
    return TestFiles.exact(functools.partial(save, name))


@pytest.mark.parametrize("name", GIVEN)
def test_a_layout_is_recognised_and_loaded(name: str, tmp_path: Path) -> None:
    given = GIVEN[name]
    found = open_checkpoint(save(name, tmp_path))
    assert (found.kind, found.layout, found.algorithm) == ("dflash", name.partition(",")[0] if "spec" in name else
                                                           "z-lab", "dflash")  # fmt: skip
    loaded = TestFiles.load(tmp_path)
    module: DFlash = loaded.module
    assert (loaded.features, loaded.mask_token_id, loaded.parallel) == ((1, 3), MASK, False)
    assert module.config.masks == tuple(BlockMask(s.window, s.causal, s.anchored) for s in given.seen)
    assert (module.config.block_size, module.config.sample_from_anchor) == (BLOCK, given.shifted)
    own = ["mask_embedding"] if given.mask_embedding is not None else []
    parameters = check_parameters(module, given.written.tensors, *own)
    for leaf, module_of in (("embed_tokens", target().get_input_embeddings()),
                            ("lm_head", target().get_output_embeddings())):  # fmt: skip
        assert (parameters[f"{leaf}.weight"] is module_of.weight) is (f"{leaf}.weight" not in given.written.tensors)
    if "d2t" in given.written.tensors:
        assert module.draft_to_target is not None
        assert module.draft_to_target.tolist() == given.written.tensors["t2d"].nonzero().flatten().tolist()


def test_options_say_where_they_come_from(tmp_path: Path) -> None:
    def options(given: Written, layers: int | None = 4, **changed: Any) -> dict[str, tuple[Any, str]]:
        return TestFiles.choices(given.save(tmp_path), layers, **changed)

    found = options(z_lab(tensors(), {"target_layer_ids": None}, rope_theta=7.0), 36)
    assert found == {
        "block_size": (BLOCK, "config.json"), "causal": ("in layers with a sliding window", "default"),
        "embed_tokens": ("the target's", "tensors"), "layer_type": ("qwen3", "tensors"),
        "feature_layers": ("hs[2], hs[34]", "default: evenly spaced from hs[2] to hs[L - 2]"),
        "lm_head": ("the target's", "tensors"), "mask_token_id": (MASK, "mask_token_id"),
        "num_layers": (2, "tensors"), "rope_theta": (7.0, "rope_theta"), "sample_from_anchor": (False, "default"),
        "use_swa": (False, "default"),
    }  # fmt: skip
    found = options(z_lab(tensors(), {"use_swa": True, "swa_window_size": 9}), anchored_window=True, mask_token_id=3)
    assert found["use_swa"] == (True, "dflash_config") and found["sliding_window"] == (9, "swa_window_size")
    assert found["anchored_window"] == (True, "draft.anchored_window")
    assert found["mask_token_id"] == (3, "draft.mask_token_id")
    assert found["feature_layers"] == ("hs[1], hs[3]", "dflash_config.target_layer_ids")
    found = options(GIVEN["speculators, sliding"].written, feature_layers=[0, 4])
    assert found["feature_layers"] == ("hs[0], hs[4]", "draft.feature_layers")
    assert found["anchored_window"] == (True, "default")
    assert found["sliding_window_non_causal"] == (False, "config.json")
    assert found["rope_theta"] == (500.0, "transformer_layer_config.rope_theta")
    assert options(z_lab(tensors(), is_causal=True))["causal"] == (True, "is_causal")
    newer = options(z_lab(tensors(), {"block_size": 5}, block_size=None))
    assert newer["block_size"] == (5, "dflash_config")
    unnamed = options(speculators(tensors(features=3), aux_hidden_state_layer_ids=None), 36)
    assert unnamed["feature_layers"] == ("hs[2], hs[18], hs[33]", "default: 2, L // 2, L - 3")


def test_default_features_are_those_of_z_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer ids ``round(1 + i * (L - 4) / (n - 1))``, whose outputs are the hidden states behind them."""
    assert default_features(5, 36) == (2, 10, 18, 26, 34)
    assert default_features(5, 32) == (2, 9, 16, 23, 30)
    assert default_features(1, 36) == (19,)
    monkeypatch.setattr(dflash, "RANDOM_LAYERS", 5)
    assert DFlashDrafter.feature_layers(4) == (2,) and DFlashDrafter.feature_layers(36) == (2, 10, 18, 26, 34)


def test_a_mask_embedding_needs_no_row_of_the_embedding(tmp_path: Path) -> None:
    given = GIVEN["mask embedding"]
    assert given.mask_embedding is not None
    given.written.save(tmp_path)
    torch.save({"embedding": given.mask_embedding[None], "mask_token_id": VOCAB + 50}, tmp_path / "mask_embedding.pt")
    loaded = TestFiles.load(tmp_path)
    assert loaded.mask_token_id == VOCAB + 50
    assert torch.equal(loaded.module.mask_embedding.flatten(), given.mask_embedding.double())


def _without(given: Written, *names: str) -> Written:
    return replace(given, tensors={key: value for key, value in given.tensors.items() if key not in names})


def _with(given: Written, name: str, *shape: int) -> Written:
    return replace(given, tensors={**given.tensors, name: torch.zeros(shape)})


MISFITS: dict[str, tuple[Callable[[], Written], str]] = {
    "another target": (
        lambda: _with(z_lab(tensors()), "fc.weight", 32, 96),
        r"fc.weight has the shape \[32, 96\], but the target Llama and config.json need \[32, 64\]",
    ),
    "another width": (
        lambda: z_lab(tensors(), target_hidden_size=64),
        "it was made for a target with hidden size 64, but the target Llama has 32",
    ),
    "a missing tensor": (
        lambda: _without(z_lab(tensors()), "layers.1.mlp.up_proj.weight"),
        "lacks layers.1.mlp.up_proj.weight; download it again or correct its config.json",
    ),
    "no map of a reduced vocabulary": (
        lambda: _without(GIVEN["speculators, sliding"].written, "d2t", "t2d"),
        "it has no d2t and a draft vocabulary of 60, but the target Llama has a vocabulary of 101",
    ),
    "no mask token": (
        lambda: z_lab(tensors(), {"mask_token_id": None}),
        "names no mask token; set draft.mask_token_id",
    ),
    "a mask token without an embedding": (
        lambda: z_lab(tensors(), {"mask_token_id": VOCAB}),
        "The mask token of .* is 101, outside its vocabulary of 101; set draft.mask_token_id to an id from 0 to 100",
    ),
    "no block size": (
        lambda: z_lab(tensors(), block_size=None),
        "block_size in the config.json of .* is None; it must be an integer above 0",
    ),
    "a block of the anchor alone": (
        lambda: z_lab(tensors(), block_size=1),
        "block_size of .* is 1, which leaves no token to draft; it must be 2 or more",
    ),
    "a window without a size": (
        lambda: z_lab(tensors(), {"use_swa": True}),
        "swa_window_size of .* is None; it must be an integer above 0",
    ),
    "no block at all": (
        lambda: speculators(tensors(), sample_from_anchor=True, block_size=0),
        "block_size in the config.json of .* is 0; it must be an integer above 0",
    ),
    "another scale": (
        lambda: z_lab(tensors(), logit_scale=0.5),
        "has logit_scale=0.5, a variant of DFlash that specgraph does not run; it runs heads with logit_scale=1.0",
    ),
    "a correction of the logits": (
        lambda: z_lab(tensors(), {"projector_type": "domino"}),
        "has projector_type='domino', a variant of DFlash that specgraph does not run; it runs heads with",
    ),
    "sinks": (lambda: z_lab(tensors(), {"attention_sink_bias": True}), "has attention_sink_bias=True, a variant of DF"),
    "layers outside of the target": (
        lambda: z_lab(tensors(), {"target_layer_ids": [0, 4]}),
        r"would read the hidden states \[1, 5\] \(dflash_config.target_layer_ids\) of a target with 4 layers; set",
    ),
    "an unknown tensor": (
        lambda: _with(z_lab(tensors()), "layers.0.attention_conv.base_kernel", 2, 3, 32),
        "holds layers.0.attention_conv.base_kernel, which a DFlash head with its configuration does not use",
    ),
}  # fmt: skip


def test_a_damaged_mask_embedding_is_named(tmp_path: Path) -> None:
    z_lab(tensors()).save(tmp_path)
    torch.save({"weight": torch.zeros(32)}, tmp_path / "mask_embedding.pt")
    with pytest.raises(ConfigError, match=r"mask_embedding.pt holds no tensor 'embedding'; remove the file or"):
        TestFiles.load(tmp_path)


def bind(name: str, count: int, rows: int | None = None) -> DFlashDrafter:
    options = DFlashDraftConfig(num_speculative_tokens=count, block_rows=rows)
    return DFlashDrafter.bind(head(name), options, None)  # type: ignore[arg-type]


def test_a_block_longer_than_those_of_the_training_is_refused() -> None:
    message = (
        f"draft.num_speculative_tokens is {BLOCK}, but the head was trained on blocks of {BLOCK} tokens, the first of "
        f"which is known; set it to {BLOCK - 1} or less."
    )
    with pytest.raises(ConfigError, match=message):
        bind("z-lab", BLOCK)
    message = f"is {BLOCK + 1}, but the head was trained on blocks of {BLOCK} tokens; set it to {BLOCK} or less."
    with pytest.raises(ConfigError, match=message):
        bind("speculators, from the anchor", BLOCK + 1)


@pytest.mark.parametrize("rows", [3, BLOCK + 1])
def test_rows_that_give_too_few_drafts_or_were_not_trained_are_refused(rows: int) -> None:
    message = (
        f"draft.block_rows is {rows}; set it from 4, the rows that 3 drafts need, to {BLOCK}, those of the blocks that "
        "the head was trained on."
    )
    with pytest.raises(ConfigError, match=message):
        bind("z-lab", 3, rows)


def test_a_shift_by_the_key_of_jetspec(tmp_path: Path) -> None:
    """JetSpec's causal heads have z-lab's layout, and a key of their own for rows that predict the next token."""
    z_lab(tensors(), {"causal_head": True, "draft_shift": True}).save(tmp_path)
    config = TestFiles.load(tmp_path).module.config
    assert config.sample_from_anchor and all(mask.causal for mask in config.masks)


@pytest.mark.parametrize("place", ["dflash_config", "top"])
def test_the_other_name_of_the_shift(place: str, tmp_path: Path) -> None:
    """sglang reads both names (its pull request 40203)."""

    def saved(name: str, value: bool, **top: Any) -> Path:
        own = {name: value}
        (z_lab(tensors(), own, **top) if place == "dflash_config" else z_lab(tensors(), **own, **top)).save(tmp_path)
        return tmp_path

    for value in (True, False):
        assert TestFiles.load(saved("query_zero_predicts_next", value)).module.config.sample_from_anchor is value
        both = saved("query_zero_predicts_next", value, sample_from_anchor=value)
        assert TestFiles.load(both).module.config.sample_from_anchor is value
        with pytest.raises(ConfigError, match=r"sample_from_anchor=.* and query_zero_predicts_next=.*, which are"):
            TestFiles.load(saved("query_zero_predicts_next", value, sample_from_anchor=not value))
    found = TestFiles.choices(saved("query_zero_predicts_next", True))["sample_from_anchor"]
    where = "dflash_config" if place == "dflash_config" else "config.json"
    assert found == (True, f"{where}.query_zero_predicts_next")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "Gemma4DSparkModel",
            "is a DSpark head .Gemma4DSparkModel., which specgraph does not read; it reads DFlash heads",
        ),
        ("DFlash2BeamDraftModel", "is a variant of DFlash .DFlash2BeamDraftModel., which specgraph does not read"),
        ("LiLiCorrDraftModel", "is a LiLiCorr head .LiLiCorrDraftModel., which specgraph does not read"),
        ("DominoDraftModel", "is a Domino head .DominoDraftModel., which specgraph does not read"),
    ],
)
def test_heads_with_the_same_layers_are_told_apart(name: str, words: str, tmp_path: Path) -> None:
    z_lab(tensors(), architectures=[name]).save(tmp_path)
    with pytest.raises(ConfigError, match=words):
        open_checkpoint(tmp_path)


# The detectors


@functools.cache
def logits_behind(name: str, accepted: tuple[int, ...], count: int) -> Tensor:
    return block_logits(name, accepted, count)


def oracle(name: str, block_size: int = BLOCK) -> NextLogits:
    """Next logits by the formula: context and block again from the first token, no cache, no module of ours."""
    count = block_size - (not GIVEN[name].shifted)

    def next_logits(accepted: Sequence[list[int]], drafted: Sequence[list[int]]) -> Tensor:
        pairs = zip(accepted, drafted, strict=True)
        return torch.stack([logits_behind(name, tuple(known), count)[len(drafts)] for known, drafts in pairs])

    return next_logits


def _inputs(module: str, **changed: Callable[[Tensor], Tensor]) -> Callable[[Program], int]:
    """Other inputs of a module."""

    def plant(program: Program) -> int:
        (node,) = calls(program.graph, module)
        with program.graph.inserting_before(node):
            new = {name: program.graph.call_function(change, (node.kwargs[name],)) for name, change in changed.items()}
        node.kwargs = {**node.kwargs, **new}
        return 1

    return plant


def _block(**changed: Callable[[Any], Any]) -> Callable[[Program], int]:
    """Other arguments of ``block_rows``."""

    def plant(program: Program) -> int:
        (node,) = calls(program.graph, block_rows)
        node.kwargs = {**node.kwargs, **{name: change(node.kwargs[name]) for name, change in changed.items()}}
        return 1

    return plant


def _earlier(program: Program) -> int:
    (node,) = calls(program.graph, block_rows)
    node.target = _row_before
    return 1


def _row_before(emitted: Tensor, start: Tensor, num_emitted: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    tokens, positions = block_rows(emitted, start, num_emitted, **options)
    before, _ = block_rows(emitted, start, num_emitted - 1, **options)
    return torch.cat([before[:, :1], tokens[:, 1:]], 1), positions


def _later(positions: Tensor) -> Tensor:
    return positions + 1


def _one_less(rows: Tensor) -> Tensor:
    return torch.where(rows > 1, rows - 1, rows)


BUGS: dict[str, tuple[Callable[[Program], int], set[str]]] = {
    "noise off by one position": (harness.BUGS["noise off by one position"], {"oracle"}),
    "features in another order": (harness.BUGS["features in another order"], {"oracle"}),
    "another mask token": (_block(mask_token_id=lambda token: token + 1), {"oracle"}),
    "block one position late": (_inputs("draft", positions=_later), {"oracle"}),
    "context one row short": (_inputs("draft_context", num_rows=_one_less), {"fresh start", "oracle", "slots"}),
    "context one position late": (_inputs("draft_context", positions=_later), {"oracle", "slots"}),
    "rejected rows kept": (_inputs("draft_context", num_rows=harness._rejected_rows_too), {"fresh start", "slots"}),
    "the token before the anchor": (_earlier, {"fresh start", "oracle"}),
}


class PlantBug(harness.PlantBug):
    """Breaks the drafter on purpose, with a bug of this file."""

    bugs: ClassVar = {name: bug[0] for name, bug in BUGS.items()}


class TestDrafts(CachedDraftContract):
    KIND = "dflash"
    target = staticmethod(target)
    draft = staticmethod(head)
    oracle = staticmethod(oracle)
    CASES = (
        *(Case("z-lab", k) for k in (1, 3)),
        *(Case(name, 3 if index % 2 else 7, "probabilistic") for index, name in enumerate(GIVEN)),
    )
    REAL = by_rule("speculators, sliding", 7)
    SEEDED = (Case("z-lab", 7), Case("z-lab", 1), Case("speculators, sliding", 7))
    POISONED = (Case("z-lab", 3), Case("windows everywhere", 3, "probabilistic"))
    BUGS = planted(Case("z-lab", 3), {name: bug[1] for name, bug in BUGS.items()})
    BUG_PASS = PlantBug

    @classmethod
    def check_slots(cls, run: Run) -> None:
        """Exactly the accepted rows but the newest are kept, once in every layer, and the block writes nothing."""
        for at, step in enumerate(run.steps):
            expected = []
            for row, (start, count) in enumerate(zip(step.start, step.num_emitted, strict=True)):
                own = slots_of(run, row, range(start, start + count))
                expected.append(own + [-1] * (step.width - count))
            layers = run.program.drafter.models["draft"].num_layers
            assert step.slots["other"] == []
            assert [s.tolist() for s in step.slots["draft"]] == [expected] * (2 * layers), f"step {at}"

    def check_program(self, case: Case, program: Program) -> None:
        assert not program.drafter.chained and program.drafter.features == (1, 3)
        assert len(program.with_role("draft")) == 1


def test_a_step_may_run_fewer_rows_than_the_training() -> None:
    config = drafting_config({"kind": "dflash", "num_speculative_tokens": 3, "block_rows": 4}, bugs=PlantBug)
    stage = drafting_stage(specgraph.compile_speculative(target(), config, draft=head("z-lab")))
    check_oracle(forced_run(stage, TestDrafts.PROMPTS, TestDrafts.LIMITS, seed=0), oracle("z-lab", 4), "strict")
    assert not torch.equal(logits_behind("z-lab", (1, 2, 3), 3), logits_behind("z-lab", (1, 2, 3), BLOCK - 1)[:3])


# The graphs


@pytest.mark.parametrize("k", [3, 7])
def test_the_step_is_one_call_of_a_block_and_reads_pages_only_where_it_must(k: int) -> None:
    program = drafting_stage(TestDrafts.decoder(Case("z-lab", k)))
    shown = [node for node in program.graph.nodes if node.op in ("call_function", "call_module")]
    assert len(shown) <= 25 and len(program.with_role("draft")) == 1
    inputs = {name: [node.name for node in program.modules[name].graph.find_nodes(op="placeholder")]
              for name in ("draft_features", "draft_context", "draft")}  # fmt: skip
    assert inputs == {
        "draft_features": ["features_0", "features_1"],
        "draft_context": ["hidden", "positions", "num_rows", "block_table", "max_length", "caches"],
        "draft": ["tokens", "positions", "block_table", "caches"],
    }
    assert reads_of(program.modules["draft_context"]).cache_bytes(100) == 0
    per_row = 2 * 2 * 2 * 8 * 8  # two layers, keys and values of two heads of 8 numbers of 8 bytes
    assert reads_of(program.modules["draft"]).cache_bytes(100) == 100 * per_row
    sliding = drafting_stage(TestDrafts.decoder(Case("windows everywhere", 3, "probabilistic"))).modules["draft"]
    assert reads_of(sliding).cache_bytes(100) == WINDOW * per_row


# Files and commands


class TestFiles(FilesContract):
    DRAFTS = TestDrafts
    DRAFTER = DFlashDrafter
    MISFITS = MISFITS
    SAVED = (
        "z-lab", "reduced vocabulary, own embedding, biases", "mask embedding", "causal", "windows everywhere",
        "one layer without norms", "speculators", "speculators, from the anchor",
    )  # fmt: skip
    LAYOUT = "z-lab"
    INSPECTED = (
        ["layout", "z-lab"], ["block_size", "8", "config.json"], ["mask_token_id", "7", "mask_embedding.pt"],
        ["feature_layers", "hs[1], hs[3]", "dflash_config.target_layer_ids"],
    )  # fmt: skip
    UNFIT = (
        lambda: make_model("llama"),
        "would read the hidden states [1, 3] (dflash_config.target_layer_ids) of a target with 2 layers",
    )

    @classmethod
    def example(cls, folder: Path) -> Path:
        return save("mask embedding", folder)

    @classmethod
    def stored(cls, name: str) -> set[str]:
        return {*GIVEN[name].written.tensors} - {"t2d"}

    def check_saved(self, again: DraftHead, given: DraftHead) -> None:
        fields = (
            "masks", "block_size", "sample_from_anchor", "draft_vocab_size", "target_hidden_size", "num_features"
        )  # fmt: skip
        for field in fields:
            assert getattr(again.module.config, field) == getattr(given.module.config, field)
        assert torch.equal(again.module.rotary.inv_freq, given.module.rotary.inv_freq)


def test_what_the_layout_cannot_express_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_name": "target", "algorithm": "dflash", "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match="has one window, counted from each row, and layers that are all causal or"):
        DFlashDrafter.save_head(head("speculators, sliding"), tmp_path, **options)
    with pytest.raises(ConfigError, match=r"names outputs of layers, and cannot express a head that reads hs\[0\]"):
        DFlashDrafter.save_head(replace(head("z-lab"), features=(0, 3)), tmp_path, **options)


def test_a_head_is_lowered_with_its_target(tmp_path: Path) -> None:
    """Rotations are in the ops of the head, and drafts stay the same."""
    model = make_model("llama", dtype=torch.float64, num_hidden_layers=4)
    checkpoint = open_checkpoint(save("windows everywhere", tmp_path))
    made = DFlashDrafter.load(checkpoint, DFlashDraftConfig(), model, info(model))
    config = {**CONFIG, "draft": {"kind": "dflash", "num_speculative_tokens": 3}}
    decoders = [specgraph.compile_speculative(model, {**config, "lowering": {"name": name}}, draft=made)
                for name in ("eager", "gpu")]  # fmt: skip
    eager, lowered = (each.generate(TestDrafts.PROMPTS, max_new_tokens=14, temperature=[0.0, 0.8, 1.3], seed=[1, 2, 3],
                                    eos_token_id=[]) for each in decoders)  # fmt: skip
    assert all(map(torch.equal, eager.new_tokens, lowered.new_tokens))
    assert eager.stats.emitted_per_step == lowered.stats.emitted_per_step
    modules = decoders[1].stages["index_rows"].modules
    for name, op in (("draft_context", "write_context"), ("draft", "paged_block_attention")):
        found = [str(node.target) for node in modules[name].graph.nodes]
        assert sum(op in each for each in found) == 2 and "aten.cat.default" not in found
        assert not [each for each in found if each.startswith(("aten.linear", "aten.mean", "aten.rsqrt"))]
        # One product gives keys and values of all layers for the context. In the block, each layer has five: queries,
        # keys with values, the output, and two of the MLP; and one is the projection of the vocabulary.
        products = {"draft_context": 1, "draft": 2 * 5 + 1}
        assert sum(each.startswith("specgraph.linear") for each in found) == products[name]
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in made.module.parameters()}
    assert sum(kept.values()) == sum(t.nbytes for t in made.module.parameters())
