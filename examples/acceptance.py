"""Measure the acceptance tables of the tiny-math model card: 200 GSM8K test questions, K = 4.

Usage: python examples/acceptance.py [number of questions]. Prints Markdown.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgraph
from specgraph import SpeculativeDecoder

HERE = Path(__file__).parent
MODELS = HERE / "models" / "tiny-math"
K = 4
NEW_TOKENS = 160
CUTS = (10, 40, 70)


def load_prompts(count: int) -> list[Tensor]:
    """The first questions as prompts."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    lines = (HERE / "data" / "gsm8k_test_200.jsonl").read_text().splitlines()[:count]
    return [tokenizer(f"Question: {json.loads(line)['question']}\nAnswer:", return_tensors="pt").input_ids[0]
            for line in lines]  # fmt: skip


def make_decoder(name: str, rule: str = "strict") -> SpeculativeDecoder:
    """A decoder of the target drafted by ``name``."""
    target = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    draft = MODELS / "draft" if name == "draft_model" else None
    cfg = {"draft": {"kind": name, "num_speculative_tokens": K}, "verify": {"rule": rule}, "max_batch_size": 1000}
    return specgraph.compile_speculative(target, cfg, draft=draft)


def row(label: str, counts: list[int]) -> str:
    """A table row: mean and standard error of tokens per step, share of steps that accept each position."""
    values = torch.tensor(counts, dtype=torch.float64)
    shares = " | ".join(f"{float((values > i).double().mean()):.3f}" for i in range(1, K + 1))
    error = float(values.std()) / math.sqrt(len(counts))
    return f"| {label} | {float(values.mean()):.3f} ± {error:.3f} | {shares} | {len(counts)} |"


def head(title: str) -> None:
    positions = " | ".join(f"draft {i}" for i in range(1, K + 1))
    print(f"\n{title}\n\n| | acceptance length | {positions} | steps |\n|{'---|' * (K + 3)}")


def greedy_table(prompts: list[Tensor]) -> None:
    """Whole answers at temperature 0; the tokens must be those of plain decoding."""
    plain = make_decoder("none").generate(prompts, max_new_tokens=NEW_TOKENS)
    head(f"Temperature 0, {len(prompts)} questions, up to {NEW_TOKENS} tokens each, rule `strict`, K = {K}:")
    for name in ("draft_model", "ngram"):
        out = make_decoder(name).generate(prompts, max_new_tokens=NEW_TOKENS)
        differing = sum(not torch.equal(a, b) for a, b in zip(out.new_tokens, plain.new_tokens, strict=True))
        counts = [n for sequence in out.stats.emitted_per_step for n in sequence]
        print(row(f"{name}, {differing} sequences differ from plain decoding", counts))


def sampled_table(prompts: list[Tensor]) -> None:
    """The first decode step after the same prefixes, so that rules are compared on the same ground."""
    plain = make_decoder("none")
    texts = plain.generate(prompts, max_new_tokens=max(CUTS), temperature=1.0, seed=0).new_tokens
    prefixes = [
        torch.cat([p, t[:cut]]) for p, t in zip(prompts, texts, strict=True) for cut in CUTS if len(t) > cut - 1
    ]
    head(f"Temperature 1, drawn drafts, first decode step after {len(prefixes)} prefixes x 2 seeds, K = {K}:")
    for rule in ("strict", "probabilistic", "block"):
        decoder, counts = make_decoder("draft_model", rule), []
        for seed in (1, 2):
            out = decoder.generate(prefixes, max_new_tokens=K + 2, temperature=1.0, seed=seed)
            counts += [steps[0] for steps in out.stats.emitted_per_step if steps]
        print(row(rule, counts))


def main() -> None:
    prompts = load_prompts(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
    greedy_table(prompts)
    sampled_table(prompts)


if __name__ == "__main__":
    main()
