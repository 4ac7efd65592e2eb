"""Lets a model write text: documents from which the draft learns, and greedy answers on which it is measured."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from ..errors import ConfigError
from ..progress import Progress
from .config import RolloutConfig
from .data import Document, Encoded, format_question

_MARKS = format_question("\0").split("\0")  # what stands before and after a question


def continue_prompts(
    model: Any, prompts: Sequence[list[int]], max_new_tokens: int, temperature: float, batch_size: int, label: str
) -> list[list[int]]:
    """Continue every prompt up to and including EOS. Temperature 0 is greedy. Shorter prompts come first.

    Returns:
        The new token ids of each prompt, in the given order. A text that reached ``max_new_tokens`` has no EOS.
    """
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    results: list[list[int]] = [[] for _ in prompts]
    with Progress(label, len(prompts), True, keep=True) as progress:
        for at in range(0, len(order), batch_size):
            chosen = order[at : at + batch_size]
            written = _generate(model, [prompts[index] for index in chosen], max_new_tokens, temperature)
            for index, ids in zip(chosen, written, strict=True):
                results[index] = ids
            progress.advance(len(chosen))
    return results


def write_documents(target: Any, tokenizer: Any, questions: Sequence[str], cfg: RolloutConfig) -> list[Encoded]:
    """Documents that the target writes: its answers to questions that it samples itself, and to the given ones."""
    device = target.device
    writer = copy.deepcopy(target).eval()
    if device.type == "cuda":
        writer.to(torch.bfloat16)
    sampled = _sample_documents(writer, tokenizer, cfg)
    asked = [*questions, *(document.question for document in sampled)]
    prompts = encode_questions(tokenizer, asked, getattr(cfg, "chat", False))
    documents: list[Encoded] = []
    for temperature in (0.0, cfg.answer_temperature):
        label = f"target answers at temperature {temperature:g}"
        answers = continue_prompts(writer, prompts, cfg.max_new_tokens, temperature, cfg.batch_size, label)
        documents += [Encoded([*p, *a], len(p)) for p, a in zip(prompts, answers, strict=True)]
    return documents


def encode_questions(tokenizer: Any, questions: Sequence[str], chat: bool) -> list[list[int]]:
    """The token ids of prompts, as chats of one turn or as the small models were trained on them.

    Raises:
        ConfigError: ``chat`` is asked for, and the tokenizer has no template.
    """
    if not chat:
        ids: list[list[int]] = tokenizer([format_question(question) for question in questions])["input_ids"]
        return ids
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("rollout.chat=true needs a tokenizer with a chat template; leave it out, or add a template.")
    chats = [[{"role": "user", "content": question}] for question in questions]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids


def split_text(text: str) -> Document | None:
    """The inverse of ``format_document``; None if the text has no question or no answer."""
    before, after = _MARKS
    if not text.startswith(before) or text.count(after) != 1:
        return None
    question, answer = text[len(before) :].split(after)
    return Document(question.strip(), answer.strip()) if question.strip() and answer.strip() else None


def _sample_documents(writer: Any, tokenizer: Any, cfg: RolloutConfig) -> list[Document]:
    """Sample whole documents, including their questions. Those that did not reach an answer are dropped."""
    if not cfg.sampled_questions:
        return []
    begin = tokenizer(_MARKS[0].rstrip())["input_ids"]
    label = "target samples questions"
    drawn = continue_prompts(
        writer, [begin] * cfg.sampled_questions, cfg.max_new_tokens, cfg.question_temperature, cfg.batch_size, label
    )
    texts = tokenizer.batch_decode([[*begin, *ids] for ids in drawn], skip_special_tokens=True)
    return [document for document in map(split_text, texts) if document is not None]


@torch.no_grad()
def _generate(model: Any, prompts: list[list[int]], max_new_tokens: int, temperature: float) -> list[list[int]]:
    """Continue one batch of prompts, padded on the left, by ``generate`` of transformers."""
    eos, pad = model.generation_config.eos_token_id, model.generation_config.pad_token_id
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=eos,
        pad_token_id=pad,
        cache_implementation="static",  # a dynamic cache, which grows with every token, spends its time in cudaMalloc
        disable_compile=True,
        **sampling,
    )
    out = model.generate(input_ids=ids, attention_mask=(ids != pad).long(), generation_config=config)
    rows: list[list[int]] = out[:, longest:].tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]
