"""Reads prompts from the command line or a file, and puts a template around them."""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from specgraph.config.paths import did_you_mean_path
from specgraph.errors import InputError

FIELDS = ("question", "prompt")
MESSAGES = "messages"
"""The field of a conversation. It counts in a record that has none of :data:`FIELDS`."""
Messages = list[dict[str, Any]]


def read_prompts(
    prompt: str | None, path: str | None, template: str | None, limit: int | None
) -> list[str | Messages]:  # fmt: skip
    """The texts to continue, or conversations to answer: ``prompt``, or those of a file.

    A .txt file has one text per line. A .jsonl file has one record per line, with a text in a field ``question`` or
    ``prompt``, or with ``messages``, a list of objects with ``role`` and ``content``.
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
    return [record[MESSAGES] if FIELDS[0] not in record else _apply(template, record) for record in records]


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
            yield {MESSAGES: record[MESSAGES]}
        else:
            fields = f"a field {' or '.join(FIELDS)}, and no list of {MESSAGES}"
            raise InputError(f"{path}:{number}: there is no text in {fields}.")


def _check_messages(where: str, messages: Any, template: str | None) -> None:
    if template is not None:
        raise InputError(f"{where}: template is for texts; {MESSAGES} have the tokenizer's chat template.")
    several = messages if isinstance(messages, list) else []
    if not several or not all(isinstance(one, dict) and isinstance(one.get("role"), str) and "content" in one
                              for one in several):  # fmt: skip
        raise InputError(f"{where}: {MESSAGES} is a list of objects with role and content, at least one of them.")


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
