"""Published models, float32 on a CPU: the tokens of transformers and of plain decoding, chats with tools, structures.

They are looked for in the folder that the environment variable SPECGRAPH_MODELS names, in which
``benchmarks/fetch_models.py`` has made folders by their names. Without it, every test here is skipped by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgraph

VARIABLE, TOKENS = "SPECGRAPH_MODELS", 12
TEXTS = ["The capital of France is", "def add(a, b):\n    return a + b\n\ndef add_all(items):\n    return"]
TOOLS = [{
    "type": "function",
    "function": {"name": "weather", "description": "The weather of a city.",
                 "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}]  # fmt: skip


def folder_of(name: str) -> Path:
    return Path(os.environ.get(VARIABLE, ""), name)


def needs(name: str, *others: str) -> Any:
    """A parameter of tests that are skipped unless these models are there."""
    there = VARIABLE in os.environ and all((folder_of(model) / "config.json").is_file() for model in (name, *others))
    reason = f"needs the environment variable {VARIABLE}, a folder that holds {' and '.join((name, *others))}"
    return pytest.param(name, marks=pytest.mark.skipif(not there, reason=reason))


class Real(NamedTuple):
    """A model with its tokenizer, and with what plain decoding gives."""

    model: Any
    tokenizer: Any
    plain: specgraph.SpeculativeDecoder

    def compiled(self, draft: str | Path) -> specgraph.SpeculativeDecoder:
        return compiled(self.model, draft)

    def prompts(self) -> list[Tensor]:
        return [torch.tensor(self.tokenizer(text)["input_ids"]) for text in TEXTS]

    def greedy(self, prompt: Tensor) -> list[int]:
        """The new tokens of transformers."""
        options = {"max_new_tokens": TOKENS, "do_sample": False}
        out: list[int] = self.model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **options)[0][
            len(prompt) :
        ].tolist()
        return out


def compiled(model: Any, draft: str | Path) -> specgraph.SpeculativeDecoder:
    """A decoder with a drafter of this name, or with the draft model in this folder."""
    kind = {"draft": draft} if isinstance(draft, str) else {}
    config = {"lowering": "eager", "max_length": 512, "max_batch_size": 2, "debug": {"self_check": False}, **kind}
    return specgraph.compile_speculative(model, config, draft=None if kind else draft)


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest) -> Iterator[Real]:
    folder = folder_of(request.param)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    yield Real(model, AutoTokenizer.from_pretrained(folder), compiled(model, "none"))


def new_tokens(decoder: specgraph.SpeculativeDecoder, prompts: list[Tensor], **options: Any) -> list[list[int]]:
    return [new.tolist() for new in decoder.generate(prompts, max_new_tokens=TOKENS, **options).new_tokens]


def check_tokens(real: Real, drafting: specgraph.SpeculativeDecoder) -> None:
    """Greedy tokens are those of transformers, and sampled ones are those of plain decoding with the same seeds."""
    prompts = real.prompts()
    expected = [real.greedy(prompt) for prompt in prompts]
    sampling: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": [3, 4]}
    sampled = new_tokens(real.plain, prompts, **sampling)
    assert sampled != expected
    for decoder in (real.plain, drafting):
        assert new_tokens(decoder, prompts, temperature=0.0) == expected
        assert new_tokens(decoder, prompts, **sampling) == sampled


@pytest.mark.parametrize("real", [needs("gemma-270m"), needs("qwen-0.5b")], indirect=True)
def test_plain_and_ngram_decoding_give_the_tokens_of_transformers(real: Real) -> None:
    check_tokens(real, real.compiled("ngram"))


@pytest.mark.parametrize("real", [needs("qwen-0.5b")], indirect=True)
def test_a_chat_with_tools_is_written_by_the_template_of_the_model(real: Real) -> None:
    chat = [{"role": "user", "content": "How is the weather in Paris?"}]
    text = real.tokenizer.apply_chat_template(chat, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert "<tools>" in text and '"name": "weather"' in text
    prompt = torch.tensor(real.tokenizer(text, add_special_tokens=False)["input_ids"])
    answer = real.plain.chat(chat, tools=TOOLS, tokenizer=real.tokenizer, max_new_tokens=TOKENS, temperature=0.0)
    assert answer == real.tokenizer.decode(real.greedy(prompt), skip_special_tokens=True)


@pytest.mark.parametrize("real", [needs("gemma-270m"), needs("qwen-0.5b")], indirect=True)
def test_an_answer_has_the_structure_that_was_asked_for(real: Real) -> None:
    pattern = r"[A-Z][a-z]{2,6}, [0-9]{4}\."
    options = {"tokenizer": real.tokenizer, "regex": pattern, "temperature": 0.8, "seed": 7}
    tokens = new_tokens(real.plain, real.prompts(), **options)
    texts = real.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert new_tokens(real.compiled("ngram"), real.prompts(), **options) == tokens


@pytest.mark.parametrize("real", [needs("qwen-1.5b", "qwen-0.5b")], indirect=True)
def test_a_smaller_model_of_the_family_drafts(real: Real) -> None:
    drafting = real.compiled(folder_of("qwen-0.5b"))
    check_tokens(real, drafting)
    out = drafting.generate(real.prompts(), max_new_tokens=TOKENS)
    assert out.stats.acceptance_per_position[0] > 0.3
