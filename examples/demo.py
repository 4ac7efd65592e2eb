"""Decode real questions with the shipped models, by transformers and by specgraph, and show what happened.

On a CPU with a C++ compiler, specgraph compiles in the first request, which takes minutes for all drafts, once.
``TORCH_COMPILE_DISABLE=1`` leaves that out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import specgraph
from specgraph import SpeculativeDecoder

HERE = Path(__file__).parent
MODELS = HERE / "models" / "tiny-math"
QUESTIONS = 4
NEW_TOKENS = 96
ROUNDS = 3

Decode = Callable[[Tensor, int], Tensor]
"""From a prompt and a number of tokens to the new tokens."""


def transformers(model: PreTrainedModel, assistant: PreTrainedModel | None = None) -> Decode:
    def decode(prompt: Tensor, count: int) -> Tensor:
        ids = prompt.unsqueeze(0)
        options = {} if assistant is None else {"assistant_model": assistant}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **options)
        return out[0, prompt.numel() :]

    return decode


def ours(decoder: SpeculativeDecoder) -> Decode:
    return lambda prompt, count: decoder.generate([prompt], max_new_tokens=count).new_tokens[0]


def say_if_it_takes_long(decoder: SpeculativeDecoder) -> None:
    """Say it before anything is compiled. Later runs find what was compiled in Inductor's cache."""
    if decoder.config.lowering.remainder == "inductor":
        print(
            "The first run compiles for minutes, and later ones for less. TORCH_COMPILE_DISABLE=1 make demo leaves "
            "that out and decodes more slowly.",
            file=sys.stderr,
        )


def measure(decoders: dict[str, Decode], prompts: list[Tensor]) -> tuple[dict[str, float], dict[str, list[Tensor]]]:
    """Tokens per second, and the tokens. Decoders take turns on each question, and the best of a few rounds counts."""
    for place, (name, decode) in enumerate(decoders.items(), 1):
        print(f"warming up {place} of {len(decoders)}: {name}", file=sys.stderr)
        decode(prompts[0], 8)  # compiles, which no measurement includes
    best: dict[tuple[str, int], float] = {}
    tokens: dict[str, list[Tensor]] = {name: [*prompts] for name in decoders}  # replaced in the first round
    for index, prompt in [*enumerate(prompts)] * ROUNDS:
        for name, decode in decoders.items():
            begin = time.perf_counter()
            tokens[name][index] = decode(prompt, NEW_TOKENS)
            seconds = time.perf_counter() - begin
            best[name, index] = min(seconds, best.get((name, index), seconds))
    counts = {name: sum(t.numel() for t in found) for name, found in tokens.items()}
    return {n: counts[n] / sum(best[n, i] for i in range(len(prompts))) for n in decoders}, tokens


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    target = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    draft = AutoModelForCausalLM.from_pretrained(MODELS / "draft", dtype=torch.float32)
    with (HERE / "data" / "gsm8k_test_200.jsonl").open() as lines:
        questions = [json.loads(next(lines))["question"] for _ in range(QUESTIONS)]
    prompts = [tokenizer(f"Question: {q}\nAnswer:", return_tensors="pt").input_ids[0] for q in questions]

    decoders = {"transformers": transformers(target), "transformers, draft": transformers(target, draft)}
    last = specgraph.compile_speculative(target, "none")
    say_if_it_takes_long(last)
    decoders["specgraph"] = ours(last)
    for name in ("ngram", "draft", "eagle3", "peagle"):
        last = specgraph.compile_speculative(target, draft=None if name == "ngram" else MODELS / name)
        decoders[f"specgraph, {name}"] = ours(last)
    speeds, tokens = measure(decoders, prompts)

    base = tokens["transformers"]
    for question, answer in zip(questions, base, strict=True):
        print(f"Q: {question}\nA: {tokenizer.decode(answer, skip_special_tokens=True).strip()}\n")
    for name, speed in speeds.items():
        same = all(map(torch.equal, tokens[name], base))
        print(f"{name:20} {speed:6.0f} tokens/s ({speed / speeds['transformers']:.2f}x), same tokens: {same}")
    print(next(line for line in last.report().splitlines() if line.startswith("- lowering:")).removeprefix("- "))
    print(f"graphs of every stage and report.md: {last.dump('graphs')}")


if __name__ == "__main__":
    main()
