"""Heads and parallel drafting under the detectors of ``tests.detectors``, and equal tokens.

Each planted bug, and what caught it here (``test_planted_bugs_are_caught`` asserts the hits; tokens would stay equal):

=========================================  ===========  ======  ======
bug                                        fresh start  oracle  slots
=========================================  ===========  ======  ======
noise off by one position                  missed       caught  missed
features in another order                  missed       caught  missed
window instead of emitted                  missed       caught  missed
target hidden in the chain                 missed       caught  missed
chained position off by one                caught       caught  caught
chained rows not written                   missed       caught  caught
catch-up skips the last row                caught       caught  caught
rejected rows written                      missed       missed  caught
proposals from the row before              caught       caught  missed
noise off by one position, parallel        missed       caught  missed
rows one position late, parallel           missed       caught  caught
another mask token, parallel               missed       caught  missed
no mask hidden, parallel                   missed       caught  missed
mask rows not written, parallel            missed       caught  caught
proposals from the row before, parallel    caught       caught  missed
=========================================  ===========  ======  ======

A bug that does the same in every step, such as a late position of all rows, is no matter of history.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.drafters.base import DraftHead
from specgraph.drafters.eagle3 import Eagle3Drafter
from specgraph.errors import ConfigError, PassError
from specgraph.ir.program import Program
from tests.decoding import CONFIG, assert_same_tokens, compiled
from tests.detectors import NextLogits, check_oracle, check_slots
from tests.drafters.contract import SHIFTED_CHAIN_BUGS, CachedDraftContract, Case, planted
from tests.drafters.test_draft_model import oracle as plain_oracle
from tests.harness import Options, real_run
from tests.models import double_model, exact_norms, make_head, make_model, ragged_prompts
from tests.pairwise import cover, product

MASK = 5


@functools.cache
def target() -> PreTrainedModel:
    return double_model("llama", 0, num_hidden_layers=3)


@functools.cache
def head(name: str) -> DraftHead:
    """A random head that computes in float64 throughout."""
    made = {
        "plain": lambda: make_head(target()),
        "two qwen3 layers": lambda: make_head(target(), "qwen3", layers=2, vocab=60, norm_before_residual=True),
        "every norm": lambda: make_head(
            target(), features=(2, 3), vocab=90, norm_before_fc=True, fc_norm=True, norm_output=True
        ),
        "few norms": lambda: make_head(target(), features=(3,), fc=False, input_norm=False, last_norm=False),
    }[name]()
    exact_norms(made.module)
    return made


@functools.cache
def pard() -> PreTrainedModel:
    return double_model("qwen3", 3, num_hidden_layers=1)


DRAFTS = ("plain", "two qwen3 layers", "every norm", "few norms", "pard")


def is_parallel(name: str) -> bool:
    """Whether the draft with this name drafts in parallel."""
    return name.endswith(", parallel")


# The oracle: everything again from the first token, no cache, no graph of ours


def oracle(name: str) -> NextLogits:
    """Next logits of a draft, by transformers' layers without a cache, of all sequences in one batch."""
    own, parallel = name.removesuffix(", parallel"), is_parallel(name)

    @torch.no_grad()
    def next_logits(accepted: Sequence[list[int]], drafted: Sequence[list[int]]) -> Tensor:
        fed = [[MASK] * len(drafts) for drafts in drafted] if parallel else drafted
        return (
            plain_oracle(pard())(accepted, fed) if own == "pard" else _head_logits(head(own), accepted, fed, parallel)
        )

    return next_logits


def _head_logits(
    given: DraftHead, accepted: Sequence[list[int]], fed: Sequence[list[int]], parallel: bool
) -> Tensor:  # fmt: skip
    """Padding on the right is not seen, since attention is causal."""
    module, every, drafts = given.module, torch.arange(len(accepted)), torch.tensor(fed).long()
    ids = pad_sequence([*map(torch.tensor, accepted)], batch_first=True)
    known = target()(input_ids=ids[:, :-1], use_cache=False, output_hidden_states=True).hidden_states
    hidden = pad(module.combine(*(known[k] for k in given.features)), (0, 0, 0, drafts.shape[1]))
    tokens = pad(ids[:, 1:], (0, drafts.shape[1]))
    last = torch.tensor([len(tokens) - 2 for tokens in accepted])
    for draft in drafts.unbind(1):
        if parallel:
            parts = module.mask_hidden.view(1, 1, -1).split(module.config.target_hidden_size, -1)
            following = module.combine(*parts)[0]
        else:
            following = module.predict(_rows(module, tokens, hidden)[every, last])[1]
        last = last + 1
        tokens[every, last], hidden[every, last] = draft, following
    return module.predict(_rows(module, tokens, hidden)[every, last])[0]


def _rows(module: torch.nn.Module, tokens: Tensor, hidden: Tensor) -> Tensor:
    rows: Tensor = module(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), hidden)
    return rows


# The detectors

AXES = {"name": DRAFTS, "parallel": (False, True), "k": (1, 4), "rule": ("strict", "probabilistic")}
"""Seven drafts are verified below, and sixteen in the batch near the end and in ``test_eagle.py``."""
CASES = [Case(f"{name}, parallel" if parallel else name, k, rule)
         for name, parallel, k, rule in cover(product(AXES), (0, 2))]  # fmt: skip


class TestDrafts(CachedDraftContract):
    KIND = "eagle3"
    target = staticmethod(target)
    oracle = staticmethod(oracle)
    PASSES: ClassVar = {"parallel": True}
    CASES = tuple(dict.fromkeys((*CASES, Case("plain", 4), Case("plain, parallel", 4))))
    REAL = (
        Case("two qwen3 layers", 4), Case("two qwen3 layers, parallel", 7, "probabilistic"), Case("pard", 4, "block"),
        Case("pard, parallel", 4, "probabilistic"),
    )  # fmt: skip
    SEEDED = (Case("plain", 4), Case("plain, parallel", 4))
    POISONED = tuple({case.name: case for case in sorted(CASES)}.values())
    """Of every draft the case with the most drafts."""
    BUGS: ClassVar = planted(Case("plain", 4), {
        **SHIFTED_CHAIN_BUGS, "features in another order": {"oracle"},
    }) + planted(Case("plain, parallel", 4), {
        "noise off by one position": {"oracle"},
        "rows one position late": {"oracle", "slots"},
        "another mask token": {"oracle"},
        "no mask hidden": {"oracle"},
        "mask rows not written": {"oracle", "slots"},
        "proposals from the row before": {"fresh start", "oracle"},
    })  # fmt: skip

    @classmethod
    def draft(cls, name: str) -> Any:
        own = name.removesuffix(", parallel")
        return pard() if own == "pard" else head(own)

    @classmethod
    def keys(cls, name: str) -> dict[str, Any]:
        own = {"kind": "draft_model", "mask_token_id": MASK} if name.startswith("pard") else {}
        return {"parallel": is_parallel(name), **own}

    def check_program(self, case: Case, program: Program) -> None:
        calls = 1 if is_parallel(case.name) else case.k
        assert program.drafter.shifted is not case.name.startswith("pard")
        for stage in (program, self.decoder(case)._program):
            assert len(stage.with_role("draft")) == len(stage.with_role("drafts")) == calls
            assert sum(n.op == "call_module" and n.target == "draft" for n in stage.graph.nodes) == calls


@pytest.mark.parametrize("name", ["plain", "plain, parallel"])
def test_a_full_batch_of_the_most_drafts_near_the_end(name: str) -> None:
    """2K + 1 draft rows per sequence at the largest batch, K = 16, with hardly any room left."""
    prompts = ragged_prompts(tuple(range(1, 9)))
    options = Options(tuple(0.4 * (row % 3) for row in range(8)), (0,) * 8, tuple(range(8)))
    limits = [len(prompt) + 1 + index for index, prompt in enumerate(prompts)]
    run = real_run(TestDrafts.decoder(Case(name, 16)), prompts, limits, options=options)
    check_slots(run)
    check_oracle(run, oracle(name), "strict")


# Equal tokens


@functools.cache
def gemma() -> PreTrainedModel:
    return make_model("gemma2", dtype=torch.float64)


@functools.cache
def gemma_draft(kind: str) -> Any:
    """A random head for the target, with a smaller vocabulary, or a random draft model."""
    return make_head(gemma(), vocab=70) if kind == "eagle3" else make_model("llama", seed=1, dtype=torch.float64)


GREEDY_AND_DRAWN = [*ragged_prompts((3, 9, 5, 12)), *ragged_prompts((3, 9, 5, 12))]


def _decode(tested: SpeculativeDecoder) -> list[Tensor]:
    """The same prompts, greedily and at temperature 1, in one batch."""
    options: dict[str, Any] = {"temperature": [0.0] * 4 + [1.0] * 4, "seed": [3, 1, 4, 1] * 2}
    return tested.generate(GREEDY_AND_DRAWN, max_new_tokens=14, **options).new_tokens


@functools.cache
def _expected() -> list[Tensor]:
    return _decode(compiled(gemma(), "none", 1))


KINDS = {"k": (1, 7), "kind": ("eagle3", "draft_model"), "parallel": (False, True)}


@pytest.mark.parametrize([*KINDS], cover(product(KINDS), (0, 1)))
def test_tokens_are_those_of_plain_decoding(kind: str, parallel: bool, k: int) -> None:
    """For a target that caps its logits; ``test_matrix`` has others."""
    options = {"kind": kind, "num_speculative_tokens": k, "parallel": parallel, "mask_token_id": MASK}
    config = {**CONFIG, "draft": options, "pipeline": {"verify": k == 7}}
    tested = specgraph.compile_speculative(gemma(), config, draft=gemma_draft(kind))
    assert any(not torch.equal(greedy, drawn) for greedy, drawn in zip(_expected()[:4], _expected()[4:], strict=True))
    assert_same_tokens(gemma(), GREEDY_AND_DRAWN, _decode(tested), _expected())


# The pass and what it refuses


def test_mask_hidden_is_projected_once_and_not_in_the_step() -> None:
    program = TestDrafts.decoder(Case("plain, parallel", 4))._program
    module = head("plain").module
    parts = module.mask_hidden.view(1, 1, -1).split(module.config.target_hidden_size, -1)
    assert torch.equal(program.modules["mask_hidden"](), module.combine(*parts).flatten())
    assert sum(n.target == "draft_features" for n in program.graph.nodes) == 1


@pytest.mark.parametrize(
    ("draft", "options", "message"),
    [
        (lambda: make_head(target(), mask_token_id=None), {"kind": "eagle3"},
         "parallel_draft: this eagle3 has no mask_hidden and a mask token"),
        (lambda: pard(), {"kind": "draft_model"}, r"has no mask token \(draft.mask_token_id\)"),
        (lambda: None, {"kind": "ngram"}, "ngram makes no chain of draft calls; set draft.parallel=false"),
    ],
)  # fmt: skip
def test_parallel_drafting_needs_a_mask(draft: Callable[[], Any], options: dict[str, Any], message: str) -> None:
    config = {**CONFIG, "draft": {**options, "parallel": True}}
    with pytest.raises(PassError, match=message) as error:
        specgraph.compile_speculative(target(), config, draft=draft())
    assert "\n" not in str(error.value)


def test_a_mask_token_outside_of_the_vocabulary_is_refused() -> None:
    config = {**CONFIG, "draft": {"kind": "draft_model", "parallel": True, "mask_token_id": 101}}
    with pytest.raises(ConfigError, match=r"draft\.mask_token_id is 101; the draft takes ids 0 to 100"):
        specgraph.compile_speculative(target(), config, draft=pard())


def test_parallel_drafting_comes_before_verification() -> None:
    order = ["expose_features", "insert_kv_cache", "insert_draft", "insert_verify", "parallel_draft"]
    config = {**CONFIG, "draft": {"kind": "eagle3", "parallel": True}, "pipeline": {"order": order}}
    with pytest.raises(PassError, match="put parallel_draft before insert_verify"):
        specgraph.compile_speculative(target(), config, draft=head("plain"))


def test_a_head_needs_its_features() -> None:
    order = ["insert_kv_cache", "insert_draft", "insert_verify"]
    config = {**CONFIG, "draft": {"kind": "eagle3"}, "pipeline": {"order": order}}
    with pytest.raises(
        PassError, match=r"eagle3 reads hs\[0, 1, 2\] of the target, and 0 are there; put expose_features"
    ):
        specgraph.compile_speculative(target(), config, draft=head("plain"))


# From a checkpoint


def test_a_pard_checkpoint_drafts_in_parallel_unless_told_otherwise(tmp_path: Path) -> None:
    draft = make_model("llama", seed=2, dtype=torch.float64)
    draft.config.pard_token = MASK
    draft.save_pretrained(tmp_path)
    for parallel, count in ((None, 1), (False, 4)):
        config = {**CONFIG, "draft": {"parallel": parallel, "num_speculative_tokens": 4}}
        tested = specgraph.compile_speculative(target(), config, draft=tmp_path)
        program = tested._program
        assert program.drafter.name == "draft_model" and len(program.with_role("draft")) == count
        assert TestDrafts.tokens_of(tested) == TestDrafts.plain_tokens()
    assert "draft: pard in the pard layout" in tested.report()


@pytest.mark.parametrize("algorithm", ["eagle3", "peagle"])
def test_a_saved_head_drafts_as_the_one_in_memory(algorithm: Any, tmp_path: Path) -> None:
    made = make_head(target(), vocab=80, mask_token_id=MASK if algorithm == "peagle" else None)
    Eagle3Drafter.save_head(made, tmp_path, target_name="target", algorithm=algorithm, num_speculative_tokens=4)
    options = {"num_speculative_tokens": 4, "parallel": algorithm == "peagle"}
    expected = specgraph.compile_speculative(target(), {**CONFIG, "draft": {**options, "kind": "eagle3"}}, draft=made)
    loaded = specgraph.compile_speculative(target(), {**CONFIG, "draft": {"model": str(tmp_path)}})
    assert loaded.stages["trace"].drafter.name == algorithm
    prompts, settings = ragged_prompts((3, 9)), {"max_new_tokens": 12, "eos_token_id": []}
    outs = [d.generate(prompts, **settings) for d in (loaded, expected)]
    assert outs[0].stats.emitted_per_step == outs[1].stats.emitted_per_step
    assert [t.tolist() for t in outs[0].new_tokens] == [t.tolist() for t in outs[1].new_tokens]
