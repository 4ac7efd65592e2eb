"""Models whose rotary frequencies change with the length, up to their whole length.

The oracle is the model's own forward pass without a cache. A second sequence beside the one that is looked at has the
last position for which the decoder was compiled, so that transformers itself takes the frequencies of that length.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specgraph
from specgraph import ConfigError, InputError, UnsupportedModelError
from specgraph.frontend import rotary
from tests.decoding import CONFIG, assert_same_tokens, compiled, reference_greedy
from tests.drafters.mtp_files import random_modules
from tests.dropin.test_attach import left_padded
from tests.models import make_model, ragged_prompts

ORIGINAL, LENGTH, NEW = 48, 96, 14
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL, "factor": 2.0,
            "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 3.0, 6.0, 9.0]}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL},
    "phimoe": {"rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.4}},
    "llama": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
              "max_position_embeddings": ORIGINAL},
}  # fmt: skip
PROMPTS = ragged_prompts((5, ORIGINAL - 3, ORIGINAL + 9))
"""One that stays below the original length, one that crosses it, and one that begins behind it."""


def model_of(name: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    return make_model(name, seed=seed, dtype=torch.float64, **MODELS[name] | options)


@torch.no_grad()
def forced_logits(model: Any, sequence: Tensor, length: int) -> Tensor:
    """The logits ``[T, V]`` of a forward pass in which another sequence has the position ``length - 1``."""
    count, positions = len(sequence), torch.arange(length)
    positions = torch.stack([positions[:count], positions[-count:]])
    logits: Tensor = model(sequence.expand(2, -1), position_ids=positions, use_cache=False).logits[0]
    return logits


def forced_greedy(model: Any, prompts: list[Tensor], new_tokens: int, length: int = LENGTH) -> list[Tensor]:
    found = []
    for prompt in prompts:
        sequence = prompt
        for _ in range(new_tokens):
            sequence = torch.cat([sequence, forced_logits(model, sequence, length)[-1:].argmax(-1)])
        found.append(sequence[len(prompt) :])
    return found


@functools.cache
def expected_of(name: str) -> list[Tensor]:
    """The greedy tokens behind ``PROMPTS`` with the frequencies of ``LENGTH``."""
    return forced_greedy(model_of(name), PROMPTS, NEW)


def greedy(decoder: specgraph.SpeculativeDecoder, prompts: list[Tensor] = PROMPTS, new_tokens: int = NEW) -> Any:
    return decoder.generate(prompts, max_new_tokens=new_tokens, eos_token_id=[])


@pytest.mark.parametrize("kind", ["none", "ngram", "draft_model"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_across_the_original_length_are_those_of_one_set_of_frequencies(name: str, kind: str) -> None:
    model = model_of(name)
    draft = model_of(name, num_hidden_layers=1) if kind == "draft_model" else None
    decoder = compiled(model, kind, draft=draft, max_length=LENGTH)
    out, expected = greedy(decoder), expected_of(name)
    assert_same_tokens(model, PROMPTS, out.new_tokens, expected)
    with decoder.session() as session:
        ids = [session.submit(prompt, max_new_tokens=NEW, eos_token_id=[]) for prompt in PROMPTS]
        found: dict[int, list[int]] = {each: [] for each in ids}
        for event in session:
            found[event.id] += event.tokens
    assert [found[each] for each in ids] == [tokens.tolist() for tokens in expected]


@pytest.mark.parametrize("name", MODELS)
def test_the_frequencies_make_a_difference(name: str) -> None:
    """So the tests above would find those of short sequences, or of another length."""
    model, sequence = model_of(name), PROMPTS[1]
    with torch.no_grad():
        short = model(sequence.unsqueeze(0), use_cache=False).logits[0]
    assert float((forced_logits(model, sequence, LENGTH) - short).abs().max()) > 1e-2


@pytest.mark.parametrize("length", [None, ORIGINAL - 8])
@pytest.mark.parametrize("name", MODELS)
def test_up_to_the_original_length_tokens_are_those_of_transformers(name: str, length: int | None) -> None:
    """A dynamic base that has grown before is not taken over."""
    model = model_of(name)
    with torch.no_grad():
        model(torch.zeros(1, LENGTH, dtype=torch.int64))
    decoder = compiled(model, max_length=length)
    assert decoder.max_length == (length or ORIGINAL)
    prompts = ragged_prompts((5, 20))
    expected = reference_greedy(model, prompts, NEW)
    assert_same_tokens(model, prompts, greedy(decoder, prompts).new_tokens, expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_base_that_has_grown_further_is_not_taken_over(name: str) -> None:
    model, expected = model_of(name), expected_of(name)[:2]
    with torch.no_grad():
        model(torch.zeros(1, 2 * LENGTH, dtype=torch.int64))
    decoder = specgraph.compile_speculative(model, {**CONFIG, "debug": {"self_check": True}, "max_length": LENGTH})
    assert_same_tokens(model, PROMPTS[:2], greedy(decoder, PROMPTS[:2]).new_tokens, expected)


def test_a_draft_model_has_the_frequencies_of_the_decoders_length() -> None:
    """A draft that is the target itself is always right."""
    model = model_of("phi3")
    decoder = compiled(model, "draft_model", draft=model_of("phi3"), max_length=LENGTH)
    out = greedy(decoder, PROMPTS[:1], 21)
    assert out.stats.emitted_per_step == [[5, 5, 5, 5]]


def test_frequencies_of_a_part_of_each_head_and_of_single_types_of_layers() -> None:
    """As in Phi-4-mini, and in a model whose layers have two rope types. The self-check compares both."""
    part = {**LONGROPE, "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 6.0], "partial_rotary_factor": 0.75}
    types = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    for name, options in (
        ("phi3", {"rope_parameters": part, "original_max_position_embeddings": ORIGINAL}),
        ("gemma3_text", {"rope_parameters": types}),
    ):
        model = make_model(name, dtype=torch.float64, **options)
        for length, reach in ((None, ORIGINAL), (LENGTH, LENGTH)):
            config = {**CONFIG, "debug": {"self_check": True}, "max_length": length}
            assert specgraph.compile_speculative(model, config).max_length == reach


def test_modules_of_mtp_have_the_frequencies_of_the_target() -> None:
    model: Any = model_of("llama")
    decoder = compiled(model, "mtp", 1, draft=random_modules(model, 1), max_length=LENGTH)
    modules = decoder.stages["insert_draft"].modules.unchanged
    target, module = (dict(modules[name].named_buffers()) for name in ("target", "mtp_0"))
    found = module["block.rotary_emb.inv_freq"]
    assert torch.equal(found, target["model.rotary_emb.inv_freq"])
    assert not torch.allclose(found, model.model.rotary_emb.original_inv_freq.to(found))


@pytest.mark.parametrize("name", MODELS)
def test_the_self_check_finds_the_frequencies_of_short_sequences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"debug": {"self_check": True}, "draft": {"kind": "none"}, "max_length": LENGTH}
    decoder = specgraph.compile_speculative(model_of(name), config)
    assert (
        f"of {LENGTH} tokens, for sequences of every length; those of short ones end at {ORIGINAL}" in decoder.report()
    )
    fix = rotary.fix_rotary
    monkeypatch.setattr("specgraph.frontend.tracing.fix_rotary", lambda model, _: fix(model, None))
    with pytest.raises(UnsupportedModelError, match="decodes differently"):
        specgraph.compile_speculative(model_of(name), config)


def test_every_sentence_about_the_length_leads_somewhere() -> None:
    model = model_of("phi3")
    short = compiled(model, "none")
    advice = r"compile with a max_length of up to 128; above 48, this model then has the rotary frequencies of long "
    with pytest.raises(InputError, match=f"has 49 tokens, but max_length is 48; shorten it, or {advice}"):
        short.generate([torch.arange(3, 52)])
    with pytest.raises(InputError, match=f"max_length of 48, which counts the prompt, too; ask for fewer, or {advice}"):
        short.generate(PROMPTS[:1], max_new_tokens=49)
    longer = compiled(model, "none", max_length=LENGTH)
    with pytest.raises(InputError, match=r"shorten it, or compile with a max_length of up to 128.$"):
        longer.generate([torch.full((97,), 5)])
    whole = compiled(model, "none", max_length=128)
    with pytest.raises(InputError, match=r"shorten it, or use a model that is right for more than 128 positions.$"):
        whole.generate([torch.full((129,), 5)])
    with pytest.raises(ConfigError, match="max_length is 129, but Phi3ForCausalLM is right for at most 128 positions"):
        compiled(model, "none", max_length=129)
    assert compiled(model_of("llama"), "none", max_length=1000).max_length == 1000


def test_an_attached_model_takes_calls_that_begin_behind_the_original_length() -> None:
    """transformers then takes the same frequencies for every token, also of shorter prompts beside the longest."""
    model: Any = model_of("phi3")
    given = left_padded(ragged_prompts((ORIGINAL + 9, 5)))
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(**given, **options)
    specgraph.attach(model, {**CONFIG, "max_length": LENGTH})
    assert torch.equal(model.generate(**given, **options), expected)
    for length in (5, ORIGINAL):
        sentence = (
            f"whose longest prompt has {length} tokens, and .* was attached with max_length=96, .* at most 48, or"
        )
        with pytest.raises(InputError, match=sentence):
            model.generate(**left_padded(ragged_prompts((length, 3))), **options)


def test_an_attached_model_whose_frequencies_change_with_every_token_stays_below_the_original_length() -> None:
    model: Any = model_of("llama")
    with pytest.raises(InputError, match=r"anew with every token, .* attach it with a max_length of at most 48"):
        specgraph.attach(model, {**CONFIG, "max_length": LENGTH})
    given, options = left_padded(PROMPTS[:2]), {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**given, **options)
    specgraph.attach(model, CONFIG)
    assert torch.equal(model.generate(**given, **options), expected)
