"""Decode real questions with the shipped models, by transformers and by specgraph, and show what happened.

On a CPU with a C++ compiler, specgraph compiles in the first request to each decoder. Later runs find what was compiled
in the cache of PyTorch. ``TORCH_COMPILE_DISABLE=1`` leaves compiling out.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

import specgraph
from specgraph import SpeculativeDecoder

HERE = Path(__file__).parent
MODELS = HERE / "models" / "tiny-math"
QUESTIONS = 3
NEW_TOKENS = 64
ROUNDS = 2

DRAFTS = {
    "no draft (plain decoding)": "none",
    "n-gram lookup": None,
    "draft model": MODELS / "draft",
    "EAGLE-3 head": MODELS / "eagle3",
}

Decode = Callable[[Tensor], tuple[Tensor, int]]
"""From a prompt to the new tokens, and the number of forwards of the target that they took."""


def transformers(model: PreTrainedModel) -> Decode:
    def decode(prompt: Tensor) -> tuple[Tensor, int]:
        ids = prompt.unsqueeze(0)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        tokens = out[0, prompt.numel() :]
        return tokens, tokens.numel()

    return decode


def ours(decoder: SpeculativeDecoder) -> Decode:
    def decode(prompt: Tensor) -> tuple[Tensor, int]:
        out = decoder.generate([prompt], max_new_tokens=NEW_TOKENS)
        return out.new_tokens[0], out.stats.steps

    return decode


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Say on standard error what is done, and how long it takes. A terminal shows the seconds while they pass."""
    begin, over = time.perf_counter(), threading.Event()

    def count() -> None:
        while not over.wait(0.5):
            print(f"\r{what} ... {time.perf_counter() - begin:.0f} s ", end="", file=sys.stderr, flush=True)

    print(f"{what} ... ", end="", file=sys.stderr, flush=True)
    counter = threading.Thread(target=count, daemon=True)
    if sys.stderr.isatty():
        counter.start()
    try:
        yield
    finally:
        over.set()
        if counter.ident is not None:
            counter.join()
            print(f"\r{what} ... ", end="", file=sys.stderr)
        print(f"{time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)


def measure(
    decoders: dict[str, Decode], prompts: list[Tensor]
) -> tuple[dict[str, float], dict[str, list[Tensor]], dict[str, int]]:
    """Tokens per second, the tokens, and the forwards of the target that they took.

    Decoders take turns on each question, and the best of the rounds counts.
    """
    best: dict[tuple[str, int], float] = {}
    found: dict[tuple[str, int], tuple[Tensor, int]] = {}
    for index, prompt in [*enumerate(prompts)] * ROUNDS:
        for name, decode in decoders.items():
            begin = time.perf_counter()
            found[name, index] = decode(prompt)
            seconds = time.perf_counter() - begin
            best[name, index] = min(seconds, best.get((name, index), seconds))
    places = range(len(prompts))
    tokens = {name: [found[name, i][0] for i in places] for name in decoders}
    forwards = {name: sum(found[name, i][1] for i in places) for name in decoders}
    speeds = {n: sum(t.numel() for t in own) / sum(best[n, i] for i in places) for n, own in tokens.items()}
    return speeds, tokens, forwards


def main() -> int:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with timed("loading the models"):
        tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
        target = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    with (HERE / "data" / "gsm8k_test_200.jsonl").open() as lines:
        questions = [json.loads(next(lines))["question"] for _ in range(QUESTIONS)]
    prompts = [tokenizer(f"Question: {q}\nAnswer:", return_tensors="pt").input_ids[0] for q in questions]

    built: dict[str, SpeculativeDecoder] = {}
    for place, (name, draft) in enumerate(DRAFTS.items(), 1):
        before = f"decoder {place} of {len(DRAFTS)}, {name}:"
        with timed(f"{before} tracing and passes"):
            if draft == "none":
                built[name] = specgraph.compile_speculative(target, "none")
            else:
                built[name] = specgraph.compile_speculative(target, draft=draft)
        compiles = built[name].config.lowering.remainder == "inductor"
        with timed(f"{before} the first request{', in which Inductor compiles' * compiles}"):
            ours(built[name])(prompts[0])  # as long as those that are measured, so that nothing is compiled in these

    decoders = {"transformers": transformers(target), **{name: ours(decoder) for name, decoder in built.items()}}
    with timed(f"{QUESTIONS} questions, {len(decoders)} decoders, {ROUNDS} rounds"):
        speeds, tokens, forwards = measure(decoders, prompts)
    base, (plain, *_, head) = tokens["transformers"], built

    print()
    for question, answer in zip(questions, base, strict=True):
        print(f"Q: {question}\nA: {tokenizer.decode(answer, skip_special_tokens=True).strip()}\n")
    chunks = built[head].stream([prompts[1]], max_new_tokens=NEW_TOKENS)
    steps = [tokenizer.decode(chunk.tokens[0], skip_special_tokens=True) for chunk in chunks]
    print(f"The second answer again, by the {head}, with | between its steps:\n{'|'.join(steps).strip()}\n")
    print(f"{'':26} tokens/s  of plain  of transformers  tokens per forward")
    for name, speed in speeds.items():
        ratios = f"{speed / speeds[plain]:8.2f}x {speed / speeds['transformers']:15.2f}x"
        per_forward = sum(answer.numel() for answer in tokens[name]) / forwards[name]
        print(f"{name:26} {speed:8.0f} {ratios} {per_forward:19.2f}")
    differ = [name for name in decoders if not all(map(torch.equal, tokens[name], base))]
    print(f"\nOther tokens than transformers: {', '.join(differ)}" if differ else
          f"\nAll {len(decoders)} gave the same {sum(answer.numel() for answer in base)} tokens.")  # fmt: skip
    last = built[head]
    print(next(line for line in last.report().splitlines() if line.startswith("- lowering:")).removeprefix("- "))
    print(f"graphs of every stage and report.md: {last.dump('graphs')}")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
