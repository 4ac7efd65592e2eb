"""Compile a causal LM and decode with n-gram drafts: nothing but the model is needed."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgraph

MODELS = Path(__file__).parent / "models" / "tiny-math"


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    decoder = specgraph.compile_speculative(model)

    question = "Question: Tom has 3 boxes with 4 pens each. He buys 5 more pens. How many pens does he have?\nAnswer:"
    prompt = tokenizer(question, return_tensors="pt").input_ids
    out = decoder.generate(prompt, max_new_tokens=80)
    print(tokenizer.decode(out.new_tokens[0], skip_special_tokens=True))
    print(f"{out.stats.acceptance_length:.2f} tokens per step")

    # The promise: exactly what the model alone emits.
    plain = model.generate(prompt, max_new_tokens=80, do_sample=False)[0, prompt.shape[1] :]
    assert torch.equal(out.new_tokens[0], plain)


if __name__ == "__main__":
    main()
