"""One whole path of each kind through Inductor, the default lowering on a CPU, against the eager decoder.

The other tests decode eagerly, since each decoder of theirs would compile for seconds. The models here are as small as
they can be, and :class:`Inductor` checks that what ran is what Inductor made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.output_code import CompiledFxGraph
from transformers import LogitsProcessor, PreTrainedModel

from specgraph import SpeculativeDecoder
from specgraph.config.lowering import DISABLED, missing_for_inductor
from specgraph.ir import compiling
from tests.decoding import assert_same_tokens, compiled
from tests.models import make_head, ragged_prompts, shared_model

PROMPTS = ragged_prompts((3, 9))
NEW_TOKENS = 10


class Inductor:
    """Makes a decoder with the default lowering, and counts how often code that Inductor made has run."""

    def __init__(self) -> None:
        self.runs = 0

    def decoder(self, model: PreTrainedModel, *given: Any, **options: Any) -> SpeculativeDecoder:
        """A decoder as users get it on a CPU."""
        decoder = compiled(model, *given, **options)
        assert decoder.config.lowering.name == "inductor"
        self.modules = decoder.stages["compile_remainder"].compiled
        assert {"target", "lm_head"} <= self.modules
        return decoder

    def check(self, steps: int) -> None:
        """Every module was compiled in one piece, and ran compiled in each of so many steps."""
        made = counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_hit"]
        assert made >= len(self.modules) and not counters["graph_break"]
        assert steps > 0 and self.runs >= steps * len(self.modules)


@pytest.fixture
def inductor(torch_compile: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inductor]:
    monkeypatch.delenv(DISABLED, raising=False)
    missing = "the default lowering is for a GPU here" if torch.cuda.is_available() else missing_for_inductor()
    if missing is not None:
        pytest.skip(missing)
    found, run = Inductor(), CompiledFxGraph.__call__

    def counted(self: CompiledFxGraph, inputs: Any) -> Any:
        found.runs += 1
        return run(self, inputs)

    monkeypatch.setattr(CompiledFxGraph, "__call__", counted)
    monkeypatch.setattr(compiling, "_regions", type(compiling._regions)())  # other tests have compiled the same layers
    counters.clear()
    yield found


def eager(*given: Any, **options: Any) -> SpeculativeDecoder:
    return compiled(*given, lowering={"name": "eager"}, **options)


@functools.cache
def expected(model: PreTrainedModel, **options: Any) -> list[Tensor]:
    return eager(model, "none", 1).generate(PROMPTS, max_new_tokens=NEW_TOKENS, **options).new_tokens


DRAFTS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": lambda: {"k": 1},
    "ngram": lambda: {"k": 2},
    "draft_model": lambda: {"k": 2, "draft": shared_model("llama", 1)},
    "eagle3": lambda: {"k": 2, "draft": make_head(shared_model("llama"), features=(0, 1, 2))},
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_decoder_of_each_kind(kind: str, inductor: Inductor) -> None:
    """With temperature 1 for one of the sequences."""
    model, options = shared_model("llama"), {"temperature": (0.0, 1.0), "seed": (3, 4)}
    out = inductor.decoder(model, kind, **DRAFTS[kind]()).generate(PROMPTS, max_new_tokens=NEW_TOKENS, **options)
    assert_same_tokens(model, PROMPTS, out.new_tokens, expected(model, **options))
    inductor.check(max(map(len, out.stats.emitted_per_step)))


def test_a_session(inductor: Inductor) -> None:
    """The second sequence comes while the first one decodes."""
    model = shared_model("llama")
    decoder = inductor.decoder(model, "ngram", 2, max_batch_size=2, max_length=32)
    found: dict[int, list[int]] = {}
    with decoder.session() as session:
        session.submit(PROMPTS[0], max_new_tokens=NEW_TOKENS)
        for event in session:
            if not found:
                session.submit(PROMPTS[1], max_new_tokens=NEW_TOKENS)
            found.setdefault(event.id, []).extend(event.tokens)
    tokens = [torch.tensor(found[number]) for number in sorted(found)]
    assert_same_tokens(model, PROMPTS, tokens, expected(model))
    inductor.check(NEW_TOKENS // 3)  # a step gives a sequence three tokens at most


def test_scores(inductor: Inductor) -> None:
    """With 8 drafts, modules are compiled for more rows than a chunk of these prompts has.

    Scores are those of float64, of which float32 without Inductor may miss as much.
    """
    model, exact = shared_model("llama"), shared_model("llama", dtype=torch.float64)
    rows = [torch.cat([prompt, new]) for prompt, new in zip(PROMPTS, expected(model), strict=True)]
    found = inductor.decoder(model, "ngram", 8).score(rows).logprobs
    wanted = eager(exact, "ngram", 8).score(rows).logprobs
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=1e-5)
    inductor.check(len(rows[0]) // 7)


def test_a_recurrent_model(inductor: Inductor) -> None:
    model = shared_model("qwen3_5_text")
    out = inductor.decoder(model, "ngram", 2).generate(PROMPTS, max_new_tokens=NEW_TOKENS)
    assert_same_tokens(model, PROMPTS, out.new_tokens, expected(model))
    inductor.check(max(map(len, out.stats.emitted_per_step)))


class OnlyEven(LogitsProcessor):
    """Specgraph does not know it, so it runs on the host."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(-1, torch.arange(1, scores.shape[-1], 2), -torch.inf)


def test_processors_of_the_host(inductor: Inductor) -> None:
    """The step is cut in two, and both halves are compiled."""
    model, options = shared_model("llama"), {"logits_processor": [OnlyEven()], "max_new_tokens": NEW_TOKENS}
    out = inductor.decoder(model, "ngram", 2).generate(PROMPTS, **options)
    assert_same_tokens(model, PROMPTS, out.new_tokens, eager(model, "none", 1).generate(PROMPTS, **options).new_tokens)
    assert out.stats.host_steps == out.stats.steps and all(int(new) % 2 == 0 for new in torch.cat(out.new_tokens))
    inductor.check(max(map(len, out.stats.emitted_per_step)))
