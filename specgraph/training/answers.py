"""Lets the target write answers and keeps them in a file, which a resumed run or the run of another head reads."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig

from specgraph.errors import InputError
from specgraph.training.config import HeadTrainConfig
from specgraph.training.data import Document, Encoded
from specgraph.training.rollout import encode_questions, write_documents


def split_rollouts(
    model: Any, tokenizer: Any, train: Sequence[Document], heldout: Sequence[Document], cfg: HeadTrainConfig
) -> tuple[list[Encoded], list[Encoded]]:
    """The target's answers for training, and its greedy answers to held-out questions.

    Raises:
        InputError: the file holds no answers, or those of another target or of other data.
    """
    path = cfg.rollout_file
    if not os.path.exists(path):
        questions = [document.question for document in [*train, *heldout]]
        _write(path, write_documents(_writer(model, tokenizer), tokenizer, questions, cfg.rollout, cfg.rollout.chat))
    documents = _read(path, len(tokenizer))
    asked = encode_questions(tokenizer, [document.question for document in heldout], cfg.rollout.chat)
    held: dict[tuple[int, ...], Encoded | None] = dict.fromkeys(map(tuple, asked))
    learned = []
    for document in documents:
        prompt = tuple(document.ids[: document.prompt_length])
        if prompt not in held:
            learned.append(_cut(document, cfg.max_length))
        elif held[prompt] is None:  # greedy answers come first
            held[prompt] = _cut(document, cfg.max_length)
    measured = [document for document in held.values() if document is not None]
    if not learned or not measured:
        raise InputError(
            f"{path} has answers to {len(measured)} of the held-out questions of {cfg.data} and {len(learned)} others: "
            "it was made from other data or another heldout; give rollout.file another name."
        )
    return learned, measured


def _writer(model: Any, tokenizer: Any) -> Any:
    """A model with one EOS token and a PAD token, which writing in batches needs."""
    writer = copy.copy(model)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    writer.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=pad)
    return writer


def _cut(document: Encoded, length: int) -> Encoded:
    return Encoded(document.ids[:length], min(document.prompt_length, length))


def _write(path: str, documents: Sequence[Encoded]) -> None:
    """Write one JSON object per line. The file gets its name only when it is complete."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(document._asdict()) + "\n" for document in documents)
    os.replace(f"{path}.tmp", path)


def _read(path: str, num_tokens: int) -> list[Encoded]:
    try:
        with open(path, encoding="utf-8") as lines:
            documents = [Encoded(**json.loads(line)) for line in lines]
        highest = max(max(document.ids) for document in documents)
    except (ValueError, TypeError, UnicodeDecodeError) as error:
        raise InputError(
            f"rollout.file={path} is not a file of answers ({str(error).splitlines()[0]}); delete it, and the target "
            "writes new ones."
        ) from None
    if highest >= num_tokens:
        raise InputError(
            f"rollout.file={path} has token {highest}, but the target's tokenizer has {num_tokens} tokens: it was "
            "written by another target; give rollout.file another name."
        )
    return documents
