"""Lets a real model write the answers from which a head learns, by specgraph itself.

    python benchmarks/write_answers.py MODEL --questions FILE.jsonl --out ANSWERS.jsonl [--count N] [--code N]

The file is one for ``rollout.file`` of ``train draft=HEAD``, with ``rollout.chat=true`` if the model has a chat
template: greedy answers to the questions that the training holds out, then one sampled answer to each of the others,
and to beginnings of functions of Python's standard library. No question of a test set is asked.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from real_models import folder_of, load
from texts import ask, code_prompts

import specgraph
from specgraph.training.data import read_documents, split_documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--questions", required=True, help="what data= of the training names")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heldout", type=int, default=64, help="as heldout= of the training")
    parser.add_argument("--seed", type=int, default=0, help="as seed= of the training")
    parser.add_argument("--count", type=int, default=8000, help="questions that are answered to learn from")
    parser.add_argument("--code", type=int, default=1000, help="functions that are continued to learn from")
    parser.add_argument("--new-tokens", type=int, default=320)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=230, help="begin no further batch after this time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lowering", default="auto")
    given = parser.parse_args()
    if given.out.exists():
        print(f"{given.out} is there: nothing to do.")
        return
    model, tokenizer = load(folder_of(given.model), given.device, given.dtype)
    train, heldout = split_documents(read_documents(given.questions), given.heldout, given.seed)
    held = ask(tokenizer, [document.question for document in heldout])
    others = ask(tokenizer, [document.question for document in train[: given.count]])
    code: list[list[int]] = tokenizer(code_prompts(given.code))["input_ids"] if given.code else []
    mixed = [prompt for prompt in [*others, *code] if len(prompt) <= 512]
    mixed = [mixed[index] for index in _shuffled(len(mixed), given.seed)]
    config: dict[str, Any] = {
        "draft": {"kind": "none"},
        "max_batch_size": given.batch,
        "max_length": max(map(len, [*held, *mixed])) + given.new_tokens + 1,
        "lowering": {"name": given.lowering},
        "numerics": "fast",
        "debug": {"self_check": False, "progress": False},
    }
    decoder = specgraph.compile_speculative(model, config)
    begin, written = time.monotonic(), 0
    given.out.parent.mkdir(parents=True, exist_ok=True)
    part = given.out.with_suffix(".part")
    with part.open("w") as file:
        size = 4 * given.batch  # a batch is filled up as sequences end, so several together leave few rows idle
        jobs = [(held, 0.0), *((mixed[at : at + size], given.temperature) for at in range(0, len(mixed), size))]
        for number, (prompts, temperature) in enumerate(jobs):
            if number and time.monotonic() - begin > given.seconds:
                break
            out = decoder.generate(prompts, max_new_tokens=given.new_tokens, temperature=temperature, seed=number)
            for prompt, new in zip(prompts, out.new_tokens, strict=True):
                file.write(json.dumps({"ids": [*prompt, *new.tolist()], "prompt_length": len(prompt)}) + "\n")
                written += len(new)
            seconds = time.monotonic() - begin
            print(f"{number + 1} of {len(jobs)}: {written} tokens, {written / seconds:.0f} tokens/s", flush=True)
    part.rename(given.out)


def _shuffled(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(count), count)


if __name__ == "__main__":
    main()
