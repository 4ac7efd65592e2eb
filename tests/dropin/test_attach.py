"""An attached model's ``generate`` beside the same model's before: the oracle is transformers."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    WatermarkingConfig,
    pipeline,
)
from transformers.generation import (
    BaseStreamer,
    GenerateDecoderOnlyOutput,
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TypicalLogitsWarper,
)

import specgraph
from specgraph import ConfigError, InputError
from tests.decoding import CONFIG
from tests.models import VOCAB, ragged_prompts, shared_model

PROMPTS = ragged_prompts((3, 17, 8))
NEW = 12


def left_padded(prompts: list[Tensor], pad: int = 0) -> dict[str, Tensor]:
    width = max(map(len, prompts))
    rows = [torch.cat([p.new_full((width - len(p),), pad), p]) for p in prompts]
    mask = [torch.cat([torch.zeros(width - len(p)), torch.ones(len(p))]).long() for p in prompts]
    return {"input_ids": torch.stack(rows), "attention_mask": torch.stack(mask)}


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w0", padding_side="left")


def attached(model: PreTrainedModel, kind: str = "ngram", **extra: Any) -> PreTrainedModel:
    """A copy, so that models that tests share stay as they are."""
    own = copy.deepcopy(model)
    specgraph.attach(own, {**CONFIG, "draft": {"kind": kind, "num_speculative_tokens": 3}, **extra})
    return own


@pytest.fixture(scope="module", params=["qwen3", "gemma3_text", "gpt_oss", "qwen3_5_text"])
def both(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A model as it is, and attached."""
    model = shared_model(request.param, dtype=torch.float64)
    return model, attached(model)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    model = shared_model("llama", dtype=torch.float64)
    return model, attached(model)


PADDED = left_padded(PROMPTS)
ONE = {"input_ids": PROMPTS[1].unsqueeze(0)}
CALLS: dict[str, dict[str, Any]] = {
    "one prompt": {**ONE, "max_new_tokens": NEW},
    "left padding": {**PADDED, "max_new_tokens": NEW},
    "the default length": ONE,
    "max_length": {**PADDED, "max_length": 25},
    "several EOS ids": {**PADDED, "max_new_tokens": 40, "eos_token_id": [2, 7, 11, 50, 60, 61, 62]},
    "its own pad id": {**PADDED, "max_new_tokens": 40, "eos_token_id": [7, 11, 50], "pad_token_id": 5},
    "no EOS": {**PADDED, "max_new_tokens": NEW, "eos_token_id": None},
    "a generation config": {**PADDED, "generation_config": GenerationConfig(max_new_tokens=7, eos_token_id=2)},
    "several of a prompt": {**PADDED, "max_new_tokens": 5, "num_beams": 1, "num_return_sequences": 1},
    "without a cache": {**ONE, "max_new_tokens": NEW, "use_cache": False},
    "warpers that a greedy choice ignores": {
        **ONE, "max_new_tokens": NEW, "logits_processor": LogitsProcessorList([TopKLogitsWarper(3)]),
    },
    "normalised scores": {**ONE, "max_new_tokens": NEW, "renormalize_logits": True},
    "ids of 32 bits": {"input_ids": ONE["input_ids"].int(), "max_new_tokens": NEW},
    "an EOS that is no token": {**PADDED, "max_new_tokens": NEW, "eos_token_id": -1, "min_new_tokens": 3},
    "ends that are no tokens": {**ONE, "max_new_tokens": 40, "eos_token_id": [7, 5000], "pad_token_id": -100},
    "no prompt": {"max_new_tokens": NEW, "bos_token_id": 5},
}  # fmt: skip


@pytest.mark.parametrize("name", ["one prompt", "left padding", "several EOS ids"])
def test_greedy_output_of_other_models_is_what_it_was(both: tuple[Any, Any], name: str) -> None:
    """Who reads the arguments of a call does not know the model."""
    model, own = both
    assert torch.equal(own.generate(**CALLS[name], do_sample=False), model.generate(**CALLS[name], do_sample=False))


@pytest.mark.parametrize("name", CALLS)
def test_greedy_output_is_what_it_was(pair: tuple[Any, Any], name: str) -> None:
    model, own = pair
    options = {"do_sample": False, **CALLS[name]}
    expected, actual = model.generate(**options), own.generate(**options)
    assert torch.equal(actual, expected) and actual.dtype == expected.dtype and actual.device == expected.device
    whole = own.generate(**options | {"return_dict_in_generate": True})
    assert type(whole) is GenerateDecoderOnlyOutput and torch.equal(whole.sequences, expected)


def test_the_first_argument_may_be_given_by_its_place(pair: tuple[Any, Any]) -> None:
    model, own = pair
    assert torch.equal(
        own.generate(ONE["input_ids"], max_new_tokens=3), model.generate(ONE["input_ids"], max_new_tokens=3)
    )


def test_a_changed_generation_config_counts_from_the_next_call_on(pair: tuple[Any, Any]) -> None:
    model, own = (copy.deepcopy(pair[0]), pair[1])
    before = copy.deepcopy(own.generation_config)
    try:
        for each in (model, own):
            each.generation_config.max_new_tokens, each.generation_config.eos_token_id = 9, [7, 50, 60]
        assert torch.equal(own.generate(**PADDED), model.generate(**PADDED))
    finally:
        own.generation_config = before


OFF: dict[str, tuple[Any, Any]] = {
    "repetition_penalty": (1.4, 1.0),
    "no_repeat_ngram_size": (1, 0),
    "suppress_tokens": ([26, 46, 60, 70], None),
    "begin_suppress_tokens": ([46, 60, 75], None),
    "bad_words_ids": ([[26], [46]], None),
    "sequence_bias": ({(9,): 30.0}, None),
    "forced_eos_token_id": (9, None),
    "min_new_tokens": (NEW, 0),
    "eos_token_id": ([46, 26], None),
    "stop_strings": ([*"6v"], None),
}
"""What a model's configuration asks for, and what a call says instead."""


@pytest.mark.parametrize("name", OFF)
def test_a_call_can_switch_off_what_the_models_configuration_asks_for(pair: tuple[Any, Any], name: str) -> None:
    model, own = (copy.deepcopy(pair[0]), pair[1])
    before = copy.deepcopy(own.generation_config)
    by_config, by_call = OFF[name]
    call = {**PADDED, "max_new_tokens": NEW, "eos_token_id": [50] if name == "min_new_tokens" else 2} | {name: by_call}
    try:
        for each in (model, own):
            setattr(each.generation_config, name, by_config)
        assert torch.equal(own.generate(**call), model.generate(**call))
        named = {"tokenizer": TOKENIZER} if name == "stop_strings" else {}
        asked = {key: value for key, value in call.items() if key != name} | named
        expected = model.generate(**asked)
        assert torch.equal(own.generate(**asked), expected)
        assert not torch.equal(expected, model.generate(**call))
    finally:
        own.generation_config = before


class PausedValues(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.got: list[list[Any]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("prompts", [ONE, PADDED], ids=["one prompt", "several"])
def test_a_streamer_gets_what_it_got(pair: tuple[Any, Any], prompts: dict[str, Tensor]) -> None:
    kept = []
    for each in pair:
        streamer = PausedValues()
        each.generate(**prompts, streamer=streamer, max_new_tokens=30, eos_token_id=[2, 7, 11, 50, 60])
        kept.append((streamer.got, streamer.ended))
    assert kept[0] == kept[1] and kept[0][1] == 1


def test_sampling_follows_torchs_seed_and_the_models_own_probabilities(pair: tuple[Any, Any]) -> None:
    """Of two tokens that top-k leaves, each comes as often as their probabilities say."""
    model, own = pair
    count, options = 2000, {"do_sample": True, "top_k": 2, "temperature": 1.7, "max_new_tokens": 1}
    torch.manual_seed(3)
    first = own.generate(**ONE, **options, num_return_sequences=count)
    torch.manual_seed(3)
    assert torch.equal(own.generate(**ONE, **options, num_return_sequences=count), first)
    assert first.shape == (count, ONE["input_ids"].shape[1] + 1)
    with torch.no_grad():
        top = model(ONE["input_ids"]).logits[0, -1].topk(2)
    likely = float((top.values / 1.7).softmax(0)[0])
    share = float((first[:, -1] == top.indices[0]).double().mean())
    assert set(first[:, -1].tolist()) == set(top.indices.tolist())
    assert abs(share - likely) < 4.5 * (likely * (1 - likely) / count) ** 0.5


def test_warpers_of_the_caller_are_those_that_count(pair: tuple[Any, Any]) -> None:
    warpers = LogitsProcessorList([TopKLogitsWarper(1)])
    own = pair[1].generate(**PADDED, do_sample=True, top_k=0, logits_processor=warpers, max_new_tokens=NEW)
    assert torch.equal(own, pair[0].generate(**PADDED, do_sample=False, max_new_tokens=NEW))


TOKENIZER = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "examples/models/tiny-math/target")
"""Its first tokens are characters."""


class After(StoppingCriteria):
    """Ends a sequence behind some of the tokens, or where it is long."""

    def __init__(self, tokens: list[int], length: int) -> None:
        self.tokens, self.length = torch.tensor(tokens), length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.isin(input_ids[:, -1], self.tokens) | torch.tensor(input_ids.shape[1] >= self.length)


@pytest.mark.parametrize(
    "options",
    [
        {"stopping_criteria": StoppingCriteriaList([After([7, 11, 50, 94], 200)])},
        {"stopping_criteria": StoppingCriteriaList([After([], 23), After([60, 61], 200)])},
        {"max_time": 0.0},
        {"stop_strings": ["4", "e", "q", "T", "}"], "tokenizer": TOKENIZER},
        {"generation_config": GenerationConfig(stop_strings=[*"5fUr}"], max_new_tokens=40), "tokenizer": TOKENIZER},
    ],
    ids=["after a token", "at a length", "after a time", "stop strings", "a configuration's stop string"],
)
def test_stopping_criteria_end_what_they_ended(pair: tuple[Any, Any], options: dict[str, Any]) -> None:
    call = {**PADDED, "max_new_tokens": 40, "eos_token_id": 2, **options}
    if "generation_config" in options:
        del call["max_new_tokens"], call["eos_token_id"]
    expected, actual = (each.generate(**copy.deepcopy(call)) for each in pair)
    assert torch.equal(actual, expected)
    free = pair[1].generate(**PADDED, max_new_tokens=40, eos_token_id=2)
    assert not torch.equal(actual, free[:, : actual.shape[1]]) or actual.shape[1] < free.shape[1]


def test_a_pipeline_returns_what_it_did(pair: tuple[Any, Any]) -> None:
    tokenizer = word_tokenizer()
    texts = [
        pipeline("text-generation", model=each, tokenizer=tokenizer)(
            ["w3 w4 w5", "w9 w8 w7 w6 w5"], batch_size=2, max_new_tokens=9, do_sample=False, return_full_text=False
        )
        for each in pair
    ]
    assert texts[0] == texts[1] and all(text[0]["generated_text"] for text in texts[0])


PROCESSED: dict[str, dict[str, Any]] = {
    "a repetition penalty": {"repetition_penalty": 1.4},
    "no token twice": {"no_repeat_ngram_size": 1},
    "bad words": {"bad_words_ids": [[token] for token in range(3, 40)] + [[50, 51]]},
    "a bias": {"sequence_bias": [[[5], 6.0], [[5, 9], 40.0]], "begin_suppress_tokens": [*range(30, 60)]},
    "a minimum": {"min_new_tokens": 7, "eos_token_id": [*range(40)], "suppress_tokens": [44, 45]},
    "a length": {"min_length": 21, "eos_token_id": [*range(40)]},
    "forced": {"forced_eos_token_id": 7, "repetition_penalty": 1.3},
    "a processor of the caller's": {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(0.8)])},
}


@pytest.mark.parametrize("name", PROCESSED)
def test_processors_that_a_step_has_give_the_tokens_that_they_gave(pair: tuple[Any, Any], name: str) -> None:
    model, own = pair
    for given in (ONE, {"input_ids": ONE["input_ids"].repeat(2, 1).roll(1, 1)}):
        expected = model.generate(**given, max_new_tokens=NEW, do_sample=False, **PROCESSED[name])
        assert torch.equal(own.generate(**given, max_new_tokens=NEW, do_sample=False, **PROCESSED[name]), expected)
        assert not torch.equal(expected, model.generate(**given, max_new_tokens=NEW, do_sample=False))


def test_padding_is_penalised_or_not_as_transformers_has_it(pair: tuple[Any, Any]) -> None:
    expected, actual = (each.generate(**PADDED, max_new_tokens=NEW, repetition_penalty=1.4) for each in pair)
    assert torch.equal(actual, expected)


PADDING_COUNTS: dict[str, dict[str, Any]] = {
    "n-grams": {"no_repeat_ngram_size": 2, "sequence_bias": {(0,): 9.0, (44,): 1.0}},
    "single tokens": {"no_repeat_ngram_size": 1, "max_new_tokens": 60},
    "n-grams longer than a prompt": {"no_repeat_ngram_size": 6, "sequence_bias": {(0,): 30.0}},
    "a word longer than a prompt": {"sequence_bias": {(0, 63, 90, 94, 8): 40.0}},
    "a forbidden word longer than a prompt": {"bad_words_ids": [[0, 63, 90, 94, 46]]},
}  # fmt: skip


@pytest.mark.parametrize("name", PADDING_COUNTS)
def test_padding_is_tokens_where_transformers_has_it_so(pair: tuple[Any, Any], name: str) -> None:
    model, own = pair
    call = {**PADDED, "max_new_tokens": NEW, "eos_token_id": None, **PADDING_COUNTS[name]}
    expected = model.generate(**call)
    assert torch.equal(own.generate(**call), expected)
    for prompt in PROMPTS:
        call |= {"input_ids": prompt.unsqueeze(0), "attention_mask": None}
        alone = model.generate(**call)[0, len(prompt) :]
        if alone.tolist() not in expected[:, PADDED["input_ids"].shape[1] :].tolist():
            return
    raise AssertionError("padding changes nothing here")


class Wave(LogitsProcessor):
    """Shifts every score by something that depends on all tokens so far."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.sin(torch.arange(scores.shape[1]) * input_ids.sum(1, keepdim=True))


def own_third(place: int, tokens: Tensor) -> list[int]:
    """Every sequence of a batch has other tokens."""
    return list(range(3 + place % 3, VOCAB, 3))


ON_THE_HOST: dict[str, dict[str, Any]] = {
    "a decay": {"exponential_decay_length_penalty": (2, 1.2)},
    "a penalty that leaves out a part": {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.3,
                                                                                              prompt_ignore_length=2)]},
    "penalties twice": {
        "logits_processor": [RepetitionPenaltyLogitsProcessor(1.1), RepetitionPenaltyLogitsProcessor(1.3)],
    },
    "behind those of the step": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "logits_processor": [Wave()]},
    "in front of those of the step": {"logits_processor": [Wave(), RepetitionPenaltyLogitsProcessor(1.4)]},
    "a filter in front": {"logits_processor": [TopKLogitsWarper(4, filter_value=-3.0), Wave()]},
    "tokens by the place of the sequence": {"prefix_allowed_tokens_fn": own_third},
}  # fmt: skip


@pytest.mark.parametrize("name", ON_THE_HOST)
def test_processors_that_a_step_does_not_have_run_on_the_host(pair: tuple[Any, Any], name: str) -> None:
    options = {**ON_THE_HOST[name]}
    if "logits_processor" in options:
        options["logits_processor"] = LogitsProcessorList(options["logits_processor"])
    call = {**PADDED, "max_new_tokens": NEW, "do_sample": False, "eos_token_id": [2, 7], **options}
    model, own = pair
    expected = model.generate(**call)
    assert torch.equal(own.generate(**call), expected)
    assert not torch.equal(expected, model.generate(**PADDED, max_new_tokens=NEW, do_sample=False, eos_token_id=[2, 7]))


@pytest.mark.parametrize(
    "warpers",
    [
        [MinPLogitsWarper(0.1), TopKLogitsWarper(1)],
        [MinPLogitsWarper(0.99, min_tokens_to_keep=1), Wave()],
        [TypicalLogitsWarper(0.9), TopKLogitsWarper(1)],
    ],
    ids=["another order", "a processor behind", "a filter that a step does not have"],
)
def test_warpers_in_another_order_are_applied_in_theirs(pair: tuple[Any, Any], warpers: list[Any]) -> None:
    """They leave one token, so what is drawn is what is the largest."""
    model, own = pair
    greedy = model.generate(**PADDED, do_sample=False, max_new_tokens=NEW)
    drawn = own.generate(
        **PADDED, do_sample=True, top_k=0, max_new_tokens=NEW, logits_processor=LogitsProcessorList(warpers)
    )
    assert torch.equal(drawn, greedy)


def test_scores_and_logits_are_in_the_output_class(pair: tuple[Any, Any]) -> None:
    call = {
        **PADDED, "max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.4, "output_scores": True,
        "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    expected, actual = (each.generate(**call) for each in pair)
    assert torch.equal(actual.sequences, expected.sequences) and type(actual) is type(expected)
    for name in ("scores", "logits"):
        theirs, ours = getattr(expected, name), getattr(actual, name)
        assert len(ours) == len(theirs) and ours[0].dtype == theirs[0].dtype
        going = torch.ones(len(PROMPTS), dtype=torch.bool)
        for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            torch.testing.assert_close(one[going], other[going], atol=1e-5, rtol=1e-5)
            going &= actual.sequences[:, PADDED["input_ids"].shape[1] + at] != 2
    model, own = pair
    transitions = [
        each.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)[0]
        for each, out in ((model, expected), (own, actual))
    ]
    torch.testing.assert_close(*transitions, atol=1e-5, rtol=1e-5)


SCORED: dict[str, dict[str, Any]] = {
    "normalised": {"renormalize_logits": True, "repetition_penalty": 1.4},
    "a temperature before a greedy choice": {"logits_processor": [TemperatureLogitsWarper(0.5)]},
    "a filter before a greedy choice": {"logits_processor": [TopKLogitsWarper(3)], "renormalize_logits": True},
    "drawn": {"do_sample": True, "top_k": 1, "temperature": 0.6},
    "drawn and normalised": {"do_sample": True, "top_k": 1, "temperature": 0.6, "renormalize_logits": True},
}


@pytest.mark.parametrize("name", SCORED)
def test_scores_are_what_transformers_gives(pair: tuple[Any, Any], name: str) -> None:
    options = {"do_sample": False, "output_scores": True, "return_dict_in_generate": True, **SCORED[name]}
    if "logits_processor" in options:
        options["logits_processor"] = LogitsProcessorList(options["logits_processor"])
    expected, actual = (each.generate(**PADDED, max_new_tokens=5, eos_token_id=None, **options) for each in pair)
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(actual.scores, expected.scores, atol=1e-5, rtol=1e-5)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 3}, "beam search"),
    "a watermark": ({"watermarking_config": WatermarkingConfig()}, "watermarking_config="),
    "stop strings without a tokenizer": ({"stop_strings": ["w7"]}, "tokenizer="),
    "hidden states": ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
    "an assistant": ({"assistant_model": "anything"}, "assistant_model="),
    "guidance": ({"negative_prompt_ids": PROMPTS[0].unsqueeze(0)}, "negative_prompt_ids="),
    "guidance by an empty prompt": ({"guidance_scale": 1.7}, "guidance_scale="),
    "a penalty of an encoder's": ({"encoder_repetition_penalty": 1.5}, "encoder_repetition_penalty="),
    "n-grams of an encoder's": ({"encoder_no_repeat_ngram_size": 2}, "encoder_no_repeat_ngram_size="),
    "healing": ({"token_healing": True, "tokenizer": TOKENIZER}, "token_healing="),
    "an exit": ({"assistant_early_exit": 1}, "assisted generation"),
    "a mask of another length": (
        {"attention_mask": torch.ones(1, 3)},
        r"attention_mask is \[1, 3\], but must be \[1, ",
    ),
    "a mask of nothing": (
        {"input_ids": torch.zeros(1, 0).long(), "attention_mask": torch.ones(1, 0)},
        "Prompt 0 is em",
    ),
    "pads inside": (
        {"input_ids": torch.tensor([[5, 7, 5]]), "pad_token_id": 7},
        "takes every pad id for padding; give",
    ),
    "no configuration": ({"generation_config": {"top_k": 3}}, "is a GenerationConfig of transformers, not dict"),
    "a seed": ({"seed": 3}, "seed is an argument of the decoder alone; call generate of what attach has returned"),
    "a schema": ({"json_schema": {}}, "json_schema is an argument of the decoder alone"),
    "a penalty of the decoder's": ({"frequency_penalty": 1.0}, "frequency_penalty is an argument of the decoder alone"),
    "no criterion": ({"stopping_criteria": 3}, "stopping_criteria is a StoppingCriteria of transformers or a list of"),
    "no processor": ({"logits_processor": [3]}, "logits_processor is a LogitsProcessor of transformers or a list"),
    "no tokenizer": (
        {"stop_strings": "a", "tokenizer": "gpt2"},
        "tokenizer is a tokenizer of transformers, not 'gpt2'",
    ),
    "no stop string": ({"stop_strings": 3, "tokenizer": TOKENIZER}, "stop_strings is a text or a list of texts"),
    "a cache": ({"past_key_values": ()}, "past_key_values="),
    "positions": ({"position_ids": torch.arange(17).unsqueeze(0)}, "position_ids="),
    "too much": ({"max_new_tokens": 100_000}, "100017 tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_there_is_no_way_to_do_is_refused_by_name(pair: tuple[Any, Any], name: str) -> None:
    options, named = REFUSED[name]
    with pytest.raises(InputError, match=named):
        pair[1].generate(**{**ONE, "max_new_tokens": 4, **options})


def test_a_model_goes_on_behind_a_refusal(pair: tuple[Any, Any]) -> None:
    model, own = pair
    expected = model.generate(**ONE, max_new_tokens=4)
    for options, _ in REFUSED.values():
        with pytest.raises(InputError):
            own.generate(**{**ONE, "max_new_tokens": 4, **options})
    assert torch.equal(own.generate(**ONE, max_new_tokens=4), expected)


def test_transformers_own_refusals_stay(pair: tuple[Any, Any]) -> None:
    for each in pair:
        with pytest.raises(ValueError, match="not_an_argument"):
            each.generate(**ONE, not_an_argument=3)


def test_token_types_of_no_use_are_left_out(pair: tuple[Any, Any]) -> None:
    model, own = pair
    types = torch.zeros_like(ONE["input_ids"])
    expected = model.generate(**ONE, max_new_tokens=4)
    assert torch.equal(own.generate(**ONE, token_type_ids=types, max_new_tokens=4), expected)


def test_token_types_that_a_model_reads_are_refused() -> None:
    own = attached(shared_model("gpt2", dtype=torch.float64))
    with pytest.raises(InputError, match="token_type_ids="):
        own.generate(**ONE, token_type_ids=torch.zeros_like(ONE["input_ids"]), max_new_tokens=4)


def test_a_decoder_is_a_method_for_the_model_that_it_was_compiled_from(pair: tuple[Any, Any]) -> None:
    model, own = pair
    method = specgraph.custom_generate(own.generate.decoder)
    with pytest.raises(InputError, match="compiled from another model than this LlamaForCausalLM"):
        model.generate(**ONE, max_new_tokens=3, custom_generate=method)
    for other in (3, None, model, specgraph.SpeculativeDecoder):
        with pytest.raises(InputError, match="custom_generate takes a decoder, which compile_speculative"):
            specgraph.custom_generate(other)


def test_a_decoding_method_refuses_what_it_would_ignore(pair: tuple[Any, Any]) -> None:
    model, own = pair
    method = specgraph.custom_generate(own.generate.decoder)
    expected = model.generate(**PADDED, max_new_tokens=3)
    positions = (PADDED["attention_mask"].cumsum(1) - 1).clamp(min=0)
    for given in ({}, {"position_ids": positions}, {"past_key_values": DynamicCache()}):
        out = own.generate(**PADDED, max_new_tokens=3, custom_generate=method, **given)
        assert torch.equal(out, expected)
    cache = DynamicCache()
    with torch.no_grad():
        model(ONE["input_ids"][:, :4], past_key_values=cache)
    for name, given in {
        "position_ids=": {"position_ids": torch.arange(17).unsqueeze(0) + 1},
        "past_key_values=": {"past_key_values": cache},
        "inputs_embeds=": {"input_ids": None, "inputs_embeds": torch.zeros(1, 4, 32, dtype=torch.float64)},
    }.items():
        with pytest.raises(InputError, match=name):
            own.generate(**{**ONE, **given}, max_new_tokens=3, custom_generate=method)


def test_a_method_that_a_call_names_is_used(pair: tuple[Any, Any]) -> None:
    def silent(model: Any, input_ids: Tensor, **_: Any) -> Tensor:
        return input_ids

    assert torch.equal(pair[1].generate(**ONE, custom_generate=silent), ONE["input_ids"])


@pytest.fixture
def fresh() -> Iterator[PreTrainedModel]:
    yield copy.deepcopy(shared_model("llama", dtype=torch.float64))


def test_detach_gives_the_method_of_the_class_back(fresh: Any) -> None:
    before = dict(vars(fresh))
    decoder = specgraph.attach(fresh, CONFIG)
    assert isinstance(decoder, specgraph.SpeculativeDecoder)
    with pytest.raises(InputError, match="attached already"):
        specgraph.attach(fresh, CONFIG)
    specgraph.detach(fresh)
    specgraph.detach(fresh)
    assert vars(fresh).keys() == before.keys()
    specgraph.attach(fresh, CONFIG)


def test_a_model_that_cannot_be_compiled_is_left_alone(fresh: Any) -> None:
    with pytest.raises(ConfigError):
        specgraph.attach(fresh, {"draft": {"kind": "no such drafter"}})
    assert "generate" not in vars(fresh)


def test_copies_and_pickles_have_the_method_of_their_class(pair: tuple[Any, Any]) -> None:
    model, own = pair
    expected = model.generate(**ONE, max_new_tokens=4)
    for other in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert other.generate.__self__ is other
        assert torch.equal(other.generate(**ONE, max_new_tokens=4), expected)
        with torch.no_grad():
            other.lm_head.weight.zero_()
    assert torch.equal(own.generate(**ONE, max_new_tokens=4), expected)


def test_help_shows_the_arguments_of_transformers(pair: tuple[Any, Any]) -> None:
    model, own = pair
    assert inspect.signature(own.generate) == inspect.signature(model.generate)
    assert own.generate.__doc__ == model.generate.__doc__
