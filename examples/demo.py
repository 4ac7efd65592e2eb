"""Decode real questions with the shipped models, with and without speculation, and show what happened."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgraph
from specgraph import GenerateOutput, SpeculativeDecoder

HERE = Path(__file__).parent
MODELS = HERE / "models" / "tiny-math"
QUESTIONS = 4
NEW_TOKENS = 96


def timed(decoder: SpeculativeDecoder, prompts: list[torch.Tensor]) -> tuple[GenerateOutput, float]:
    """One question at a time, as a user would ask; the first call warms up."""
    decoder.generate(prompts[:1], max_new_tokens=8)
    begin = time.perf_counter()
    outs = [decoder.generate([p], max_new_tokens=NEW_TOKENS) for p in prompts]
    seconds = time.perf_counter() - begin
    merged = outs[0]
    merged.new_tokens = [t for out in outs for t in out.new_tokens]
    merged.stats.emitted_per_step = [s for out in outs for s in out.stats.emitted_per_step]
    return merged, sum(t.numel() for t in merged.new_tokens) / seconds


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    target = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    with (HERE / "data" / "gsm8k_test_200.jsonl").open() as lines:
        questions = [json.loads(next(lines))["question"] for _ in range(QUESTIONS)]
    prompts = [tokenizer(f"Question: {q}\nAnswer:", return_tensors="pt").input_ids[0] for q in questions]

    plain, base = timed(specgraph.compile_speculative(target, "none"), prompts)
    for question, tokens in zip(questions, plain.new_tokens, strict=True):
        print(f"Q: {question}\nA: {tokenizer.decode(tokens, skip_special_tokens=True).strip()}\n")
    print(f"without speculation {base:6.0f} tokens/s, 1.00 tokens per step")
    decoder = None
    for name in ("ngram", "draft", "eagle3", "peagle"):
        draft = None if name == "ngram" else MODELS / name
        decoder = specgraph.compile_speculative(target, draft=draft)
        out, speed = timed(decoder, prompts)
        same = all(map(torch.equal, out.new_tokens, plain.new_tokens))
        shares = " ".join(f"{share:.2f}" for share in out.stats.acceptance_per_position)
        length = out.stats.acceptance_length
        print(f"{name:19} {speed:6.0f} tokens/s ({speed / base:.2f}x), {length:.2f} tokens per step, "
              f"accepted per position {shares}, same tokens: {same}")  # fmt: skip
    assert decoder is not None
    print(f"graphs of every stage and report.md: {decoder.dump('graphs')}")


if __name__ == "__main__":
    main()
