"""Reads questions and answers from a jsonl file, and makes batches of token ids from them."""

import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.errors import ConfigError, InputError


@dataclass(frozen=True)
class Document:
    """One line of the data file."""

    question: str
    answer: str


class Encoded(NamedTuple):
    """One document as token ids: ``prompt_length`` ids of the prompt, then the answer, then EOS."""

    ids: list[int]
    prompt_length: int


class Batch(NamedTuple):
    """``tokens`` is int64 ``[B, S]``, padded on the right. ``weights``, float32 ``[B, S - 1]``, is the weight of each
    prediction of ``tokens[:, 1:]`` in the loss, which is 0 for padding."""

    tokens: Tensor
    weights: Tensor


def format_question(question: str) -> str:
    """The prompt of a question, as the models were trained on it. A continuation begins with a space."""
    return f"Question: {question}\nAnswer:"


def read_documents(path: str, name: str = "data") -> list[Document]:
    """Read a jsonl file with the fields ``question`` and ``answer``. Other fields are ignored.

    Args:
        path: the file, in which empty lines are skipped.
        name: the key that gave the path, for error messages.

    Raises:
        InputError: the file does not exist, is empty or is not UTF-8, a line is not JSON, or a field is missing or is
            not a text.
    """
    if not os.path.isfile(path):
        raise InputError(f"{name}={path}: there is no such file; give the path of a jsonl file.")
    try:
        with open(path, encoding="utf-8-sig") as lines:
            documents = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    except UnicodeDecodeError as error:
        raise InputError(f"{name}={path}: not UTF-8 at byte {error.start}; save the file as UTF-8.") from None
    if not documents:
        raise InputError(f"{name}={path}: the file has no documents; it needs one JSON object per line.")
    return documents


def _parse(line: str, where: str) -> Document:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({error.msg}); each line must be one JSON object.") from None
    for key in ("question", "answer"):
        if not isinstance(record, dict) or not isinstance(record.get(key), str):
            raise InputError(
                f'{where}: the field "{key}" is missing or not a text; each line must look like '
                '{"question": "...", "answer": "..."}.'
            )
    return Document(record["question"].strip(), record["answer"].strip())


def split_documents(documents: Sequence[Document], heldout: int, seed: int) -> tuple[list[Document], list[Document]]:
    """Shuffle the documents, and split them into those for training and those that are held out.

    Raises:
        ConfigError: nothing would be left to train on, or nothing is held out.
    """
    if not 0 < heldout < len(documents):
        raise ConfigError(
            f"heldout={heldout} of {len(documents)} documents is out of range: hold out at least 1 and leave at "
            f"least 1 to train on, for example heldout={max(1, len(documents) // 20)}."
        )
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)
    return shuffled[heldout:], shuffled[:heldout]


def collate(documents: Sequence[Encoded], pad_id: int, question_weight: float = 1.0) -> Batch:
    """Make a batch that is padded on the right.

    The weights are ``question_weight`` for question tokens, 1 for the answer and EOS, and 0 for padding. The width is
    that of the longest document, rounded up to a multiple of 32 so that few shapes occur.
    """
    width = -(-max(len(document.ids) for document in documents) // 32) * 32
    tokens = torch.tensor([document.ids + [pad_id] * (width - len(document.ids)) for document in documents])
    predicted = torch.arange(1, width)
    is_token = predicted < torch.tensor([[len(document.ids)] for document in documents])
    is_answer = predicted >= torch.tensor([[document.prompt_length] for document in documents])
    weights = torch.where(is_answer, 1.0, question_weight) * is_token
    return Batch(tokens, weights)


def by_length(documents: Sequence[Encoded], batch_size: int) -> list[list[Encoded]]:
    """The documents in the order of length, in groups of ``batch_size``."""
    ordered = sorted(documents, key=lambda document: len(document.ids))
    return [ordered[at : at + batch_size] for at in range(0, len(ordered), batch_size)]


def shuffled(
    documents: Sequence[Encoded], batch_size: int, pad_id: int, seed: int, question_weight: float = 1.0
) -> Iterator[Batch]:
    """Endless batches, epoch by epoch. Documents of similar length share a batch, so that there is little padding."""
    rng = random.Random(seed)
    while True:
        for group in _epoch(documents, batch_size, rng):
            yield collate(group, pad_id, question_weight)


def _epoch(documents: Sequence[Encoded], batch_size: int, rng: random.Random) -> list[list[Encoded]]:
    """The batches of one epoch.

    Documents are shuffled, sorted by length in groups of 16 batches, and cut into batches, which are shuffled.
    """
    order, pool = rng.sample(documents, len(documents)), 16 * batch_size
    groups = [group for at in range(0, len(order), pool) for group in by_length(order[at : at + pool], batch_size)]
    rng.shuffle(groups)
    return groups
