"""More bad input, as a new user would give it: each is one sentence, and none is ignored or fails inside of PyTorch."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GenerationConfig
from transformers.generation import TopKLogitsWarper

import specgraph
from specgraph import (
    ConfigError,
    InputError,
    NumericsError,
    PassError,
    SpecgraphWarning,
    SpeculativeDecoder,
    UnsupportedModelError,
)
from specgraph.checkpoints.tokenizers import compare_tokenizers
from specgraph.drafters.base import DraftHead
from specgraph.drafters.medusa import MedusaDrafter
from tests.decoding import compiled
from tests.models import VOCAB, make_head, make_model, shared_model

IDS = torch.tensor([[5, 6, 7]])
NAN, INF = float("nan"), float("inf")
TOKENIZER = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "examples/models/tiny-math/target")
LISTS = r"input_ids must be \[B, S\] or a list of 1-D tensors"
NUMBER = "must be a number or one number per sequence, not"

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a text": ({"input_ids": "hello"}, rf"{LISTS}, not str; decoder.text\(\) takes texts, and a tokenizer makes ids"),
    "list of texts": ({"input_ids": ["hello"]}, r"a list of token ids, not str; decoder.text\(\) takes texts"),
    "list of lists of texts": ({"input_ids": [["hello"]]}, r"not a list with 'hello'; decoder.text\(\) takes texts"),
    "messages": ({"input_ids": [{"role": "user", "content": "hello"}]}, r"decoder.chat\(\) takes conversations"),
    "conversations": ({"input_ids": [[{"role": "user"}]]}, r"decoder.chat\(\) takes conversations"),
    "list of ints": ({"input_ids": [5, 6]}, "for a single prompt, put it into a list"),
    "list of 2-D": ({"input_ids": [IDS]}, "for a single prompt, put it into a list"),
    "None inside": ({"input_ids": [IDS[0], None]}, "A prompt is a 1-D tensor or a list of token ids, not NoneType"),
    "three dims": ({"input_ids": torch.ones(1, 2, 3).long()}, f"{LISTS}, not a tensor of 3 dims"),
    "no dims": ({"input_ids": torch.tensor(5)}, f"{LISTS}, not a tensor of 0 dims"),
    "bool": ({"input_ids": torch.ones(1, 3).bool()}, "input_ids must hold integers, not torch.bool"),
    "complex": ({"input_ids": torch.ones(1, 3) * 1j}, "input_ids must hold integers, not torch.complex64"),
    "meta": ({"input_ids": IDS.to("meta")}, "input_ids is on the device meta, where tensors hold no values; give"),
    "meta inside": ({"input_ids": [IDS[0].to("meta")]}, "input_ids is on the device meta"),
    "sparse": ({"input_ids": IDS.to_sparse()}, "input_ids is of torch.sparse_coo; give a dense tensor"),
    "no columns": ({"input_ids": IDS[:, :0]}, "Prompt 0 is empty"),
    "no rows": ({"input_ids": IDS[:0]}, "input_ids is empty; give at least one prompt"),
    "far id": ({"input_ids": [torch.tensor([2**40])]}, "Prompt 0 holds the id 1099511627776; ids are 0 to 100"),
    "nothing": ({"input_ids": {}}, "There is no prompt; give input_ids"),
    "meta mask": ({"attention_mask": torch.ones(1, 3, device="meta")}, "attention_mask is on the device meta"),
    "nan mask": ({"attention_mask": torch.tensor([[1.0, NAN, 1.0]])}, "attention_mask holds NaN; it is 0 at padding"),
    "4-D mask": ({"attention_mask": torch.ones(1, 1, 3, 3)}, r"attention_mask is \[1, 1, 3, 3\], but must be a tensor"),
    "inf tokens": ({"max_new_tokens": INF}, "max_new_tokens must be an integer of at least 0, got inf"),
    "text tokens": ({"max_new_tokens": "3"}, f"max_new_tokens {NUMBER} str"),
    "bool tokens": ({"max_new_tokens": True}, f"max_new_tokens {NUMBER} bool"),
    "no tokens": ({"max_new_tokens": []}, "max_new_tokens has 0 values for 1 sequences"),
    "2-D tokens": ({"max_new_tokens": torch.ones(2, 2)}, f"max_new_tokens {NUMBER} list of list"),
    "inf temperature": ({"temperature": INF}, "temperature must be 0 or more, got inf"),
    "complex temperature": ({"temperature": 1j}, f"temperature {NUMBER} complex"),
    "set of temperatures": ({"temperature": {1.0}}, f"temperature {NUMBER} set"),
    "None temperature": ({"temperature": [None]}, f"temperature {NUMBER} list of NoneType"),
    "nan top_k": ({"top_k": NAN}, "top_k must be 0 .off. or a positive integer, got nan"),
    "nan top_p": ({"top_p": NAN}, r"top_p must be in \(0, 1\], got nan"),
    "negative min_p": ({"min_p": -0.1}, r"min_p must be in \[0, 1\], got -0.1"),
    "generator": ({"seed": torch.Generator()}, f"seed {NUMBER} Generator"),
    "negative EOS": ({"eos_token_id": -1}, "eos_token_id has -1, which is not a token id; ids are 0 to 100"),
    "far EOS": ({"eos_token_id": 2**70}, "is not a token id"),
    "None EOS": ({"eos_token_id": [None]}, "eos_token_id must be an integer, got None"),
    "bool EOS": ({"eos_token_id": True}, "eos_token_id must be a token id or a list of them, not bool"),
    "logprobs": ({"return_logprobs": 2}, "return_logprobs is False, True, 'raw' or 'processed', not 2"),
    "text criterion": ({"stopping_criteria": "stop"}, "stopping_criteria is a StoppingCriteria .*, not 'stop'"),
    "criterion's answer": ({"stopping_criteria": lambda ids, scores: torch.ones(7)},
                           r"answers with one bool for it; <lambda> gave a tensor \[7\]"),
    "unknown": ({"max_tokens": 3}, "There is no argument 'max_tokens'; did you mean 'max_new_tokens'"),
    "array of texts": ({"input_ids": np.array(["a"])}, f"{LISTS}, not ndarray"),
    "nested": ({"input_ids": torch.nested.nested_tensor([IDS[0], IDS[0, 1:]])}, "input_ids is nested; give a dense"),
    "None among ids": ({"input_ids": [[5, None]]}, "not a list with None"),
    "an endless id": ({"input_ids": [[5, 2**70]]}, f"not a list with {2**70}, which has over 64 bits"),
    "only embeddings": ({"input_ids": None, "inputs_embeds": torch.zeros(1, 2, 32)}, "inputs_embeds=Tensor is not sup"),
    "empty beside a mask": ({"input_ids": IDS[:, :0], "attention_mask": torch.ones(1, 0)}, "Prompt 0 is empty"),
    "added mask": ({"attention_mask": torch.full((1, 3), -1e9)}, "attention_mask holds -1000000000.0; it is 0 at pad"),
    "packed mask": ({"attention_mask": torch.tensor([[1, 2, 2]])}, "attention_mask holds 2; it is 0 at padding and 1"),
    "mask of texts": ({"input_ids": [[5, 6]], "attention_mask": ["ab"]}, "one list of 0 and 1 per prompt, not str"),
    "number as a mask": ({"input_ids": [[5, 6]], "attention_mask": 1}, "a list of 1-D tensors needs none"),
    "two configurations": ({"attention_mask": GenerationConfig(), "generation_config": GenerationConfig()},
                           "generation_config is given twice"),
    "form": ({"return_dict_in_generate": "yes"}, "return_dict_in_generate is True, False or None, not 'yes'"),
    "a tokenizer's name": ({"tokenizer": "gpt2"}, "tokenizer is a tokenizer of transformers, not 'gpt2'; Auto"),
    "a mapping of tokens": ({"begin_suppress_tokens": {5: 1}}, "begin_suppress_tokens is a list of token ids, or"),
    "no token left": ({"suppress_tokens": [*range(VOCAB)]}, f"forbid all {VOCAB} tokens; allow one at least"),
    "forced EOS": ({"forced_eos_token_id": "a"}, "forced_eos_token_id must be a token id or a list of them, not str"),
    "forced lists": ({"forced_eos_token_id": [[3], [4]]}, "forced_eos_token_id has 2 lists of ids for 1 sequences"),
    "class": ({"logits_processor": TopKLogitsWarper}, "not the class TopKLogitsWarper; make an object of it"),
    "few parameters": ({"logits_processor": lambda ids: ids}, r"with tokens and scores, but <lambda>\(ids\) takes"),
    "imaginary": ({"logits_processor": lambda ids, s: s * 1j}, "real numbers, but <lambda> returned torch.complex"),
    "allows None": ({"prefix_allowed_tokens_fn": lambda place, ids: None}, "gives a list of token ids, not None"),
    "allows texts": ({"prefix_allowed_tokens_fn": lambda place, ids: ["a"]}, r"list of token ids, not \['a'\]"),
    "allows fractions": ({"prefix_allowed_tokens_fn": lambda place, ids: [1.5]}, r"list of token ids, not \[1.5\]"),
    "allows others": ({"prefix_allowed_tokens_fn": lambda place, ids: [-1]}, "gives -1, which is not a token id"),
    "criterion's silence": ({"stopping_criteria": lambda ids, scores: None}, "one bool for it; <lambda> gave None"),
    "stop mapping": ({"stop_strings": {"a": 1}, "tokenizer": None}, "stop_strings is a text or a list of texts that"),
    "a set in a schema": ({"json_schema": {"enum": {1}}, "tokenizer": TOKENIZER}, "something that JSON does not have"),
}  # fmt: skip
CONFIGURED: dict[str, tuple[Any, str]] = {
    "temperature": ("hot", f"temperature {NUMBER} str"),
    "eos_token_id": ([None], "eos_token_id must be an integer, got None"),
    "pad_token_id": ("x", "pad_token_id must be an integer, got 'x'"),
    "do_sample": ("yes", "do_sample is True, False or None, not 'yes'"),
    "stop_strings": (3, "stop_strings is a text or a list of texts that are not empty, not 3"),
    "output_scores": (1, "output_scores is True, False or None, not 1"),
    "num_return_sequences": ("2", "num_return_sequences must be an integer, got '2'"),
}
"""Values of a configuration."""


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return compiled(shared_model("llama"), max_batch_size=4, max_length=64)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str, decoder: SpeculativeDecoder) -> None:
    given, message = ARGUMENTS[name]
    with pytest.raises(InputError, match=message) as caught:
        decoder.generate(**{"input_ids": IDS, "max_new_tokens": 4, **given})
    assert "\n" not in str(caught.value)
    assert decoder.generate(IDS, max_new_tokens=2).new_tokens[0].tolist() == [72, 68]


@pytest.mark.parametrize("name", CONFIGURED)
def test_configurations_are_checked_as_arguments_are(name: str, decoder: SpeculativeDecoder) -> None:
    value, message = CONFIGURED[name]
    config = GenerationConfig(do_sample=True)
    setattr(config, name, value)
    with pytest.raises(InputError, match=message):
        decoder.generate(IDS, max_new_tokens=4, generation_config=config)


def test_a_configuration_that_samples_needs_a_temperature(decoder: SpeculativeDecoder) -> None:
    config = GenerationConfig(do_sample=True, temperature=0.0)
    with pytest.raises(InputError, match="do_sample=True needs a temperature above 0"):
        decoder.generate(IDS, max_new_tokens=2, generation_config=config)
    greedy = decoder.generate(IDS, max_new_tokens=2, generation_config=config, temperature=0.0)
    assert greedy.new_tokens[0].tolist() == [72, 68]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 9}, "max_new_tokens is given, so max_length has no effect."),
        ({"min_new_tokens": 7}, "asks for 7 new tokens of sequence 0, which has room for 4; it gets those."),
        ({"min_length": 30}, "asks for 27 new tokens of sequence 0, which has room for 4; it gets those."),
    ],
)
def test_what_has_no_effect_is_a_warning(decoder: SpeculativeDecoder, options: dict[str, Any], message: str) -> None:
    with pytest.warns(SpecgraphWarning, match=re.escape(message)) as caught:
        out = decoder.generate(IDS, max_new_tokens=4, **options)
    assert len(out.new_tokens[0]) == 4 and caught[0].filename == __file__


def test_ids_outside_of_the_vocabulary_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    monkeypatch.setattr(model.generation_config, "eos_token_id", [-1, 5000])
    out = compiled(model).generate(IDS, max_new_tokens=4, min_new_tokens=3)
    assert out.new_tokens[0].tolist()[:2] == [72, 68] and out.finish_reasons == ["length"]


SUBMITTED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a text": ("abc", {}, "A prompt is a 1-D tensor or a list of token ids, not str"),
    "None": (None, {}, "A prompt is a 1-D tensor or a list of token ids, not NoneType"),
    "2-D": (IDS, {}, "A prompt is a 1-D tensor or a list of token ids, not a tensor of 2 dims"),
    "fractions": ([1.5], {}, "input_ids must hold integers"),
    "empty": ([], {}, "Prompt 0 is empty"),
    "too long": ([5] * 65, {}, "Prompt 0 has 65 tokens, but max_length is 64"),
    "nan tokens": ([5], {"max_new_tokens": NAN}, "max_new_tokens must be an integer of at least 0, got nan"),
    "seeds": ([5], {"seed": [1]}, f"seed {NUMBER}"),
    "temperatures": ([5], {"temperature": [1.0, 2.0]}, "temperature has 2 values for 1 sequences"),
    "a mask": ([5], {"attention_mask": [1]}, "submit does not take attention_mask, which is for generate and stream"),
    "criteria": ([5], {"stopping_criteria": []}, "submit does not take stopping_criteria, which is for generate"),
}


@pytest.mark.parametrize("name", SUBMITTED)
def test_submitted_sequences(name: str, decoder: SpeculativeDecoder) -> None:
    prompt, options, message = SUBMITTED[name]
    with decoder.session() as session, pytest.raises(InputError, match=message):
        session.submit(prompt, **options)


def test_what_a_session_does_not_know_is_refused(decoder: SpeculativeDecoder) -> None:
    with pytest.raises(InputError, match="session does not take max_batch_size; it takes return_logprobs"):
        decoder.session(max_batch_size=3)
    with decoder.session() as session:
        number = session.submit([5, 6], max_new_tokens=2)
        for other in (number + 1, -1, "x", None):
            with pytest.raises(InputError, match=f"There is no sequence {other!r} in this session"):
                session.cancel(other)
        with pytest.raises(InputError, match="A session cannot be pickled or copied"):
            copy.deepcopy(session)
        session.cancel(number)
        assert [event.finish_reason for event in session] == ["cancelled"]
        session.cancel(number)
    with pytest.raises(InputError, match="The session is closed"):
        _ = session.capacity


def test_a_stream_has_no_scores(decoder: SpeculativeDecoder) -> None:
    for name in ("output_scores", "output_logits"):
        with pytest.raises(InputError, match=f"stream does not take {name}, because its chunks have none"):
            decoder.stream(IDS, **{name: True})


def llama() -> Any:
    return shared_model("llama")


def mixed() -> Any:
    model = make_model("llama", num_hidden_layers=1)
    model.lm_head.double()
    return model


def quantised() -> Any:
    """As ``from_pretrained`` marks a model that bitsandbytes has quantised, with one weight of eight bits."""
    model: Any = make_model("llama", num_hidden_layers=1)
    weight = model.lm_head.weight
    model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(weight, dtype=torch.int8), requires_grad=False)
    model.config.quantization_config, model.is_quantized = BitsAndBytesConfig(load_in_8bit=True), True
    return model


def nan_head() -> Any:
    head = make_head(llama())
    with torch.no_grad():
        head.module.fc.weight[0, 0] = NAN
    return head


def overflowing() -> Any:
    head = make_head(llama())
    with torch.no_grad():
        head.module.fc.weight.fill_(1e38)
    return head


def medusa(width: int) -> DraftHead:
    """Random Medusa heads for a target with hidden states of so many numbers."""
    head = MedusaDrafter.random(make_model("llama", hidden_size=width), MedusaDrafter.Config(num_speculative_tokens=2))
    assert head is not None
    return head


def of(**options: Any) -> Callable[[], object]:
    return lambda: compiled(llama(), **options)


MODELS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "two dtypes": (lambda: compiled(mixed()), UnsupportedModelError,
                   "own forward pass fails on 3 tokens: .* Its weights are float32 and float64; convert them to one"),
    "float8": (lambda: compiled(make_model("llama", num_hidden_layers=1).to(torch.float8_e4m3fn)),
               UnsupportedModelError, "is quantised: model.embed_tokens.weight is torch.float8_e4m3fn, and specgraph"),
    "bitsandbytes": (lambda: specgraph.compile_speculative(quantised()), UnsupportedModelError,
                     "is quantised by bitsandbytes: lm_head.weight is torch.int8, and .*; load it without a quanti"),
    "head of NaN": (lambda: specgraph.compile_speculative(llama(), draft=nan_head()), NumericsError,
                    r"The draft's fc.weight .* holds NaN, so none of its drafts would be accepted"),
    "head that overflows": (lambda: specgraph.compile_speculative(llama(), draft=overflowing()), NumericsError,
                            "The draft computes NaN from random tokens: its module draft gives it, and no weight"),
    "float64 head": (lambda: compiled(llama(), draft=make_head(shared_model("llama", dtype=torch.double))),
                     ConfigError, "The head is torch.float64 on cpu, the target torch.float32 on cpu"),
    "head's features": (lambda: compiled(llama(), draft=make_head(llama(), features=(9,))),
                        PassError, r"hs\[9\] does not exist; this model has hs\[0\] to hs\[3\]"),
    "head's width": (lambda: compiled(llama(), draft=make_head(make_model("llama", hidden_size=64))), ConfigError,
                     "The head reads hidden states of width 64, and those of LlamaForCausalLM have 32; it is for an"),
    "head's count": (lambda: compiled(llama(), draft=replace(make_head(llama()), features=(0, 1))), ConfigError,
                     r"The head reads 3 hidden states of its target, and its features name \[0, 1\]; name as many"),
    "Medusa's width": (lambda: compiled(llama(), "medusa", 2, draft=medusa(64)), ConfigError,
                       "The head reads hidden states of width 64, and those of LlamaForCausalLM have 32"),
    "draft of a number": (lambda: specgraph.compile_speculative(llama(), draft=5),  # type: ignore[arg-type]
                          UnsupportedModelError, "draft: Expected a transformers causal LM, got int"),
    "K of 2.5": (of(k=2.5), ConfigError, "num_speculative_tokens is an integer, auto, or a table"),
    "K of 5000": (of(k=5000), ConfigError, "num_speculative_tokens is 5000, but a sequence has at most 128 tokens"),
    "no K": (of(k={}), ConfigError, "they begin with 1 and ascend"),
    "infinite batch": (of(max_batch_size=INF), ConfigError, "max_batch_size is an integer, not inf"),
    "nan share": (of(cache={"memory_share": NAN}), ConfigError, r"cache.memory_share must be in \(0, 1\], got nan"),
    "order as a text": (of(pipeline={"order": "insert_verify"}), ConfigError, "pipeline.order is a list of texts"),
    "cache as a text": (of(cache="big"), ConfigError, "cache is a group of keys .*, not 'big'"),
    "list": (lambda: specgraph.compile_speculative(llama(), ["draft"]),  # type: ignore[arg-type]
             ConfigError, "A configuration is a mapping, a YAML path or a preset name, not list"),
    "attach a name": (lambda: specgraph.attach("gpt2"), UnsupportedModelError,  # type: ignore[arg-type]
                      "Expected a transformers causal LM, got str"),
    "detach a name": (lambda: specgraph.detach("gpt2"), InputError,  # type: ignore[arg-type]
                      "detach takes the model that attach was given, not str"),
    "no dump": (lambda: specgraph.load_dump(None), ConfigError,  # type: ignore[arg-type]
                "A dumped stage is given by the path of its folder, not by NoneType"),
    "a key as an argument": (lambda: specgraph.compile_speculative(llama(), num_speculative_tokens=4), ConfigError,
                             "compile_speculative takes a model, a configuration and draft=, but no num_speculative_"
                             "tokens; keys of the configuration go into a mapping, such as compile_speculative.model, "
                             "{'draft.num_speculative_tokens': 4}.."),
    "attach with a key": (lambda: specgraph.attach(llama(), lenght=3), ConfigError, r"attach\(model, {'max_length': 3"),
    "missing dump": (lambda: specgraph.load_dump("/nowhere"), ConfigError, "There is no folder /nowhere; give"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_and_configurations(name: str) -> None:
    call, error, message = MODELS[name]
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_report_says_whether_the_tokenizers_were_compared() -> None:
    model = llama()
    report = compiled(model, draft=make_model("llama", seed=1)).report()
    assert "the tokenizers were not compared, because neither model was loaded from a folder with one" in report
    folder = Path("examples/models/tiny-math")
    pair = [AutoModelForCausalLM.from_pretrained(folder / name) for name in ("target", "draft")]
    assert compare_tokenizers(*pair) == ("the draft has the target's tokenizer, entry by entry", None)
    pair[1].name_or_path = ""
    assert "because the draft was not loaded" in compare_tokenizers(*pair)[0]


def test_masks_and_ids_of_any_kind_of_integer_or_number_are_read(decoder: SpeculativeDecoder) -> None:
    expected = decoder.generate([IDS[0, 1:]], max_new_tokens=3).new_tokens[0]
    for dtype in (torch.int8, torch.uint8, torch.int32):
        for mask in (torch.tensor([[0.0, 1.0, 1.0]]), torch.tensor([[False, True, True]])):
            actual: Tensor = decoder.generate(IDS.to(dtype), mask, max_new_tokens=3).new_tokens[0]
            assert torch.equal(actual, expected)
