"""Where options leave a sequence no token: nothing is drawn, one sentence says why, and the others go on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgraph
from specgraph import InputError, NumericsError, SpecgraphWarning, SpeculativeDecoder
from tests.decoding import CONFIG, compiled
from tests.pairwise import cover, product

FOLDER = Path(__file__).parents[2] / "examples/models/tiny-math"
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER / "target")
PROMPT: list[int] = TOKENIZER("Question: What is 3 + 4?\nAnswer:")["input_ids"]
VOCAB = 3072
DIGITS = [token for token in range(VOCAB) if any(c.isdigit() for c in TOKENIZER.decode([token]))]
KINDS = {
    "none": ("none", "strict"), "ngram": ("ngram", "strict"), "strict": ("eagle3", "strict"),
    "probabilistic": ("eagle3", "probabilistic"), "block": ("eagle3", "block"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER / "target", dtype=torch.float64)


@pytest.fixture(scope="module", params=KINDS)
def decoder(model: Any, request: pytest.FixtureRequest) -> SpeculativeDecoder:
    kind, rule = KINDS[request.param]
    if kind != "eagle3":
        return compiled(model, kind)
    return specgraph.compile_speculative(model, {**CONFIG, "verify": {"rule": rule}}, draft=FOLDER / "eagle3")


def all_but(*tokens: int) -> list[int]:
    return [token for token in range(VOCAB) if token not in tokens]


def nothing(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.full_like(scores, -torch.inf)


# What leaves the second of three sequences without a token; the tokens before that, the options that are named.
EMPTY: dict[str, tuple[dict[str, Any], list[int], str]] = {
    "a grammar of what is forbidden": (
        {"regex": [None, "[0-9]{3}", None], "suppress_tokens": [None, DIGITS, None]},
        [], "suppress_tokens and regex together forbid",
    ),
    "words behind two tokens": (
        {"suppress_tokens": [None, all_but(7), None], "bad_words_ids": [None, [[7, 7, 7]], None]},
        [7, 7], "bad_words_ids and suppress_tokens together forbid",
    ),
    "a minimum": (
        {"suppress_tokens": [None, all_but(5, 7), None], "bad_words_ids": [None, [[7, 7]], None],
         "min_new_tokens": [0, 4, 0], "eos_token_id": 5},
        [7], "bad_words_ids, suppress_tokens and min_new_tokens together forbid",
    ),
    "a forced end": (
        {"regex": [None, "(ab){40}", None], "forced_eos_token_id": [[], [5], []], "max_new_tokens": [6, 1, 6]},
        [], "forced_eos_token_id and regex together forbid",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("decoder", "name", "temperature"),
    [
        ("none", "a grammar of what is forbidden", 0.0), ("none", "a forced end", 1.0),
        ("ngram", "a grammar of what is forbidden", 1.0), ("ngram", "a minimum", 0.0),
        ("strict", "words behind two tokens", 1.0), ("strict", "a forced end", 0.0),
        ("probabilistic", "words behind two tokens", 0.0), ("probabilistic", "a minimum", 1.0),
        ("block", "a grammar of what is forbidden", 1.0), ("block", "words behind two tokens", 1.0),
    ],
    indirect=["decoder"],
)  # fmt: skip
def test_one_sequence_ends_with_a_sentence_and_the_others_are_what_they_are_alone(
    decoder: SpeculativeDecoder, name: str, temperature: float
) -> None:
    given, before, named = EMPTY[name]
    options = {"max_new_tokens": 6, "eos_token_id": [], "temperature": temperature, "tokenizer": TOKENIZER}
    options |= {"eos_token_id": 0, "seed": [1, 2, 3]} | given
    prompts = [PROMPT, [*PROMPT, 7, 7, 7, 7, 12], PROMPT[:5]]
    with pytest.raises(InputError, match=named) as caught:
        decoder.generate(prompts, **options)
    message = str(caught.value)
    assert f"sequence 1 behind {len(prompts[1])} prompt and {len(before)} new tokens" in message
    assert "\n" not in message and len(message) < 300
    out = caught.value.output
    assert out.new_tokens[1].tolist() == before and out.finish_reasons[1] == "error"
    assert out.errors == [None, caught.value, None]
    free = {key: value for key, value in options.items() if key in ("eos_token_id", "temperature", "seed")}
    alone = decoder.generate(prompts, **free, max_new_tokens=6)
    assert [out.new_tokens[n].tolist() for n in (0, 2)] == [alone.new_tokens[n].tolist() for n in (0, 2)]
    streamed: list[list[int]] = [[], [], []]
    with pytest.raises(InputError, match=named):
        for chunk in decoder.stream(prompts, **options):
            streamed = [known + new for known, new in zip(streamed, chunk.tokens, strict=True)]
            reasons = chunk.finish_reasons
    assert streamed == [new.tolist() for new in out.new_tokens] and reasons == out.finish_reasons


@pytest.mark.parametrize("decoder", ["none", "ngram", "block"], indirect=True)
def test_a_session_tells_that_sequence_alone(decoder: SpeculativeDecoder) -> None:
    with decoder.session(tokenizer=TOKENIZER) as session:
        first = session.submit([*PROMPT, 222, 20, 222, 20], max_new_tokens=6, regex=" 3", suppress_tokens=[20])
        second = session.submit(PROMPT, max_new_tokens=6)
        tokens: dict[int, list[int]] = {first: [], second: []}
        ends = {}
        for event in session:
            tokens[event.id] += event.tokens
            ends[event.id] = (event.finish_reason, event.error)
    (alone,) = decoder.generate([PROMPT], max_new_tokens=6).new_tokens
    assert tokens[first] == [222] and tokens[second] == alone.tolist()
    message = "No token is left for sequence 0 behind 17 prompt and 1 new tokens: suppress_tokens and regex"
    assert ends[first][0] == "error" and str(ends[first][1]).startswith(message)


def test_a_trace_has_the_tokens_up_to_the_end(model: Any) -> None:
    """The step that finds no token left has accepted a draft, which is told as by every other step."""
    options = {"suppress_tokens": [all_but(7), None], "bad_words_ids": [[[7, 7, 7]], None], "eos_token_id": []}
    decoder = compiled(model, "ngram")
    with pytest.raises(InputError, match="No token is left") as caught:
        decoder.generate([[*PROMPT, 12, 7, 7, 12], PROMPT], max_new_tokens=6, trace=True, **options)
    out = caught.value.output
    first, last = out.trace.of(0)
    assert (first.tokens, last.tokens) == ((7,), (7,)) and first.prompt and not last.prompt
    assert last.drafts[0].token == 7 and last.drafts[0].target_rank == 1 and last.drafts[0].target_probability == 1
    assert last.num_accepted == 1 < len(last.drafts) and last.own_token is last.own_probability is last.own_rank is None
    assert out.stats.emitted_per_step[0] == [1]
    other = [token for step in out.trace.of(1) for token in step.tokens]
    assert other == out.new_tokens[1].tolist() and len(other) == 6


def test_rows_behind_rejected_drafts_may_have_no_token(model: Any) -> None:
    """Behind 8 nothing is left. It is drafted behind every 7, and never drawn."""
    prompt = [*PROMPT, 7, 8, 7, 8, 7]
    options = {"max_new_tokens": 8, "eos_token_id": [], "suppress_tokens": all_but(7, 8)}
    options |= {"bad_words_ids": [[8, 7], [8, 8]], "sequence_bias": {(7,): 1000.0}}
    out = compiled(model, "ngram").generate([prompt], **options)
    assert out.new_tokens[0].tolist() == [7] * 8 and out.finish_reasons == ["length"]


@pytest.mark.parametrize("by", ["words", "function", "processor"])
def test_rows_behind_an_accepted_eos_may_have_no_token(model: Any, by: str) -> None:
    def allowed(place: int, tokens: torch.Tensor) -> list[int]:
        return {8: [9], 9: []}.get(int(tokens[-1]), [8])

    def processor(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forbidden = torch.ones_like(scores, dtype=torch.bool)
        forbidden[0, allowed(0, tokens[0])] = False
        return scores.masked_fill(forbidden, -torch.inf)

    prompt = [*PROMPT, 8, 9, 8, 9, 8, 9, 12]
    words = {"suppress_tokens": all_but(8, 9), "bad_words_ids": [[12, 9], [8, 8], [9, 8]]}
    words |= {"sequence_bias": {(9, 9): -torch.inf}}
    given: dict[str, dict[str, Any]] = {
        "words": words, "function": {"prefix_allowed_tokens_fn": allowed}, "processor": {"logits_processor": processor},
    }  # fmt: skip
    out = compiled(model, "ngram").generate([prompt], max_new_tokens=8, eos_token_id=9, **given[by])
    assert out.new_tokens[0].tolist() == [8, 9] and out.finish_reasons == ["eos"]
    assert out.stats.emitted_per_step[0] == [1]  # the draft of 9 was accepted, with rows behind it


def test_a_model_of_minus_infinity_is_an_error_of_numerics(model: Any) -> None:
    broken = AutoModelForCausalLM.from_pretrained(FOLDER / "draft", dtype=torch.float64)
    head = broken.lm_head
    decoder = compiled(broken, "none")
    with torch.no_grad():
        head.weight.fill_(-torch.inf)
    with pytest.raises((NumericsError, InputError)) as caught:
        decoder.generate([PROMPT, PROMPT], max_new_tokens=3)
    assert isinstance(caught.value, NumericsError) and len(caught.value.output.errors) == 2


FORCED: dict[str, tuple[dict[str, Any], Callable[[list[int]], bool]]] = {
    "a bad word": ({"prefix_allowed_tokens_fn": lambda b, i: [9], "bad_words_ids": [[9]]}, lambda new: new == [9] * 6),
    "a minimum": (
        {"prefix_allowed_tokens_fn": lambda b, i: [5], "eos_token_id": 5, "min_new_tokens": 4}, lambda new: new == [5],
    ),
    "two bad words": (
        {"prefix_allowed_tokens_fn": lambda b, i: [9, 12], "bad_words_ids": [[9], [12]]},
        lambda new: {*new} <= {9, 12} and len(new) == 6,
    ),
    "no token at all": ({"logits_processor": [nothing], "eos_token_id": 5}, lambda new: new == [0] * 6),
    "all are suppressed": ({"suppress_tokens": [*range(VOCAB)], "eos_token_id": 5}, lambda new: new == [0] * 6),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["none", "ngram"])
def test_an_attached_model_does_what_transformers_does(model: Any, kind: str) -> None:
    prompt = torch.tensor([[*PROMPT, 9, 9, 0, 0, 0]])
    calls = {(name, drawn): {**FORCED[name][0], "max_new_tokens": 6, "do_sample": drawn} for name in FORCED
             for drawn in (False, True)}  # fmt: skip
    mask = torch.ones_like(prompt)
    fails = [("no token at all", True), ("all are suppressed", True)]
    before = {key: model.generate(prompt, attention_mask=mask, **calls[key]) for key in calls if key not in fails}
    specgraph.attach(model, {**CONFIG, "draft": {"kind": kind}})
    try:
        for key, expected in before.items():
            found = model.generate(prompt, attention_mask=mask, **calls[key])
            assert FORCED[key[0]][1](found[0, prompt.shape[1] :].tolist()), key
            assert key[1] or torch.equal(found, expected), key
        for key in fails:  # transformers' torch.multinomial fails, too
            with pytest.raises(InputError, match="No token is left for sequence 0"):
                model.generate(prompt, attention_mask=mask, **calls[key])
        with pytest.raises(ValueError, match="prefix_allowed_tokens_fn allows no token behind"):
            model.generate(prompt, attention_mask=mask, prefix_allowed_tokens_fn=lambda b, i: [], max_new_tokens=2)
    finally:
        specgraph.detach(model)


LEAST = {
    "temperature": (0.0, 1.0), "eos": (0, 5),
    "least": (("min_new_tokens", 6), ("min_length", len(PROMPT) + 6), ("min_new_tokens", 3)),
}  # fmt: skip


@pytest.mark.parametrize("decoder", ["none", "ngram", "block"], indirect=True)
def test_a_grammar_counts_before_a_minimum_that_it_cannot_reach(decoder: SpeculativeDecoder) -> None:
    options: dict[str, Any] = {"tokenizer": TOKENIZER, "max_new_tokens": 12, "seed": 1}
    for temperature, eos, (name, least) in cover(product(LEAST), (1, 2)):
        with pytest.warns(SpecgraphWarning, match="behind 2 new tokens, before the [36] that min_new"):
            out = decoder.generate(
                [PROMPT], regex=" 3", eos_token_id=eos, temperature=temperature, **{name: least}, **options
            )
        assert out.new_tokens[0].tolist() == [222, 20, eos] and out.finish_reasons == ["eos"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = decoder.generate([PROMPT], regex="[0-9]+", min_new_tokens=6, temperature=1.0, **options)
    assert len(TOKENIZER.decode(out.new_tokens[0], skip_special_tokens=True)) >= 6 and 0 not in out.new_tokens[0][:6]
    assert len(out.new_tokens[0]) > 6
