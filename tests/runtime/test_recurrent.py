"""Targets with recurrent layers: the tokens of the model's own forward, whatever is drafted, reused or cancelled."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.qwen3_next import modeling_qwen3_next

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.errors import ConfigError, UnsupportedModelError
from specgraph.frontend.recurrent import conv_hook, delta_rule_hook, hooked_recurrence
from tests.decoding import CONFIG, compiled, forward_greedy
from tests.models import BASE, HYBRIDS, make_head, make_model, ragged_prompts

LENGTHS = (1, 2, 40, 7)
PROMPTS = ragged_prompts(LENGTHS)
NEW = 16
SMALL = "lfm2"
"""The architecture that traces soonest."""
DELTA = "olmo_hybrid"
"""The one that does so among those with a gated delta rule."""
KIMI = "kimi_linear"
"""One whose gated delta rule has a gate per channel."""
BAILING = ["bailing_hybrid"] if "bailing_hybrid" in HYBRIDS else []
"""Another one, which is not in every release of transformers."""


FULL = os.environ.get("SPECGRAPH_MATRIX") == "full"
"""Whether every architecture is tested with K = 1, 3 and 7, which takes ten minutes."""


def each(chosen: Sequence[Any], *others: Sequence[Any]) -> list[Any]:
    """Cases of an architecture and ``others``: those of ``chosen``, or all if :data:`FULL`."""
    return [*itertools.product(HYBRIDS, *others)] if FULL else [*chosen]


@functools.cache
def model_of(architecture: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    deeper = {"num_hidden_layers": 2} if architecture == "falcon_h1" and FULL else {}  # a head reads two layers
    return make_model(architecture, dtype=dtype, **deeper)


@functools.cache
def decoder_of(architecture: str, kind: str = "ngram", k: int = 3) -> SpeculativeDecoder:
    return compiled(model_of(architecture), kind, k, pipeline={"verify": True})


@functools.cache
def own_greedy(architecture: str) -> list[Tensor]:
    """The greedy continuations by the model's own forward."""
    return forward_greedy(model_of(architecture), PROMPTS, NEW)


def cut(tokens: Sequence[Tensor]) -> list[list[int]]:
    """Up to the EOS, id 2."""
    rows = [row.tolist() for row in tokens]
    return [row[: row.index(2) + 1] if 2 in row else row for row in rows]


GREEDY = [("qwen3_next", 3), ("qwen3_5_text", 1), ("qwen3_5_moe_text", 7), ("olmo_hybrid", 3), ("lfm2", 7),
          ("lfm2_moe", 1), ("falcon_h1", 3), ("bamba", 1), ("granitemoehybrid", 7), ("nemotron_h", 3), ("zamba2", 3),
          ("jamba", 7), ("mamba2", 7), ("mamba", 3), ("falcon_mamba", 1), (KIMI, 3),
          *((name, 3) for name in BAILING)]  # fmt: skip


@pytest.mark.parametrize(("architecture", "k"), each(GREEDY, (1, 3, 7)))
def test_greedy_tokens_are_those_of_the_models_own_forward(architecture: str, k: int) -> None:
    assert architecture in HYBRIDS
    out = decoder_of(architecture, k=k).generate(PROMPTS, max_new_tokens=NEW)
    assert cut(out.new_tokens) == cut(own_greedy(architecture))


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "lfm2", "falcon_h1", "mamba"])
def test_the_forms_for_cpus_give_the_tokens_of_the_references(architecture: str) -> None:
    """In float32, which they compute, with drafts and without, and together and alone."""
    plain, drafted = (compiled(model_of(architecture, torch.float32), kind, 3) for kind in ("none", "ngram"))
    together = [cut(decoder.generate(PROMPTS, max_new_tokens=NEW).new_tokens) for decoder in (plain, drafted)]
    alone = [cut(drafted.generate([prompt], max_new_tokens=NEW).new_tokens)[0] for prompt in PROMPTS]
    assert [*together, alone] == [cut(own_greedy(architecture))] * 3


def with_head(architecture: str, rule: str, k: int, rate: float = 0.6) -> SpeculativeDecoder:
    """Drafts of a random head, which are always made, verified by ``rule``."""
    model = model_of(architecture)
    given = {**CONFIG, "draft": {"num_speculative_tokens": k}, "verify": {"rule": rule, "acceptance_rate": rate}}
    return specgraph.compile_speculative(model, given, draft=make_head(model))


@pytest.mark.parametrize(("architecture", "k"), each([(SMALL, 3), (KIMI, 3)], (1, 3, 7)))
def test_no_drafts_change_a_seeded_token(architecture: str, k: int) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0.7, "seed": 5}
    plain = decoder_of(architecture, k=7).generate(PROMPTS, **options)
    assert cut(with_head(architecture, "strict", k).generate(PROMPTS, **options).new_tokens) == cut(plain.new_tokens)


@pytest.mark.parametrize(("architecture",), each([(name,) for name in (DELTA, KIMI, *BAILING)]))
def test_drawn_tokens_are_as_likely_as_the_models_own_forward_says(architecture: str) -> None:
    decoder, model = decoder_of(architecture), model_of(architecture)
    out = decoder.generate(PROMPTS, max_new_tokens=NEW, temperature=0.8, seed=3, return_logprobs=True)
    for prompt, new, drawn, scored in zip(
        PROMPTS, out.new_tokens, out.logprobs or [], decoder.score(out).logprobs, strict=True
    ):
        with torch.no_grad(), hooked_recurrence(model):
            logits = model(torch.cat([prompt, new])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        own = logits.log_softmax(-1).gather(-1, new[:, None])[:, 0]
        for found in (drawn, scored):
            torch.testing.assert_close(found.double(), own.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("architecture", "k", "rate"),
    each([(name, 3, 0.6) for name in (SMALL, DELTA, KIMI, *BAILING, "mamba2", "mamba")], (1, 3, 7), (0.0, 0.6, 1.0)),
)
def test_whatever_was_accepted_the_state_is_that_of_a_fresh_start(architecture: str, k: int, rate: float) -> None:
    """Drafts are accepted by lot, so that histories are mixed; scoring runs the tokens that came out as a prompt."""
    decoder = with_head(architecture, "synthetic", k, rate)
    out = decoder.generate(PROMPTS, max_new_tokens=60, eos_token_id=[], return_logprobs=True)
    counts = {count for row in out.stats.emitted_per_step for count in row}
    assert counts == {1} if rate == 0 else counts >= ({k + 1} if rate == 1 else {1, 2})
    assert (k, rate) != (3, 0.6) or counts == {1, 2, 3, 4}
    for own, scored in zip(out.logprobs or [], decoder.score(out).logprobs, strict=True):
        torch.testing.assert_close(own, scored, rtol=1e-6, atol=1e-6)


def test_rows_that_are_used_again_begin_anew() -> None:
    config = {**CONFIG, "cache": {"block_size": 4, "prefill_chunk": 7}, "max_batch_size": 2}
    decoder = specgraph.compile_speculative(model_of(DELTA), config)
    alone = [cut(decoder.generate([prompt], max_new_tokens=NEW).new_tokens)[0] for prompt in PROMPTS]
    with decoder.session() as session:
        numbers = [session.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS for _ in range(2)]
        begun = session.step()
        session.cancel(numbers[0])
        found: dict[int, list[int]] = {number: [] for number in numbers}
        for event in [*begun, *session]:
            found[event.id] += event.tokens
        assert [found[number] for number in numbers[1:]] == [alone[place // 2] for place in range(1, len(numbers))]


def test_the_self_check_compares_recurrent_layers_too() -> None:
    given = {**CONFIG, "debug": {"self_check": True}}
    decoder = specgraph.compile_speculative(model_of(SMALL), given)
    assert "agrees with its own forward" in decoder.report()
    assert "insert_recurrent_state" in decoder.report()


def test_a_pipeline_that_would_leave_the_state_out_is_refused() -> None:
    order = ["insert_kv_cache", "insert_draft", "insert_verify"]
    with pytest.raises(ConfigError, match=r"layers of target would forget .*; add insert_recurrent_state"):
        compiled(model_of(SMALL), pipeline={"order": order})


def test_layers_that_select_keys_are_refused_by_name() -> None:
    layers = {"layer_types": ["linear_attention", "indexed_attention"], "q_lora_rank": 16, "qk_rope_head_dim": 0}
    small = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16}
    config = AutoConfig.for_model("glm5_next", text_config={**BASE, **HYBRIDS[KIMI], **layers}, vision_config=small)
    model = AutoModelForImageTextToText.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match=r"Glm5Next.* of the kind indexed_attention, where an indexer"):
        specgraph.compile_speculative(model, {**CONFIG})


def test_an_argument_that_is_not_known_is_refused() -> None:
    x = torch.zeros(1, 4, 3)
    with pytest.raises(UnsupportedModelError, match="seq_idx to its causal convolution, which specgraph does not know"):
        conv_hook(x, torch.zeros(4, 2), seq_idx=x)
    with pytest.raises(UnsupportedModelError, match="followed by 'gelu', and specgraph knows None, silu, swish"):
        conv_hook(x, torch.zeros(4, 2), activation="gelu")
    rows = torch.zeros(1, 3, 2, 4)
    with pytest.raises(UnsupportedModelError, match="cu_seqlens, initial_state to its gated delta rule"):
        delta_rule_hook(rows, rows, rows, rows[..., 0], rows[..., 0], initial_state=rows, cu_seqlens=rows)


def test_other_threads_call_the_function_of_transformers_meanwhile() -> None:
    rows, seen = torch.ones(1, 3, 2, 4), []

    def elsewhere() -> None:
        _, state = modeling_qwen3_next.torch_chunk_gated_delta_rule(
            rows, rows, rows, -rows[..., 0], rows[..., 0], output_final_state=True
        )
        seen.append(state.shape)

    before = modeling_qwen3_next.torch_chunk_gated_delta_rule
    with hooked_recurrence(make_model("qwen3_next")):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        with pytest.raises(UnsupportedModelError, match="output_final_state"):
            modeling_qwen3_next.torch_chunk_gated_delta_rule(
                rows, rows, rows, -rows[..., 0], rows[..., 0], output_final_state=True
            )
    assert seen == [(1, 2, 4, 4)]
    assert modeling_qwen3_next.torch_chunk_gated_delta_rule is before
