"""DSpark on a GPU: a random head on tiny-math, bit for bit; what it expects does not depend on the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.bench.models import random_head
from specgraph.config.load import load_config
from specgraph.drafters.dflash import RANDOM_RANK
from specgraph.drafters.dspark import DSparkDrafter
from specgraph.drafters.dspark_module import DSpark, DSparkConfig
from tests.gpu.capture import no_synchronisation
from tests.gpu.test_bitwise_gpu import MODELS, assert_same, plain, prompts, run

KINDS = ("vanilla", "gated", "rnn")


def decoder(k: int, kind: str = "vanilla", rule: str = "strict") -> SpeculativeDecoder:
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.bfloat16).cuda()
    config = {"draft": {"kind": "dspark", "num_speculative_tokens": k}, "verify": {"rule": rule},
              "debug": {"self_check": False}}  # fmt: skip
    head = random_head(model, load_config(config).draft)
    assert head is not None
    if kind != "vanilla":
        values: dict[str, Any] = vars(head.module.config) | {"markov_kind": kind, "markov_rank": RANDOM_RANK}
        torch.manual_seed(0)
        other = DSpark(DSparkConfig(**values)).cuda().to(torch.bfloat16)
        other.load_state_dict(head.module.state_dict(), strict=False)
        other.embed_tokens.weight, other.lm_head.weight = head.module.embed_tokens.weight, head.module.lm_head.weight
        head = replace(head, module=other.eval().requires_grad_(False))
    assert DSparkDrafter.takes(head)
    return specgraph.compile_speculative(model, config, draft=head)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("k", "kind", "count", "batch"), [(3, "gated", 50, 50), (7, "vanilla", 33, 33), (7, "rnn", 16, 5), (1, "rnn", 3, 1)]
)
def test_speculation_changes_no_bit(k: int, kind: str, count: int, batch: int, temperature: float) -> None:
    assert_same(run(decoder(k, kind), count, batch, temperature), plain(temperature))


@pytest.mark.parametrize("rule", ["strict", "probabilistic"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_confidence_of_a_sequence_do_not_depend_on_its_batch(kind: str, rule: str) -> None:
    compiled, some = decoder(7, kind, rule), prompts()[:8]
    options: dict[str, Any] = {"max_new_tokens": 32, "eos_token_id": [], "temperature": 0.8}
    together = compiled.generate(some, seed=list(range(8)), **options)
    assert all(len(step) == 7 for steps in together.stats.confidence for step in steps)
    for row in range(8):
        alone = compiled.generate([some[row]], seed=[row], **options)
        assert torch.equal(alone.new_tokens[0], together.new_tokens[row]), row
        assert alone.stats.confidence[0] == together.stats.confidence[row], row


def test_the_steady_loop_waits_for_nothing_but_its_results() -> None:
    compiled, some = decoder(7), prompts()[:4]
    expected = compiled.generate(some, max_new_tokens=32, eos_token_id=[]).new_tokens
    with no_synchronisation():
        found = compiled.generate(some, max_new_tokens=32, eos_token_id=[]).new_tokens
    assert all(map(torch.equal, found, expected))
