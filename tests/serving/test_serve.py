"""The served example, asked by OpenAI's own client: the tokens of ``generate``, errors, and clients who go away."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import openai
import pytest
import torch

from tests.docs.blocks import blocks_of
from tests.serving.conftest import CONFIG, EXAMPLES, KEY, MODEL, ROWS, WAITING, Alone, Server

QUESTIONS = [
    json.loads(line)["question"][:90] for line in (EXAMPLES / "data" / "gsm8k_test_200.jsonl").open().readlines()[:16]
]
SCHEMA = {"type": "object", "properties": {"pens": {"enum": [3, 7]}}, "required": ["pens"],
          "additionalProperties": False, "x-guidance": {"whitespace_pattern": ""}}  # fmt: skip
CALLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.8, "top_p": 0.9}),
    ({"temperature": 0.0, "stop": [" of", "."]}, {"temperature": 0.0, "stop_strings": [" of", "."]}),
    ({"temperature": 1.0, "frequency_penalty": 0.5}, {"temperature": 1.0, "frequency_penalty": 0.5}),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "pens", "schema": SCHEMA}}},
     {"json_schema": SCHEMA}),
]  # fmt: skip
"""Fields of requests, and what they are in terms of ``generate``."""
TOKENS = 20


def asynchronous(server: Server, key: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=300)


def messages(place: int) -> list[Any]:
    return [{"role": "user", "content": QUESTIONS[place % len(QUESTIONS)]}]


async def streamed(client: openai.AsyncOpenAI, place: int) -> dict[str, Any]:
    """Everything that the stream of one request says."""
    fields = {"max_tokens": TOKENS, "seed": place, "logprobs": True, **CALLS[place % len(CALLS)][0]}
    stream = await client.chat.completions.create(
        model="tiny", messages=messages(place), stream=True, stream_options={"include_usage": True},
        extra_body={"return_token_ids": True}, **fields,
    )  # fmt: skip
    said: dict[str, Any] = {"text": "", "tokens": [], "logprobs": [], "chunks": 0}
    async for chunk in stream:
        if not chunk.choices:
            said["usage"] = chunk.usage
            continue
        (choice,) = chunk.choices
        said["text"] += choice.delta.content
        said["tokens"] += choice.token_ids
        said["logprobs"] += [entry.logprob for entry in choice.logprobs.content]
        said["reason"], said["chunks"] = choice.finish_reason, said["chunks"] + 1
    return said


async def leave(client: openai.AsyncOpenAI, place: int) -> None:
    """Begin a long answer, and close the connection in the middle: after some chunks, or before the first."""
    request = client.chat.completions.create(
        model="tiny", messages=messages(place), max_tokens=200, stream=True, extra_body={"regex": "[a-z ]{999}"}
    )
    with contextlib.suppress(asyncio.TimeoutError):
        stream = await asyncio.wait_for(request, 1.0 if place % 2 else None)
        await anext(aiter(stream))
        await stream.close()


def all_free(server: Server) -> dict[str, Any]:
    """The statistics when everything has ended that was asked for."""
    for _ in range(600):
        stats = server.stats()
        if stats["free_rows"] == stats["rows"] and not stats["waiting"]:
            break
        time.sleep(0.1)
    assert (stats["free_rows"], stats["free_pages"], stats["waiting"]) == (ROWS, stats["pages"], 0)
    assert stats["followed"] == 0
    return stats


def test_thirty_two_streams_get_what_generate_gives_while_others_leave(server: Server, alone: Alone) -> None:
    async def run() -> list[dict[str, Any]]:
        async with asynchronous(server) as client:
            leaving = [asyncio.create_task(leave(client, place)) for place in range(4)]
            said = await asyncio.gather(*(streamed(client, place) for place in range(32)))
            await asyncio.gather(*leaving)
        return said

    reasons = set()
    for place, said in enumerate(asyncio.run(run())):
        options = CALLS[place % len(CALLS)][1]
        out = alone(QUESTIONS[place % len(QUESTIONS)], seed=place, max_new_tokens=TOKENS, **options)
        tokens = out.new_tokens[0].tolist()
        assert said["tokens"] == tokens
        torch.testing.assert_close(torch.tensor(said["logprobs"]), out.logprobs[0].float(), rtol=0, atol=1e-5)
        whole = alone.tokenizer.decode(tokens, skip_special_tokens=True)
        places = [found for text in options.get("stop_strings", ()) if (found := whole.find(text)) >= 0]
        assert said["text"] == whole[: min(places, default=len(whole))]
        assert said["reason"] == {"length": "length"}.get(out.finish_reasons[0], "stop")
        assert said["usage"].completion_tokens == len(tokens) and said["chunks"] > 1
        if "json_schema" in options and said["reason"] == "stop":
            assert json.loads(said["text"]).keys() == {"pens"}
        reasons.add(out.finish_reasons[0])
    assert reasons >= {"stop", "length", "eos"}
    all_free(server)


def test_a_whole_answer_is_that_of_the_stream(server: Server, alone: Alone) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        answer = client.chat.completions.create(model="tiny", messages=messages(0), max_tokens=9, seed=5, temperature=1)
    out = alone(QUESTIONS[0], seed=5, max_new_tokens=9, temperature=1)
    assert answer.choices[0].message.content == alone.tokenizer.decode(out.new_tokens[0], skip_special_tokens=True)
    assert answer.usage is not None and answer.usage.total_tokens == answer.usage.prompt_tokens + 9


def test_a_structure_begins_behind_a_text(server: Server, alone: Alone) -> None:
    options = {"regex": "[0-9]{2}!", "structure_after": " "}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        answer = client.chat.completions.create(
            model="tiny", messages=messages(0), max_tokens=40, seed=5, temperature=1, extra_body=options
        )
    out = alone(QUESTIONS[0], seed=5, max_new_tokens=40, temperature=1, **options)
    text = alone.tokenizer.decode(out.new_tokens[0], skip_special_tokens=True)
    assert answer.choices[0].message.content == text and re.fullmatch("[^ ]* [0-9]{2}!", text), text
    assert answer.choices[0].finish_reason == "stop"


def test_the_client_of_the_page_on_serving_gets_an_answer(server: Server, alone: Alone) -> None:
    (block,) = [block for block in blocks_of(EXAMPLES.parent / "docs" / "serving.md") if block.language == "python"]
    page: dict[str, Any] = {}
    exec(block.text, page)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        text = page["ask"](client, "tiny")
    out = alone("Tom has 3 boxes with 4 pens each. How many pens does he have?", seed=0, max_new_tokens=40)
    assert text == alone.tokenizer.decode(out.new_tokens[0], skip_special_tokens=True)


def test_nothing_is_left_of_a_hundred_clients_who_went_away(server: Server) -> None:
    async def run() -> None:
        async with asynchronous(server) as client:
            for wave in range(0, 100, 25):
                await asyncio.gather(*(leave(client, place) for place in range(wave, wave + 25)))

    before = all_free(server)
    asyncio.run(run())
    after = all_free(server)
    begun = sum(after["ended"].values()) - sum(before["ended"].values())
    assert after["ended"]["cancelled"] - before["ended"].get("cancelled", 0) == begun > 50


def post(
    server: Server, body: bytes, path: str = "/v1/chat/completions", key: str = KEY
) -> tuple[int, str, str | None]:
    """The status, the message and the field of an error."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(urllib.request.Request(f"{server.url}{path}", body, headers), timeout=60)
    said = json.load(error.value)["error"]
    assert said["code"] == str(error.value.code) and said["type"] in ("invalid_request_error", "server_error")
    return error.value.code, said["message"], said["param"]


def fields(**changes: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": messages(0), "max_tokens": 3, **changes}).encode()


LONG = [{"role": "user", "content": "pens " * 300}]
MESSAGE = {"role": "user"}
REFUSED: list[tuple[Callable[[Server], tuple[int, str, str | None]], int, str, str | None]] = [
    (lambda s: post(s, fields(), key="another"), 401, "The API key is wrong", None),
    (lambda s: post(s, fields(), path="/v1/chat"), 404, "There is no POST /v1/chat here; there are POST /v1/", None),
    (lambda s: post(s, fields(model="gpt")), 404, "There is no model 'gpt' here; it is 'tiny'.", "model"),
    (lambda s: post(s, fields(logit_bias={})), 400, "There is no field 'logit_bias' here; leave it out.", "logit_bias"),
    (lambda s: post(s, fields(max_token=3)), 400, "'max_token' here (did you mean 'max_tokens'?); leave", "max_token"),
    (lambda s: post(s, fields(reasoning_effort="low")), 400, "'reasoning_effort' here; leave it out.",
     "reasoning_effort"),
    (lambda s: post(s, b"{"), 400, "The body is no JSON object: ", None),
    (lambda s: post(s, b"[1, 2]"), 400, "The body is no JSON object: ", None),
    (lambda s: post(s, b"\xff\xfe{}"), 400, "The body is no JSON object: ", None),
    (lambda s: post(s, b"[" * 100_000), 400, "The body is no JSON object: ", None),
    (lambda s: post(s, b"{}"), 400, "The request has no messages.", "messages"),
    (lambda s: post(s, b" " * (2 << 20)), 413, "The body has more than 1048576 bytes; send less.", None),
    (lambda s: post(s, fields(messages=LONG)), 400, " tokens, but with the answer there may be at most 256",
     "messages"),
    (lambda s: post(s, fields(messages=[])), 400, "A conversation is a list of messages", "messages"),
    (lambda s: post(s, fields(messages=[MESSAGE])), 400, "Message 1 of 1 must have a role", "messages"),
    (lambda s: post(s, fields(messages=[{"role": "chef", "content": "a"}])), 400, "There is no role 'chef'; it is ",
     "messages"),
    (lambda s: post(s, fields(messages="hello")), 400, "messages is a list, not 'hello'.", "messages"),
    (lambda s: post(s, fields(max_tokens="many")), 400, "max_tokens is an integer, not 'many'.", "max_tokens"),
    (lambda s: post(s, fields(stream="yes")), 400, "stream is true or false, not 'yes'.", "stream"),
    (lambda s: post(s, fields(max_tokens=-1)), 400, "max_tokens must be an integer of at least 0", "max_tokens"),
    (lambda s: post(s, fields(max_tokens=10**6)), 400, "max_tokens=1000000 and the ", "max_tokens"),
    (lambda s: post(s, fields(n=2)), 400, "n is 1 here, not 2; send a request for each answer", "n"),
    (lambda s: post(s, fields(n=0)), 400, "n is 1 here, not 0", "n"),
    (lambda s: post(s, fields(n=True)), 400, "n is an integer, not True.", "n"),
    (lambda s: post(s, fields(max_completion_tokens=-1)), 400, "max_completion_tokens must", "max_completion_tokens"),
    (lambda s: post(s, fields(temperature=-1)), 400, "temperature must be 0 or more, got -1", "temperature"),
    (lambda s: post(s, fields(temperature=math.nan)), 400, "temperature must be", "temperature"),
    (lambda s: post(s, fields(top_p="x")), 400, "top_p must be a number", "top_p"),
    (lambda s: post(s, fields(seed=1.5)), 400, "seed must be an integer, got 1.5.", "seed"),
    (lambda s: post(s, fields(stop=[1])), 400, "stop is a text or a list of texts", "stop"),
    (lambda s: post(s, fields(response_format={"type": "xml"})), 400, "The type of response_format is text, ",
     "response_format"),
    (lambda s: post(s, fields(response_format={"type": "json_schema"})), 400, "no json_schema with a schema in it",
     "response_format"),
    (lambda s: post(s, fields(regex="[")), 400, "regex is not one that llguidance takes", "regex"),
    (lambda s: post(s, fields(regex="(")), 400, "regex parse error: unclosed group", "regex"),
    (lambda s: post(s, fields(regex="a", structure_after="")), 400, "structure_after is a text or", "structure_after"),
    (lambda s: post(s, fields(tools=["add"])), 400, "tools is a list of objects, each with a type and", "tools"),
    (lambda s: post(s, fields(tool_choice="required")), 400, "tool_choice is 'auto' or 'none' here, not 'required'",
     "tool_choice"),
    (lambda s: post(s, fields(chat_template_kwargs={"tokenize": True})), 400,
     "chat_template_kwargs has 'tokenize', which is no variable for a caller to set", "chat_template_kwargs"),
    (lambda s: post(s, fields(stream=True, temperature=-1)), 400, "temperature must be 0 or more", "temperature"),
]  # fmt: skip


def test_errors_are_sentences_and_the_server_goes_on(server: Server) -> None:
    for ask, status, sentence, field in REFUSED:
        code, message, param = ask(server)
        assert code == status and sentence in message and param == field
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="another", max_retries=0) as client:
        models = client.models
        with pytest.raises(openai.AuthenticationError, match="The API key is wrong"):
            models.list()
    all_free(server)


def test_a_client_is_told_what_a_client_can_do(server: Server, alone: Alone) -> None:
    """Answers fit where the sentence says so, and a client that always sends ``n=1`` gets one."""
    known = len(alone.tokenizer(f"Question: {QUESTIONS[0]}\nAnswer:")["input_ids"])
    room = CONFIG["max_length"] - known
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        create = functools.partial(client.chat.completions.create, model="tiny", messages=messages(0))
        for limit in ("max_tokens", "max_completion_tokens"):
            with pytest.raises(openai.BadRequestError) as error:
                create(**{limit: room + 1})
            assert error.value.param == limit and error.value.body["message"] == (  # type: ignore[index]
                f"{limit}={room + 1} and the {known} tokens of the messages are more than 256, the most there may be; "
                f"set {limit} to {room} or less, or shorten the messages."
            )
        longest = {"extra_body": {"regex": "[a-z ]{999}"}, "seed": 1}
        full = create(n=1, max_tokens=room, **longest)
        assert full.usage.completion_tokens == room and full.usage.total_tokens == 256
        assert create(**longest).choices[0].message.content == full.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="n is 1 here, not 3"):
            create(n=3)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.org/pens.png"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    ],
)
def test_what_is_no_text_is_refused_by_name(part: Any, server: Server) -> None:
    text = {"type": "text", "text": QUESTIONS[0]}
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client,
        pytest.raises(openai.BadRequestError) as error,
    ):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": [text, part]}])
    assert error.value.param == "messages" and error.value.body["message"] == (  # type: ignore[index]
        f"Message 1 of 1 has a part of type {part['type']!r}, but only text is decoded here; leave it out."
    )


def test_more_than_may_wait_are_refused(server: Server) -> None:
    """So many long answers that rows and places to wait are full, until one is refused. Then all clients go away."""

    async def ask(client: openai.AsyncOpenAI, place: int) -> str:
        request = {"model": "tiny", "messages": messages(place), "max_tokens": 150}
        try:
            await client.chat.completions.create(**request, extra_body={"regex": "[a-z ]{999}"})
        except openai.RateLimitError as error:
            return str(error)
        return ""

    async def run() -> list[str]:
        async with asynchronous(server) as client:
            waiting = {asyncio.create_task(ask(client, place)) for place in range(2 * (ROWS + WAITING))}
            refused: list[str] = []
            while waiting and not refused:
                ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                refused = [text for task in ended if (text := task.result())]
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            return refused

    refused = asyncio.run(run())
    assert refused
    assert all(f"this session lets {WAITING} wait for a row; try again later" in text for text in refused)
    all_free(server)


REFUSED_AT_ONCE = {
    "--model nowhere has no config.json; give the folder of a model.": ["--model", "nowhere"],
    "--draft nowhere has no config.json; give the folder of a draft.": ["--model", str(MODEL), "--draft", "nowhere"],
    "--config {lowering: eager}: Expecting property name": ["--model", str(MODEL), "--config", "{lowering: eager}"],
    "did you mean 'lowering'?": ["--model", str(MODEL), "--config", '{"lowerin": "eager"}'],
}
ONE_AFTER_ANOTHER = """
import json, runpy, sys
script, given = sys.argv[1:]
sys.path.insert(0, script.rpartition("/")[0])
for options in json.loads(given):
    sys.argv = [script, *options]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print(json.dumps(end.code))
"""
"""Starts the server with each of several options in one process, since each process imports for seconds."""


def test_what_every_replica_would_refuse_is_refused_at_once() -> None:
    """With a sentence, which Python prints to standard error before it ends with status 1."""
    command = [sys.executable, "-c", ONE_AFTER_ANOTHER, EXAMPLES / "serve.py", json.dumps([*REFUSED_AT_ONCE.values()])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    sentences = [json.loads(line) for line in done.stdout.splitlines()]
    for message, sentence in zip(REFUSED_AT_ONCE, sentences, strict=True):
        assert message in sentence and "\n" not in sentence


def test_messages_with_tool_calls_alone_and_variables_of_the_template(server: Server, alone: Alone) -> None:
    """The template of serve.py reads neither tools nor variables, which the log says."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
    talk: list[Any] = [{"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "tool_calls": [call]},
                       {"role": "tool", "tool_call_id": "1", "content": "7"}]  # fmt: skip
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        answer = client.chat.completions.create(
            model="tiny", messages=talk, tools=[tool], tool_choice="auto", max_tokens=8, top_p=0.9,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}, "return_token_ids": True},
        )  # fmt: skip
    expected = alone("What is 3 + 4?\n\n7", seed=0, max_new_tokens=8, temperature=0)
    assert answer.choices[0].model_extra["token_ids"] == expected.new_tokens[0].tolist()
    for said in ("The chat template does not read enable_thinking and tools", "top_p has no effect"):
        assert any(said in server.log.read_text() for _ in range(100) if time.sleep(0.1) is None)


CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [1-9]\}\}\n</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def answer(server: Server, regex: str, *, stream: bool, **fields: Any) -> tuple[str, list[Any], str]:
    """The text, the calls and the reason of an answer that has this form."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        said = client.chat.completions.create(
            model="tiny", messages=messages(0), max_tokens=100, stream=stream, extra_body={"regex": regex}, **fields
        )
        if not stream:
            (choice,) = said.choices
            return choice.message.content, choice.message.tool_calls or [], choice.finish_reason
        parts = [choice for chunk in said for choice in chunk.choices]
    text = "".join(part.delta.content for part in parts)
    return text, [call for part in parts for call in part.delta.tool_calls or []], parts[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_calls_in_an_answer_are_tool_calls(server: Server, stream: bool) -> None:
    text, calls, reason = answer(server, f"Well\\.{CALL}{CALL}", stream=stream, tools=[TOOL])
    assert text == "Well." and reason == "tool_calls" and len(calls) == 2
    for call in calls:
        assert call.type == "function" and call.function.name == "add"
        assert json.loads(call.function.arguments)["a"] in range(1, 10)
    assert len({call.id for call in calls}) == 2
    if stream:
        assert [call.index for call in calls] == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_calls_remain_text_where_there_are_no_tools(server: Server, stream: bool, fields: dict[str, Any]) -> None:
    text, calls, reason = answer(server, CALL, stream=stream, **fields)
    assert text.startswith("<tool_call>") and text.endswith("</tool_call>") and not calls and reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["<tool_call> add 3 </tool_call>!", '<tool_call>{"name": "add"', "3 < 4 <tool_c"])
def test_what_is_no_call_remains_text(server: Server, stream: bool, form: str) -> None:
    text, calls, reason = answer(server, re.escape(form).replace(r"\ ", " "), stream=stream, tools=[TOOL])
    assert (text, calls, reason) == (form, [], "stop")
