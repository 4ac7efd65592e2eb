"""Bad input gets one sentence that says what was given and what is allowed, and leaves the decoder usable."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Step3p7Config,
    Step3p7ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

import specgraph
from specgraph import ConfigError, InputError, NumericsError, PassError, SpeculativeDecoder, UnsupportedModelError
from tests.decoding import compiled
from tests.models import VOCAB, make_model, ragged_prompts, shared_model

PROMPTS = ragged_prompts()


def broken_llama() -> Any:
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 3] = float("nan")
    return model


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return compiled(shared_model("llama"), max_batch_size=4, max_length=64)


@pytest.fixture(scope="module")
def expected(decoder: SpeculativeDecoder) -> list[torch.Tensor]:
    return decoder.generate(PROMPTS, max_new_tokens=6).new_tokens


ONE = [torch.tensor([5, 6])]
BAD_CALLS: dict[str, tuple[Callable[[SpeculativeDecoder], object], str]] = {
    "empty batch": (lambda d: d.generate([]), "input_ids is empty; give at least one prompt"),
    "empty prompt": (lambda d: d.generate([torch.tensor([5]), torch.tensor([], dtype=torch.int64)]),
                     "Prompt 1 is empty; give it at least one token"),
    "all padding": (lambda d: d.generate(torch.ones(2, 3).long() * 5, torch.tensor([[1, 1, 1], [0, 0, 0]])),
                    r"Prompt 1 is padding alone \(3 ids, by the mask or the pad id\); give it at least one token"),
    "all pad ids": (lambda d: d.generate(torch.tensor([[5, 6], [0, 0]]), pad_token_id=0, eos_token_id=[]),
                    r"Prompt 1 is padding alone \(2 ids"),
    "hole in mask": (lambda d: d.generate(torch.full((1, 4), 5), torch.tensor([[1, 0, 1, 1]])), "has a hole"),
    "mask shape": (lambda d: d.generate(torch.full((1, 4), 5), torch.ones(1, 3)), r"attention_mask is \[1, 3\]"),
    "mask with list": (lambda d: d.generate(ONE, torch.ones(1, 2)), "a list of 1-D tensors needs none"),
    "1-D tensor": (lambda d: d.generate(torch.tensor([5, 6])), r"must be \[B, S\] or a list of 1-D tensors"),
    "floats": (lambda d: d.generate([torch.tensor([1.0])]), "must hold integers, not torch.float32"),
    "too long": (lambda d: d.generate([torch.full((65,), 5)]), "65 tokens, but max_length is 64; shorten it"),
    "eos lists": (lambda d: d.generate(ONE, eos_token_id=[[1], [2]]), "eos_token_id has 2 lists of ids for 1 seq"),
    "new tokens": (lambda d: d.generate(ONE, max_new_tokens=[1, 2]), "max_new_tokens has 2 values for 1 seq"),
    "id too large": (lambda d: d.generate([torch.tensor([VOCAB])]), f"holds the id {VOCAB}; ids are 0 to {VOCAB - 1}"),
    "negative id": (lambda d: d.generate([torch.tensor([-1])]), "holds the id -1"),
    "temperature": (lambda d: d.generate(ONE, temperature=-0.1), "temperature must be 0 or more, got -0.1"),
    "nan temperature": (lambda d: d.generate(ONE, temperature=float("nan")), "temperature must be 0 or more"),
    "top_p 0": (lambda d: d.generate(ONE, top_p=0), r"top_p must be in \(0, 1\], got 0"),
    "top_p above": (lambda d: d.generate(ONE, top_p=1.5), r"top_p must be in \(0, 1\], got 1.5"),
    "min_p": (lambda d: d.generate(ONE, min_p=2), r"min_p must be in \[0, 1\], got 2"),
    "top_k": (lambda d: d.generate(ONE, top_k=-1), "top_k must be 0 .off. or a positive integer, got -1"),
    "top_k float": (lambda d: d.generate(ONE, top_k=1.5), "top_k must be an integer, got 1.5"),
    "values": (lambda d: d.generate(ONE, temperature=[1.0, 2.0]), "temperature has 2 values for 1 sequences"),
    "type": (lambda d: d.generate(ONE, temperature="hot"), "must be a number or one number per sequence, not str"),
    "seed": (lambda d: d.generate(ONE, seed=[1, 2]), "seed has 2 values for 1 sequences"),
    "nan new tokens": (lambda d: d.generate(ONE, max_new_tokens=float("nan")), "max_new_tokens must be an integer"),
    "pickle": (pickle.dumps, "A decoder cannot be pickled or copied"),
    "deepcopy": (copy.deepcopy, "A decoder cannot be pickled or copied"),
    "max_new_tokens": (lambda d: d.generate(ONE, max_new_tokens=-1), "max_new_tokens must be an integer of at least 0"),
    "more new tokens": (lambda d: d.generate(ONE, max_new_tokens=65), "max_new_tokens=65 is more than the decoder's "
                        "max_length of 64, which counts the prompt, too; ask for fewer, or compile with a max_"),
    "longer": (lambda d: d.generate(ONE, max_length=100000), "max_length=100000 is more than the decoder's max_length"),
    "eos": (lambda d: d.generate(ONE, eos_token_id=VOCAB), f"eos_token_id has {VOCAB}, which is not a token id"),
    "logprobs": (lambda d: d.generate(ONE, return_logprobs="all"), "return_logprobs is False, True, 'raw'"),
    "eos type": (lambda d: d.generate(ONE, eos_token_id="a"), "eos_token_id must be a token id or a list of them"),
    "eos fraction": (lambda d: d.generate(ONE, eos_token_id=[2.5]), "eos_token_id must be an integer, got 2.5"),
    "list of strings": (lambda d: d.generate(ONE, temperature=["a"]), "must be a number .* not list of str"),
    "nan seed": (lambda d: d.generate(ONE, seed=float("nan")), "seed must be an integer, got nan"),
    "nothing": (lambda d: d.generate(None), "There is no prompt; give input_ids"),
    "mask type": (lambda d: d.generate(torch.full((1, 2), 5), [[1, 1]]), "is list, but must be a tensor"),
    "logprobs type": (lambda d: d.generate(ONE, return_logprobs=[1]), "return_logprobs is False, True"),
    "stream": (lambda d: d.stream([]), "input_ids is empty"),
    "options among prompts": (lambda d: d.generate({"input_ids": ONE, "temperature": 0.8, "seed": 1}),
                              "mapping of prompts has seed, temperature; give seed= as an argument"),
    "streamed options": (lambda d: d.stream({"input_ids": ONE, "seed": 1}), "mapping of prompts has seed"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call_is_refused_and_decoder_stays_usable(
    name: str, decoder: SpeculativeDecoder, expected: list[torch.Tensor]
) -> None:
    call, message = BAD_CALLS[name]
    with pytest.raises(InputError, match=message) as caught:
        call(decoder)
    assert "\n" not in str(caught.value)
    again = decoder.generate(PROMPTS, max_new_tokens=6).new_tokens
    assert all(map(torch.equal, again, expected))


def llama() -> Any:
    return shared_model("llama")


def spread_out() -> Any:
    """A model with weights on two devices, as accelerate's ``device_map`` leaves it when one is too small."""
    model = make_model("llama", num_hidden_layers=1)
    model.lm_head.to("meta")
    return model


def gemma3() -> Any:
    with torch.device("meta"):
        return Gemma3ForConditionalGeneration(Gemma3Config())


def step3p7() -> Any:
    with torch.device("meta"):
        return Step3p7ForConditionalGeneration(Step3p7Config())


BAD_COMPILES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "not a model": (lambda: specgraph.compile_speculative("gpt2"), UnsupportedModelError,
                    "Expected a transformers causal LM, got str"),
    "plain module": (lambda: specgraph.compile_speculative(torch.nn.Linear(1, 1)), UnsupportedModelError, "got Linear"),
    "masked LM": (lambda: specgraph.compile_speculative(BertForMaskedLM(BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=16))),
        UnsupportedModelError, "BertForMaskedLM is not a causal LM"),
    "encoder-decoder": (lambda: specgraph.compile_speculative(T5ForConditionalGeneration(T5Config(
        d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16))),
        UnsupportedModelError, "is an encoder-decoder; specgraph compiles decoder-only"),
    "multimodal, not loaded": (lambda: specgraph.compile_speculative(gemma3()), UnsupportedModelError,
                               "Gemma3ForConditionalGeneration has weights on meta, "),
    "multimodal draft": (lambda: specgraph.compile_speculative(llama(), draft=gemma3()), UnsupportedModelError,
        "Gemma3ForConditionalGeneration is multimodal, and .*; load its text model by Gemma3ForCausalLM.$"),
    "multimodal draft alone": (lambda: specgraph.compile_speculative(llama(), draft=step3p7()), UnsupportedModelError,
                               "is multimodal, and .*; transformers has no ForCausalLM class for its text model"),
    "without a head": (lambda: specgraph.compile_speculative(llama().model), UnsupportedModelError,
                       "LlamaModel is not a causal LM"),
    "two devices": (lambda: specgraph.compile_speculative(spread_out()), UnsupportedModelError,
                    "LlamaForCausalLM has weights on cpu, meta, .* load it on one, as by from_pretrained"),
    "K": (lambda: compiled(llama(), k=0), ConfigError, "draft.num_speculative_tokens must be at least 1, got 0"),
    "drafter": (lambda: compiled(llama(), "eagle9"), ConfigError, "draft.kind is one of dflash, dflash2, draft_mod"),
    "rule": (lambda: compiled(llama(), verify={"rule": "strickt"}), ConfigError, "verify.rule: .*strict"),
    "lowering": (lambda: compiled(llama(), lowering={"name": "cuda"}), ConfigError, "lowering.name is one of auto, "),
    "preset": (lambda: specgraph.compile_speculative(llama(), "eagle7"), ConfigError, "Unknown preset 'eagle7'"),
    "yaml": (lambda: specgraph.compile_speculative(llama(), "no.yaml"), ConfigError, "no configuration file 'no.yaml'"),
    "key": (lambda: compiled(llama(), drafts={}), ConfigError, "Unknown configuration key 'drafts': did you"),
    "pass": (lambda: compiled(llama(), pipeline={"order": ["insert_kv_cash"]}), ConfigError,
             "Unknown pass 'insert_kv_cash' .did you mean 'insert_kv_cache'"),
    "order": (lambda: compiled(llama(), pipeline={"order": ["insert_draft"]}), PassError,
              "insert_draft needs 'kv_cache', .* put insert_kv_cache before it"),
    "empty order": (lambda: compiled(llama(), pipeline={"order": []}), ConfigError,
                    "ends without 'kv_cache', .* add insert_kv_cache"),
    "pass option": (lambda: compiled(llama(), passes={"insert_verify": {"rule": "block"}}), PassError,
                    "verifies by 'block', but insert_draft drew its drafts for 'strict'"),
    "block size": (lambda: compiled(llama(), passes={"insert_kv_cache": {"block_size": 0}}), ConfigError,
                   "insert_kv_cache: block_size must be at least 1, got 0"),
    "none with draft": (lambda: compiled(llama(), "none", draft=llama()), ConfigError, "but draft.kind is 'none'"),
    "length": (lambda: compiled(llama(), max_length=4096), ConfigError, "max_length is 4096, .* at most 128 positions"),
    "drafts": (lambda: compiled(llama(), k=128), ConfigError, "num_speculative_tokens is 128, .* at most 128 tokens"),
    "draft name": (lambda: specgraph.compile_speculative(llama(), draft="ngram"), ConfigError,
                   "draft='ngram' is the name of a drafter.* compile_speculative.model, {'draft': 'ngram'}"),
    "no option": (lambda: compiled(llama(), passes={"share_weights": {"foo": 1}}), ConfigError,
                  "passes.share_weights has no options, got foo"),
    "nan weights": (lambda: specgraph.compile_speculative(broken_llama()), NumericsError,
                    r"own forward pass gives NaN: model.layers.1.mlp.down_proj.weight holds NaN"),
    "draft missing": (lambda: compiled(llama(), "draft_model"), ConfigError, "needs a model: pass draft="),
    "draft path": (lambda: specgraph.compile_speculative(llama(), draft="/nowhere"), ConfigError,
                   "'/nowhere' cannot be loaded as a causal LM"),
    "draft type": (lambda: specgraph.compile_speculative(llama(), draft=torch.nn.Linear(1, 1)), UnsupportedModelError,
                   "draft: Expected a transformers causal LM, got Linear"),
    "draft vocabulary": (lambda: compiled(llama(), draft=make_model("llama", vocab_size=5000)), UnsupportedModelError,
                         "The draft has 5000 tokens and the target 101, more than padding explains"),
    "draft EOS": (lambda: compiled(llama(), draft=make_model("llama", eos_token_id=7)), UnsupportedModelError,
                  r"The draft's EOS is \[7\], the target's \[2\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_COMPILES)
def test_bad_compilation_is_refused_in_one_sentence(name: str) -> None:
    call, error, message = BAD_COMPILES[name]
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_padded_vocabulary_of_the_same_tokenizer_is_fine() -> None:
    model, draft = shared_model("llama"), make_model("llama", seed=1, vocab_size=VOCAB + 27)
    plain = compiled(model, "none")
    for rule in ("strict", "probabilistic"):
        decoder = compiled(model, draft=draft, verify={"rule": rule})
        out = decoder.generate(PROMPTS, max_new_tokens=20, temperature=1.0, seed=1)
        assert all(int(t.max()) < VOCAB for t in out.new_tokens)
    same = compiled(model, draft=draft).generate(PROMPTS, max_new_tokens=20, temperature=1.0, seed=1).new_tokens
    want = plain.generate(PROMPTS, max_new_tokens=20, temperature=1.0, seed=1).new_tokens
    assert all(map(torch.equal, same, want))


def test_nan_logits_are_an_error_and_the_decoder_recovers() -> None:
    model = make_model("llama")
    decoder = compiled(model)
    expected = decoder.generate(PROMPTS, max_new_tokens=5).new_tokens
    weight = model.model.norm.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(NumericsError, match=r"logits are NaN in sequence 0.*Check the weights"):
        decoder.generate(PROMPTS, max_new_tokens=5)
    with torch.no_grad():
        weight.copy_(kept)
    assert all(map(torch.equal, decoder.generate(PROMPTS, max_new_tokens=5).new_tokens, expected))


def test_a_prompt_beyond_the_models_own_length_is_refused() -> None:
    model = make_model("llama")
    model.generation_config.max_length = 8
    decoder = compiled(model)
    assert len(decoder.generate([torch.arange(3, 10)]).new_tokens[0]) <= 1
    with pytest.raises(InputError, match=r"Prompt 1 has 8 tokens, and max_length=8 counts them; pass max_new_tokens"):
        decoder.generate([torch.arange(3, 10), torch.arange(3, 11)])
    assert len(decoder.generate([torch.arange(3, 11)], max_new_tokens=2).new_tokens[0]) <= 2


@pytest.mark.parametrize(
    ("option", "value"), [("typical_p", 0.9), ("exponential_decay_length_penalty", (3, 1.1)), ("num_beams", 2)]
)
def test_unsupported_processor_is_refused_by_name(option: str, value: object) -> None:
    model = make_model("llama")
    setattr(model.generation_config, option, value)
    with pytest.raises(UnsupportedModelError, match=f"{option}=.*will not ignore"):
        compiled(model)
