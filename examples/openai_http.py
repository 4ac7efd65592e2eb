"""OpenAI's chat interface for serve.py: reads requests as options of a session, and writes its events as answers."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import StreamingResponse
from tool_calls import Splitter, writes_calls

import specgraph

PASSED_ON = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "regex",
    "structure_after",
}
"""Fields that ``submit`` checks, and explains where they are wrong."""
FIELDS = dict.fromkeys(PASSED_ON, object) | {
    "model": str, "messages": list, "stream": bool, "stream_options": dict, "max_tokens": int, "logprobs": bool,
    "max_completion_tokens": int, "stop": str | list, "response_format": dict, "return_token_ids": bool, "user": str,
    "n": int, "tools": list, "tool_choice": str, "chat_template_kwargs": dict,
}  # fmt: skip
WORDS = {str: "a text", bool: "true or false", int: "an integer", list: "a list", dict: "an object",
         str | list: "a text or a list of texts"}  # fmt: skip
ROLES = ("system", "developer", "user", "assistant", "tool")
LIMITS = ("max_completion_tokens", "max_tokens")
LARGEST_BODY = 1 << 20
REASONS = {"eos": "stop", "stop": "stop", "length": "length", "max_length": "length"}


class FieldError(HTTPException):
    """A field of a request that is refused, which OpenAI's clients show as ``param``."""

    def __init__(self, field: str, message: str, status: int = 400) -> None:
        super().__init__(status, message)
        self.field = field


async def read_body(request: Request) -> dict[str, Any]:
    """The fields of a request that are not null. A field that would have no effect is refused."""
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > LARGEST_BODY:
            raise HTTPException(413, f"The body has more than {LARGEST_BODY} bytes; send less.")
    try:
        body = {name: value for name, value in dict(json.loads(raw)).items() if value is not None}
    except (ValueError, TypeError, RecursionError) as error:
        raise HTTPException(400, f"The body is no JSON object: {error}.") from error
    for name, value in body.items():
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1, 0.75)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise FieldError(name, f"There is no field {name!r} here{hint}; leave it out.")
        if not isinstance(value, FIELDS[name]) or (isinstance(value, bool) and FIELDS[name] is int):
            raise FieldError(name, f"{name} is {WORDS[FIELDS[name]]}, not {value!r:.60}.")
    for name in sorted({"model", "messages"} - body.keys()):
        raise FieldError(name, f"The request has no {name}.")
    for role in (message.get("role", ROLES[0]) for message in body["messages"] if isinstance(message, dict)):
        if role not in ROLES:
            raise FieldError("messages", f"There is no role {role!r:.60}; it is one of {', '.join(ROLES)}.")
    request.state.body = body
    return body


def options(body: dict[str, Any], prompt: Sequence[int], longest: int) -> dict[str, Any]:
    """The arguments of ``submit``. What a request leaves out is what the model's generation_config says."""
    if body.get("n", 1) != 1:
        raise FieldError("n", f"n is 1 here, not {body['n']}; send a request for each answer, with a seed of its own.")
    count = _count(body, len(prompt), longest)
    own = {"max_new_tokens": count, "stop_strings": body.get("stop"), "json_schema": _schema(body)}
    return own | {name: body[name] for name in PASSED_ON & body.keys()}


def tools(body: dict[str, Any]) -> Any:
    """What the chat template says that the model may call."""
    chosen = body.get("tool_choice", "auto")
    if chosen not in ("auto", "none"):
        raise FieldError(
            "tool_choice", f"tool_choice is 'auto' or 'none' here, not {chosen!r:.60}; nothing forces a call."
        )
    if not all(isinstance(tool, dict) for tool in body.get("tools", [])):
        raise FieldError(
            "tools", f"tools is a list of objects, each with a type and a function, not {body['tools']!r:.60}."
        )
    return None if chosen == "none" else body.get("tools")


def _count(body: dict[str, Any], known: int, longest: int) -> int:
    """How many tokens may follow a prompt of ``known`` tokens. A client cannot compile a decoder of longer sequences,
    so it is told how much there is room for."""
    room = longest - known
    limit = next((name for name in LIMITS if name in body), None)
    count: int = room if limit is None else body[limit]
    if room < 1:
        said = f"The messages have {known} tokens, but with the answer there may be at most {longest}"
        raise FieldError("messages", f"{said}; shorten the messages.")
    if limit is not None and count > room:
        said = f"{limit}={count} and the {known} tokens of the messages are more than {longest}, the most there may be"
        raise FieldError(limit, f"{said}; set {limit} to {room} or less, or shorten the messages.")
    return count


def _schema(body: dict[str, Any]) -> Any:
    form = body.get("response_format", {"type": "text"})
    known = {"text": None, "json_object": {"type": "object"}, "json_schema": form.get("json_schema")}
    kind = form.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise FieldError("response_format", f"The type of response_format is {', '.join(known)}, not {kind!r}.")
    if kind == "json_schema" and not (isinstance(known[kind], dict) and "schema" in known[kind]):
        raise FieldError(
            "response_format", "response_format of type json_schema has no json_schema with a schema in it."
        )
    return known[kind]["schema"] if kind == "json_schema" else known[kind]


def splitter(body: dict[str, Any], tokenizer: Any) -> Splitter:
    """Finds tool calls in an answer, if the request has tools and the model's format is known."""
    return Splitter(bool(tools(body)) and writes_calls(tokenizer))


def message(body: dict[str, Any], events: Sequence[specgraph.Event], tokenizer: Any) -> dict[str, Any]:
    """A whole answer, whose calls have no index."""
    own = choice(body, events, tokenizer, "message", splitter(body, tokenizer))
    for call in own["message"].get("tool_calls", []):
        del call["index"]
    return own


def choice(
    body: dict[str, Any], events: Sequence[specgraph.Event], tokenizer: Any, part: str, splitter: Splitter
) -> dict[str, Any]:
    """What some events of a sequence say; ``part`` is ``message`` or, in a stream, ``delta``."""
    tokens = [token for event in events for token in event.tokens]
    reason = events[-1].finish_reason
    text, calls = splitter.feed("".join(event.text or "" for event in events), last=reason is not None)
    said = {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})
    own: dict[str, Any] = {"index": 0, part: said, "finish_reason": REASONS.get(reason or "")}
    if splitter.calls and own["finish_reason"] == "stop":
        own["finish_reason"] = "tool_calls"
    own["logprobs"] = {"content": _logprobs(events, tokenizer)} if body.get("logprobs") else None
    return own | ({"token_ids": tokens} if body.get("return_token_ids") else {})


def _logprobs(events: Sequence[specgraph.Event], tokenizer: Any) -> list[dict[str, Any]]:
    pairs = [pair for event in events for pair in zip(event.tokens, event.logprobs or (), strict=True)]
    return [
        {"token": tokenizer.decode([token]), "logprob": value, "bytes": None, "top_logprobs": []}
        for token, value in pairs
    ]


def usage(prompt: Sequence[int], events: Sequence[specgraph.Event]) -> dict[str, int]:
    """How many tokens there were."""
    new = sum(len(event.tokens) for event in events)
    return {"prompt_tokens": len(prompt), "completion_tokens": new, "total_tokens": len(prompt) + new}


def completion(model: str, choices: Sequence[Any], form: str = "", **fields: Any) -> dict[str, Any]:
    """A whole answer, or one of its chunks if ``form`` is ``.chunk``."""
    about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": f"chat.completion{form}", "created": int(time.time())}
    return {**about, "model": model, "choices": choices, **fields}


def described(error: Any, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """The status and the body of an error that the request with this ``body`` met."""
    if isinstance(error, specgraph.InputError):
        error = in_fields(error, body)
    status = getattr(error, "status_code", 429 if isinstance(error, specgraph.BusyError) else 500)
    kind = "invalid_request_error" if status < 429 else "server_error"
    about = {"message": getattr(error, "detail", str(error)), "type": kind, "param": getattr(error, "field", None)}
    return status, {"error": about | {"code": str(status)}}


def in_fields(error: specgraph.InputError, body: Mapping[str, Any]) -> FieldError:
    """An error of ``submit`` with the names that the request has for its arguments.

    Such an error begins with the argument that it is about, or else it is about the prompt.
    """
    limit = next((name for name in LIMITS if name in body), "max_tokens")
    names = {"max_new_tokens": limit, "stop_strings": "stop", "json_schema": "response_format"}
    message = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))
    first = re.split(r"\W", message, maxsplit=1)[0]
    return FieldError(first if first in body else "messages", message)


async def lines(
    body: dict[str, Any], model: str, tokenizer: Any, prompt: Sequence[int], first: specgraph.Event,
    rest: AsyncIterator[specgraph.Event],
) -> AsyncIterator[str]:  # fmt: skip
    """The lines of a stream: a chunk for each event, and one with the usage if it is wanted."""
    seen, chunk, split = [first], completion(model, [], ".chunk"), splitter(body, tokenizer)
    while True:
        event = seen[-1]
        chunk["choices"] = [choice(body, [event], tokenizer, "delta", split)]
        yield f"data: {json.dumps(described(event.error, body)[1] if event.error else chunk)}\n\n"
        if event.finish_reason is not None:
            break
        seen.append(await anext(rest))
    if body.get("stream_options", {}).get("include_usage"):
        yield f"data: {json.dumps(chunk | {'choices': [], 'usage': usage(prompt, seen)})}\n\n"
    yield "data: [DONE]\n\n"


class Chunks(StreamingResponse):
    """A stream that ends its sequence in any case, also where the client has gone before the first byte."""

    def __init__(self, events: AsyncGenerator[specgraph.Event, None], lines: AsyncIterator[str]) -> None:
        super().__init__(lines, media_type="text/event-stream")
        self.events = events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with contextlib.aclosing(self.events):
            await super().__call__(scope, receive, send)
