"""``draft.window``: no drafter reads keys in front of its window, and no token depends on it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.bench.models import random_head
from specgraph.config import CacheConfig, load_config
from specgraph.drafters import dflash
from specgraph.drafters.dflash_module import BlockMask
from specgraph.drafters.step import VERIFIED
from specgraph.errors import ConfigError
from specgraph.ir.graphs import calls
from specgraph.ir.program import Program
from specgraph.ir.state import State
from tests import harness
from tests.capturing import captured
from tests.decoding import CONFIG, compiled
from tests.detectors import check_fresh_drafts
from tests.drafters.test_matrix import DRAFTERS, PROMPTS, VOCAB, draft, heads_exported_once, model
from tests.harness import PlantBug, blank_state, draft_caches, drafting_config, drafting_stage, forced_run
from tests.models import ragged_prompts, shared_model
from tests.runtime.test_prefixes import PROMPTS as SHARING
from tests.runtime.test_prefixes import REUSING, steps_of

__all__ = ["heads_exported_once"]

K = 7
SEEING = [name for name in DRAFTERS if name not in ("ngram", "suffix", "medusa", "early_exit")]
EACH: dict[str, Any] = {"temperature": [0.0, 0.8, 1.0] * 2, "seed": [1, 2, 3, 4, 5, 6], "max_new_tokens": 12}


def windowed(
    drafter: str, window: int | None, rule: str = "strict", target: str = "llama", **extra: Any
) -> SpeculativeDecoder:
    options = {**DRAFTERS[drafter], "num_speculative_tokens": K, "window": window, **extra.pop("options", {})}
    config = {**CONFIG, "draft": options, "verify": {"rule": rule}, **extra}
    return specgraph.compile_speculative(model(target), config, draft=draft(drafter, target))


def told(decoder: SpeculativeDecoder) -> list[tuple[list[int], list[float]]]:
    """The tokens and log-probabilities of every sequence."""
    out = decoder.generate(PROMPTS, **EACH, eos_token_id=[], return_logprobs=True)
    assert out.logprobs is not None
    return [(own.tolist(), said.tolist()) for own, said in zip(out.new_tokens, out.logprobs, strict=True)]


@functools.cache
def plain() -> list[tuple[list[int], list[float]]]:
    return told(compiled(model("llama"), "none", 1))


@pytest.mark.parametrize("drafter", SEEING)
def test_tokens_and_log_probabilities_are_those_of_plain_decoding(drafter: str) -> None:
    """With a window that has fewer tokens than there are drafts."""
    tested = windowed(drafter, 3)
    assert told(tested) == plain()
    assert "attention layers see 3 tokens at most" in tested.report()


class PlantWindow(PlantBug):
    """Lets the target see as little as the drafter should."""

    bugs: ClassVar[dict[str, Callable[[Program], int]]] = {"the target's": lambda program: _limit_target(program)}


def _limit_target(program: Program) -> int:
    nodes = [*calls(program.modules["target"].graph, torch.ops.specgraph.paged_attention.default)]
    for node in nodes:
        node.update_kwarg("window", 3)
    program.modules["target"].recompile()
    return len(nodes)


def test_a_window_of_the_target_is_noticed() -> None:
    keys = {**DRAFTERS["eagle3"], "num_speculative_tokens": K, "window": 3}
    config = drafting_config(keys, bug="the target's", bugs=PlantWindow)
    assert told(specgraph.compile_speculative(model("llama"), config, draft=draft("eagle3", "llama"))) != plain()


@pytest.mark.parametrize("options", [{"num_speculative_tokens": {1: 5, 2: 2, 5: 0}}, {"adaptive": True}], ids=str)
def test_k_may_be_chosen_beside_a_window(options: dict[str, Any]) -> None:
    tested = captured(windowed("eagle3", 3, options=options, pipeline={"verify": False}))
    assert told(tested) == plain()
    assert len(tested._step_cache.steps) > 1


@pytest.mark.parametrize("drafter", ["mtp, 3 chained", "dflash"])
def test_a_session_that_shares_prefixes_accepts_as_many_drafts(drafter: str) -> None:
    """Equal numbers of accepted drafts mean equal drafts."""
    prompts = [prompt % VOCAB for prompt in SHARING[::2]]
    decoder = windowed(drafter, 3, max_batch_size=3, max_length=64)
    with decoder.session() as session:
        expected = steps_of(session, prompts, seed=0)
    decoder._runners.cache = CacheConfig(**REUSING)
    for seed in (1, 2):
        with decoder.session() as session:
            assert steps_of(session, prompts, seed) == expected
            assert session.stats.prefix_hit_rate > 0.2


# What drafts depend on


def one_more(program: Program, poisoned: range) -> Tensor:
    """What the drafts behind 20 tokens are drawn from, ``[K, Vd]``, where some rows are others than the drafter has
    cached."""
    tokens = ragged_prompts((20,), seed=5, vocab=11)[0]
    state = blank_state(program, [40], seed=0)
    with torch.no_grad():
        call(program, state, tokens[:-1], 0)
        slots = harness.slots_of(harness.Run(program, [40], state["block_table"], harness.Options()), 0, poisoned)
        for cache in draft_caches(state):
            cache.flatten(0, 1)[slots] = 1e3
        call(program, state, tokens[-2:], len(tokens) - 2)
    return state["draft_logits"][0]


def call(program: Program, state: State, tokens: Tensor, start: int) -> None:
    """A step in which all tokens behind the first are accepted."""
    count = len(tokens) - 1
    given = {"start": start, "num_rows": count, "num_forced": count - 1, "temperature": 1.0}
    for name in given.keys() & state.keys():
        state[name].fill_(given[name])
    window = torch.cat([tokens[:-1], tokens.new_zeros(K)]).unsqueeze(0)
    emitted = torch.cat([tokens[1:], tokens.new_full((K,), -1)]).unsqueeze(0)
    program.step()(window=window, **{**state, VERIFIED: emitted})


def outermost(program: Program, window: int) -> int:
    """The first position that the first draft behind 20 tokens sees, whose row is that of the newest token.

    A shifted drafter has none for that. The rows of a block see so many positions in front of it.
    """
    drafter: Any = program.drafter
    last = 20 - 1 - (drafter.shifted or not drafter.chained)
    return last + 1 - window


def check_sight(program: Program, window: int) -> None:
    """Drafts do not see what lies in front of the window, and the first draft sees all that is inside."""
    first = outermost(program, window)
    rerun = getattr(program.drafter, "num_kept", 0)  # rows that MTP modules run again see further back
    kept = one_more(program, range(0))
    assert torch.equal(one_more(program, range(first - rerun)), kept)
    assert torch.equal(one_more(program, range(first))[0], kept[0])
    assert not torch.equal(one_more(program, range(first, first + 1))[0], kept[0])


@pytest.mark.parametrize(
    ("drafter", "window"), [*((drafter, 4) for drafter in SEEING), ("mtp, 3 chained", 9), ("dflash", 9)]
)
def test_drafts_see_the_window_and_nothing_in_front_of_it(drafter: str, window: int) -> None:
    check_sight(drafting_stage(windowed(drafter, window, "probabilistic")), window)
    if window == 4 and drafter in ("draft_model", "dflash"):
        for wrong in (3, 5):
            broken = drafting_stage(windowed(drafter, wrong, "probabilistic"))
            with pytest.raises(AssertionError):
                check_sight(broken, window)


@pytest.mark.parametrize("drafter", ["draft_model", "peagle", "mtp, 3 chained", "dflash"])
def test_drafts_do_not_tell_what_was_accepted_and_rejected_before(drafter: str) -> None:
    """They are those of each sequence alone in a new state, with all of its tokens in one call."""
    stage = drafting_stage(windowed(drafter, 4))
    run = forced_run(stage, ragged_prompts((3, 9, 5), vocab=VOCAB), (48, 41, 23), seed=0, alphabet=VOCAB)
    assert {0, K} <= set(run.accept_counts)
    check_fresh_drafts(run)


# What has a window, and what has none


def test_a_smaller_window_of_a_head_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dflash, "RANDOM_LAYERS", 3)
    options = load_config({"draft": {"kind": "dflash", "num_speculative_tokens": K, "window": 4}}).draft
    head: Any = random_head(model("llama"), options)
    masks = BlockMask(window=2), BlockMask(window=9), BlockMask(causal=True)
    for layer, mask in zip(head.module.layers, masks, strict=True):
        layer.mask = mask
    decoder = specgraph.compile_speculative(model("llama"), {**CONFIG, "draft": vars(options)}, draft=head)
    graph = decoder.stages["trace"].modules.unchanged["draft"].graph
    found = [node.kwargs for node in calls(graph, torch.ops.specgraph.block_attention.default)]
    assert [given["window"] for given in found] == [2, 4, 4]
    assert [given.get("anchored", False) for given in found] == [False, False, True]
    assert "2 of the drafter's 3 attention layers see 4 tokens at most, and the others keep" in decoder.report()


@pytest.mark.parametrize("kind", ["none", "ngram", "suffix", "medusa", "early_exit"])
def test_a_drafter_without_attention_is_refused(kind: str) -> None:
    given = draft("medusa", "llama") if kind == "medusa" else None
    with pytest.raises(ConfigError, match=rf"draft.window=4 is for the attention of a drafter, and {kind} has none"):
        keys = {**DRAFTERS.get(kind, {}), "kind": kind, "window": 4}
        specgraph.compile_speculative(model("llama"), {"draft": keys}, draft=given)
    with pytest.raises(ConfigError, match=r"draft.window must be at least 1, got 0"):
        load_config({"draft": {"kind": kind, "window": 0}})


def test_recurrent_layers_see_everything_and_the_report_says_so() -> None:
    config = {**CONFIG, "draft": {"kind": "draft_model", "num_speculative_tokens": 2, "window": 4}}
    target, hybrid, mamba = (shared_model(name, dtype=torch.float64) for name in ("llama", "qwen3_5_text", "mamba"))
    decoder = specgraph.compile_speculative(target, config, draft=hybrid)
    assert "1 attention layers see 4 tokens at most; 2 recurrent ops have no window" in decoder.report()
    with pytest.raises(ConfigError, match=r"of a drafter, and draft_model has recurrent layers alone; leave it out"):
        specgraph.compile_speculative(target, config, draft=mamba)
