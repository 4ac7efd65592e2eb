"""Measure the acceptance tables of a model card: 200 GSM8K test questions, every drafter.

Prints Markdown. On two cores all of tiny-math takes about an hour; the arguments choose a part, other models, or a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgraph
from specgraph import SpeculativeDecoder

HERE = Path(__file__).parent
MODELS = HERE / "models" / "tiny-math"
LOOKUPS = ("ngram", "suffix")
HEADS = ("eagle3", "peagle", "eagle", "mtp", "medusa", "dflash", "dflash2", "dspark")
MATCHES = {"medusa": (2, 4, 8), "eagle3": (4, 8)}
"""How many tokens must match for a lookup in front of each of these drafters."""
NEW_TOKENS = 160
CUTS = (10, 40, 70)
BATCH = 100


@dataclass(frozen=True)
class Models:
    """A folder with a target and its drafts, each in a folder that is named after its kind, and where they run."""

    folder: Path
    device: str = "cpu"

    @property
    def names(self) -> list[str]:
        """The drafters that can be measured."""
        return [*(name for name in ("draft_model", *HEADS) if self.draft(name)), *LOOKUPS]

    def draft(self, name: str) -> Path | None:
        """The folder of a draft, if there is one."""
        folder = self.folder / {"draft_model": "draft"}.get(name, name)
        return folder if folder.is_dir() else None


def load_prompts(models: Models, count: int) -> list[Tensor]:
    """The first questions as prompts."""
    tokenizer = AutoTokenizer.from_pretrained(models.folder / "target")
    lines = (HERE / "data" / "gsm8k_test_200.jsonl").read_text().splitlines()[:count]
    return [tokenizer(f"Question: {json.loads(line)['question']}\nAnswer:", return_tensors="pt").input_ids[0]
            for line in lines]  # fmt: skip


def make_decoder(models: Models, name: str, k: int, rule: str = "strict", **options: object) -> SpeculativeDecoder:
    """A decoder of the target drafted by ``name``; ``options`` are further keys of ``draft``."""
    target = AutoModelForCausalLM.from_pretrained(models.folder / "target", dtype=torch.float32).to(models.device)
    kind = {"peagle": "eagle3"}.get(name, name)
    draft = {"kind": kind, "num_speculative_tokens": k, **options}
    cfg = {"draft": draft, "verify": {"rule": rule}, "max_batch_size": 1000}
    return specgraph.compile_speculative(target, cfg, draft=models.draft(name))


def row(label: str, k: int, counts: list[int]) -> str:
    """A table row: mean and standard error of tokens per step, share of steps that accept each position."""
    values = torch.tensor(counts, dtype=torch.float64)
    shares = " | ".join(f"{float((values > i).double().mean()):.3f}" for i in range(1, k + 1))
    error = float(values.std()) / math.sqrt(len(counts))
    return f"| {label} | {float(values.mean()):.3f} ± {error:.3f} | {shares} | {len(counts)} |"


def head(title: str, k: int) -> None:
    positions = " | ".join(f"draft {i}" for i in range(1, k + 1))
    print(f"\n{title}, K = {k}:\n\n| | acceptance length | {positions} | steps |\n|{'---|' * (k + 3)}")


def greedy_table(models: Models, prompts: list[Tensor], names: list[str], k: int) -> None:
    """Whole answers at temperature 0; the tokens must be those of plain decoding."""
    plain = make_decoder(models, "none", k).generate(prompts, max_new_tokens=NEW_TOKENS)
    head(f"Temperature 0, {len(prompts)} questions, up to {NEW_TOKENS} tokens each, rule `strict`", k)
    for name in names:
        out = make_decoder(models, name, k).generate(prompts, max_new_tokens=NEW_TOKENS)
        differing = sum(not torch.equal(a, b) for a, b in zip(out.new_tokens, plain.new_tokens, strict=True))
        counts = [n for sequence in out.stats.emitted_per_step for n in sequence]
        print(row(f"{name}, {differing} sequences differ from plain decoding", k, counts), flush=True)


def first_table(models: Models, prompts: list[Tensor], names: list[str], k: int) -> None:
    """Whole answers at temperature 0, with and without a lookup in front of the drafter."""
    head(f"Temperature 0, {len(prompts)} questions, `draft.first=ngram`", k)
    for name in filter(names.__contains__, MATCHES):
        for match in (None, *MATCHES[name]):
            options = {} if match is None else {"first": "ngram", "first_match": match}
            out = make_decoder(models, name, k, **options).generate(prompts, max_new_tokens=NEW_TOKENS)
            label = name if match is None else f"{name}, n-gram first where {match} tokens match"
            print(row(label, k, [n for sequence in out.stats.emitted_per_step for n in sequence]), flush=True)


def sampled_table(models: Models, prompts: list[Tensor], names: list[str], k: int) -> None:
    """The first decode step after the same prefixes, so that rules are compared on the same ground."""
    plain = make_decoder(models, "none", k)
    texts = plain.generate(prompts, max_new_tokens=max(CUTS), temperature=1.0, seed=0).new_tokens
    prefixes = [
        torch.cat([p, t[:cut]]) for p, t in zip(prompts, texts, strict=True) for cut in CUTS if len(t) > cut - 1
    ]
    prefixes.sort(key=len)  # a batch is as long as its longest prefix
    head(f"Temperature 1, first decode step after {len(prefixes)} prefixes x 2 seeds", k)
    for name in names:
        for rule in ("strict", "probabilistic", "block"):
            counts = first_steps(make_decoder(models, name, k, rule), prefixes, k)
            print(row(f"{name}, {rule}", k, counts), flush=True)


def first_steps(decoder: SpeculativeDecoder, prefixes: list[Tensor], k: int) -> list[int]:
    """Tokens of the first decode step after every prefix, twice with other seeds."""
    counts = []
    for begin in range(0, 2 * len(prefixes), BATCH):
        numbers = range(begin, min(begin + BATCH, 2 * len(prefixes)))
        batch = [prefixes[number // 2] for number in numbers]
        out = decoder.generate(batch, max_new_tokens=k + 2, temperature=1.0, seed=list(numbers))
        counts += [steps[0] for steps in out.stats.emitted_per_step if steps]
    return counts


TABLES = {"greedy": greedy_table, "sampled": sampled_table, "first": first_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=int, nargs="?", default=200, help="how many questions (200)")
    parser.add_argument("tables", nargs="*", choices=TABLES, default=list(TABLES), help="all tables, if none is named")
    parser.add_argument("--models", type=Path, default=MODELS, help="a folder with target and drafts (tiny-math)")
    parser.add_argument("--device", default="cpu", help="where the decoders run, in float32 (cpu)")
    parser.add_argument("--drafts", nargs="+", help="all of the folder, and lookups")
    parser.add_argument("--k", type=int, default=5, help="drafts per step (5)")
    options = parser.parse_args()
    models = Models(options.models, options.device)
    unknown = set(options.drafts or ()) - set(models.names)
    if unknown:
        parser.error(f"--drafts: {models.folder} has no {', '.join(sorted(unknown))}; it has {', '.join(models.names)}")
    prompts = load_prompts(models, options.questions)
    for name in options.tables:
        TABLES[name](models, prompts, options.drafts or models.names, options.k)


if __name__ == "__main__":
    main()
