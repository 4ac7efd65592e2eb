"""A batch of questions of different lengths, a small draft model, sampling with one seed per sequence."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgraph

HERE = Path(__file__).parent
MODELS = HERE / "models" / "tiny-math"


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    target = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    with (HERE / "data" / "gsm8k_test_200.jsonl").open() as lines:
        questions = [json.loads(next(lines))["question"] for _ in range(4)]
    prompts = [tokenizer(f"Question: {q}\nAnswer:", return_tensors="pt").input_ids[0] for q in questions]
    options = {"max_new_tokens": 60, "temperature": 0.8, "top_p": 0.95, "seed": [1, 2, 3, 4]}

    decoder = specgraph.compile_speculative(target, draft=MODELS / "draft")
    out = decoder.generate(prompts, **options)
    for question, tokens in zip(questions, out.new_tokens, strict=True):
        print(f"Q: {question}\nA: {tokenizer.decode(tokens, skip_special_tokens=True).strip()}\n")
    per_position = ", ".join(f"{share:.2f}" for share in out.stats.acceptance_per_position)
    print(f"{out.stats.acceptance_length:.2f} tokens per step; accepted per draft position: {per_position}")

    # The same seeds give the same tokens without any drafts.
    plain = specgraph.compile_speculative(target, "none").generate(prompts, **options)
    print("same tokens without speculation:", all(map(torch.equal, out.new_tokens, plain.new_tokens)))


if __name__ == "__main__":
    main()
