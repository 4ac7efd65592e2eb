"""Lets a model write text: documents from which the draft learns, and greedy answers on which it is measured."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from specgraph.compiler.compile import compile_speculative
from specgraph.errors import ConfigError
from specgraph.progress import Progress
from specgraph.runtime.decoder import SpeculativeDecoder
from specgraph.training.config import RolloutConfig
from specgraph.training.data import Document, Encoded, format_question

_MARKS = format_question("\0").split("\0")  # what stands before and after a question


def continue_prompts(
    model: Any, prompts: Sequence[list[int]], max_new_tokens: int, temperatures: Sequence[float], batch_size: int,
    label: str,
) -> list[list[list[int]]]:  # fmt: skip
    """Continue every prompt up to and including EOS, once for each temperature, by a decoder without drafts.

    Args:
        model: a causal LM, whose generation_config names the EOS.
        temperatures: 0 is greedy. Seeds are drawn from torch's random generator.
        batch_size: how many texts are written together.
        label: what the progress bar says.

    Returns:
        For each temperature the new token ids of each prompt. A text that reached ``max_new_tokens`` has no EOS.
    """
    decoder = _decoder(model, max(map(len, prompts)) + max_new_tokens, min(batch_size, len(prompts)))
    size = 4 * batch_size  # a row is filled again when its text ends, so several batches together leave few rows idle
    texts: list[list[list[int]]] = []
    with Progress(label, len(temperatures) * len(prompts), True, keep=True) as progress:
        for temperature in temperatures:
            written: list[list[int]] = []
            for at in range(0, len(prompts), size):
                some = prompts[at : at + size]
                seeds = torch.randint(2**31, (len(some),)).tolist()
                out = decoder.generate(
                    some, max_new_tokens=max_new_tokens, temperature=temperature, top_k=0, top_p=1.0,
                    seed=seeds if temperature else None,
                )  # fmt: skip
                written += [new.tolist() for new in out.new_tokens]
                progress.advance(len(some))
            texts.append(written)
    return texts


def _decoder(model: Any, longest: int, batch_size: int) -> SpeculativeDecoder:
    """A decoder without drafts for sequences of ``longest`` tokens, or of as many as the model has positions."""
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    config: dict[str, Any] = {
        "draft": "none",
        "max_batch_size": batch_size,
        "max_length": longest if known is None else min(longest, known),
        "numerics": "fast",
        "debug": {"self_check": False, "progress": False},
    }
    return compile_speculative(model, config)


def write_documents(
    target: Any, tokenizer: Any, questions: Sequence[str], cfg: RolloutConfig, chat: bool = False
) -> list[Encoded]:
    """Documents that the target writes: its answers to questions that it samples itself, and to the given ones.

    ``chat`` is that of :func:`encode_questions`.
    """
    writer = copy.deepcopy(target).to(torch.bfloat16) if target.device.type == "cuda" else target
    sampled = _sample_documents(writer, tokenizer, cfg)
    asked = [*questions, *(document.question for document in sampled)]
    prompts = encode_questions(tokenizer, asked, chat)
    temperatures = (0.0, cfg.answer_temperature)
    answers = continue_prompts(writer, prompts, cfg.max_new_tokens, temperatures, cfg.batch_size, "target answers")
    return [
        Encoded([*prompt, *answer], len(prompt))
        for written in answers
        for prompt, answer in zip(prompts, written, strict=True)
    ]


def encode_questions(tokenizer: Any, questions: Sequence[str], chat: bool) -> list[list[int]]:
    """The token ids of prompts, as chats of one turn or as the small models were trained on them.

    Raises:
        ConfigError: ``chat`` is asked for, and the tokenizer has no template.
    """
    if not chat:
        return tokenizer([format_question(question) for question in questions])["input_ids"]
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("rollout.chat=true needs a tokenizer with a chat template; leave it out, or add a template.")
    chats = [[{"role": "user", "content": question}] for question in questions]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids


def split_text(text: str) -> Document | None:
    """The question and the answer of a text that the target wrote; None if the text has no question or no answer."""
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
    temperatures, label = [cfg.question_temperature], "target samples questions"
    (drawn,) = continue_prompts(
        writer, [begin] * cfg.sampled_questions, cfg.max_new_tokens, temperatures, cfg.batch_size, label
    )
    texts = tokenizer.batch_decode([[*begin, *ids] for ids in drawn], skip_special_tokens=True)
    return [document for document in map(split_text, texts) if document is not None]
