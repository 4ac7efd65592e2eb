"""More bad input, as a new user would give it: each is one sentence, and none is ignored or fails inside of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import specgraph
from specgraph import ConfigError, InputError, NumericsError, PassError, SpeculativeDecoder, UnsupportedModelError
from specgraph.checkpoints.tokenizers import check_same_tokenizer
from tests.decoding import compiled
from tests.models import make_head, make_model, shared_model

pytestmark = pytest.mark.usefixtures("cached_traces")
IDS = torch.tensor([[5, 6, 7]])
NAN, INF = float("nan"), float("inf")
LISTS = r"input_ids must be \[B, S\] or a list of 1-D tensors"
NUMBER = "must be a number or one number per sequence, not"

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a text": ({"input_ids": "hello"}, f"{LISTS}, not str"),
    "list of texts": ({"input_ids": ["hello"]}, "A prompt is a 1-D tensor or a list of token ids, not str"),
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
    "negative EOS": ({"eos_token_id": -1}, "eos_token_id -1 is not a token id; ids are 0 to 100"),
    "far EOS": ({"eos_token_id": 2**70}, "is not a token id"),
    "None EOS": ({"eos_token_id": [None]}, "eos_token_id must be an integer, got None"),
    "bool EOS": ({"eos_token_id": True}, "eos_token_id must be a token id or a list of them, not bool"),
    "logprobs": ({"return_logprobs": 2}, "return_logprobs is False, True, 'raw' or 'processed', not 2"),
    "text criterion": ({"stopping_criteria": "stop"}, "stopping_criteria is a StoppingCriteria .*, not 'stop'"),
    "criterion's answer": ({"stopping_criteria": lambda ids, scores: torch.ones(7)},
                           r"answers with one bool for it; function gave a tensor \[7\]"),
    "unknown": ({"max_tokens": 3}, "There is no argument 'max_tokens'; did you mean 'max_new_tokens'"),
}  # fmt: skip


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
}


@pytest.mark.parametrize("name", SUBMITTED)
def test_submitted_sequences(name: str, decoder: SpeculativeDecoder) -> None:
    prompt, options, message = SUBMITTED[name]
    with decoder.session() as session, pytest.raises(InputError, match=message):
        session.submit(prompt, **options)


def llama() -> Any:
    return shared_model("llama")


def mixed() -> Any:
    model = make_model("llama", num_hidden_layers=1)
    model.lm_head.double()
    return model


def quantised() -> Any:
    """As ``from_pretrained`` marks a model that bitsandbytes has quantised."""
    model: Any = make_model("llama", num_hidden_layers=1)
    model.config.quantization_config, model.is_quantized = BitsAndBytesConfig(load_in_8bit=True), True
    return model


def nan_head() -> Any:
    head = make_head(llama())
    with torch.no_grad():
        head.module.fc.weight[0, 0] = NAN
    return head


def of(**options: Any) -> Callable[[], object]:
    return lambda: compiled(llama(), **options)


MODELS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "two dtypes": (lambda: compiled(mixed()), UnsupportedModelError,
                   "own forward pass fails on 3 tokens: .* Its weights are float32 and float64; convert them to one"),
    "float8": (lambda: compiled(make_model("llama", num_hidden_layers=1).to(torch.float8_e4m3fn)),
               UnsupportedModelError, "is quantised: model.embed_tokens.weight is torch.float8_e4m3fn, and specgraph"),
    "bitsandbytes": (lambda: specgraph.compile_speculative(quantised()), UnsupportedModelError,
                     "LlamaForCausalLM is quantised by bitsandbytes, and .*; load it without a quantization_config"),
    "head of NaN": (lambda: specgraph.compile_speculative(llama(), draft=nan_head()), NumericsError,
                    r"The draft's fc.weight .* holds NaN, so none of its drafts would be accepted"),
    "float64 head": (lambda: compiled(llama(), draft=make_head(shared_model("llama", dtype=torch.double))),
                     ConfigError, "The head is torch.float64 on cpu, the target torch.float32 on cpu"),
    "head's features": (lambda: compiled(llama(), draft=make_head(llama(), features=(9,))),
                        PassError, r"hs\[9\] does not exist; this model has hs\[0\] to hs\[3\]"),
    "draft of a number": (lambda: specgraph.compile_speculative(llama(), draft=5),  # type: ignore[arg-type]
                          UnsupportedModelError, "draft: Expected a transformers causal LM, got int"),
    "K of 2.5": (of(k=2.5), ConfigError, "num_speculative_tokens is an integer, not 2.5"),
    "K of 5000": (of(k=5000), ConfigError, "num_speculative_tokens is 5000, but a sequence has at most 128 tokens"),
    "no K": (of(k={}), ConfigError, "they begin with 1 and ascend"),
    "infinite batch": (of(max_batch_size=INF), ConfigError, "max_batch_size is an integer, not inf"),
    "nan share": (of(cache={"memory_share": NAN}), ConfigError, r"cache.memory_share must be in \(0, 1\], got nan"),
    "order as a text": (of(pipeline={"order": "fuse_verify"}), ConfigError, "pipeline.order is a list of texts"),
    "cache as a text": (of(cache="big"), ConfigError, "cache is a group of keys .*, not 'big'"),
    "list": (lambda: specgraph.compile_speculative(llama(), ["draft"]),  # type: ignore[arg-type]
             ConfigError, "A configuration is a mapping, a YAML path or a preset name, not list"),
    "attach a name": (lambda: specgraph.attach("gpt2"), UnsupportedModelError,  # type: ignore[arg-type]
                      "Expected a transformers causal LM, got str"),
    "detach a name": (lambda: specgraph.detach("gpt2"), InputError,  # type: ignore[arg-type]
                      "detach takes the model that attach was given, not str"),
    "no dump": (lambda: specgraph.load_dump(None), ConfigError,  # type: ignore[arg-type]
                "A dumped stage is given by the path of its folder, not by NoneType"),
    "missing dump": (lambda: specgraph.load_dump("/nowhere"), ConfigError, "/nowhere is not a dumped stage"),
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
    assert check_same_tokenizer(*pair) == "the draft has the target's tokenizer, entry by entry"
    pair[1].name_or_path = ""
    assert "because the draft was not loaded" in check_same_tokenizer(*pair)


def test_masks_and_ids_of_any_kind_of_integer_or_number_are_read(decoder: SpeculativeDecoder) -> None:
    expected = decoder.generate([IDS[0, 1:]], max_new_tokens=3).new_tokens[0]
    for dtype in (torch.int8, torch.uint8, torch.int32):
        for mask in (torch.tensor([[0.0, 1.0, 1.0]]), torch.tensor([[False, True, True]])):
            actual: Tensor = decoder.generate(IDS.to(dtype), mask, max_new_tokens=3).new_tokens[0]
            assert torch.equal(actual, expected)
