"""Tool calls in the answers of serve.py: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

So write the models whose chat templates follow Hermes, such as Qwen2.5 and Qwen3. The text is split by the parser of
transformers, which holds a tag back until it is whole.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FORMAT = {
    "start_anchor": "assistant",  # of the prompt, which holds no part of the answer here
    "fields": {
        "call": {"open": OPEN, "close": CLOSE, "repeats": True, "content_args": {"strip": False}},
        "text": {"content": "text"},
    },
}


def writes_calls(tokenizer: Any) -> bool:
    """Whether the chat template asks the model for calls in this format. Qwen3.5 writes XML between the tags."""
    return OPEN in tokenizer.chat_template and "<function=" not in tokenizer.chat_template


class Splitter:
    """Takes the text of an answer piece by piece, and says what of it is text and what are calls."""

    def __init__(self, parse: bool) -> None:
        """Without ``parse``, everything is text."""
        self.parser = ResponseParser(FORMAT, prefix="") if parse else None
        self.calls = 0

    def feed(self, piece: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """What is known to be text, and the calls that end in this piece. What is no call in JSON remains text."""
        if self.parser is None:
            return piece, []
        text, calls = "", []
        for event in self.parser.feed(piece):
            if event["type"] == "region_chunk" and event["field"] == "text":
                text += event["text"]
            elif event["type"] == "region_close" and event["field"] == "call":
                call = _call(event["value"], self.calls)
                text += "" if call else f"{OPEN}{event['value']}{CLOSE}"
                calls += [call] if call else []
                self.calls += call is not None
        return text + (self._rest() if last else ""), calls

    def _rest(self) -> str:
        """What was held back at the end: the beginning of a tag, or a call that is not complete."""
        assert self.parser is not None
        text = ""
        for event in self.parser.finalize()[1]:
            if event["type"] == "region_chunk" and event["field"] == "text":
                text += event["text"]
            elif event["type"] == "region_close" and event["field"] == "call":
                text += OPEN + event["value"]
        return text


def _call(text: str, index: int) -> dict[str, Any] | None:
    """A call in OpenAI's form; None if the text between the tags is none."""
    try:
        said = json.loads(text)
        function = {"name": str(said["name"]), "arguments": json.dumps(said.get("arguments", {}))}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return {"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
