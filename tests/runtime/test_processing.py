"""Options that change logits: transformers' own ``generate`` is the oracle, and drafts and batches change nothing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from specgraph import InputError, SpeculativeDecoder
from specgraph.passes.insert_processors import OPTIONS as STATE_OF_THE_PASS
from specgraph.runtime.requests.logit_option_table import LOGIT_OPTIONS
from specgraph.runtime.requests.logit_options import LogitOptions, read_logit_options
from specgraph.runtime.requests.processing import OPTION_STATE, Processing
from tests.decoding import CONFIG, compiled
from tests.models import VOCAB, ragged_prompts, shared_model
from tests.runtime.test_decoder import noisy_copy

NEW = 24
PROMPTS = [*ragged_prompts((3, 17, 8)), torch.tensor([4, 5, 4, 5, 4, 5, 4, 9])]
DRAFTERS = ("none", "ngram", "draft_model")


@pytest.fixture(scope="module")
def model() -> Any:
    return shared_model("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def decoders(model: Any) -> dict[str, SpeculativeDecoder]:
    drafts = {"draft_model": noisy_copy()}
    return {kind: compiled(model, kind, draft=drafts.get(kind), max_length=96) for kind in DRAFTERS}


class Counted(LogitsProcessor):  # type: ignore[misc]
    """Frequency and presence penalty for transformers, which has neither."""

    def __init__(self, prompt: int, frequency: float, presence: float) -> None:
        self.prompt, self.frequency, self.presence = prompt, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids[:, self.prompt :], torch.ones_like(scores))
        return scores - self.frequency * counts - self.presence * (counts > 0)


def oracle(model: Any, prompt: Tensor, options: dict[str, Any], **more: Any) -> list[int]:
    """transformers' greedy continuation of one prompt."""
    own = {name: value for name, value in options.items() if name not in ("frequency_penalty", "presence_penalty")}
    counted = Counted(len(prompt), options.get("frequency_penalty", 0.0), options.get("presence_penalty", 0.0))
    ids = model.generate(
        prompt.unsqueeze(0), do_sample=False, pad_token_id=0, logits_processor=LogitsProcessorList([counted]),
        **{"max_new_tokens": NEW, **more}, **own,
    )  # fmt: skip
    return [int(token) for token in ids[0, len(prompt) :]]


GREEDY: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "a reward": {"repetition_penalty": 0.8},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 1.9},
    "all penalties": {"repetition_penalty": 1.1, "frequency_penalty": -0.4, "presence_penalty": 0.6},
    "pairs": {"no_repeat_ngram_size": 2},
    "single tokens": {"no_repeat_ngram_size": 1},
    "suppressed": {"suppress_tokens": [8, 20, 33, 44, 67, 90]},
    "suppressed at first": {"begin_suppress_tokens": [*range(3, 90)]},
    "a bias": {"sequence_bias": {(5,): 6.0, (5, 9): 40.0, (9, 33): -5.0}},
    "a bias as a list": {"sequence_bias": [[[5], 6.0], [[5, 9], 40.0]]},
    "bad words": {"bad_words_ids": [[token] for token in range(3, 40)] + [[50, 51], [60, 61, 62]]},
    "a last token": {"forced_eos_token_id": 7},
    "one of several last tokens": {"forced_eos_token_id": [90, 88]},
    "everything": {
        "repetition_penalty": 1.2, "frequency_penalty": 0.1, "no_repeat_ngram_size": 3, "suppress_tokens": [8],
        "sequence_bias": {(5,): 9.0}, "bad_words_ids": [[9], [5, 5]], "min_new_tokens": 9, "forced_eos_token_id": 7,
    },
}  # fmt: skip


@functools.cache
def expected_greedy(model: Any, name: str | None) -> list[list[int]]:
    """transformers' continuations of all prompts with the options of a name, or without any."""
    return [oracle(model, prompt, {} if name is None else GREEDY[name]) for prompt in PROMPTS]


@pytest.mark.parametrize("name", GREEDY)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_tokens_are_those_of_transformers(
    model: Any, decoders: dict[str, SpeculativeDecoder], kind: str, name: str
) -> None:
    out = decoders[kind].generate(PROMPTS, max_new_tokens=NEW, **GREEDY[name])
    expected = expected_greedy(model, name)
    assert [row.tolist() for row in out.new_tokens] == expected
    assert expected != expected_greedy(model, None)
    if kind == "draft_model":
        assert max(map(max, out.stats.emitted_per_step)) > 1, "drafts are accepted"


def ends_early(model: Any, index: int) -> int:
    """A token that ends a sequence early if it is an EOS."""
    return oracle(model, PROMPTS[index], {}, eos_token_id=None)[3]


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, ({"min_new_tokens": 9}, {"min_length": 20})[index % 2]) for index, kind in enumerate(DRAFTERS)],
    ids=str,
)
def test_no_eos_comes_before_a_sequence_is_long_enough(
    model: Any, decoders: dict[str, SpeculativeDecoder], kind: str, options: dict[str, Any]
) -> None:
    for index, prompt in enumerate(PROMPTS):
        eos = ends_early(model, index)
        short, expected = (oracle(model, prompt, own, eos_token_id=eos) for own in ({}, options))
        out = decoders[kind].generate([prompt], max_new_tokens=NEW, eos_token_id=eos, **options)
        assert out.new_tokens[0].tolist() == expected
        assert len(expected) > len(short) or len(prompt) > 16


def test_lengths_count_padding_as_transformers_does(model: Any, decoders: dict[str, SpeculativeDecoder]) -> None:
    eos = ends_early(model, 0)
    ids = torch.cat([torch.zeros(6, dtype=torch.int64), PROMPTS[0]]).unsqueeze(0)
    mask = (torch.arange(9) >= 6).long().unsqueeze(0)
    for options in ({"min_length": 14}, {"min_new_tokens": 5}):
        given = {"max_new_tokens": NEW, "eos_token_id": eos, "pad_token_id": 0, **options}
        expected = model.generate(ids, attention_mask=mask, do_sample=False, **given)
        assert torch.equal(decoders["none"].generate(ids, mask, **given).sequences, expected)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_bos_is_forced_behind_a_prompt_of_one_token(
    model: Any, decoders: dict[str, SpeculativeDecoder], kind: str
) -> None:
    options = {"forced_bos_token_id": 9, "begin_suppress_tokens": [*range(3, 80)]}
    for prompt in (torch.tensor([5]), torch.tensor([5, 6])):
        out = decoders[kind].generate([prompt], max_new_tokens=6, **options).new_tokens[0].tolist()
        assert out == oracle(model, prompt, options, max_new_tokens=6)
        assert (out[0] == 9) == (len(prompt) == 1)


EACH: dict[str, list[Any]] = {
    "repetition_penalty": [1.0, 1.3, 0.9, 2.0],
    "frequency_penalty": [0.5, 0.0, 0.0, 0.3],
    "presence_penalty": [0.0, 0.0, 1.5, -0.5],
    "no_repeat_ngram_size": [0, 2, 0, 3],
    "suppress_tokens": [None, [8, 11], [], [67]],
    "bad_words_ids": [[[7, 8], [9]], None, [[5]], None],
    "sequence_bias": [{(5,): 3.0}, None, None, {(5, 4): -3.0, (9,): 1.0}],
    "min_new_tokens": [0, 5, 9, 0],
    "forced_eos_token_id": [[4], [5], [6], [7]],
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_depends_on_drafts_on_the_batch_or_on_its_order(
    decoders: dict[str, SpeculativeDecoder], temperature: float
) -> None:
    sampling: dict[str, Any] = {"max_new_tokens": NEW, "temperature": temperature, "return_logprobs": True}
    seeds = [7, 8, 9, 10]
    plain = decoders["none"].generate(PROMPTS, seed=seeds, **sampling, **EACH)
    for decoder in decoders.values():
        together = decoder.generate(PROMPTS, seed=seeds, **sampling, **EACH)
        order = [2, 0, 3, 1]
        turned = decoder.generate(
            [PROMPTS[n] for n in order], seed=[seeds[n] for n in order], **sampling,
            **{name: [values[n] for n in order] for name, values in EACH.items()},
        )  # fmt: skip
        for place, n in enumerate(order):
            for out, row in ((together, n), (turned, place)):
                assert torch.equal(out.new_tokens[row], plain.new_tokens[n])
                torch.testing.assert_close(out.logprobs[row], plain.logprobs[n], rtol=1e-6, atol=1e-6)
        own = {name: values[3] for name, values in EACH.items() if values[3] is not None}
        alone = decoder.generate([PROMPTS[3]], seed=[seeds[3]], **sampling, **own)
        assert torch.equal(alone.new_tokens[0], plain.new_tokens[3])


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_rules_that_compare_distributions_compare_the_changed_ones(model: Any, rule: str) -> None:
    decoder = compiled(model, "draft_model", draft=noisy_copy(), max_length=96, verify={"rule": rule})
    out = decoder.generate(PROMPTS, max_new_tokens=NEW, **EACH)
    for n, prompt in enumerate(PROMPTS):
        expected = oracle(model, prompt, {name: values[n] for name, values in EACH.items()})
        assert out.new_tokens[n].tolist() == expected


def test_sequences_of_a_session_have_options_of_their_own(decoders: dict[str, SpeculativeDecoder]) -> None:
    """One that asks for nothing runs before, beside and after one that does."""
    decoder, tokens = decoders["draft_model"], {}
    wanted = {0: {}, 1: {"repetition_penalty": 1.3}, 2: {"frequency_penalty": 0.7}, 3: {}}
    with decoder.session() as session:
        numbers = {session.submit(PROMPTS[0], max_new_tokens=NEW): 0}
        for count, event in enumerate(session):
            tokens.setdefault(numbers[event.id], []).extend(event.tokens)
            if count == 1:
                numbers |= {session.submit(PROMPTS[n], max_new_tokens=NEW, **wanted[n]): n for n in (1, 2, 3)}
    for n, options in wanted.items():
        assert tokens[n] == decoder.generate([PROMPTS[n]], max_new_tokens=NEW, **options).new_tokens[0].tolist()


def test_tokens_of_a_prefix_that_is_reused_count(model: Any) -> None:
    config = {"cache": {**CONFIG["cache"], "reuse_prefixes": True}, "max_length": 96}
    decoder = compiled(model, "none", **config)
    with decoder.session() as session:
        history, prompt = session._engine._runner.state["history"], PROMPTS[1]
        for _ in range(2):
            session.submit(prompt, max_new_tokens=NEW, repetition_penalty=1.3)
            tokens = [token for event in session for token in event.tokens]
            assert tokens == oracle(model, prompt, {"repetition_penalty": 1.3})
            assert torch.equal(history[0, : len(prompt)], prompt)
        reused = session.stats.reused_tokens
        assert reused > 0
        session.submit(prompt, max_new_tokens=NEW)
        assert [token for event in session for token in event.tokens] == oracle(model, prompt, {})
        assert session.stats.reused_tokens > reused and not history[0].any(), "a sequence without options needs none"


def test_raw_log_probabilities_are_the_models_and_processed_ones_the_changed(
    model: Any, decoders: dict[str, SpeculativeDecoder]
) -> None:
    penalty = 1.3
    for kind in ("raw", "processed"):
        out = decoders["ngram"].generate(
            [PROMPTS[1]], max_new_tokens=6, repetition_penalty=penalty, return_logprobs=kind, temperature=1.0, seed=3
        )
        tokens = torch.cat([PROMPTS[1], out.new_tokens[0]])
        logits = model(tokens.unsqueeze(0)).logits[0].detach()
        for n, (token, value) in enumerate(zip(out.new_tokens[0], out.logprobs[0], strict=True)):
            x = logits[len(PROMPTS[1]) + n - 1].clone()
            if kind == "processed":
                known = tokens[: len(PROMPTS[1]) + n].unique()
                x[known] = torch.where(x[known] < 0, x[known] * penalty, x[known] / penalty)
            torch.testing.assert_close(value.double(), x.log_softmax(-1)[token], rtol=1e-5, atol=1e-5)


def test_what_a_generation_config_asks_for_is_the_default() -> None:
    from tests.models import make_model

    model = make_model("llama", dtype=torch.float64)
    expected = [oracle(model, prompt, {"repetition_penalty": 1.3}) for prompt in PROMPTS]
    plain = [oracle(model, prompt, {}) for prompt in PROMPTS]
    model.generation_config.repetition_penalty = 1.3
    decoder = compiled(model, "none", max_length=96)
    assert [row.tolist() for row in decoder.generate(PROMPTS, max_new_tokens=NEW).new_tokens] == expected
    off = decoder.generate(PROMPTS, max_new_tokens=NEW, repetition_penalty=1.0)
    assert [row.tolist() for row in off.new_tokens] == plain


def test_last_tokens_of_several_are_drawn_alike(decoders: dict[str, SpeculativeDecoder]) -> None:
    last = [[4, 5], [6], [], None]
    out = decoders["ngram"].generate(PROMPTS, max_new_tokens=4, temperature=1.0, forced_eos_token_id=last, seed=3)
    assert int(out.new_tokens[0][-1]) in last[0] and out.new_tokens[1][-1] == 6
    many = decoders["ngram"].generate(
        PROMPTS[:1], do_sample=True, num_return_sequences=64, max_new_tokens=1, forced_eos_token_id=[4, 5], seed=1
    )
    assert {int(new) for new in many.new_tokens} == {4, 5}
    with decoders["ngram"].session() as session:
        session.submit(PROMPTS[0], max_new_tokens=4, forced_eos_token_id=[5, 4])
        assert [token for event in session for token in event.tokens][-1] == 4


def test_the_table_of_options_fills_what_the_step_reads() -> None:
    assert STATE_OF_THE_PASS.keys() == OPTION_STATE


def test_every_option_has_a_value_that_asks_for_nothing(decoders: dict[str, SpeculativeDecoder]) -> None:
    off = {name: option.off for name, option in LOGIT_OPTIONS.items()}
    out = decoders["ngram"].generate(PROMPTS, max_new_tokens=3, **off)
    assert out.stats.host_steps == 0
    (values,) = read_logit_options({"forced_eos_token_id": 7, "suppress_tokens": [3], **off}, 1, VOCAB)
    assert LogitOptions(values, 3, 5, (2,)).processing(0, VOCAB) == Processing()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "zero": ({"repetition_penalty": 0}, "repetition_penalty must be more than 0; 1 is off, got 0."),
    "nan": ({"presence_penalty": float("nan")}, "presence_penalty must be a finite number; 0 is off, got nan."),
    "infinite": ({"frequency_penalty": float("inf")}, "frequency_penalty must be a finite number; 0 is off, got inf."),
    "too many": ({"repetition_penalty": [1.0, 2.0]}, "repetition_penalty has 2 values for 4 sequences."),
    "half a count": ({"no_repeat_ngram_size": 2.5}, "no_repeat_ngram_size must be an integer, got 2.5."),
    "a long n-gram": ({"no_repeat_ngram_size": 257}, "no_repeat_ngram_size must be 0 (off) to 256, got 257."),
    "a negative count": ({"min_new_tokens": -1}, "min_new_tokens must be 0 or more, got -1."),
    "no token": (
        {"suppress_tokens": [101]}, "suppress_tokens has 101, which is not a token id; ids are 0 to 100.",
    ),
    "a negative token": (
        {"forced_eos_token_id": -1}, "forced_eos_token_id has -1, which is not a token id; ids are 0 to 100.",
    ),
    "words of text": (
        {"bad_words_ids": "rude"},
        "bad_words_ids is a list of words, each a list of token ids, or a list with one of these per sequence, not "
        "'rude'.",
    ),
    "an empty word": ({"bad_words_ids": [[3], []]}, "bad_words_ids has a word without tokens; give each at least one."),
    "words for others": ({"suppress_tokens": [[3], [4]]}, "suppress_tokens has 2 entries for 4 sequences."),
    "a bias of text": (
        {"sequence_bias": {(3,): "much"}}, "sequence_bias must have numbers below infinity as biases, got 'much'.",
    ),
    "an infinite bias": (
        {"sequence_bias": {(3,): float("inf")}}, "sequence_bias must have numbers below infinity as biases, got inf.",
    ),
    "a bias without a word": (
        {"sequence_bias": {3: 1.0}},
        "sequence_bias is a mapping from tuples of token ids to numbers, or a list with one of these per sequence, not "
        "{3: 1.0}.",
    ),
    "text": (
        {"frequency_penalty": "1"},
        "frequency_penalty must be a number or one number per sequence, not str.",
    ),
    "another name": (
        {"repetition_penality": 1.0},
        "There is no argument 'repetition_penality'; did you mean 'repetition_penalty'?",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_refused(decoders: dict[str, SpeculativeDecoder], name: str) -> None:
    options, message = BAD[name]
    for call in (decoders["none"].generate, decoders["none"].stream):
        with pytest.raises(InputError) as caught:
            call(PROMPTS, max_new_tokens=2, **options)
        assert str(caught.value) == message


def test_a_session_refuses_what_it_does_not_know(decoders: dict[str, SpeculativeDecoder]) -> None:
    with decoders["none"].session() as session:
        for name, message in {
            "presense_penalty": "There is no argument 'presense_penalty'; did you mean 'presence_penalty'?",
            "xyzzy": "There is no argument 'xyzzy'; help(decoder.generate) lists what there is.",
            "stop_strings": "stop_strings is a text or a list of texts that are not empty, not 1.5.",
            "streamer": "submit does not take streamer, which is for generate and stream; leave it out.",
            "num_beams": "num_beams=1.5 is not supported (tokens are chosen greedily or by sampling); leave it out.",
        }.items():
            with pytest.raises(InputError) as caught:
                session.submit(PROMPTS[0], **{name: 1.5})
            assert str(caught.value) == message


def test_a_session_has_room_for_so_many_words(decoders: dict[str, SpeculativeDecoder]) -> None:
    words = [[token, token] for token in range(3, 101)]
    longer = [[*word, 3] for word in words]
    with decoders["none"].session() as session:
        session.submit(PROMPTS[0], bad_words_ids=words, max_new_tokens=2)
        with pytest.raises(InputError, match="biases for words of 294 tokens, and there is room for 256; give fewer"):
            session.submit(PROMPTS[0], bad_words_ids=longer, max_new_tokens=2)
    assert len(decoders["none"].generate(PROMPTS, bad_words_ids=longer, max_new_tokens=2).new_tokens[0]) > 0


def test_a_step_without_the_nodes_says_so(model: Any) -> None:
    order = ["expose_features", "insert_kv_cache", "insert_draft", "insert_verify"]
    decoder = compiled(model, "none", max_length=96, pipeline={"order": order})
    assert len(decoder.generate([PROMPTS[0]], max_new_tokens=2).new_tokens[0]) == 2
    with pytest.raises(InputError, match="asks for repetition_penalty, which this step has no nodes for; compile with"):
        decoder.generate([PROMPTS[0]], max_new_tokens=2, repetition_penalty=1.2)
