"""What a server needs of a session: texts in pieces, stop strings, a bound on those that wait, errors of one alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specgraph import BusyError, Event, InputError, Session, SpeculativeDecoder
from specgraph.runtime.outputs.detokenizer import IncrementalDetokenizer
from specgraph.runtime.requests.grammar import Matching
from specgraph.runtime.requests.stopping import stop_criteria
from tests.decoding import compiled
from tests.dropin.test_attach import word_tokenizer

FOLDER = Path(__file__).parents[2] / "examples/models/tiny-math"
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER / "target")
QUESTIONS = [
    "Tom has 3 boxes with 4 pens each. How many pens does he have?",
    "What is 3 + 4?",
    "Ann eats 2 eggs a day.",
]
PROMPTS = [TOKENIZER(f"Question: {question}\nAnswer:")["input_ids"] for question in QUESTIONS]
STOPS = [["\n"], ["pens", "7"], [" is", ". "]]
OPTIONS: dict[str, Any] = {"max_new_tokens": 60, "temperature": 0.8}


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    """With room for two sequences."""
    model, draft = (
        AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float64) for name in ("target", "draft")
    )
    return compiled(model, "draft_model", draft=draft, max_batch_size=2)


def alone(decoder: SpeculativeDecoder, place: int, **options: Any) -> Any:
    return decoder.generate([PROMPTS[place]], seed=[place + 1], tokenizer=TOKENIZER, **OPTIONS, **options)


def ends(events: Iterable[Event]) -> dict[int, str]:
    return {event.id: event.finish_reason for event in events if event.finish_reason is not None}


def tokens_of(events: Iterable[Event], number: int) -> list[int]:
    return [token for event in events if event.id == number for token in event.tokens]


def is_empty(session: Session) -> bool:
    capacity = session.capacity
    return capacity.free_rows == capacity.rows and capacity.free_pages == capacity.pages and not capacity.waiting


def test_stop_strings_end_a_sequence_where_generate_ends_it(decoder: SpeculativeDecoder) -> None:
    expected = [alone(decoder, place, stop_strings=stops) for place, stops in enumerate(STOPS)]
    reasons = [out.finish_reasons[0] for out in expected]
    assert reasons.count("stop") >= 2
    with decoder.session(return_text=True, return_logprobs=True) as session:
        numbers = [
            session.submit(PROMPTS[place], seed=place + 1, stop_strings=stops, **OPTIONS)
            for place, stops in enumerate(STOPS)
        ]
        events = list(session)
        assert is_empty(session) and session.stats.ended["cancelled"] == 0
        assert session.stats.ended["stop"] == reasons.count("stop")
    assert [ends(events)[number] for number in numbers] == reasons
    for number, out, stops in zip(numbers, expected, STOPS, strict=True):
        own = [event for event in events if event.id == number]
        assert tokens_of(own, number) == out.new_tokens[0].tolist()
        assert all(len(event.logprobs or ()) == len(event.tokens) for event in own)
        whole = TOKENIZER.decode(out.new_tokens[0], skip_special_tokens=True)
        places = [place for text in stops if (place := whole.find(text)) >= 0]
        assert "".join(event.text or "" for event in own) == whole[: min(places, default=len(whole))]


def test_pieces_hold_back_what_later_tokens_may_change() -> None:
    tokens = TOKENIZER("a café 🙂 costs 3.\n#### 3")["input_ids"]
    whole = TOKENIZER.decode(tokens)
    for stops, wanted in (((), whole), (["\n####"], whole[: whole.index("\n####")]), (["\n#?"], whole)):
        pieces = IncrementalDetokenizer(TOKENIZER, stops)
        shown = [pieces.add([token], last=place == len(tokens) - 1) for place, token in enumerate(tokens)]
        assert "".join(shown) == wanted
        assert not any("�" in piece for piece in shown)
        assert all(wanted.startswith("".join(shown[:count])) for count in range(len(shown)))
    assert len([piece for piece in shown if piece]) > 5
    assert not any(piece.endswith("\n") for piece in shown)  # it came with what shows that it is no stop string


def test_a_blank_behind_a_special_token_stays() -> None:
    words = word_tokenizer()
    tokens = [*range(4, 12)]
    pieces = IncrementalDetokenizer(words, ())
    assert "".join(pieces.add([token]) for token in tokens) + pieces.add([], last=True) == words.decode(tokens)


def test_stop_strings_are_compiled_once_for_a_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "target")
    first = stop_criteria(["a", "b"], tokenizer, None)[0]
    assert stop_criteria(["a", "b"], tokenizer, None)[0] is first
    assert stop_criteria(["a"], tokenizer, None)[0] is not first
    tokenizer.add_tokens(["a new one"])
    assert stop_criteria(["a", "b"], tokenizer, None)[0] is not first


def test_a_session_refuses_more_than_may_wait(decoder: SpeculativeDecoder) -> None:
    with decoder.session(max_waiting=1) as session:
        kept = [session.submit(PROMPTS[0], max_new_tokens=4) for _ in range(3)]  # two rows are free, and one may wait
        assert session.capacity.waiting == 3
        with pytest.raises(BusyError, match="3 sequences wait already, and this session lets 1 wait for a row"):
            session.submit(PROMPTS[0], max_new_tokens=4)
        assert {*ends(session)} == {*kept}
        session.submit(PROMPTS[0], max_new_tokens=4, stop_strings="x", tokenizer=TOKENIZER)
        assert len(ends(session)) == 1 and is_empty(session)
    with pytest.raises(InputError, match="max_waiting must be an integer of at least 0, or None, got -1"):
        decoder.session(max_waiting=-1)


def test_an_error_of_one_grammar_ends_one_sequence(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(decoder, 1).new_tokens[0].tolist()
    before = Matching.masks

    def masks(self: Matching, new_tokens: Any, drafts: Any) -> Any:
        if len(new_tokens) >= 3:
            raise InputError("The grammar cannot be followed any further: it has reached a limit.")
        return before(self, new_tokens, drafts)

    monkeypatch.setattr(Matching, "masks", masks)
    with decoder.session(tokenizer=TOKENIZER) as session:
        broken = session.submit(PROMPTS[0], regex="[a-z ]{9,99}", **OPTIONS)
        good = session.submit(PROMPTS[1], seed=2, **OPTIONS)
        events = list(session)
        assert ends(events)[broken] == "error" and is_empty(session)
        (error,) = (event.error for event in events if event.id == broken and event.finish_reason)
        assert isinstance(error, InputError) and "cannot be followed any further" in str(error)
        assert tokens_of(events, good) == expected
    with pytest.raises(InputError, match="cannot be followed any further"):
        alone(decoder, 0, regex="[a-z ]{9,99}")


def test_what_a_session_cannot_take_is_refused_by_name(decoder: SpeculativeDecoder) -> None:
    with decoder.session() as session:
        with pytest.raises(InputError, match="stop_strings needs the model's tokenizer; pass it as tokenizer="):
            session.submit(PROMPTS[0], stop_strings="x")
        with pytest.raises(InputError, match="submit does not take streamer"):
            session.submit(PROMPTS[0], streamer=None)
        assert session.capacity.waiting == 0
    with pytest.raises(InputError, match="it takes return_logprobs, return_text, tokenizer and max_waiting"):
        decoder.session(text=True)
