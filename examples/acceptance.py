"""Measure the acceptance tables of the tiny-math model card: 200 GSM8K test questions, K = 5, every drafter.

Usage: python examples/acceptance.py [number of questions [greedy|sampled|first]]. Prints Markdown.
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
DRAFTS: dict[str, Path | None] = {
    "draft_model": MODELS / "draft",
    "eagle3": MODELS / "eagle3",
    "peagle": MODELS / "peagle",
    "eagle": MODELS / "eagle",
    "medusa": MODELS / "medusa",
    "mtp": MODELS / "mtp",
    "ngram": None,
    "suffix": None,
}
MATCHES = {"medusa": (2, 4, 8), "eagle3": (4, 8)}
"""How many tokens must match for a lookup in front of each of these drafters."""
K = 5
NEW_TOKENS = 160
CUTS = (10, 40, 70)
BATCH = 100


def load_prompts(count: int) -> list[Tensor]:
    """The first questions as prompts."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    lines = (HERE / "data" / "gsm8k_test_200.jsonl").read_text().splitlines()[:count]
    return [tokenizer(f"Question: {json.loads(line)['question']}\nAnswer:", return_tensors="pt").input_ids[0]
            for line in lines]  # fmt: skip


def make_decoder(name: str, rule: str = "strict", **options: object) -> SpeculativeDecoder:
    """A decoder of the target drafted by ``name``; ``options`` are further keys of ``draft``."""
    target = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    kind = {"peagle": "eagle3"}.get(name, name)
    draft = {"kind": kind, "num_speculative_tokens": K, **options}
    cfg = {"draft": draft, "verify": {"rule": rule}, "max_batch_size": 1000}
    return specgraph.compile_speculative(target, cfg, draft=DRAFTS.get(name))


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
    for name in DRAFTS:
        out = make_decoder(name).generate(prompts, max_new_tokens=NEW_TOKENS)
        differing = sum(not torch.equal(a, b) for a, b in zip(out.new_tokens, plain.new_tokens, strict=True))
        counts = [n for sequence in out.stats.emitted_per_step for n in sequence]
        print(row(f"{name}, {differing} sequences differ from plain decoding", counts), flush=True)


def first_table(prompts: list[Tensor]) -> None:
    """Whole answers at temperature 0, with and without a lookup in front of the drafter."""
    head(f"Temperature 0, {len(prompts)} questions, `draft.first=ngram`, K = {K}:")
    for name, matches in MATCHES.items():
        for match in (None, *matches):
            options = {} if match is None else {"first": "ngram", "first_match": match}
            out = make_decoder(name, **options).generate(prompts, max_new_tokens=NEW_TOKENS)
            label = name if match is None else f"{name}, n-gram first where {match} tokens match"
            print(row(label, [n for sequence in out.stats.emitted_per_step for n in sequence]), flush=True)


def sampled_table(prompts: list[Tensor]) -> None:
    """The first decode step after the same prefixes, so that rules are compared on the same ground."""
    plain = make_decoder("none")
    texts = plain.generate(prompts, max_new_tokens=max(CUTS), temperature=1.0, seed=0).new_tokens
    prefixes = [
        torch.cat([p, t[:cut]]) for p, t in zip(prompts, texts, strict=True) for cut in CUTS if len(t) > cut - 1
    ]
    prefixes.sort(key=len)  # a batch is as long as its longest prefix
    head(f"Temperature 1, first decode step after {len(prefixes)} prefixes x 2 seeds, K = {K}:")
    for name in DRAFTS:
        for rule in ("strict", "probabilistic", "block"):
            print(row(f"{name}, {rule}", first_steps(make_decoder(name, rule), prefixes)), flush=True)


def first_steps(decoder: SpeculativeDecoder, prefixes: list[Tensor]) -> list[int]:
    """Tokens of the first decode step after every prefix, twice with other seeds."""
    counts = []
    for begin in range(0, 2 * len(prefixes), BATCH):
        numbers = range(begin, min(begin + BATCH, 2 * len(prefixes)))
        batch = [prefixes[number // 2] for number in numbers]
        out = decoder.generate(batch, max_new_tokens=K + 2, temperature=1.0, seed=list(numbers))
        counts += [steps[0] for steps in out.stats.emitted_per_step if steps]
    return counts


def main() -> None:
    prompts = load_prompts(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
    parts = sys.argv[2:] or ["greedy", "sampled", "first"]
    if "greedy" in parts:
        greedy_table(prompts)
    if "sampled" in parts:
        sampled_table(prompts)
    if "first" in parts:
        first_table(prompts)


if __name__ == "__main__":
    main()
