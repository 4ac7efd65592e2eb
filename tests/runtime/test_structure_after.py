"""A structure that begins behind a boundary: the same with and without drafts, and obeyed from the first byte on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgraph
from specgraph import InputError, SpeculativeDecoder
from specgraph.runtime.requests.delayed_structure import TextBoundary
from specgraph.runtime.requests.grammar import MOST_BOUNDARIES, Grammars, StructureOptions
from tests.decoding import CONFIG, compiled
from tests.pairwise import cover, product

FOLDER = Path(__file__).parents[2] / "examples/models/tiny-math"
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER / "target")
PROMPT: list[int] = TOKENIZER("Question: What is 3 + 4?\nAnswer:")["input_ids"]
EOS, EQUALS = 0, TOKENIZER("=")["input_ids"][0]


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER / "target", dtype=torch.float64)


@pytest.fixture(scope="module")
def plain(model: Any) -> SpeculativeDecoder:
    return compiled(model, "none")


@pytest.fixture(scope="module", params=["ngram", "eagle3"])
def drafted(model: Any, request: pytest.FixtureRequest) -> SpeculativeDecoder:
    if request.param == "ngram":
        return compiled(model, "ngram", 4)
    return specgraph.compile_speculative(model, CONFIG, draft=FOLDER / "eagle3")


def written(tokens: torch.Tensor) -> str:
    text: str = TOKENIZER.decode(tokens, skip_special_tokens=True)
    return text


def parted(tokens: torch.Tensor, after: Any) -> tuple[str, bool, str]:
    """The text before a boundary, whether there is one, and the text behind it."""
    if isinstance(after, str):
        before, found, structure = written(tokens).partition(after)
        return before, bool(found), structure
    ids = tokens.tolist()
    place = ids.index(after) if after in ids else len(ids)
    return written(tokens[:place]), place < len(ids), written(tokens[place + 1 :])


# A boundary of several tokens, one that begins inside a token, a token, and a text with a repeated beginning.
AFTER = {"several tokens": "3+4 =", "the end of a token": "=", "a token": EQUALS, "a repeated beginning": "++4"}


@pytest.mark.parametrize(
    ("drafted", "name", "temperature"),
    cover(product({"drafted": ("ngram", "eagle3"), "name": (*AFTER,), "temperature": (0.0, 1.0)}), (0, 1)),
    indirect=["drafted"],
)
def test_free_text_then_structure_with_and_without_drafts(
    plain: SpeculativeDecoder, drafted: SpeculativeDecoder, name: str, temperature: float
) -> None:
    """The prompts hold an answer that is drafted, with the boundary inside."""
    after = AFTER[name]
    shown = TOKENIZER(" 3+4 = 3++4")["input_ids"]
    prompts = [PROMPT, [*PROMPT, *shown, *PROMPT], [*shown, *shown, 222]]
    options: dict[str, Any] = {
        "max_new_tokens": 28, "temperature": temperature, "seed": [3, 4, 5], "tokenizer": TOKENIZER,
        "structure_after": [after, after, None], "regex": "[xyz ]{5}!", "sequence_bias": {(EQUALS,): 3.0},
    }  # fmt: skip
    out, expected = drafted.generate(prompts, **options), plain.generate(prompts, **options)
    assert torch.equal(out.sequences, expected.sequences) and out.finish_reasons == expected.finish_reasons
    assert re.fullmatch("[xyz ]{5}!", written(out.new_tokens[2]))
    for new, reason in zip(out.new_tokens[:2], out.finish_reasons[:2], strict=True):
        free, found, structure = parted(new, after)
        assert reason == "eos" if found else (reason == "length" and EOS not in new)
        assert not found or re.fullmatch("[xyz ]{5}!", structure), (free, structure)
    free_alone = plain.generate(prompts[:1], **{**options, "regex": None, "structure_after": None, "seed": [3]})
    before, alone = parted(out.new_tokens[0], after)[0], written(free_alone.new_tokens[0])
    assert temperature or before.startswith(alone) or alone.startswith(before)  # up to an EOS, which waits
    with drafted.session(tokenizer=TOKENIZER) as session:
        numbers = [
            session.submit(prompt, **{**options, "seed": seed, "structure_after": mark})
            for prompt, seed, mark in zip(prompts, options["seed"], options["structure_after"], strict=True)
        ]
        tokens: dict[int, list[int]] = {number: [] for number in numbers}
        for event in session:
            tokens[event.id] += event.tokens
    assert [*tokens.values()] == [new.tolist() for new in expected.new_tokens]


def test_the_boundary_lies_inside_accepted_drafts(model: Any) -> None:
    """The structure is drafted, too, since the whole answer stands in the prompt."""
    answer = TOKENIZER("abc = de fg hi")["input_ids"]
    forced = {(*answer[:n], answer[n]): 1000.0 for n in range(1, len(answer))}
    prompt = [*answer, 200, *answer, 200, answer[0]]
    options: dict[str, Any] = {"max_new_tokens": 30, "tokenizer": TOKENIZER, "sequence_bias": forced}
    options |= {"structure_after": "=", "regex": " de fg( hi)?"}
    out = compiled(model, "ngram", 6).generate([prompt], **options)
    expected = compiled(model, "none").generate([prompt], **options)
    assert torch.equal(out.sequences, expected.sequences)
    assert "abc = de fg" in "a" + written(out.new_tokens[0]) or written(out.new_tokens[0]).endswith("= de fg hi")
    boundary = next(n for n, token in enumerate(out.new_tokens[0]) if "=" in TOKENIZER.decode([token]))
    ends = torch.tensor([1, *out.stats.emitted_per_step[0]]).cumsum(0).tolist()
    assert boundary + 1 not in ends, "the step that accepted the boundary went on behind it"


def test_bytes_behind_the_boundary_in_the_same_token_belong_to_the_structure(plain: SpeculativeDecoder) -> None:
    """`>>.` and `>>` are tokens. With a bias, the first is taken only where the structure begins with a full stop."""
    (longer,), (shorter,) = (TOKENIZER(text)["input_ids"] for text in (">>.", ">>"))
    options: dict[str, Any] = {"max_new_tokens": 30, "tokenizer": TOKENIZER, "structure_after": ">>"}
    options |= {"sequence_bias": {(longer,): 200.0, (shorter,): 100.0}}
    for regex, first in ((r"\.[0-9]{2}", longer), (r"[0-9]{2}", shorter)):
        out = plain.generate([PROMPT], regex=regex, **options)
        assert int(out.new_tokens[0][0]) == first and re.fullmatch(f">>{regex}", written(out.new_tokens[0]))


def test_no_eos_comes_before_the_boundary(plain: SpeculativeDecoder, drafted: SpeculativeDecoder) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 30,
        "tokenizer": TOKENIZER,
        "structure_after": "</think>",
        "regex": "a",
    }
    for decoder in (plain, drafted):
        out = decoder.generate([PROMPT], **options)
        assert out.finish_reasons == ["length"] and EOS not in out.new_tokens[0]
    assert plain.generate([PROMPT], max_new_tokens=30).finish_reasons == ["eos"]


def test_texts_chats_and_streams_take_it(plain: SpeculativeDecoder) -> None:
    options: dict[str, Any] = {
        "regex": "[xyz]{3}",
        "structure_after": "=",
        "tokenizer": TOKENIZER,
        "max_new_tokens": 40,
    }
    text = plain.text("Question: What is 3 + 4?\nAnswer:", **options)
    assert re.fullmatch("[^=]*=[xyz]{3}", text)
    streamed = [token for chunk in plain.stream([PROMPT], **options) for token in chunk.tokens[0]]
    assert TOKENIZER.decode(streamed, skip_special_tokens=True) == text


@pytest.mark.parametrize("text", [b"aab", b"aaa", b"abab", b"</think>", b"a"])
def test_the_search_finds_the_first_end_however_text_is_cut(text: bytes) -> None:
    class Bytes:
        @staticmethod
        def tokenize_bytes(given: bytes) -> list[int]:
            return [*given]

    pieces = [b"a", b"b", b"aa", b"ab", b"ba", b"aba", b"abb", b"aabab", b"</thin", b"k>", b"k>a", b"<", b"/think>b"]
    boundary = TextBoundary(text, pieces, Bytes())
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        state, seen = 0, b""
        for token in torch.randint(len(pieces), (12,), generator=generator).tolist():
            early = boundary.ending_early(state)
            state, rest = boundary.step(state, token)
            seen += pieces[token]
            assert (rest is None) == (text not in seen)
            assert early.get(token, []) == (rest or [])
            if rest is not None:
                assert bytes(rest) == seen.partition(text)[2]
                break


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no structure": ({"structure_after": "="}, "structure_after needs a structure; give grammar or json_"),
    "an EOS": ({"structure_after": EOS, "regex": "a"}, "structure_after=0 is an EOS, which ends a sequence before"),
    "no token": ({"structure_after": 3072, "regex": "a"}, r"is a text or a token id \(0 to 3071\), .* not 3072"),
    "an empty text": ({"structure_after": "", "regex": "a"}, "structure_after is a text or a token id"),
    "a bool": ({"structure_after": True, "regex": "a"}, "structure_after is a text or a token id .* not True"),
    "too many": ({"structure_after": ["a", "b"], "regex": "a"}, "structure_after has 2 entries for 1 sequences"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_sentence(plain: SpeculativeDecoder, name: str) -> None:
    given, message = WRONG[name]
    with pytest.raises(InputError, match=message) as caught:
        plain.generate([PROMPT], tokenizer=TOKENIZER, **given)
    assert "\n" not in str(caught.value)


def test_texts_are_kept_up_to_a_number_and_share_the_bytes_of_tokens() -> None:
    grammars = Grammars(len(TOKENIZER))

    def boundary(text: str) -> TextBoundary:
        (matching,) = grammars.read([StructureOptions("regex", "a", text)], lambda: TOKENIZER, [(EOS,)], [0])
        found: Any = matching
        return found._following._boundary

    first = boundary("text 0")
    assert boundary("text 0") is first
    others = [boundary(f"text {number}") for number in range(1, 2 * MOST_BOUNDARIES)]
    assert all(other.vocabulary is first.vocabulary for other in others)
    assert len(grammars._boundaries[TOKENIZER].values) <= MOST_BOUNDARIES
