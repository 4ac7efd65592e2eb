"""Compiling disturbs no other thread: not one that runs the same model, nor one that runs or compiles another one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph import SpeculativeDecoder
from specgraph.ir.exporting import exporting, own_copy
from tests.decoding import assert_same_tokens, compiled, reference_greedy
from tests.models import make_head, make_model, ragged_prompts

PROMPTS = ragged_prompts()
TOKENS = PROMPTS[1].unsqueeze(0)
NEW = 6


def forward(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(TOKENS).logits
    return logits


def generate(model: Any) -> Tensor:
    # A cache that is passed in, as in a second turn: transformers reads it in another way while something is compiled.
    first = model.generate(TOKENS, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, TOKENS], dim=1)
    out: Tensor = model.generate(longer, past_key_values=first.past_key_values, max_new_tokens=4, do_sample=False)
    return out


def decode(decoder: SpeculativeDecoder) -> list[Tensor]:
    return decoder.generate([TOKENS[0]], max_new_tokens=NEW).new_tokens


def running(work: Callable[[], Tensor], compile_: Callable[[], Any]) -> tuple[list[Tensor], Any]:
    """What ``work`` gives again and again in a thread while this one runs ``compile_``, and what that gives."""
    begun, done, results = threading.Event(), threading.Event(), []

    def repeat() -> None:
        while not done.is_set():
            results.append(work())
            begun.set()
            done.wait(0.01)  # so that compiling gets on

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(repeat)
        try:
            assert begun.wait(60)
            made = compile_()
        finally:
            done.set()
        future.result()
    return results, made


@pytest.mark.parametrize("same", [True, False], ids=["the same model", "another model"])
@pytest.mark.parametrize("call", [forward, generate])
def test_a_thread_that_runs_a_model_meanwhile_gets_what_it_got_before(
    call: Callable[[Any], Tensor], same: bool
) -> None:
    target = make_model("qwen3_moe", num_hidden_layers=1)
    other = target if same else make_model("gemma2", seed=1)
    expected = call(other)
    results, decoder = running(lambda: call(other), lambda: compiled(target))
    assert len(results) > 1  # the first one came before
    assert all(torch.equal(result, expected) for result in results)
    assert_same_tokens(target, [TOKENS[0]], decode(decoder), reference_greedy(target, [TOKENS[0]], NEW))


def test_a_thread_that_decodes_meanwhile_gets_what_it_got_before() -> None:
    target = make_model("llama")
    decoder = compiled(target)
    (expected,) = decode(decoder)
    results, second = running(lambda: decode(decoder)[0], lambda: compiled(target, "eagle3", draft=make_head(target)))
    assert len(results) > 1  # the first one came before
    assert all(torch.equal(result, expected) for result in [*results, *decode(second)])


def test_two_threads_compile_at_the_same_time() -> None:
    models = [make_model(name, num_hidden_layers=1) for name in ("llama", "gpt_oss")]
    models.append(models[0])
    together = threading.Barrier(len(models))

    def work(model: Any) -> list[Tensor]:
        together.wait()
        return decode(compiled(model))

    with ThreadPoolExecutor(len(models)) as pool:
        tokens = [*pool.map(work, models)]
    for model, actual in zip(models, tokens, strict=True):
        assert_same_tokens(model, [TOKENS[0]], actual, reference_greedy(model, [TOKENS[0]], NEW))


def test_a_module_that_another_thread_calls_is_not_recorded() -> None:
    """The same without luck: the other thread calls its model while this one is inside of the export."""
    other, seen = make_model("llama"), list[Any]()
    expected = forward(other)

    class Meeting(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.extend((pool.submit(forward, other).result(), pool.submit(torch.compiler.is_compiling).result()))
            return super().forward(x)

    with ThreadPoolExecutor(1) as pool, exporting():
        torch.export.export(Meeting(2, 2), (torch.zeros(1, 2),), strict=False)
    assert seen
    assert all(torch.equal(result, expected) for result in seen[::2])
    assert not any(seen[1::2])
    assert not torch.compiler.is_compiling()


def test_an_own_copy_shares_its_tensors_and_nothing_else() -> None:
    model = make_model("gemma3_text")
    own = own_copy(model)
    assert all(a is b for a, b in zip(model.parameters(), own.parameters(), strict=True))
    assert all(a is b for a, b in zip(model.buffers(), own.buffers(), strict=True))
    assert not {*map(id, model.modules())} & {*map(id, own.modules())}
    assert own.config is not model.config
    assert own.config is own.model.config
    assert own.config.to_dict() == model.config.to_dict()
    assert own.lm_head.weight is own.model.embed_tokens.weight
    own.lm_head = torch.nn.Identity()
    own.model.layers[0].forward = lambda *args, **kwargs: None
    assert torch.equal(forward(model), forward(own_copy(model)))


def test_a_method_that_stands_in_for_another_one_runs_the_copy() -> None:
    model: Any = make_model("llama")
    mlp = model.model.layers[0].mlp
    before, seen = mlp.forward, list[Tensor]()

    def halved(x: Tensor) -> Tensor:
        out: Tensor = before(x) / 2
        seen.append(out)
        return out

    mlp.forward = halved
    expected = reference_greedy(model, [TOKENS[0]], NEW)
    seen.clear()
    decoder = compiled(model)
    assert not seen  # no fake tensor of the export stays behind
    assert_same_tokens(model, [TOKENS[0]], decode(decoder), expected)
    assert not any("constant" in name for name in dict(decoder.stages["trace"].modules["target"].named_buffers()))


def test_what_cannot_be_copied_is_shared() -> None:
    model: Any = make_model("llama")
    model.lock = threading.Lock()
    assert own_copy(model).lock is model.lock
    assert_same_tokens(model, [TOKENS[0]], decode(compiled(model)), reference_greedy(model, [TOKENS[0]], NEW))


def test_a_compiled_forward_is_traced_as_what_was_compiled(torch_compile: None) -> None:
    model: Any = make_model("llama")
    expected = reference_greedy(model, [TOKENS[0]], NEW)
    model.forward = torch.compile(model.forward, backend="eager")
    assert_same_tokens(model, [TOKENS[0]], decode(compiled(model)), expected)
