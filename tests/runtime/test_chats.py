"""What a chat template reads besides messages, messages that have tool calls alone, and texts that begin with a BOS."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from specgraph import InputError, SpecgraphWarning, SpeculativeDecoder
from specgraph.runtime.requests.chats import encode_chats
from specgraph.runtime.requests.text import encode_texts
from tests.decoding import compiled
from tests.dropin.test_attach import word_tokenizer
from tests.models import shared_model

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.content }} {% for call in m.tool_calls or [] %}{{ call.function.arguments.word }} "
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}w9{% if enable_thinking is false %} w8{% endif %}{% endif %}"
)
USER = {"role": "user", "content": "w3"}
TOOL = {"type": "function", "function": {"name": "w7", "description": "", "parameters": {"type": "object"}}}


def calling(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "w7", "arguments": arguments}}],
    }


RESULT = {"role": "tool", "content": "w6"}


def tokenizer_with(template: str = TEMPLATE, *, bos: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    if bos:
        tokenizer.add_special_tokens({"bos_token": "w1"})
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="w1 $A w2", pair="$A $B", special_tokens=[("w1", 1), ("w2", 2)]
        )
    return tokenizer


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return compiled(shared_model("llama"), lowering="eager")


def test_tools_and_variables_reach_the_template(decoder: SpeculativeDecoder) -> None:
    tokenizer = tokenizer_with()
    assert encode_chats(tokenizer, [[USER]]) == [[3, 9]]
    given: dict[str, Any] = {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
    assert encode_chats(tokenizer, [[USER], [USER, USER]], **given) == [[7, 3, 9, 8], [7, 3, 3, 9, 8]]
    expected = decoder.text("w7 w3 w9 w8", tokenizer=tokenizer, max_new_tokens=5)
    assert decoder.chat([USER], tokenizer=tokenizer, max_new_tokens=5, **given) == expected
    assert decoder.chat([USER], tokenizer=tokenizer, max_new_tokens=5) != expected


def w7(w5: int) -> None:
    """Is a tool.

    Args:
        w5: a number.
    """


def test_a_function_is_a_tool_as_for_transformers() -> None:
    assert encode_chats(tokenizer_with(), [[USER]], tools=[w7]) == [[7, 3, 9]]


@pytest.mark.parametrize("arguments", [{"word": "w5"}, '{"word": "w5"}'])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_tool_calls_alone_are_a_message(arguments: Any, content: dict[str, Any]) -> None:
    """OpenAI has the arguments as a text of JSON, and templates want an object."""
    tokenizer = tokenizer_with(TEMPLATE.replace("m.content", "m.content or ''"))
    talk = [USER, {**calling(arguments), **content}, RESULT]
    before = str(talk)
    assert encode_chats(tokenizer, [talk]) == [[3, 5, 6, 9]]
    assert str(talk) == before


def test_parts_of_text_beside_tool_calls() -> None:
    tokenizer = tokenizer_with(TEMPLATE.replace("m.content", "m.content or ''"))
    parts = {"role": "user", "content": [{"type": "text", "text": "w3"}]}
    assert encode_chats(tokenizer, [[parts, calling('{"word": "w5"}'), RESULT]]) == [[3, 5, 6, 9]]


WRONG: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "no content": ([USER, {"role": "assistant"}], {}, "^Message 2 of 2 must have a role, .* only one with tool_calls"),
    "calls at the end": ([USER, calling({})], {}, "^The last message has tool calls and no content, .* add the res"),
    "tools": ([USER], {"tools": "w7"}, "^tools is a list of JSON schemas of functions, .*, not 'w7'"),
    "a tool": ([USER], {"tools": [7]}, "^tools is a list of JSON schemas"),
    "variables": ([USER], {"chat_template_kwargs": ["w7"]}, "^chat_template_kwargs maps variables of the chat"),
    "settled": (
        [USER], {"chat_template_kwargs": {"tokenize": True}}, "^chat_template_kwargs has 'tokenize', which is no",
    ),
    "a variable beside": ([USER], {"enable_thinking": False}, "into chat_template_kwargs={'enable_thinking': ...}"),
    "a typing error": ([USER], {"max_new_token": 3}, "There is no argument .*; did you mean 'max_new_tokens'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_no_template_can_read_is_refused(decoder: SpeculativeDecoder, name: str) -> None:
    messages, options, message = WRONG[name]
    with pytest.raises(InputError, match=message):
        decoder.chat(messages, tokenizer=tokenizer_with(), **options)


def test_variables_that_the_template_does_not_read_are_warned_of() -> None:
    tokenizer = tokenizer_with("{% for m in messages %}{{ m.content }} {% endfor %}")
    with pytest.warns(SpecgraphWarning, match="^The chat template does not read enable_thinking and tools, so") as seen:
        assert encode_chats(tokenizer, [[USER]] * 2, [TOOL], {"enable_thinking": False}) == [[3]] * 2
    assert len(seen) == 1


def test_a_text_that_begins_with_a_bos_gets_no_second_one(decoder: SpeculativeDecoder) -> None:
    tokenizer = tokenizer_with(bos=True)
    assert encode_texts(tokenizer, ["w3"]) == [[1, 3, 2]]
    with pytest.warns(SpecgraphWarning, match="^The text begins with w1, so .* chat\\(\\) takes the messages") as seen:
        assert decoder.text("w1 w3", tokenizer=tokenizer, max_new_tokens=4) == decoder.text(
            "w3", tokenizer=tokenizer, max_new_tokens=4
        )
    assert [warning.filename for warning in seen] == [__file__]
    with pytest.warns(SpecgraphWarning, match="^2 of 3 texts begin with w1, so"):
        assert encode_texts(tokenizer, ["w1 w3", "w4", "w1 w1 w5"]) == [[1, 3, 2], [1, 4, 2], [1, 1, 5, 2]]


def test_a_tokenizer_that_adds_no_bos_leaves_texts_as_they_are() -> None:
    tokenizer = tokenizer_with()
    tokenizer.add_special_tokens({"bos_token": "w1"})
    assert encode_texts(tokenizer, ["w1 w1 w3", "w1 w3"]) == [[1, 1, 3], [1, 3]]


def test_a_template_that_writes_the_bos_gets_no_second_one() -> None:
    tokenizer = tokenizer_with("w1 {% for m in messages %}{{ m.content }}{% endfor %}", bos=True)
    assert encode_chats(tokenizer, [[USER]]) == [[1, 3]]
