"""Texts in, texts out: for those who do not want to see token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from specgraph.errors import InputError
from specgraph.runtime.values import name_of


class Tokenizers:
    """The tokenizer of a model, loaded from where the model came from when it is first asked for."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._source = str(getattr(model, "name_or_path", "") or "")
        self._own: Any = None

    def get(self, given: Any) -> Any:
        """``given``, else the model's.

        Raises:
            InputError: there is none, or ``given`` is none.
        """
        if given is not None:
            check_tokenizer(given)
            return given
        if self._own is None:
            try:
                self._own = AutoTokenizer.from_pretrained(self._source)
            except (OSError, ValueError, KeyError) as error:
                where = repr(self._source) if self._source else "the model, which was not loaded from a folder"
                raise InputError(f"There is no tokenizer beside {where}; pass one as tokenizer=.") from error
        return self._own


def check_tokenizer(given: Any) -> None:
    """Refuse what is no tokenizer of transformers, such as its name."""
    if not callable(given) or not all(hasattr(given, name) for name in ("decode", "get_vocab")):
        shown = repr(given) if isinstance(given, str) else name_of(given)
        raise InputError(
            f"tokenizer is a tokenizer of transformers, not {shown}; AutoTokenizer.from_pretrained loads one."
        )


_MADE, _ALONE = "the tokenizer makes it", "the result is the text alone"
_NO_OPTIONS = {
    **dict.fromkeys(("input_ids", "inputs", "attention_mask", "token_type_ids"), _MADE),
    **dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits", "return_logprobs"), _ALONE),
}
"""Arguments of ``generate`` that have no use where texts go in and come out, and why."""


def check_text_options(options: Mapping[str, Any]) -> None:
    """Refuse arguments of ``generate`` that would have no effect, except where they ask for nothing.

    Raises:
        InputError: names the argument.
    """
    for name, why in _NO_OPTIONS.items():
        if options.get(name) is not None and options[name] is not False:
            raise InputError(f"text() and chat() do not take {name} ({why}); leave it out, or call generate().")


def encode_texts(tokenizer: Any, texts: Sequence[Any]) -> list[list[int]]:
    """The token ids of each text, with the special tokens that the tokenizer adds.

    Raises:
        InputError: something is no text, or a text is empty of tokens.
    """
    if not isinstance(texts, list | tuple):
        raise InputError(f"Prompts are a text or a list of texts here, not {type(texts).__name__}.")
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"A prompt is a text here, not {type(text).__name__}; generate() takes token ids.")
    rows = [list(tokenizer(text)["input_ids"]) for text in texts]
    if [] in rows:
        raise InputError(f"The tokenizer makes no token of the text {texts[rows.index([])]!r}; give it some text.")
    return rows


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
    """The text of a conversation. Where a template does not know parts of text, a content is the text of its parts."""
    parts = [message["content"] for message in messages if _is_text_parts(message["content"])]
    if not parts:
        return _rendered(tokenizer, messages)
    try:
        text = _rendered(tokenizer, messages)
        known = not any(str(content) in text for content in parts)  # else the template has printed the list
    except InputError:
        known = False
    return text if known else _rendered(tokenizer, [*map(_without_parts, messages)])


def _without_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message["content"]
    return {**message, "content": "".join(part["text"] for part in content)} if _is_text_parts(content) else message


def _rendered(tokenizer: Any, messages: Sequence[Any]) -> str:
    """What the template makes of messages. What it raises, as for roles that it does not take, is about its input."""
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
    for message in messages:
        content, role = message["content"], message["role"]
        if other := _other_part(content):
            raise InputError(f"A message has a part of type {other!r}, but only text is decoded here; leave it out.")
        unsaid = content is None and bool(message.get("tool_calls"))
        if not isinstance(role, str) or not (isinstance(content, str) or unsaid or _is_text_parts(content)):
            raise InputError(
                'A message has a role, which is a text, and a content, which is a text or a list of {"type": "text", '
                f'"text": "..."}}; this is {message!r:.80}.'
            )


def _other_part(content: Any) -> str | None:
    """The type of the first part of a content that is no text, such as ``image_url``."""
    parts = content if isinstance(content, list | tuple) else []
    types = [part.get("type") for part in parts if isinstance(part, Mapping)]
    return next((kind for kind in types if isinstance(kind, str) and kind != "text"), None)


def _is_text_parts(content: Any) -> bool:
    is_list = isinstance(content, list | tuple) and len(content) > 0
    return is_list and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    )
