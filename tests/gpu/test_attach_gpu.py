"""An attached model on a GPU, in bf16: greedy tokens part from transformers' only where two logits nearly tie."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import specgraph
from specgraph import InputError
from tests.dropin.test_attach import left_padded
from tests.gpu.test_bitwise_gpu import MODELS, prompts

COUNT, NEW_TOKENS = 32, 128
TIE = 2.0
"""In units in the last place of bfloat16 at the largest logit. Both sides round their logits to bfloat16, transformers
behind a library's products, and specgraph behind its own."""


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.bfloat16).cuda()
    own = copy.deepcopy(model)
    specgraph.attach(own, {"debug": {"self_check": False}}, draft=MODELS / "eagle3")
    return model, own


def gap(exact: Any, row: Tensor, at: int) -> tuple[float, float]:
    """How far apart the two largest logits are behind the first ``at`` tokens, and the unit in the last place there."""
    with torch.no_grad():
        first, second = exact(row[:at].unsqueeze(0)).logits[0, -1].topk(2).values.tolist()
    return first - second, 2.0 ** (math.floor(math.log2(abs(first))) - 7)


def test_greedy_tokens_part_at_near_ties_alone(pair: tuple[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    model, own = pair
    given = {name: value.cuda() for name, value in left_padded(prompts()[:COUNT], pad=1).items()}
    options = {**given, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    theirs, ours = model.generate(**options), own.generate(**options)
    assert ours.device == theirs.device and ours.dtype == theirs.dtype
    width = min(theirs.shape[1], ours.shape[1])
    exact, parted = copy.deepcopy(model).double(), []
    for row, mask in enumerate(given["attention_mask"]):
        differing = (theirs[row, :width] != ours[row, :width]).nonzero()
        if not len(differing):
            continue
        at, begin = int(differing[0]), int(mask.argmax())
        apart, unit = gap(exact, ours[row, begin:], at - begin)
        parted.append((row, at - begin, apart, apart / unit))
    largest = max(parted, key=lambda found: found[3], default=(0, 0, 0.0, 0.0))
    with capsys.disabled():
        print(
            f"\n{len(parted)} of {COUNT} sequences part, at gaps of at most {largest[2]:.4f} or {largest[3]:.2f} units"
        )
    assert all(units <= TIE for *_, units in parted), parted
    assert len(parted) < COUNT // 2


def test_a_pipeline_decodes_through_it(pair: tuple[Any, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    text = "Question: What is 3 + 4?\nAnswer:"
    made = pipeline("text-generation", model=pair[1], tokenizer=tokenizer, device="cuda:0")
    (found,) = made(text, max_new_tokens=16, do_sample=False, return_full_text=False)
    decoder = pair[1].generate.decoder
    assert found["generated_text"] == decoder.text(text, tokenizer=tokenizer, max_new_tokens=16)


def test_a_model_that_was_moved_is_refused() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.bfloat16)
    specgraph.attach(model, {"debug": {"self_check": False}})
    model.cuda()
    with pytest.raises(InputError, match="compile the model again"):
        model.generate(prompts()[0].unsqueeze(0).cuda(), max_new_tokens=4)
