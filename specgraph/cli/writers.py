"""Writes what was decoded: as text for people, or as one JSON object per line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from specgraph.cli.prompts import Messages
from specgraph.config.errors import did_you_mean
from specgraph.errors import ConfigError
from specgraph.runtime.outputs.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:  # it imports torch, and a help text is shown without
    from specgraph.runtime.outputs.trace import Trace

TEXT, JSONL = "text", "jsonl"
TERMINAL = "-"
FORMATS = (TEXT, JSONL)


@dataclass(frozen=True)
class Answer:
    """What is known of the answer to one prompt.

    Attributes:
        place: of the prompt among all, from 0.
        source: its text, or the messages of its conversation.
        prompt_tokens: how many tokens it has.
        tokens: the new ids.
        reason: why it ended, as ``finish_reasons`` of ``generate``; None while it goes on.
        steps: the tokens that each of its decode steps emitted.
    """

    place: int
    source: str | Messages
    prompt_tokens: int
    tokens: list[int]
    reason: str | None
    steps: Sequence[int]


Writer = Callable[[Answer], None]


def writer(form: str, tokenizer: Any, *, stream: bool = False) -> Writer:
    """A function that writes each answer in one of :data:`FORMATS`, to what is the standard output at this moment.

    It writes an answer when it is complete or, for a ``stream``, as it grows.
    """
    if stream:
        return _Growing(tokenizer)
    written, out = (_text if form == TEXT else _json), sys.stdout

    def write(answer: Answer) -> None:
        if answer.reason is not None:
            text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
            print(written(answer, text), file=out, flush=True)

    return write


class _Growing:
    """Prints the text of one answer after the other, each as it grows."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._place = tokenizer, -1

    def __call__(self, answer: Answer) -> None:
        if answer.place != self._place:
            print(heading(answer.source, answer.place))
            self._place, self._shown, self._pieces = answer.place, 0, IncrementalDetokenizer(self._tokenizer)
        ended = answer.reason is not None
        piece = self._pieces.add(answer.tokens[self._shown :], last=ended)
        self._shown = len(answer.tokens)
        print(piece, end="\n" if ended else "", flush=True)


def check_format(form: str, *, stream: bool) -> None:
    """Refuse a format that does not exist, and a stream of JSON.

    Raises:
        ConfigError: says which formats there are.
    """
    if form not in FORMATS:
        raise ConfigError(f"There is no format={form}{did_you_mean(form, FORMATS)}; it is {' or '.join(FORMATS)}.")
    if form == JSONL and stream:
        raise ConfigError("format=jsonl writes a line when a text is done, and stream=true parts of it; leave one out.")


def check_trace(trace: str | None, *, stream: bool) -> None:
    """Refuse a file that cannot be written, before anything is decoded.

    Raises:
        ConfigError: says what is wrong with it.
    """
    if trace is None:
        return
    if stream:
        raise ConfigError(
            f"trace={trace} is of all prompts together, and stream=true decodes one by one; leave one out."
        )
    path = Path(trace).expanduser().absolute()
    if trace != TERMINAL and (not path.parent.is_dir() or path.is_dir()):
        raise ConfigError(
            f"trace={trace} is no file that can be written; give one in a folder that exists, or - to print it."
        )


def write_trace(trace: Trace, place: str, tokenizer: Any, terminal: TextIO) -> str:
    """Write a trace to a file, or print it on a terminal; says where it is."""
    if place == TERMINAL:
        print("\n" + trace.text(tokenizer, color=terminal.isatty()), file=terminal)
        return "above"
    return str(trace.save(Path(place).expanduser(), tokenizer))


def notes(form: str) -> TextIO:
    """The stream for everything but the answers. With JSON lines, only answers go to standard output."""
    return sys.stderr if form == JSONL else sys.stdout


def heading(source: str | Messages, place: int) -> str:
    """The line above the text of an answer."""
    line = " ".join(str(source if isinstance(source, str) else source[-1].get("content", "")).split())
    return f"--- {place + 1}: {line if len(line) <= 100 else line[:97] + '...'}"


def _text(answer: Answer, text: str) -> str:
    """A heading and the text."""
    return f"{heading(answer.source, answer.place)}\n{text}"


def _json(answer: Answer, text: str) -> str:
    """An object, with no character beyond ASCII, so that every terminal and file takes it."""
    name = "prompt" if isinstance(answer.source, str) else "messages"
    stats = {"prompt_tokens": answer.prompt_tokens, "new_tokens": len(answer.tokens), "steps": len(answer.steps)}
    mean = sum(answer.steps) / len(answer.steps) if answer.steps else None
    return json.dumps({
        name: answer.source, "text": text, "tokens": answer.tokens, "finish_reason": answer.reason,
        "stats": {**stats, "tokens_per_step": mean},
    })  # fmt: skip
