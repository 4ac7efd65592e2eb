"""Captured steps: several graphs over one state, requests that end early or badly, threads and streams."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from specgraph import InputError, NumericsError, SpeculativeDecoder
from specgraph.runtime.execution.cuda_graphs import GraphPool
from specgraph.runtime.execution.graph_runner import GraphRunner
from specgraph.runtime.execution.results import Mailbox
from specgraph.runtime.execution.workspace import PATIENCE, Shape, Workspace
from specgraph.runtime.memory.state_rows import staged
from tests.decoding import compiled
from tests.gpu.capture import no_synchronisation
from tests.models import make_model, ragged_prompts

PROMPTS = ragged_prompts((3, 17, 8, 1, 30, 5, 11, 2))
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": []}
DRAWN: dict[str, Any] = {**GREEDY, "temperature": 1.0, "seed": list(range(8))}
DEVICE = torch.device("cuda", 0)


def made(dtype: torch.dtype = torch.bfloat16, **extra: Any) -> SpeculativeDecoder:
    return compiled(make_model("llama", dtype=dtype).cuda(), **extra)


def idle(decoder: SpeculativeDecoder) -> Workspace:
    space = decoder._runners.idle
    assert space is not None
    return space


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return made()


@pytest.fixture(scope="module")
def expected(decoder: SpeculativeDecoder) -> list[Tensor]:
    return decoder.generate(PROMPTS, **GREEDY).new_tokens


def test_batch_sizes_and_modes_alternate_without_a_new_capture(expected: list[Tensor]) -> None:
    fresh = made()

    def run() -> None:
        for count in (8, 1, 3):
            assert same(fresh.generate(PROMPTS[:count], **GREEDY).new_tokens, expected[:count])
            drawn = fresh.generate(PROMPTS[:count], **{**DRAWN, "seed": list(range(count))}).new_tokens
            assert same(drawn, first[:count])

    first = fresh.generate(PROMPTS, **DRAWN).new_tokens
    run()
    space = idle(fresh)
    shapes = space.shapes
    # For each mode, one for 8, 4, 2 and 1 sequences at most: those that a batch begins with, and those that are left.
    assert 6 <= sum(shape.width is None for shape in shapes) <= 8
    run()
    assert idle(fresh) is space and space.shapes == shapes


def test_a_state_grows_and_shrinks_and_captures_anew(expected: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropping all graphs of a pool, and capturing into a new one, several times over."""
    monkeypatch.setattr("specgraph.runtime.execution.workspace.SHRINK_BYTES", 1)
    fresh = made()
    for _ in range(2):
        for count in (1, 4, 8):
            assert same(fresh.generate(PROMPTS[:count], **GREEDY).new_tokens, expected[:count])
        fresh.generate(PROMPTS, **{**GREEDY, "max_new_tokens": 98})
        large = idle(fresh).num_bytes
        for _ in range(PATIENCE):
            assert same(fresh.generate(PROMPTS[:1], **GREEDY).new_tokens, expected[:1])
        assert idle(fresh).num_bytes < large / 2


def test_memory_of_dropped_states_is_used_again() -> None:
    fresh = made()
    seen = []
    for _ in range(3):
        for count in (1, 8):
            fresh._runners.idle = None
            fresh.generate(PROMPTS[:count], **GREEDY)
        torch.cuda.empty_cache()
        seen.append(torch.cuda.memory_reserved())
    assert seen[2] <= seen[1]


LONG = ragged_prompts((1, 130, 700, 1500, 2500, 40, 129, 2048))


@functools.cache
def long_outputs(kind: str, chunk: int, captured: bool, temperature: float) -> list[tuple[Tensor, Tensor]]:
    """Tokens and log-probabilities behind long prompts."""
    model = make_model("llama", dtype=torch.bfloat16, max_position_embeddings=4096).cuda()
    fresh = compiled(model, kind, cache={"prefill_chunk": chunk}, lowering={"cuda_graph": captured})
    options = {"max_new_tokens": 12, "eos_token_id": [], "temperature": temperature, "seed": list(range(8))}
    out = fresh.generate(LONG, **options, return_logprobs=True)
    assert out.logprobs is not None
    return list(zip(out.new_tokens, out.logprobs, strict=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("kind", "chunk"), [("none", 2048), ("none", 300), ("ngram", 2048), ("ngram", 97)])
def test_captured_prompt_steps_give_the_bits_of_single_calls(kind: str, chunk: int, temperature: float) -> None:
    expected = long_outputs("none", 256, False, temperature)
    for (tokens, values), (own, other) in zip(long_outputs(kind, chunk, True, temperature), expected, strict=True):
        assert torch.equal(tokens, own) and torch.equal(values, other)


def test_prompt_steps_captured_between_steps_of_others_leave_them_alone(
    decoder: SpeculativeDecoder, expected: list[Tensor]
) -> None:
    """A state in use keeps every bit when a graph is captured over it."""
    with decoder.session() as session:
        for prompt in PROMPTS:
            session.submit(prompt, **GREEDY)
        for _ in range(len(PROMPTS) + 4):
            session.step()
        runner = session._engine._runner
        assert isinstance(runner, GraphRunner)
        steps = decoder._step_cache.steps
        mode = next(mode for mode in steps if mode.packed)
        before, shape = pytree.tree_map(torch.clone, runner.state), Shape(mode, 4, 48, 100)
        assert shape not in runner.space.shapes
        runner.use(mode, steps[mode])
        with torch.no_grad(), runner.active():
            runner.graph(shape, GraphRunner._load)
        runner.close()
        assert bool(before["num_rows"].any())
        assert all(map(torch.equal, pytree.tree_leaves(runner.state), pytree.tree_leaves(before)))
    assert same(decoder.generate(PROMPTS, **GREEDY).new_tokens, expected)


def test_the_report_names_the_memory_of_the_graphs(decoder: SpeculativeDecoder, expected: list[Tensor]) -> None:
    found = re.search(r"steps with prompts of (.*) sequences; these graphs share (\d+) MB", decoder.report())
    assert found is not None and " rows of " in found[1]
    assert 2 <= int(found[2]) < 1000 and idle(decoder)._pool.num_bytes > 2_000_000  # a segment has 2 MB at least


def test_a_stream_closed_half_way_leaves_nothing_behind(decoder: SpeculativeDecoder, expected: list[Tensor]) -> None:
    for taken in (0, 1, 3, 7):
        stream = decoder.stream(PROMPTS, **{**GREEDY, "max_new_tokens": 60})
        for _ in range(taken):
            next(stream)
        stream.close()
        assert same(decoder.generate(PROMPTS, **GREEDY).new_tokens, expected)
    stream = decoder.stream(PROMPTS, **GREEDY)
    next(stream)
    del stream
    # A mode that is captured now, over rows that were active.
    processed = decoder.generate(PROMPTS, **GREEDY, return_logprobs="processed")
    assert same(processed.new_tokens, expected)


def test_nan_logits_are_named_and_the_next_request_works(expected: list[Tensor]) -> None:
    model = make_model("llama", dtype=torch.bfloat16).cuda()
    fresh = compiled(model)
    assert same(fresh.generate(PROMPTS, **GREEDY).new_tokens, expected)
    space, weight = idle(fresh), model.model.norm.weight
    kept = weight.detach().clone()
    stream = fresh.stream(PROMPTS, **GREEDY)
    next(stream)
    with torch.no_grad():
        weight.fill_(torch.nan)
    with pytest.raises(NumericsError, match=r"logits are NaN in sequence \d"):  # of those that the next step runs
        list(stream)
    with pytest.raises(NumericsError, match=r"logits are NaN in sequence \d"):
        fresh.generate(PROMPTS, **GREEDY)
    with torch.no_grad():
        weight.copy_(kept)
    assert same(fresh.generate(PROMPTS, **GREEDY).new_tokens, expected)
    assert idle(fresh) is space


def test_a_decoder_says_that_a_second_one_has_moved_its_weights(expected: list[Tensor]) -> None:
    """Its graphs read the memory where they were, and what is written into them now would not reach it."""
    model = make_model("llama", dtype=torch.bfloat16).cuda()
    first = compiled(model, passes={"merge_linears": {"enabled": False}})
    assert len(first.generate(PROMPTS, **GREEDY).new_tokens) == len(PROMPTS)
    projection = model.model.layers[0].self_attn.q_proj
    before = projection.weight.data_ptr()
    second = compiled(model)
    assert projection.weight.data_ptr() != before
    assert same(second.generate(PROMPTS, **GREEDY).new_tokens, expected)
    with pytest.raises(InputError, match=r"q_proj.weight was replaced by another tensor .* compile the model again"):
        first.generate(PROMPTS, **GREEDY)
    third = compiled(model)  # which finds them where it wants them
    for each in (second, third):
        assert same(each.generate(PROMPTS, **GREEDY).new_tokens, expected)


@pytest.mark.parametrize("kind", ["ngram", "draft_model"])
def test_float16_is_bitwise_as_well(kind: str) -> None:
    draft = make_model("llama", seed=1, dtype=torch.float16).cuda() if kind == "draft_model" else None
    plain, drafting = made(torch.float16, kind="none"), made(torch.float16, kind=kind, draft=draft)
    for options in (GREEDY, DRAWN):
        a, b = (d.generate(PROMPTS, **options, return_logprobs=True) for d in (plain, drafting))
        assert a.logprobs and b.logprobs
        assert same(a.new_tokens, b.new_tokens) and same(a.logprobs, b.logprobs)
        own = {**options, "seed": [1]} if "seed" in options else options
        alone = drafting.generate(PROMPTS[1:2], **own, return_logprobs=True)
        assert alone.logprobs and same(alone.logprobs, a.logprobs[1:2])


def test_requests_wait_for_nothing_but_their_results(decoder: SpeculativeDecoder, expected: list[Tensor]) -> None:
    """Setting the state, prompts of many chunks, steps and the end."""
    for options in (GREEDY, DRAWN):  # captured, if they are not yet
        decoder.generate(PROMPTS, **options)
    with no_synchronisation():
        assert same(decoder.generate(PROMPTS, **GREEDY).new_tokens, expected)
        decoder.generate(PROMPTS, **DRAWN)


def test_a_chunk_is_not_overwritten_before_its_copy_has_run() -> None:
    """The host stages many blocks while the device is busy."""
    torch.cuda._sleep(1 << 28)
    found = []
    for index in range(50):
        found.append(staged(torch.full((4096,), index), DEVICE).to(DEVICE, non_blocking=True))
    assert all(bool((values == index).all()) for index, values in enumerate(found))


def test_the_mailbox_holds_two_steps_while_the_device_is_busy() -> None:
    box = Mailbox(2, 1, 5, DEVICE)
    given = [torch.tensor([[n, 0, 1, 0, 1]] * 2, dtype=torch.int32, device=DEVICE) for n in range(6)]
    torch.cuda._sleep(1 << 26)
    sent = box.send(given[0])
    for index in range(1, 6):
        ahead = box.send(given[index])
        assert sent.read(2).tokens == [[index - 1]] * 2
        sent = ahead


WAITING = """
import torch
from specgraph.runtime.execution.cuda_graphs import GraphPool
device = torch.device("cuda", 0)
values, before = torch.ones(4, device=device), torch.cuda.current_stream()
try:
    GraphPool(device).capture(lambda: values * values.sum().item())
finally:
    assert torch.cuda.current_stream() == before
"""


def test_what_cannot_be_captured_is_refused() -> None:
    """In a process of its own, which a broken capture may leave in any state."""
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=300, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(r"PassError: .*runs, but not as a CUDA graph: .* lowering.cuda_graph=false", last), done.stderr


def test_graphs_of_a_pool_share_memory_and_run_in_any_order() -> None:
    values, pool = torch.ones(1 << 20, device=DEVICE), GraphPool(DEVICE)
    graphs = [pool.capture(functools.partial(_chain, values, factor)) for factor in range(2, 6)]
    for factor, (replay, result) in [*enumerate(graphs, 2), *reversed([*enumerate(graphs, 2)])]:
        values.fill_(factor)
        replay()
        assert result.tolist() == [factor * factor + 4.0] * 4


def _chain(values: Tensor, factor: int) -> Tensor:
    """The first four of ``values * factor + 4``, with intermediate results of the full size."""
    for _ in range(4):
        values = values + 1
    return ((values - 4) * factor + 4)[:4].clone()


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException]]:
    """What threads raise."""
    raised: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value or SystemExit()))
    yield raised
    assert not raised


@pytest.mark.parametrize("own_streams", [True, False])
def test_threads_decode_and_capture_side_by_side(
    own_streams: bool, expected: list[Tensor], errors: list[BaseException]
) -> None:
    """Two decoders, three threads, each with graphs to capture while the others run."""
    one, other = made(), made()
    decoders = [one, other, other]
    failed: list[int] = []

    def run(index: int) -> None:
        stream = torch.cuda.Stream() if own_streams else None
        with torch.cuda.stream(stream):
            for turn in range(12):
                count = (8, 1, 3, 2)[(turn + index) % 4]
                found = decoders[index].generate(PROMPTS[:count], **GREEDY).new_tokens
                if not same(found, expected[:count]):
                    failed.append(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    torch.cuda.synchronize()  # weights may still be moving on this thread's stream
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and not errors


def test_a_stream_stays_on_the_cuda_stream_where_it_began(decoder: SpeculativeDecoder, expected: list[Tensor]) -> None:
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    chunks = decoder.stream(PROMPTS, **GREEDY)
    others = [torch.cuda.Stream() for _ in range(3)]
    for turn in range(1000):
        with torch.cuda.stream(others[turn % 3]):
            chunk = next(chunks, None)
        if chunk is None:
            break
        tokens = [row + new for row, new in zip(tokens, chunk.tokens, strict=True)]
    assert tokens == [row.tolist() for row in expected]


def test_a_callers_default_device_does_not_change_the_tokens(expected: list[Tensor]) -> None:
    model = make_model("llama", dtype=torch.bfloat16).cuda()
    torch.set_default_device("cuda")
    try:
        fresh = compiled(model, debug={"self_check": True})
        out = fresh.generate(PROMPTS, **GREEDY)
        fresh.generate(PROMPTS, max_new_tokens=4, temperature=1.0)
    finally:
        torch.set_default_device(None)
    assert same(out.new_tokens, expected)
    assert out.sequences.device.type == "cpu"
