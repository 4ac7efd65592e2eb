"""Options that change logits, on a GPU: kernels against plain PyTorch, and the bits of plain decoding with drafts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.ops import Op
from specgraph.kernels.processors import biases, forced, ngrams, penalties
from tests.gpu.capture import captured, no_synchronisation
from tests.gpu.test_bitwise_gpu import decoder, prompts

DEVICE = torch.device("cuda")
COUNT, NEW_TOKENS = 16, 128
EACH: dict[str, list[Any]] = {
    "repetition_penalty": [1.0 + 0.1 * (n % 4) for n in range(COUNT)],
    "frequency_penalty": [0.2 * (n % 3) for n in range(COUNT)],
    "presence_penalty": [0.3 * (n % 2) for n in range(COUNT)],
    "no_repeat_ngram_size": [(0, 3, 2, 5)[n % 4] for n in range(COUNT)],
    "sequence_bias": [({}, {(13,): 9.0, (13, 13): -30.0})[n % 2] for n in range(COUNT)],
    "suppress_tokens": [([], [*range(20, 40)])[n % 3 // 2] for n in range(COUNT)],
    "forced_eos_token_id": [[3 + n] for n in range(COUNT)],
}
"""Options of every prompt. The first has values that change nothing, but for the token that is forced."""


def context(batch: int, rows: int, vocab: int, longest: int, dtype: torch.dtype) -> dict[str, Any]:
    """Sequences of all lengths, with tokens of which many repeat."""
    draw = torch.Generator(DEVICE).manual_seed(batch + rows)

    def ids(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=draw, device=DEVICE)

    start = ids(longest - 64, batch)
    return {
        "logits": (torch.randn(batch, rows, vocab, generator=draw, device=DEVICE) * 4).to(dtype),
        "history": ids(min(vocab, 5000), batch + 1, longest),
        "rows": torch.arange(batch, device=DEVICE).flip(0) + 1,
        "window": ids(min(vocab, 5000), batch, rows + 2),
        "start": start,
        "num_forced": ids(3, batch),
    }


def penalised(*shape: Any) -> tuple[Op, dict[str, Any]]:
    given = context(*shape)
    options = {"repetition_penalty": 0.5, "frequency_penalty": -0.5, "presence_penalty": -0.5}
    drawn = {name: torch.rand(shape[0], device=DEVICE) + low for name, low in options.items()}
    return penalties.PENALISE, {**given, "prompt_length": given["start"] // 2 + 1, **drawn}


def biased(*shape: Any) -> tuple[Op, dict[str, Any]]:
    """Words of one to three tokens, of which many are at the end of some context. No token has two biases, since the
    reference adds those in any order on a GPU."""
    given, (batch, words) = context(*shape), (shape[0], 90)
    prompt_length = given["start"] // 2 + 1
    sizes = torch.arange(words, device=DEVICE) % 3 + 1
    ends = sizes.cumsum(0)
    tokens = torch.randint(0, 5, (batch, int(ends[-1])), device=DEVICE)
    tokens[:, ends - 1] = torch.randperm(101, device=DEVICE)[:words]
    given["window"].remainder_(5)
    values = torch.randn(batch, words, device=DEVICE)
    values[:, ::7] = -float("inf")
    until = torch.where(torch.arange(words, device=DEVICE) % 5 == 0, 2000, 1 << 62)
    tables = {"bias_tokens": tokens, "bias_ends": ends.repeat(batch, 1), "bias_values": values}
    tables["bias_until"] = until.repeat(batch, 1)
    return biases.ADD_BIASES, {**given, "prompt_length": prompt_length, **tables}


def without_repeats(*shape: Any) -> tuple[Op, dict[str, Any]]:
    given = context(*shape)
    given["history"].remainder_(50)
    given["window"].remainder_(50)
    sizes = (torch.arange(shape[0], device=DEVICE) + 1) % 4
    return ngrams.BAN_NGRAMS, {**given, "no_repeat_ngram_size": sizes}


def with_forced_tokens(*shape: Any) -> tuple[Op, dict[str, Any]]:
    given = context(*shape)
    given["start"][::2] = 0
    tokens = torch.arange(shape[0], device=DEVICE)
    behind = given["num_forced"].clamp(max=2) + 2  # of the window's first token: the first row gives the last token
    forced_ids = {"forced_bos_token_id": tokens, "forced_eos_token_id": (tokens + 1) % 3 - 1}
    own = {name: given[name] for name in ("logits", "window", "start", "num_forced")}
    return forced.FORCE_TOKENS, {**own, "max_length": given["start"] + behind, **forced_ids}


CASES = [penalised, biased, without_repeats, with_forced_tokens]


@pytest.mark.parametrize(("vocab", "longest"), [(101, 70), (128_256, 4096), (151_936, 131_072)])
@pytest.mark.parametrize(("batch", "rows"), [(1, 4), (3, 1), (16, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_kernels_have_the_bits_of_the_reference(
    case: Callable[..., tuple[Op, dict[str, Any]]], batch: int, rows: int, vocab: int, longest: int, dtype: torch.dtype
) -> None:
    if longest * batch * rows > 3_000_000 and case is without_repeats:
        batch = 2  # the reference needs memory for every row and token
    op, given = case(batch, rows, vocab, longest, dtype)
    if case is without_repeats:
        expected = torch.cat([reference_of_ngrams(given, b) for b in range(batch)])
    else:
        expected = op.form("reference")(*given.values())
    actual = getattr(torch.ops.specgraph, op.name)(*given.values())
    assert torch.equal(actual, expected) and not torch.equal(actual, given["logits"].float())


def reference_of_ngrams(given: dict[str, Any], b: int) -> Tensor:
    """That of one sequence."""
    one = {name: part if name == "history" else part[b : b + 1] for name, part in given.items()}
    return ngrams.BAN_NGRAMS.form("reference")(*one.values())


@pytest.mark.parametrize("case", CASES)
def test_kernels_are_captured_and_wait_for_nothing(case: Callable[..., tuple[Op, dict[str, Any]]]) -> None:
    op, given = case(4, 4, 128_256, 4096, torch.bfloat16)
    function = getattr(torch.ops.specgraph, op.name)
    expected = function(*given.values())
    with no_synchronisation():
        function(*given.values())
    graph, out = captured(lambda: function(*given.values()))
    for _ in range(2):
        graph.replay()
        assert torch.equal(out, expected)


def run(compiled: Any, batch: int, temperature: float, options: dict[str, list[Any]]) -> list[tuple[Tensor, Tensor]]:
    found = []
    for begin in range(0, COUNT, batch):
        rows = range(begin, min(begin + batch, COUNT))
        out = compiled.generate(
            [prompts()[row] for row in rows], max_new_tokens=NEW_TOKENS, eos_token_id=[], temperature=temperature,
            seed=list(rows), return_logprobs=True, **{name: [of[row] for row in rows] for name, of in options.items()},
        )  # fmt: skip
        found += list(zip(out.new_tokens, out.logprobs, strict=True))
    return found


@functools.cache
def made(kind: str) -> Any:
    return decoder(kind, 4)


@functools.cache
def plain(temperature: float) -> list[tuple[Tensor, Tensor]]:
    return run(made("none"), COUNT, temperature, EACH)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("kind", ["none", "ngram", "eagle3", "draft"])
def test_drafts_and_batches_change_no_bit(kind: str, batch: int, temperature: float) -> None:
    found = run(made(kind), batch, temperature, EACH)
    for row, ((tokens, values), (expected, expected_values)) in enumerate(zip(found, plain(temperature), strict=True)):
        assert torch.equal(tokens, expected), f"tokens of prompt {row} differ"
        assert torch.equal(values, expected_values), f"log-probabilities of prompt {row} differ"


@pytest.mark.parametrize("name", EACH)
def test_every_option_changes_something(name: str) -> None:
    free = run(made("none"), COUNT, 0.0, {})
    changed = run(made("none"), COUNT, 0.0, {name: EACH[name]})
    neutral = [row for row, value in enumerate(EACH[name]) if value == EACH[name][0] and not name.startswith("forced")]
    differ = [row for row in range(COUNT) if not torch.equal(free[row][0], changed[row][0])]
    assert differ and not set(differ) & set(neutral)
    # Beside sequences that ask for something, those that do not keep their bits.
    assert all(torch.equal(free[row][1], changed[row][1]) for row in neutral)
