"""Conversations in: checks their messages, and writes them in the chat template of a tokenizer."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from specgraph.errors import InputError, warn_caller

_READ_BY_TEMPLATES = {"documents"}
"""Parameters of transformers' ``apply_chat_template`` that are variables of a template."""


def encode_chats(
    tokenizer: Any, chats: Sequence[Any], tools: Any = None, chat_template_kwargs: Any = None
) -> list[list[int]]:
    """The token ids of each conversation in the tokenizer's chat template, up to where the answer begins.

    A last message of the assistant is continued, as by transformers' pipeline.

    Args:
        tools: what the model may call, as JSON schemas or functions that transformers describes by their docstrings.
        chat_template_kwargs: further variables of the template, such as ``{"enable_thinking": False}``.

    Raises:
        InputError: something is no conversation, or there is no chat template, or it refuses one.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError("The tokenizer has no chat template; set tokenizer.chat_template, or use text().")
    variables = _variables(tokenizer, tools, chat_template_kwargs)
    rows = []
    for messages in chats:
        _check_messages(messages)
        text = _joined(tokenizer, [*map(_with_arguments, messages)], variables)
        rows.append(list(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return rows


def _variables(tokenizer: Any, tools: Any, others: Any) -> dict[str, Any]:
    """What the template is given besides messages. A variable that it does not read is warned of."""
    are_tools = isinstance(tools, list | tuple) and all(isinstance(own, Mapping) or callable(own) for own in tools)
    if tools is not None and not are_tools:
        raise InputError(f"tools is a list of JSON schemas of functions, or of functions, not {tools!r:.80}.")
    if others is not None and not (isinstance(others, Mapping) and all(isinstance(name, str) for name in others)):
        raise InputError(
            f'chat_template_kwargs maps variables of the chat template to values, as in {{"enable_thinking": false}}; '
            f"this is {others!r:.80}."
        )
    given: dict[str, Any] = {**(others or {})}
    settled = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - _READ_BY_TEMPLATES | {"messages"}
    for name in given:
        if name in settled:
            raise InputError(
                f"chat_template_kwargs has {name!r}, which is no variable for a caller to set; leave it out."
            )
    given |= {"tools": list(tools)} if tools else {}
    unread = [name for name in given if not _reads(tokenizer, tools, name)]
    if unread:
        warn_caller(
            f"The chat template does not read {' and '.join(unread)}, so the prompt is the same without; leave it out, "
            "or set another tokenizer.chat_template."
        )
    return given


def _reads(tokenizer: Any, tools: Any, name: str) -> bool:
    """Whether a variable occurs in the template that is taken for these tools."""
    template = tokenizer.get_chat_template(tools=list(tools) if tools else None)
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _with_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose tool calls have their arguments as objects, which templates expect, and not as OpenAI's texts."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _joined(tokenizer: Any, messages: Sequence[Any], variables: Mapping[str, Any]) -> str:
    """The text of a conversation. Where a template does not know parts of text, a content is the text of its parts."""
    parts = [message["content"] for message in messages if _is_text_parts(message.get("content"))]
    if not parts:
        return _rendered(tokenizer, messages, variables)
    try:
        text = _rendered(tokenizer, messages, variables)
        known = not any(str(content) in text for content in parts)  # else the template has printed the list
    except InputError:
        known = False
    return text if known else _rendered(tokenizer, [*map(_without_parts, messages)], variables)


def _without_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content: Any = message.get("content")
    return {**message, "content": "".join(part["text"] for part in content)} if _is_text_parts(content) else message


def _rendered(tokenizer: Any, messages: Sequence[Any], variables: Mapping[str, Any]) -> str:
    """What the template makes of messages. What it raises, as for roles that it does not take, is about its input."""
    unfinished = messages[-1]["role"] == "assistant"
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=not unfinished, continue_final_message=unfinished,
            **variables,
        )  # fmt: skip
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise InputError(f"The chat template refuses a conversation: {reason}.") from error
    return text


def _check_messages(messages: Any) -> None:
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
    if not is_list or not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise InputError(
            'A conversation is a list of messages like {"role": "user", "content": "..."}, at least one of them; '
            f"this is {messages!r:.80}."
        )
    for place, message in enumerate(messages, start=1):
        _check_message(message, f"Message {place} of {len(messages)}")
    if _is_call_alone(messages[-1]):
        raise InputError(
            "The last message has tool calls and no content, so there is nothing to answer or to continue; add the "
            'results, as in {"role": "tool", "content": "..."}.'
        )


def _check_message(message: Mapping[str, Any], which: str) -> None:
    content, role = message.get("content"), message["role"]
    if other := _other_part(content):
        raise InputError(f"{which} has a part of type {other!r}, but only text is decoded here; leave it out.")
    if not isinstance(role, str) or not (
        isinstance(content, str) or _is_text_parts(content) or _is_call_alone(message)
    ):
        raise InputError(
            f'{which} must have a role, which is a text, and a content, which is a text or a list of {{"type": "text", '
            f'"text": "..."}}; only one with tool_calls may have none. It is {message!r:.80}.'
        )


def _is_call_alone(message: Mapping[str, Any]) -> bool:
    """Whether a message has tool calls and no content, as OpenAI allows."""
    return message.get("content") is None and bool(message.get("tool_calls"))


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
