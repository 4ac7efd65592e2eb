"""Structured output: valid, and the same with and without drafts. The oracle for validity is the package jsonschema."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import specgraph
from specgraph import InputError, SpeculativeDecoder
from tests.decoding import CONFIG, compiled
from tests.dropin.test_attach import word_tokenizer
from tests.runtime.schemas import SCHEMAS

FOLDER = Path(__file__).parents[2] / "examples/models/tiny-math"
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER / "target")
PROMPT = "Question: What is 3 + 4?\nAnswer:"
PROMPTS = [TOKENIZER(f"{PROMPT} {n}")["input_ids"] for n in range(len(SCHEMAS))]


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER / "target", dtype=torch.float64)


@pytest.fixture(scope="module")
def plain(model: Any) -> SpeculativeDecoder:
    return compiled(model, "none")


@pytest.fixture(scope="module")
def decoder(model: Any) -> SpeculativeDecoder:
    return compiled(model, "ngram", 4)


def test_fifty_schemas_are_followed_with_and_without_drafts(
    decoder: SpeculativeDecoder, plain: SpeculativeDecoder
) -> None:
    """Every other one greedily, with blanks; the others are drawn, without."""
    assert len(SCHEMAS) == 50
    no_blanks = {"x-guidance": {"whitespace_pattern": ""}}
    options: dict[str, Any] = {
        "max_new_tokens": 160, "temperature": [0.0, 1.0] * 25, "seed": [*range(50)],
        "json_schema": [{**schema, **(no_blanks if at % 2 else {})} for at, schema in enumerate(SCHEMAS.values())],
    }  # fmt: skip
    out, expected = (each.generate(PROMPTS, **options, tokenizer=TOKENIZER) for each in (decoder, plain))
    assert torch.equal(out.sequences, expected.sequences)
    assert out.stats.acceptance_length > 1.05  # what a grammar forces is what it forced before
    ended = 0
    for (name, schema), new, reason in zip(SCHEMAS.items(), out.new_tokens, out.finish_reasons, strict=True):
        written = TOKENIZER.decode(new, skip_special_tokens=True)
        if reason == "eos":
            jsonschema.validate(json.loads(written), schema, format_checker=jsonschema.FormatChecker())
            ended += 1
        else:
            assert reason == "length" and name == "a list that refers to itself", (name, written)
    assert ended >= 49


def test_sequences_without_structure_are_what_they_are_alone(decoder: SpeculativeDecoder) -> None:
    prompts = PROMPTS[:4]
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1.0, "seed": [1, 2, 3, 4]}
    free = decoder.generate(prompts, **options)
    mixed = decoder.generate(prompts, **options, regex=[None, "[0-9]{3}", None, "yes|no"], tokenizer=TOKENIZER)
    assert torch.equal(mixed.new_tokens[0], free.new_tokens[0])
    assert torch.equal(mixed.new_tokens[2], free.new_tokens[2])
    texts = TOKENIZER.batch_decode(mixed.new_tokens, skip_special_tokens=True)
    assert re.fullmatch("[0-9]{3}", texts[1]) and texts[3] in ("yes", "no")


def test_regular_expressions_and_grammars_and_models(decoder: SpeculativeDecoder) -> None:
    class Point:
        """As a pydantic model has it."""

        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return SCHEMAS["a point"]

    options: dict[str, Any] = {"max_new_tokens": 60, "tokenizer": TOKENIZER}
    assert re.fullmatch(r"#+ [a-f]{2,5}", decoder.text(PROMPT, regex=r"#{1,3} [a-f]{2,5}", **options))
    lark = 'start: "(" item ("," item){2} ")"\nitem: /[0-9]{1,2}/ | "x"'
    assert re.fullmatch(r"\(([0-9]{1,2}|x)(,([0-9]{1,2}|x)){2}\)", decoder.text(PROMPT, grammar=lark, **options))
    schema = SCHEMAS["a point"]
    texts = [decoder.text(PROMPT, json_schema=form, **options) for form in (schema, json.dumps(schema), Point)]
    assert len({*texts}) == 1 and json.loads(texts[0]).keys() == {"x", "y"}
    anything = decoder.text(PROMPT, json_schema=True, **options)
    assert anything == decoder.text(PROMPT, json_schema={}, **options) and anything[0] in '{["-0123456789tfn'


def test_a_text_that_stands_in_the_prompt_is_drafted_and_accepted(decoder: SpeculativeDecoder) -> None:
    words = "alpha beta gamma delta"
    prompt = TOKENIZER(f"{words}. {words}. ")["input_ids"]
    out = decoder.generate([prompt], max_new_tokens=60, regex=words, tokenizer=TOKENIZER)
    assert TOKENIZER.decode(out.new_tokens[0], skip_special_tokens=True) == words
    assert out.finish_reasons == ["eos"] and out.stats.acceptance_length > 1.5
    assert out.stats.host_steps == 1 + len(out.stats.emitted_per_step[0])  # no chunk of the prompt but the last


def test_sequences_of_a_session_have_a_structure_of_their_own(decoder: SpeculativeDecoder) -> None:
    wanted = ["[0-9]{3}", None, "yes|no", None]
    free = decoder.generate(PROMPTS[:4], max_new_tokens=12).new_tokens
    with decoder.session() as session:
        numbers = [
            session.submit(prompt, max_new_tokens=12, **({} if regex is None else {"regex": regex}))
            for prompt, regex in zip(PROMPTS, wanted, strict=False)
        ]
        found: dict[int, list[int]] = {number: [] for number in numbers}
        for event in session:
            found[event.id] += event.tokens
    for number, regex, alone in zip(numbers, wanted, free, strict=True):
        text = TOKENIZER.decode(found[number], skip_special_tokens=True)
        assert found[number] == alone.tolist() if regex is None else re.fullmatch(regex, text)


NUMBERED = TOKENIZER("héllo 终于 ok", add_special_tokens=False).input_ids[:8]
BY_NUMBER = {
    "tokens alone": ("start: " + " ".join(f"<[{token}]>" for token in NUMBERED), NUMBERED),
    "tokens and text": ("start: <[73]> <[129]> /[0-9 ]{1,8}/", [73, 129]),
    "a range": (f"start: <[{NUMBERED[0]}-{NUMBERED[0] + 1}]> <[^1-500]> /[a-c]{{2}}/", [NUMBERED[0]]),
}


@pytest.mark.parametrize("kind", ["ngram", "suffix", "eagle3"])
def test_grammars_of_numbered_tokens_are_the_same_with_and_without_drafts(
    model: Any, plain: SpeculativeDecoder, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if kind == "eagle3":
        drafted = specgraph.compile_speculative(model, CONFIG, draft=FOLDER / "eagle3")
    else:
        drafted = compiled(model, kind, 4)
    prompts = [[*PROMPTS[0], *NUMBERED, *NUMBERED], [*NUMBERED, 73, 129, 20, 20, 73, 129, 20, 20], PROMPTS[1]]
    for grammar, beginning in BY_NUMBER.values():
        options: dict[str, Any] = {"grammar": grammar, "tokenizer": TOKENIZER, "max_new_tokens": 11}
        options |= {"temperature": [0.0, 1.0, 1.0], "seed": [1, 2, 3]}
        out, expected = drafted.generate(prompts, **options), plain.generate(prompts, **options)
        assert torch.equal(out.sequences, expected.sequences) and out.finish_reasons == expected.finish_reasons
        assert all(new[: len(beginning)].tolist()[0] in (beginning[0], beginning[0] + 1) for new in out.new_tokens)
        if grammar.endswith(">"):
            assert [new.tolist() for new in out.new_tokens] == [[*beginning, 0]] * 3
    assert "Parser Error" not in capfd.readouterr().err


def test_a_structure_that_cannot_be_followed_is_one_sentence(model: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A lossy rule accepts drafts that the grammar does not allow."""
    rule = {"rule": "synthetic", "acceptance_rate": 1.0}
    lossy = compiled(model, "ngram", 2, verify=rule)
    prompt = TOKENIZER("12 ab 12 ab 12 ab 12 ab ")["input_ids"]
    with pytest.raises(
        InputError, match="The sequence cannot follow its regex any further; llguidance says: "
    ) as caught:
        lossy.generate([prompt], regex="1.{3}[0-9]{30}x", max_new_tokens=30, tokenizer=TOKENIZER)
    assert "\n" not in str(caught.value) and "<state>" not in str(caught.value) and len(str(caught.value)) < 250
    assert not capfd.readouterr().err.strip()


def slow_tokenizer() -> Any:
    class Slow:
        is_fast, decode, get_vocab = False, TOKENIZER.decode, TOKENIZER.get_vocab

        def __call__(self, text: str) -> Any:
            return TOKENIZER(text)

    return Slow()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "two kinds": ({"regex": "a", "grammar": "b"}, "grammar and regex are given, but a call follows one of"),
    "no schema": ({"json_schema": {"type": 3}}, "json_schema is not one that llguidance takes: type must be a string"),
    "no JSON": ({"json_schema": "{"}, "json_schema is not one that llguidance takes"),
    "a number": ({"json_schema": 3}, "json_schema is a mapping, its JSON text or a pydantic model, not int"),
    "no expression": ({"regex": "("}, r"regex is not one that llguidance takes: .*: unclosed group\.$"),
    "no grammar": ({"grammar": "start: nowhere"}, "grammar is not one that llguidance takes"),
    "no text": ({"regex": 3}, "regex is a text, not int"),
    "no end": ({"regex": "a", "eos_token_id": []}, "regex needs an EOS id with which a sequence can end"),
    "too many": ({"regex": ["a", "b"]}, "regex has 2 entries for 1 sequences"),
    "a slow tokenizer": ({"regex": "a", "tokenizer": slow_tokenizer()}, "need a fast tokenizer of transformers, and S"),
    "no decoder": ({"regex": "a", "tokenizer": word_tokenizer()}, "llguidance does not take this tokenizer: can't"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_sentence(decoder: SpeculativeDecoder, name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(InputError, match=message):
        decoder.generate(PROMPTS[:1], **{"tokenizer": TOKENIZER, **options})


def test_the_models_own_tokenizer_is_found_and_kept(decoder: SpeculativeDecoder) -> None:
    first = decoder.generate(PROMPTS[:1], regex="[a-z]{3}", max_new_tokens=9)
    assert re.fullmatch("[a-z]{3}", TOKENIZER.decode(first.new_tokens[0], skip_special_tokens=True))


def test_without_the_library_it_says_what_to_install(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(InputError, match=r"need the library llguidance; pip install -e '.\[grammar\]'"):
        decoder.generate(PROMPTS[:1], regex="a", tokenizer=TOKENIZER)


def test_rows_of_the_vocabulary_without_a_token_never_come_out(model: Any) -> None:
    """Models pad their vocabulary; llguidance is told its size."""
    characters = [chr(code) for code in range(33, 127)]
    words = Tokenizer(BPE({c: n for n, c in enumerate(characters)}, [], unk_token="!"))
    words.decoder = ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="~")
    out = compiled(model, "none").generate(
        PROMPTS[:1], max_new_tokens=30, regex="[^x]{20}", tokenizer=tokenizer, eos_token_id=93, temperature=5.0, seed=1
    )
    assert int(out.new_tokens[0].max()) < len(characters) and out.finish_reasons == ["eos"]
