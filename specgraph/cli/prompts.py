"""Reads prompts from the command line or a file, and puts a template around them."""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from specgraph.config.paths import did_you_mean_path
from specgraph.errors import InputError

FIELDS = ("question", "prompt")
MESSAGES = "messages"
"""The field of a conversation. It counts in a record that has none of :data:`FIELDS`."""
CHAT_FIELDS = ("tools", "chat_template_kwargs")
"""Further fields of a conversation, and keys of ``generate`` that hold for all of them."""
Messages = list[dict[str, Any]]


class Conversation(NamedTuple):
    """Messages, and what else the chat template reads."""

    messages: Messages
    options: Mapping[str, Any]


def read_prompts(
    prompt: str | None, path: str | None, template: str | None, limit: int | None,
    chat_options: Mapping[str, Any] | None = None,
) -> list[str | Conversation]:  # fmt: skip
    """The texts to continue, or conversations to answer: ``prompt``, or those of a file.

    A .txt file has one text per line. A .jsonl file has one record per line, with a text in a field ``question`` or
    ``prompt``, or with ``messages``, a list of objects with ``role`` and ``content``, beside which there may be
    :data:`CHAT_FIELDS`. They count before ``chat_options``, which hold for all conversations.
    ``template`` is put around each text: ``{question}`` and ``{prompt}`` stand for the text, other names for fields of
    the record, and a backslash with an n for a new line. ``limit`` is the most texts that are read.

    Raises:
        InputError: neither or both of ``prompt`` and ``path`` are given, the file cannot be read, or the template names
            an unknown field.
    """
    if (prompt is None) == (path is None):
        raise InputError('Give either prompt="some text" or prompts=FILE (.txt or .jsonl), one of the two.')
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1, got {limit}.")
    try:
        records = (
            [_record(prompt)] if prompt is not None else list(itertools.islice(_read(Path(str(path)), template), limit))
        )
    except UnicodeDecodeError as error:
        raise InputError(f"prompts={path}: not UTF-8 at byte {error.start}; save the file as UTF-8.") from None
    if not records:
        raise InputError(f"prompts={path}: the file has no prompts.")
    if chat_options and not any(FIELDS[0] not in record for record in records):
        raise InputError(
            f"{' and '.join(chat_options)} is for conversations, and these prompts are texts; leave it out, or give a "
            f".jsonl file with {MESSAGES}."
        )
    return [
        _conversation(record, chat_options or {}) if FIELDS[0] not in record else _apply(template, record)
        for record in records
    ]


def read_chat_options(options: object) -> dict[str, Any]:
    """The keys of ``generate`` that hold for all conversations. ``tools`` may be the name of a JSON file.

    Raises:
        InputError: there is no such file, or it is no JSON.
    """
    given = {name: value for name in CHAT_FIELDS if (value := getattr(options, name)) is not None}
    if isinstance(given.get("tools"), str):
        path = Path(given["tools"]).expanduser()
        if not path.is_file():
            raise InputError(
                f"tools={path}: there is no such file{did_you_mean_path(path)}; give a JSON file with a list of tools."
            )
        try:
            given["tools"] = json.loads(path.read_text(encoding="utf-8-sig"))
        except ValueError as error:
            raise InputError(f"tools={path}: not JSON ({error}); the file has a list of tools.") from None
    return given


def _conversation(record: dict[str, Any], options: Mapping[str, Any]) -> Conversation:
    own = {name: record[name] for name in CHAT_FIELDS if record.get(name) is not None}
    variables = [each.get(CHAT_FIELDS[1]) for each in (options, own)]
    if all(isinstance(each, Mapping) for each in variables):
        own[CHAT_FIELDS[1]] = {**variables[0], **variables[1]}  # type: ignore[dict-item]
    return Conversation(record[MESSAGES], {**options, **own})


def _record(text: str) -> dict[str, Any]:
    return dict.fromkeys(FIELDS, text)


def _read(path: Path, template: str | None) -> Iterator[dict[str, Any]]:
    if path.suffix not in (".txt", ".jsonl"):
        raise InputError(f"prompts={path}: a file of prompts ends in .txt (one per line) or .jsonl.")
    if not path.is_file():
        raise InputError(f"prompts={path}: there is no such file{did_you_mean_path(path)}.")
    with path.open(encoding="utf-8-sig") as file:
        lines = ((number, line.rstrip("\n")) for number, line in enumerate(file, 1) if line.strip())
        if path.suffix == ".txt":
            yield from (_record(line) for _, line in lines)
        else:
            yield from _parse(path, lines, template)


def _parse(path: Path, lines: Iterable[tuple[int, str]], template: str | None) -> Iterator[dict[str, Any]]:
    for number, line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number}: not JSON ({error.msg}); each line is one JSON object.") from None
        texts = [record[name] for name in FIELDS if isinstance(record, dict) and isinstance(record.get(name), str)]
        if texts:
            yield {**_record(texts[0]), **record}
        elif isinstance(record, dict) and MESSAGES in record:
            _check_messages(f"{path}:{number}", record[MESSAGES], template)
            yield {name: record[name] for name in (MESSAGES, *CHAT_FIELDS) if name in record}
        else:
            fields = f"a field {' or '.join(FIELDS)}, and no list of {MESSAGES}"
            raise InputError(f"{path}:{number}: there is no text in {fields}.")


def _check_messages(where: str, messages: Any, template: str | None) -> None:
    if template is not None:
        raise InputError(f"{where}: template is for texts; {MESSAGES} have the tokenizer's chat template.")
    several = messages if isinstance(messages, list) else []
    if not several or not all(map(_is_message, several)):
        raise InputError(f"{where}: {MESSAGES} is a list of objects with role and content, at least one of them.")


def _is_message(given: Any) -> bool:
    """Whether it has a role, and a content or tool calls."""
    is_object = isinstance(given, dict) and isinstance(given.get("role"), str)
    return is_object and ("content" in given or bool(given.get("tool_calls")))


def _apply(template: str | None, record: dict[str, Any]) -> str:
    if template is None:
        return str(record[FIELDS[0]])
    try:
        text = template.replace("\\n", "\n").format_map(record)
    except KeyError as error:
        raise InputError(f"template: there is no field {error}; there are {', '.join(record)}.") from None
    except (ValueError, IndexError, AttributeError) as error:
        raise InputError(f"template: {error}; write {{question}} for the text, and {{{{ for a brace.") from None
    if not any(field for _, field, _, _ in string.Formatter().parse(template)):
        raise InputError("template has no field, so all prompts would be the same; write {question} for the text.")
    return text
