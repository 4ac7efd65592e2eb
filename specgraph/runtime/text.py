"""Texts in, texts out: for those who do not want to see token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from specgraph.errors import InputError


class Tokenizers:
    """The tokenizer of a model, loaded from where the model came from when it is first asked for."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._source = str(getattr(model, "name_or_path", "") or "")
        self._own: Any = None

    def get(self, given: Any) -> Any:
        """``given``, else the model's.

        Raises:
            InputError: there is none.
        """
        if given is not None:
            return given
        if self._own is None:
            try:
                self._own = AutoTokenizer.from_pretrained(self._source)
            except (OSError, ValueError, KeyError) as error:
                where = repr(self._source) if self._source else "the model, which was not loaded from a folder"
                raise InputError(f"There is no tokenizer beside {where}; pass one as tokenizer=.") from error
        return self._own


def encode_texts(tokenizer: Any, texts: Sequence[Any]) -> list[list[int]]:
    """The token ids of each text, with the special tokens that the tokenizer adds.

    Raises:
        InputError: something is no text, or a text is empty of tokens.
    """
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"A prompt is a text here, not {type(text).__name__}; generate() takes token ids.")
    return [list(tokenizer(text)["input_ids"]) for text in texts]


def encode_chats(tokenizer: Any, chats: Sequence[Any]) -> list[list[int]]:
    """The token ids of each conversation in the tokenizer's chat template, up to where the answer begins.

    A last message of the assistant is continued, as by transformers' pipeline.

    Raises:
        InputError: something is no conversation, or there is no chat template, or it refuses one.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError("The tokenizer has no chat template; set tokenizer.chat_template, or use text().")
    rows = []
    for messages in chats:
        _check_messages(messages)
        rows.append(list(tokenizer(_joined(tokenizer, messages), add_special_tokens=False)["input_ids"]))
    return rows


def _joined(tokenizer: Any, messages: Sequence[Any]) -> str:
    """The text of a conversation. What a template raises, as for roles that it does not take, is about its input."""
    unfinished = messages[-1]["role"] == "assistant"
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=not unfinished, continue_final_message=unfinished
        )
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise InputError(f"The chat template refuses a conversation: {reason}.") from error
    return text


def _check_messages(messages: Any) -> None:
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
    if not is_list or not all(isinstance(m, Mapping) and "role" in m and "content" in m for m in messages):
        raise InputError(
            'A conversation is a list of messages like {"role": "user", "content": "..."}, at least one of them; '
            f"this is {messages!r:.80}."
        )
