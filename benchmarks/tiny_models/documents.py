"""Makes training texts of questions and their answers."""

from collections.abc import Sequence
from typing import Any

from specgraph.training.data import Batch, Document, Encoded, by_length, collate, format_question


def format_document(document: Document) -> str:
    """The whole text of a document, without EOS."""
    return f"{format_question(document.question)} {document.answer}"


def encode_documents(documents: Sequence[Document], tokenizer: Any, max_length: int) -> list[Encoded]:
    """Encode documents. Prompt and answer are encoded separately, as a prompt and its continuation are in decoding.

    A document that is longer than ``max_length`` tokens is cut, and then has no EOS.
    """
    prompts = tokenizer([format_question(d.question) for d in documents])["input_ids"]
    answers = tokenizer([f" {d.answer}" for d in documents])["input_ids"]
    eos = tokenizer.eos_token_id
    return [
        Encoded([*prompt, *answer, eos][:max_length], min(len(prompt), max_length))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def in_order(documents: Sequence[Encoded], batch_size: int, pad_id: int, question_weight: float = 1.0) -> list[Batch]:
    """Batches for evaluation, with every document once, in the order of length."""
    return [collate(group, pad_id, question_weight) for group in by_length(documents, batch_size)]
