"""Runners: one state and its graphs for many requests. Graphs are stood in for by calls, so no GPU is needed."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from specgraph import NumericsError, SpeculativeDecoder
from specgraph.kernels.launch import arrival_counters
from specgraph.runtime.execution import runner_pool
from specgraph.runtime.execution.cuda_graphs import GraphPool, first_error
from specgraph.runtime.execution.engine import Engine
from specgraph.runtime.execution.graph_runner import GraphRunner
from specgraph.runtime.execution.results import Mailbox
from specgraph.runtime.execution.runner_pool import RunnerPool
from specgraph.runtime.execution.workspace import PATIENCE, SHRINK_BYTES, Shape, Workspace, next_sizes
from specgraph.runtime.memory.sizes import StateSizes, largest
from specgraph.runtime.memory.state_rows import staged
from specgraph.runtime.schedule.prefill import Chunk
from tests.capturing import Calls, captured
from tests.decoding import compiled
from tests.models import ragged_prompts, shared_model
from tests.runtime.test_decoder import noisy_copy

PROMPTS = ragged_prompts((3, 17, 8, 1))
LENGTHS = (9, 30, 9, 9)


def replaying(kind: str = "ngram", **extra: Any) -> SpeculativeDecoder:
    """A decoder whose decode steps are replayed, and read one step behind."""
    return captured(compiled(shared_model("llama", dtype=torch.float64), kind, **extra))


@pytest.fixture(scope="module")
def plain() -> SpeculativeDecoder:
    return compiled(shared_model("llama", dtype=torch.float64))


@pytest.fixture
def decoder() -> SpeculativeDecoder:
    return replaying()


def idle(decoder: SpeculativeDecoder) -> Workspace:
    space = decoder._runners.idle
    assert space is not None
    return space


def decode_graphs(space: Workspace) -> int:
    return sum(shape.width is None for shape in space.shapes)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def test_replayed_steps_read_one_behind_emit_what_calls_do(plain: SpeculativeDecoder) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "seed": [1, 2, 3, 4], "return_logprobs": True}
    decoder = replaying()
    for temperature in (0.0, 1.0):
        for prompts in (PROMPTS, PROMPTS[:1] * 4, PROMPTS[::-1]):
            expected = plain.generate(prompts, temperature=temperature, **options)
            found = decoder.generate(prompts, temperature=temperature, **options)
            assert same(found.new_tokens, expected.new_tokens)
            assert found.logprobs and expected.logprobs and same(found.logprobs, expected.logprobs)
            assert found.stats.emitted_per_step == expected.stats.emitted_per_step


def test_batch_sizes_and_modes_share_one_state_and_are_captured_once(
    decoder: SpeculativeDecoder, plain: SpeculativeDecoder
) -> None:
    def run() -> None:
        for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[1:3]):
            for options in ({}, {"temperature": 1.0, "seed": 3}, {"return_logprobs": True}):
                both = [made.generate(prompts, max_new_tokens=9, **options) for made in (decoder, plain)]
                assert same(both[0].new_tokens, both[1].new_tokens)

    decoder.generate(PROMPTS, max_new_tokens=9)
    space = idle(decoder)
    run()
    assert idle(decoder) is space and decode_graphs(space) == 9
    shapes = space.shapes
    run()
    assert idle(decoder) is space and space.shapes == shapes
    decoder.generate(PROMPTS[:3], max_new_tokens=9)  # in the bucket of four
    assert decode_graphs(space) == 9


def test_a_larger_request_gets_a_new_state_with_room_for_both(decoder: SpeculativeDecoder) -> None:
    decoder.generate(PROMPTS, max_new_tokens=4)
    first = idle(decoder)
    decoder.generate(PROMPTS[:1], max_new_tokens=100)
    second = idle(decoder)
    assert second is not first and decode_graphs(second) == 1
    assert largest([first.sizes, second.sizes]) == second.sizes
    decoder.generate(PROMPTS, max_new_tokens=4)
    assert idle(decoder) is second


def test_a_state_that_is_too_small_is_freed_before_the_next_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, there = replaying(), list[bool]()
    decoder.generate(PROMPTS, max_new_tokens=4)
    old, made = weakref.ref(idle(decoder)), runner_pool.Workspace

    def make(*given: Any) -> Workspace:
        gc.collect()
        there.append(old() is not None)
        return made(*given)

    monkeypatch.setattr(runner_pool, "Workspace", make)
    decoder.generate(PROMPTS[:1], max_new_tokens=100)
    assert there == [False]


def test_a_state_that_could_not_be_cleaned_is_given_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = replaying()

    def fail(engine: Engine) -> None:
        raise RuntimeError("no memory to stop a sequence")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory to stop"):
        patch.setattr(Engine, "close", fail)
        decoder.generate(PROMPTS, max_new_tokens=4)
    assert decoder._runners.idle is None
    assert len(decoder.generate(PROMPTS, max_new_tokens=4).new_tokens) == len(PROMPTS)


def test_streams_side_by_side_have_a_state_each(decoder: SpeculativeDecoder, plain: SpeculativeDecoder) -> None:
    expected = [
        plain.generate([p], max_new_tokens=n).new_tokens[0].tolist() for p, n in zip(PROMPTS, LENGTHS, strict=True)
    ]
    streams = [decoder.stream([p], max_new_tokens=n) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    under_way = dict(enumerate(streams))
    while under_way:
        for row, stream in list(under_way.items()):
            chunk = next(stream, None)
            tokens[row] += chunk.tokens[0] if chunk else []
            if chunk is None:
                del under_way[row]
    assert tokens == expected
    assert idle(decoder).sizes.num_pages == 12  # 47 tokens in pages of 4: of all, the largest is kept


def test_threads_share_a_decoder(decoder: SpeculativeDecoder, plain: SpeculativeDecoder) -> None:
    expected = plain.generate(PROMPTS, max_new_tokens=12).new_tokens
    found: dict[int, list[Tensor]] = {}

    def run(index: int) -> None:
        found[index] = decoder.generate(PROMPTS, max_new_tokens=12).new_tokens

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(found[index], expected) for index in range(3))


def test_a_stream_closed_half_way_leaves_nothing_behind(decoder: SpeculativeDecoder, plain: SpeculativeDecoder) -> None:
    stream = decoder.stream(PROMPTS, max_new_tokens=40, eos_token_id=[])
    for _ in range(5):
        next(stream)
    stream.close()
    space = idle(decoder)
    assert not space.state["num_rows"].any()
    for options in ({"temperature": 1.0, "seed": 2}, {}):
        expected = plain.generate(PROMPTS, max_new_tokens=10, **options).new_tokens
        assert same(decoder.generate(PROMPTS, max_new_tokens=10, **options).new_tokens, expected)
    assert idle(decoder) is space


def test_nan_logits_are_named_and_the_next_request_works(plain: SpeculativeDecoder) -> None:
    decoder = replaying()
    weight = shared_model("llama", dtype=torch.float64).get_output_embeddings().weight
    expected = plain.generate(PROMPTS, max_new_tokens=10).new_tokens
    before = weight.detach().clone()
    with torch.no_grad():
        weight[5] = torch.nan
    try:
        with pytest.raises(NumericsError, match="logits are NaN in sequence 0"):
            decoder.generate(PROMPTS, max_new_tokens=10)
    finally:
        with torch.no_grad():
            weight.copy_(before)
    assert same(decoder.generate(PROMPTS, max_new_tokens=10).new_tokens, expected)


def test_a_capture_counts_arrivals_in_a_buffer_of_its_workspace(decoder: SpeculativeDecoder) -> None:
    seen: list[Tensor] = []

    class Watching(Calls):
        def capture(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
            seen.append(arrival_counters(torch.device("cpu")))
            return super().capture(function)

    decoder._runners.make_pool = Watching
    decoder.generate(PROMPTS, max_new_tokens=2)
    assert len(seen) == 1 + len(idle(decoder).shapes)  # one graph begins the sequences
    assert all(own is idle(decoder).counters for own in seen)
    assert arrival_counters(torch.device("cpu")) is not seen[0]


def test_an_interrupted_call_leaves_the_counters_of_its_workspace(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, own = decoder.generate(PROMPTS, max_new_tokens=5).new_tokens, idle(decoder).counters

    def interrupt(*_: Any) -> None:
        assert arrival_counters(torch.device("cpu")) is own
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) as caught:
        patched.setattr(GraphRunner, "decode", interrupt)
        decoder.generate(PROMPTS, max_new_tokens=5)
    assert caught.tb is not None and arrival_counters(torch.device("cpu")) is not own
    assert same(decoder.generate(PROMPTS, max_new_tokens=5).new_tokens, expected)


def test_a_graph_keeps_weights_that_a_later_decoder_may_move(decoder: SpeculativeDecoder) -> None:
    decoder.generate(PROMPTS, max_new_tokens=2)
    steps = decoder._step_cache.steps.values()
    kept = {tensor.data_ptr() for tensor in idle(decoder)._weights.values()}
    assert len(steps) == 2 and {p.data_ptr() for step in steps for p in (*step.parameters(), *step.buffers())} <= kept


@pytest.mark.parametrize("kind", ["none", "ngram", "draft_model"])
def test_capturing_a_prompt_step_changes_no_state(kind: str) -> None:
    """Over sequences that were decoding."""
    decoder = replaying(kind, draft=noisy_copy() if kind == "draft_model" else None)
    with decoder.session() as session:
        for prompt in PROMPTS:
            session.submit(prompt, max_new_tokens=40, eos_token_id=[], temperature=1.0, seed=1)
        for _ in range(9):
            session.step()
        runner, steps = session._engine._runner, decoder._step_cache.steps
        assert isinstance(runner, GraphRunner)
        before = pytree.tree_map(torch.clone, runner.state)
        (mode,) = (mode for mode in steps if mode.packed)
        shape = Shape(mode, 2, 16, 32)
        assert shape not in runner.space.shapes
        runner.use(mode, steps[mode])
        runner.graph(shape, GraphRunner._load)
        assert shape in runner.space.shapes and bool(before["num_rows"].any())
        assert all(map(torch.equal, pytree.tree_leaves(runner.state), pytree.tree_leaves(before)))


def test_a_prompt_step_runs_in_the_next_larger_shape_and_gives_the_same(
    plain: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "seed": [1, 2, 3, 4]}
    expected = plain.generate(PROMPTS, **options).new_tokens
    seen = []
    for columns, rows in ((None, None), (8, 24), (32, 64)):
        if columns is not None:
            prefill = "specgraph.runtime.schedule.prefill"
            monkeypatch.setattr(f"{prefill}.captured_width", lambda width, count, n=columns: n)
            monkeypatch.setattr(f"{prefill}.padded_rows", lambda count, n=rows, **_: n)
        decoder = replaying()
        assert same(decoder.generate(PROMPTS, **options).new_tokens, expected)
        seen.append({tuple(shape[1:4]) for shape in idle(decoder).shapes if shape.width is not None})
    # The first step has the first rows of all prompts; beside what is left of two of them, the others decode.
    assert seen == [{(4, 256, 32)}, {(4, 8, 24)}, {(4, 32, 64)}]


def test_nothing_is_enqueued_behind_a_step_that_surely_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, decoded = replaying("none"), list[int]()
    decode, wide = GraphRunner.decode, GraphRunner.wide

    def beside(chunk: Chunk) -> list[int]:
        return chunk.state_rows[len(chunk.forced) :]

    monkeypatch.setattr(GraphRunner, "decode", lambda own, rows, pause: decoded.extend(rows) or decode(own, rows))
    monkeypatch.setattr(GraphRunner, "wide", lambda own, chunk, _: decoded.extend(beside(chunk)) or wide(own, chunk))
    for count in (1, 3):
        decoded.clear()
        out = decoder.generate(PROMPTS, max_new_tokens=count, eos_token_id=[])
        assert [len(tokens) for tokens in out.new_tokens] == [count] * 4
        assert sorted(decoded) == [row for row in range(4) for _ in range(count - 1)]


def test_the_report_says_what_is_captured_and_the_memory_it_takes(
    decoder: SpeculativeDecoder, plain: SpeculativeDecoder
) -> None:
    first_use = "## while running\n- every step is a CUDA graph, captured when a request first needs its shape\n"
    assert decoder.report().endswith(first_use)
    decoder.generate(PROMPTS[:1], max_new_tokens=2)
    decoder.generate(PROMPTS[:1], max_new_tokens=2, temperature=1.0)
    assert decoder.report().endswith(
        f"{first_use}- captured for 2 kinds of request: decode steps of 1 sequences; steps with prompts of 16 rows "
        "of 1 sequences; these graphs share 3 MB, and their state takes 0 MB\n"
    )
    assert "while running" not in plain.report()


SMALL, LARGE = (StateSizes(1, m, m, 4 * m) for m in (8, 64))


def test_a_state_grows_with_a_request_and_shrinks_after_many_small_ones() -> None:
    assert next_sizes(SMALL, SHRINK_BYTES, [LARGE]) == LARGE
    wide = replace(SMALL, rows=8)
    assert next_sizes(LARGE, SHRINK_BYTES, [wide]) == replace(LARGE, rows=8)
    assert next_sizes(LARGE, SHRINK_BYTES, [SMALL] * (PATIENCE - 1)) == LARGE
    assert next_sizes(LARGE, SHRINK_BYTES, [wide] + [SMALL] * (PATIENCE - 1)) == wide
    assert next_sizes(LARGE, SHRINK_BYTES, [LARGE] + [SMALL] * (PATIENCE - 1)) == LARGE
    assert next_sizes(LARGE, SHRINK_BYTES - 1, [SMALL] * PATIENCE) == LARGE
    quarter = replace(SMALL, num_pages=LARGE.num_pages // 4)
    assert next_sizes(LARGE, SHRINK_BYTES, [quarter] * PATIENCE) == quarter
    assert next_sizes(LARGE, SHRINK_BYTES, [replace(quarter, num_pages=quarter.num_pages + 1)] * PATIENCE) == LARGE


def test_a_decoder_shrinks_a_large_state(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgraph.runtime.execution.workspace.SHRINK_BYTES", 1)
    decoder.generate(PROMPTS, max_new_tokens=100)
    large = idle(decoder)
    for _ in range(PATIENCE - 1):
        decoder.generate(PROMPTS[:1], max_new_tokens=4)
        assert idle(decoder) is large
    decoder.generate(PROMPTS[:1], max_new_tokens=4)
    assert idle(decoder).num_bytes < large.num_bytes / 4


def test_the_mailbox_holds_the_results_of_two_steps() -> None:
    box = Mailbox(4, 1, 5, torch.device("cpu"))

    def packed(token: int) -> Tensor:
        return torch.tensor([[token, 0, 1, 0, 1]] * 2, dtype=torch.int32)

    first, second = box.send(packed(7)), box.send(packed(8))
    assert first.read(2).tokens == [[7], [7]] and second.read(1).tokens == [[8]]
    assert box.send(packed(9)).read(2).tokens == [[9], [9]] and second.read(1).tokens == [[8]]


def test_of_several_errors_the_first_is_named() -> None:
    with pytest.raises(RuntimeError) as caught:
        try:
            raise ValueError("waited for the device.\nAnd more.")
        except ValueError:
            raise RuntimeError("the capture is broken") from None
    assert first_error(caught.value) == "waited for the device."
    assert first_error(KeyError()) == "KeyError."


def test_an_error_that_a_caller_is_handling_is_not_the_one_that_is_named() -> None:
    try:
        raise LookupError("the caller's own")
    except LookupError as own:
        with pytest.raises(ValueError, match="invalid literal") as caught:
            int("nothing")
        assert first_error(caught.value) == "the caller's own."
        assert first_error(caught.value, own).startswith("invalid literal")


def test_what_is_staged_for_a_cpu_is_not_copied() -> None:
    values = torch.arange(3)
    assert staged(values, torch.device("cpu")) is values


def test_an_uncaptured_program_runs_by_calls(plain: SpeculativeDecoder) -> None:
    plain.generate(PROMPTS, max_new_tokens=2)
    assert isinstance(plain._runners, RunnerPool) and plain._runners.idle is None
    assert GraphRunner.lag == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_a_step_is_captured(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph or an event in a cycle would be freed by a collection, and the capture would be broken."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    pool = GraphPool.__new__(GraphPool)
    pool._handle, pool._stream = None, None
    (gc.enable if enabled else gc.disable)()
    try:
        _, during = pool._record(lambda: torch.tensor(gc.isenabled()))
        assert not during and gc.isenabled() is enabled
    finally:
        gc.enable()
