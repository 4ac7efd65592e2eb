"""``decoder.generate`` with what people pass to ``model.generate``: the oracle is transformers."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    GenerationConfig,
    GenerationMixin,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
)

import specgraph
from specgraph import InputError, SpeculativeDecoder, UnsupportedModelError
from specgraph.runtime.requests import arguments
from tests.decoding import compiled
from tests.dropin.test_attach import NEW, ONE, PADDED, PROMPTS, PausedValues, left_padded, word_tokenizer
from tests.models import VOCAB, shared_model

EOS = [2, 7, 11, 50, 60, 61, 62]
TARGET = Path(__file__).parents[2] / "examples/models/tiny-math/target"
RAGGED = [prompt.tolist() for prompt in PROMPTS]


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3_text", "gpt_oss"])
def both(request: pytest.FixtureRequest) -> tuple[Any, SpeculativeDecoder]:
    """A model, and the decoder that was compiled from it; its configuration is its own."""
    model = copy.copy(shared_model(request.param, dtype=torch.float64))
    model.generation_config = copy.deepcopy(model.generation_config)
    return model, compiled(model, "ngram", 3)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, SpeculativeDecoder]:
    model = copy.copy(shared_model("llama", dtype=torch.float64))
    model.generation_config = copy.deepcopy(model.generation_config)
    return model, compiled(model, "ngram", 3)


CALLS: dict[str, dict[str, Any]] = {
    "one prompt": {**ONE, "max_new_tokens": NEW},
    "left padding": {**PADDED, "max_new_tokens": NEW},
    "the default length": ONE,
    "max_length counts padding": {**PADDED, "max_length": 25},
    "several EOS ids": {**PADDED, "max_new_tokens": 40, "eos_token_id": EOS},
    "its own pad id": {**PADDED, "max_new_tokens": 40, "eos_token_id": EOS, "pad_token_id": 5},
    "a generation config": {**PADDED, "generation_config": GenerationConfig(max_new_tokens=7, eos_token_id=2)},
    "arguments count before it": {
        **PADDED, "generation_config": GenerationConfig(max_new_tokens=7, pad_token_id=9), "eos_token_id": EOS,
    },
    "a tokenizer's output": {**BatchEncoding(PADDED), "max_new_tokens": NEW},
    "inputs": {"inputs": ONE["input_ids"], "max_new_tokens": NEW},
    "greedy, whatever the temperature": {**ONE, "do_sample": False, "temperature": 0.7, "max_new_tokens": NEW},
    "about a cache and an assistant": {
        **ONE, "max_new_tokens": NEW, "use_cache": False, "num_assistant_tokens": 3, "renormalize_logits": True,
    },
    "values that ask for nothing": {
        **ONE, "max_new_tokens": NEW, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
        "output_scores": False, "return_dict_in_generate": True, "streamer": None, "logits_processor": [],
    },
    "stop strings": {
        **PADDED, "max_new_tokens": 40, "stop_strings": [*"4eqT}"], "tokenizer": AutoTokenizer.from_pretrained(TARGET),
    },
    "no time": {**PADDED, "max_new_tokens": 40, "max_time": 1e-9},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_greedy_sequences_are_those_of_transformers(pair: tuple[Any, SpeculativeDecoder], name: str) -> None:
    """Other models: :func:`test_the_decoder_is_a_decoding_method_of_transformers`."""
    model, decoder = pair
    call = {"return_dict_in_generate": True, **copy.deepcopy(CALLS[name])}
    expected = model.generate(**{"do_sample": False, **call}).sequences
    out = decoder.generate(**call)
    assert torch.equal(out.sequences, expected)


@pytest.mark.parametrize("name", ["ragged lists", "lists with masks", "arrays", "an encoding", "a config second"])
def test_prompts_come_in_every_form_that_tokenizers_have(pair: tuple[Any, SpeculativeDecoder], name: str) -> None:
    _, decoder = pair
    expected = decoder.generate(PROMPTS, max_new_tokens=NEW).new_tokens
    lists = {key: value.tolist() for key, value in PADDED.items()}
    arrays = {key: np.array(value) for key, value in lists.items()}
    forms: dict[str, tuple[Any, ...]] = {
        "ragged lists": (RAGGED, [[1] * len(row) for row in RAGGED]),
        "lists with masks": (lists["input_ids"], lists["attention_mask"]),
        "arrays": (arrays["input_ids"], arrays["attention_mask"]),
        "an encoding": (BatchEncoding(PADDED),),
        "a config second": (RAGGED, GenerationConfig(max_new_tokens=NEW, eos_token_id=2)),
    }
    extra = {} if name == "a config second" else {"max_new_tokens": NEW}
    out = decoder.generate(*forms[name], **extra)
    assert all(map(torch.equal, out.new_tokens, expected))


def test_the_output_answers_like_the_tensor_of_sequences(pair: tuple[Any, SpeculativeDecoder]) -> None:
    model, decoder = pair
    tensor = model.generate(**PADDED, max_new_tokens=NEW)
    out = decoder.generate(**PADDED, max_new_tokens=NEW)
    assert len(out) == len(tensor) and out.shape == tensor.shape and out.sequences.dtype == tensor.dtype
    assert all(map(torch.equal, out, tensor)) and torch.equal(out[0], tensor[0])
    assert torch.equal(out[:, 17:], tensor[:, 17:])
    tokenizer = word_tokenizer()
    assert tokenizer.batch_decode(out, skip_special_tokens=True) == tokenizer.batch_decode(
        tensor, skip_special_tokens=True
    )
    again = pickle.loads(pickle.dumps(out))
    assert torch.equal(again.sequences, tensor) and again.stats == out.stats
    assert "finish_reasons=['length', 'length', 'length']" in repr(out)


def test_ids_before_a_prompt_stay_as_they_were_given(pair: tuple[Any, SpeculativeDecoder]) -> None:
    model, decoder = pair
    padded = left_padded(PROMPTS, pad=33)
    expected = model.generate(**padded, max_new_tokens=4)
    assert torch.equal(decoder.generate(**padded, max_new_tokens=4).sequences, expected)


def test_a_configuration_that_changes_counts_from_the_next_call_on(pair: tuple[Any, SpeculativeDecoder]) -> None:
    model, decoder = pair
    before = copy.deepcopy(model.generation_config)
    try:
        for name, value in {"max_new_tokens": 9, "eos_token_id": [*EOS], "pad_token_id": 4}.items():
            setattr(model.generation_config, name, value)
            assert torch.equal(decoder.generate(**PADDED).sequences, model.generate(**PADDED, do_sample=False)), name
        model.generation_config.eos_token_id.append(30)
        assert torch.equal(decoder.generate(**PADDED).sequences, model.generate(**PADDED, do_sample=False))
        model.generation_config.num_beams = 2
        with pytest.raises(UnsupportedModelError, match="asks for num_beams=2"):
            decoder.generate(**ONE)
        assert decoder.generate(**ONE, num_beams=1).shape[0] == 1
    finally:
        model.generation_config = before


def test_sampling_follows_do_sample(pair: tuple[Any, SpeculativeDecoder]) -> None:
    _, decoder = pair
    asked = {**PADDED, "max_new_tokens": NEW, "seed": 3}
    plain = decoder.generate(**asked, temperature=1.0, top_k=50)
    assert torch.equal(decoder.generate(**asked, do_sample=True).sequences, plain.sequences)  # transformers' top_k
    config = GenerationConfig(do_sample=True, temperature=0.6, top_k=0, top_p=0.8)
    by_config = decoder.generate(**asked, generation_config=config)
    assert torch.equal(by_config.sequences, decoder.generate(**asked, temperature=0.6, top_p=0.8).sequences)
    greedy = decoder.generate(**PADDED, max_new_tokens=NEW)
    assert torch.equal(decoder.generate(**asked, generation_config=config, do_sample=False).sequences, greedy.sequences)


def test_several_of_a_prompt_are_those_of_repeated_prompts(pair: tuple[Any, SpeculativeDecoder]) -> None:
    _, decoder = pair
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "seed": 5}
    out = decoder.generate(PROMPTS, num_return_sequences=3, **options)
    repeated = decoder.generate([prompt for prompt in PROMPTS for _ in range(3)], **options)
    assert torch.equal(out.sequences, repeated.sequences)
    assert len({tuple(row.tolist()) for row in out.new_tokens[:3]}) == 3


@pytest.mark.parametrize("prompts", [ONE, PADDED], ids=["one prompt", "several"])
@pytest.mark.parametrize("way", ["generate", "stream"])
def test_a_streamer_gets_what_transformers_gives_it(
    pair: tuple[Any, SpeculativeDecoder], prompts: dict[str, Tensor], way: str
) -> None:
    model, decoder = pair
    theirs, ours = PausedValues(), PausedValues()
    options = {**prompts, "max_new_tokens": 30, "eos_token_id": EOS}
    model.generate(**options, streamer=theirs)
    if way == "generate":
        decoder.generate(**options, streamer=ours)
    else:
        list(decoder.stream(**options, streamer=ours))
    assert ours.got == theirs.got and ours.ended == theirs.ended == 1


def test_text_can_be_read_in_another_thread(pair: tuple[Any, SpeculativeDecoder]) -> None:
    model, decoder = pair
    streamer = TextIteratorStreamer(word_tokenizer(), skip_prompt=True)
    thread = threading.Thread(target=decoder.generate, kwargs={**ONE, "max_new_tokens": 9, "streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    new = model.generate(**ONE, max_new_tokens=9)[0, ONE["input_ids"].shape[1] :]
    assert text == word_tokenizer().decode(new)


def test_every_sequence_says_why_it_ended(pair: tuple[Any, SpeculativeDecoder]) -> None:
    model, _ = pair
    decoder = compiled(model, "ngram", 3, max_length=24)
    out = decoder.generate(PROMPTS, max_new_tokens=[5, 24, 12], eos_token_id=[])
    assert out.finish_reasons == ["length", "max_length", "length"]
    assert [len(new) for new in out.new_tokens] == [5, 24 - len(PROMPTS[1]), 12]
    last = int(out.new_tokens[0][-1])
    assert decoder.generate(PROMPTS[:1], max_new_tokens=9, eos_token_id=last).finish_reasons == ["eos"]
    chunks = list(decoder.stream(PROMPTS, max_new_tokens=[5, 24, 12], eos_token_id=[]))
    assert chunks[-1].finish_reasons == out.finish_reasons and None in chunks[0].finish_reasons
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    text = tokenizer.decode([last])
    stopped = decoder.generate(PROMPTS[:1], max_new_tokens=9, stop_strings=text, tokenizer=tokenizer)
    assert stopped.finish_reasons == ["stop"]
    full = decoder.generate([torch.full((24,), 5)], max_new_tokens=3)
    assert full.finish_reasons == ["max_length"] and len(full.new_tokens[0]) == 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 4}, r"num_beams=4 is not supported \(tokens are chosen greedily or by sampling\)"),
    "images": ({"pixel_values": torch.zeros(1)}, r"pixel_values=Tensor is not supported \(prompts are token ids alone"),
    "a cache": ({"past_key_values": object()}, "past_key_values=object is not supported"),
    "an assistant": ({"assistant_model": object()}, "drafts come from the draft that the model was compiled with"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 is not supported"),
    "attention": ({"output_attentions": True}, "output_attentions=True is not supported"),
    "a typo": ({"max_tokens": 3}, "There is no argument 'max_tokens'; did you mean 'max_new_tokens'?"),
    "nonsense": ({"xyzzy": 3}, r"There is no argument 'xyzzy'; help\(decoder.generate\) lists"),
    "no config": ({"generation_config": {"max_length": 3}}, "is a GenerationConfig of transformers, not dict"),
    "a config with beams": ({"generation_config": GenerationConfig(num_beams=3)}, "This generation_config asks for"),
    "strings alone": ({"stop_strings": ["a"]}, "stop_strings needs the model's tokenizer; pass it as tokenizer="),
    "no strings": ({"stop_strings": [3], "tokenizer": word_tokenizer()}, "a text or a list of texts"),
    "a flag": ({"do_sample": "yes"}, "do_sample is True, False or None, not 'yes'"),
    "sampling at 0": ({"do_sample": True, "temperature": 0}, "do_sample=True needs a temperature above 0"),
    "none of a prompt": ({"num_return_sequences": 0}, "num_return_sequences must be at least 1, got 0"),
    "equal sequences": ({"num_return_sequences": 2}, "num_return_sequences=2 would give equal sequences"),
    "a pad id": ({"pad_token_id": VOCAB}, f"pad_token_id has {VOCAB}, which is not a token id"),
    "a short length": ({"max_length": 5}, "Prompt 0 has 17 tokens, and max_length=5 counts them"),
    "a length of text": ({"max_length": "long"}, "max_length must be a number or one number per sequence, not str"),
    "a negative time": ({"max_time": -1}, "max_time must be a number of seconds above 0, got -1"),
    "a streamer": ({"streamer": 3}, "streamer has put"),
    "two names": ({"inputs": ONE["input_ids"]}, "two names of the same argument"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(pair: tuple[Any, SpeculativeDecoder], name: str) -> None:
    _, decoder = pair
    options, message = REFUSED[name]
    for call in (decoder.generate, decoder.stream):
        with pytest.raises(InputError, match=message):
            call(**{**ONE, **options})


def test_padding_is_named_where_a_length_counts_it(pair: tuple[Any, SpeculativeDecoder]) -> None:
    with pytest.raises(InputError, match="Prompt 0 has 17 tokens, padding included, and max_length=17 counts them"):
        pair[1].generate(**PADDED, max_length=17)


def test_token_types_that_a_model_reads_are_refused() -> None:
    decoder = compiled(shared_model("gpt2", dtype=torch.float64), "ngram", 3)
    types = torch.zeros_like(ONE["input_ids"])
    with pytest.raises(InputError, match="token_type_ids is not supported"):
        decoder.generate(**ONE, token_type_ids=types)


def test_token_types_of_no_use_are_left_out(pair: tuple[Any, SpeculativeDecoder]) -> None:
    model, decoder = pair
    out = decoder.generate(**ONE, token_type_ids=torch.zeros_like(ONE["input_ids"]), max_new_tokens=4)
    assert torch.equal(out.sequences, model.generate(**ONE, max_new_tokens=4))


def test_no_argument_of_transformers_is_ignored_in_silence() -> None:
    """Each stands in one of the tables, whatever version is installed."""
    theirs = {*GenerationConfig().__dict__, *inspect.signature(GenerationMixin.generate).parameters}
    theirs -= {"self", "kwargs"}
    tables = [arguments.OWN, arguments.HONOURED, arguments.PROCESSING, arguments.WITHOUT_EFFECT,
              frozenset(arguments.REFUSED)]  # fmt: skip
    assert theirs <= frozenset.union(*tables)
    assert sum(map(len, tables)) == len(frozenset.union(*tables))
    parameters = inspect.signature(SpeculativeDecoder.generate).parameters
    assert {*parameters} - {"self", "others"} == arguments.OWN


def test_the_decoder_is_a_decoding_method_of_transformers(both: tuple[Any, SpeculativeDecoder]) -> None:
    model, decoder = both
    for call in ({"max_new_tokens": NEW}, {"max_length": 25, "eos_token_id": EOS}, {"return_dict_in_generate": True}):
        expected = model.generate(**PADDED, **call)
        actual = model.generate(**PADDED, **call, custom_generate=specgraph.custom_generate(decoder))
        assert type(actual) is type(expected)
        pairs = (actual, expected) if isinstance(actual, Tensor) else (actual.sequences, expected.sequences)
        assert torch.equal(*pairs)
    with pytest.raises(InputError, match="beam search"):
        model.generate(**ONE, num_beams=2, custom_generate=specgraph.custom_generate(decoder))


CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w9 {% endif %}"


def with_template() -> PreTrainedTokenizerFast:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


def test_texts_go_in_and_come_out(pair: tuple[Any, SpeculativeDecoder]) -> None:
    model, decoder = pair
    tokenizer = word_tokenizer()
    texts = ["w3 w4 w5", "w9 w8 w7 w6"]
    expected = [
        tokenizer.decode(new[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
        for encoded in (tokenizer(text, return_tensors="pt") for text in texts)
        for new in [model.generate(**encoded, max_new_tokens=6, do_sample=False)]
    ]
    assert decoder.text(texts, tokenizer=tokenizer, max_new_tokens=6) == expected
    assert decoder.text(texts[1], tokenizer=tokenizer, max_new_tokens=6) == expected[1]


def test_conversations_are_answered_in_their_template(pair: tuple[Any, SpeculativeDecoder]) -> None:
    _, decoder = pair
    user = {"role": "user", "content": "w3 w4"}
    expected = decoder.text("w3 w4 w9", tokenizer=with_template(), max_new_tokens=6)
    assert decoder.chat([user], tokenizer=with_template(), max_new_tokens=6) == expected
    assert decoder.chat([[user]] * 2, tokenizer=with_template(), max_new_tokens=6) == [expected] * 2
    begun = [user, {"role": "assistant", "content": "w5"}]
    continued = decoder.text("w3 w4 w5", tokenizer=with_template(), max_new_tokens=6)
    assert decoder.chat(begun, tokenizer=with_template(), max_new_tokens=6) == continued


PARTS = {
    "prints contents": "{% for m in messages %}{{ m.content }} {% endfor %}",
    "adds to contents": "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}",
    "knows parts": (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %} {% endfor %}"
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_text_are_the_text_whatever_the_template_knows(
    pair: tuple[Any, SpeculativeDecoder], name: str
) -> None:
    _, decoder = pair
    tokenizer = word_tokenizer()
    tokenizer.chat_template = PARTS[name]
    texts = [{"role": "user", "content": "w3 w4"}, {"role": "user", "content": "w5"}]
    parts: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "w3 "}, {"type": "text", "text": "w4"}]},
        {"role": "user", "content": "w5"},
    ]
    expected = decoder.chat(texts, tokenizer=tokenizer, max_new_tokens=6)
    assert decoder.chat(parts, tokenizer=tokenizer, max_new_tokens=6) == expected
    assert expected == decoder.text("w3 w4 w5", tokenizer=tokenizer, max_new_tokens=6)


def test_what_is_no_text_or_conversation_is_refused(pair: tuple[Any, SpeculativeDecoder]) -> None:
    _, decoder = pair
    with pytest.raises(InputError, match=r"There is no tokenizer beside the model, .*; pass one as tokenizer="):
        decoder.text("w3")
    with pytest.raises(InputError, match="A prompt is a text here, not int"):
        decoder.text([3], tokenizer=word_tokenizer())
    with pytest.raises(InputError, match="The tokenizer has no chat template"):
        decoder.chat([{"role": "user", "content": "w3"}], tokenizer=word_tokenizer())
    for wrong in ([], "w3", [[]], [{"content": "w3"}]):
        with pytest.raises(InputError, match="A conversation is a list of messages"):
            decoder.chat(wrong, tokenizer=with_template())


NO_TEXTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a number": (3, {}, "Prompts are a text or a list of texts here, not int"),
    "a mapping": ({"w3": 1}, {}, "Prompts are a text or a list of texts here, not dict"),
    "an empty text": (["w3", ""], {}, "The tokenizer makes no token of the text ''; give it some text"),
    "ids": ("w3", {"input_ids": [[3]]}, r"do not take input_ids \(the tokenizer makes it\)"),
    "a mask": ("w3", {"attention_mask": [[1]]}, r"do not take attention_mask \(the tokenizer makes it\)"),
    "scores": ("w3", {"output_scores": True}, r"do not take output_scores \(the result is the text alone\); leave it"),
    "a class": ("w3", {"return_dict_in_generate": True}, "do not take return_dict_in_generate"),
}


@pytest.mark.parametrize("name", NO_TEXTS)
def test_texts_that_are_none_are_refused(pair: tuple[Any, SpeculativeDecoder], name: str) -> None:
    prompts, options, message = NO_TEXTS[name]
    with pytest.raises(InputError, match=message):
        pair[1].text(prompts, tokenizer=word_tokenizer(), **options)


NO_CHATS: dict[str, tuple[Any, str]] = {
    "a message alone": ({"role": "user", "content": "w3"}, "A conversation is a list of messages"),
    "a number": (3, "A conversation is a list of messages"),
    "nothing": (None, "A conversation is a list of messages"),
    "an image": (
        [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
        "Message 1 of 1 has a part of type 'image', but only text is decoded here; leave it out",
    ),
    "a sound behind a text": (
        [{"role": "user", "content": ({"type": "text", "text": "w3"}, {"type": "input_audio"})}],
        "Message 1 of 1 has a part of type 'input_audio', but only text",
    ),
    "a part without a text": (
        [{"role": "user", "content": [{"type": "text"}]}],
        "Message 1 of 1 must have a role, which is a text",
    ),
    "a part without a type": ([{"role": "user", "content": [{"text": "w3"}]}], "Message 1 of 1 must have a role"),
    "no content": ([{"role": "user", "content": None}], "must have a role, .* and a content, which is a text or a"),
    "a role of 3": ([{"role": 3, "content": "w3"}], "Message 1 of 1 must have a role, which is a text"),
}


@pytest.mark.parametrize("name", NO_CHATS)
def test_conversations_that_are_none_are_refused(pair: tuple[Any, SpeculativeDecoder], name: str) -> None:
    messages, message = NO_CHATS[name]
    with pytest.raises(InputError, match=message):
        pair[1].chat(messages, tokenizer=with_template())


def test_several_texts_of_a_prompt_come_together(pair: tuple[Any, SpeculativeDecoder]) -> None:
    options: dict[str, Any] = {"tokenizer": word_tokenizer(), "max_new_tokens": 6, "do_sample": True, "seed": 3}
    several = pair[1].text("w3 w4", num_return_sequences=3, **options)
    assert several == pair[1].text(["w3 w4"] * 3, **options) and len({*several}) > 1


def test_scores_can_be_log_probabilities(pair: tuple[Any, SpeculativeDecoder]) -> None:
    model, decoder = pair
    call = {**PADDED, "max_new_tokens": 4, "do_sample": False, "output_scores": True, "renormalize_logits": True}
    expected = model.generate(**call, eos_token_id=None, return_dict_in_generate=True).scores
    torch.testing.assert_close(decoder.generate(**call, eos_token_id=[]).scores, expected, atol=1e-5, rtol=1e-5)


def test_the_tokenizer_beside_a_model_is_found() -> None:
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float64)
    decoder = compiled(model, "ngram", 3)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    text = "Question: What is 3 + 4?\nAnswer:"
    expected = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=8, do_sample=False)[0]
    prompt = len(tokenizer(text)["input_ids"])
    answer = tokenizer.decode(expected[prompt:], skip_special_tokens=True)
    assert decoder.text(text, max_new_tokens=8) == answer
    middle = answer[len(answer) // 2]
    cut = decoder.text(text, max_new_tokens=8, stop_strings=middle)
    assert answer.startswith(cut) and middle in cut and len(cut) < len(answer)
