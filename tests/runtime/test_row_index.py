"""A step runs any of the sequences whose state is kept, and touches no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from specgraph import PassError, SpeculativeDecoder
from specgraph.ir.graphs import set_argument
from specgraph.ir.state import State
from specgraph.kernels.state import Buffer
from specgraph.runtime.execution.graph_runner import GraphRunner
from specgraph.runtime.execution.inputs import load_chunk
from specgraph.runtime.execution.results import Results
from specgraph.runtime.execution.runner import Runner
from specgraph.runtime.schedule.prefill import Chunk
from specgraph.specialise.index_rows import IndexRows
from tests.decoding import compiled
from tests.harness import Prefill, begun
from tests.models import ragged_prompts, shared_model
from tests.runtime.test_decoder import noisy_copy
from tests.runtime.test_runner import replaying

PROMPTS = ragged_prompts((3, 17, 8, 1))
SHARED = ("target_caches", "draft_caches", "rows")


def decoder_of(kind: str) -> SpeculativeDecoder:
    model = shared_model("llama", dtype=torch.float64)
    draft = noisy_copy() if kind == "draft_model" else None
    return compiled(model, kind, verify={"rule": "probabilistic"}, draft=draft)


def prefilled(decoder: SpeculativeDecoder) -> tuple[torch.nn.Module, State]:
    """The step, and the state of four sequences whose prompts it has run."""
    call = decoder._reader.call(PROMPTS, None, {"max_new_tokens": 40, "temperature": 1.0, "seed": 3})
    program = decoder._program
    step, (state, prefill) = program.step(), begun(program, call.requests)
    while prefill.pending():
        rows, window = load_chunk(state, prefill.chunk(4))
        run(step, state, rows, window)
    return step, state


def run(step: torch.nn.Module, state: State, rows: Tensor, window: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return step(window=window, **{**state, "rows": rows})  # type: ignore[no-any-return]


def decode(step: torch.nn.Module, state: State, rows: Sequence[int]) -> tuple[Tensor, ...]:
    index = torch.tensor(rows)
    return run(step, state, index, state["next_window"][index.clamp_min(0)])


def copied(state: State) -> State:
    return pytree.tree_map(lambda tensor: tensor.clone(), state)


@pytest.mark.parametrize("rows", [[2, 0], [3], [1, -1, 3, -1]], ids=str)
@pytest.mark.parametrize("kind", ["none", "ngram", "draft_model"])
def test_a_call_gives_what_a_call_of_all_gives_and_leaves_the_others_alone(kind: str, rows: list[int]) -> None:
    step, state = prefilled(decoder_of(kind))
    whole, before = copied(state), copied(state)
    for _ in range(3):
        expected, found = decode(step, whole, range(4)), decode(step, state, rows)
        for all_rows, own in zip(expected[:2], found[:2], strict=True):
            for place, row in enumerate(rows):
                if row >= 0:
                    assert torch.equal(own[place], all_rows[row])
    for name, value in state.items():
        if name in SHARED:
            continue
        run_rows, others = [row for row in rows if row >= 0], [row for row in range(4) if row not in rows]
        torch.testing.assert_close(value[run_rows], whole[name][run_rows])
        assert torch.equal(value[others], before[name][others])
    assert not torch.equal(state["start"], before["start"])


@pytest.mark.parametrize("kind", ["none", "ngram", "draft_model"])
def test_a_call_of_no_sequence_changes_nothing(kind: str) -> None:
    step, state = prefilled(decoder_of(kind))
    before = copied(state)
    _, num_emitted, _, bad = decode(step, state, [-1, -1])
    assert not num_emitted.any() and not bad.any()
    assert all(map(torch.equal, pytree.tree_leaves(state), pytree.tree_leaves(before)))


class Watched:
    """Remembers what every call of a runner runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chunks: list[Chunk] = []
        self.decoded: list[list[int]] = []
        wide = Runner.wide
        monkeypatch.setattr(Runner, "wide", lambda own, chunk, pause: self.chunks.append(chunk) or wide(own, chunk))
        for kind in (Runner, GraphRunner):
            monkeypatch.setattr(kind, "decode", self._watched(kind.decode))

    def _watched(self, decode: Callable[..., Results]) -> Callable[..., Results]:
        return lambda own, rows, pause: self.decoded.append([*rows]) or decode(own, rows)


def test_wide_steps_run_pending_prompts_and_decode_steps_sequences_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, watched = compiled(shared_model("llama", dtype=torch.float64), "none"), Watched(monkeypatch)
    out = decoder.generate(PROMPTS, max_new_tokens=6, eos_token_id=[])
    assert [len(tokens) for tokens in out.new_tokens] == [6] * 4
    assert sum(chunk.num_tokens for chunk in watched.chunks) == sum(map(len, PROMPTS))
    beside = [chunk.state_rows[len(chunk.forced) :] for chunk in watched.chunks]
    for chunk, decoding in zip(watched.chunks, beside, strict=True):
        assert bool((chunk.inputs[: len(chunk.forced), 1] > 0).all())
        assert chunk.inputs[len(chunk.forced) :, 1].tolist() == [-1] * len(decoding)
        assert {*decoding}.isdisjoint(chunk.state_rows[: len(chunk.forced)])
    assert beside[0] == [] and any(beside) and [0, 1, 2, 3] in watched.decoded
    assert [sum(row in rows for rows in (*beside, *watched.decoded)) for row in range(4)] == [5] * 4
    # One sequence that ends early is not run again.
    watched.decoded.clear()
    watched.chunks.clear()
    ends = [int(out.new_tokens[2][1])]
    expected = [len(tokens) for tokens in decoder.generate(PROMPTS, max_new_tokens=6, eos_token_id=ends).new_tokens]
    beside = [chunk.state_rows[len(chunk.forced) :] for chunk in watched.chunks]
    lengths = [sum(row in rows for rows in (*beside, *watched.decoded)) + 1 for row in range(4)]
    assert lengths == expected and min(expected) < 6


def test_a_long_prompt_does_not_make_short_ones_run_its_padding() -> None:
    prefill, shapes = Prefill(1, 10, overhead=1), []
    for row, prompt in enumerate(ragged_prompts((2,) * 9 + (64,))):
        prefill.add(row, prompt)
    while prefill.pending():
        shapes.append(tuple(prefill.chunk(32).inputs.shape))
    # Windows of 31 rows and the token behind them, then of the whole rest.
    assert shapes == [(1, 3 + 32), (1, 3 + 32), (10, 3 + 2)]


def test_a_captured_step_serves_whichever_sequences_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, decoder = compiled(shared_model("llama", dtype=torch.float64), "none"), replaying("none")
    watched = Watched(monkeypatch)
    prompts = ragged_prompts((3, 5, 8, 1, 6))
    first = plain.generate(prompts, max_new_tokens=12, eos_token_id=[]).new_tokens
    ends = sorted({int(first[row][place]) for row, place in ((0, 2), (2, 4), (4, 6))})
    expected = plain.generate(prompts, max_new_tokens=12, eos_token_id=ends).new_tokens
    watched.decoded.clear()
    for _ in range(2):
        found = decoder.generate(prompts, max_new_tokens=12, eos_token_id=ends).new_tokens
        assert all(map(torch.equal, found, expected))
    space = decoder._runners.idle
    assert space is not None
    left = {len(rows) for rows in watched.decoded}
    assert len({len(tokens) for tokens in expected}) > 1
    captured = {shape.entries for shape in space.shapes if shape.width is None}
    assert captured == {1 << (n - 1).bit_length() for n in left}


def indexed_program(decoder: SpeculativeDecoder) -> Any:
    return decoder.stages["capture_cuda_graph"].copy()


def test_an_indexed_buffer_without_the_row_index_is_refused() -> None:
    program = indexed_program(decoder_of("ngram"))
    (record,) = (node for node in program.graph.nodes if node.name == "record_tokens_")
    set_argument(record, "rows", None)
    with pytest.raises(PassError, match="record_tokens_ reads 'history', which is indexed, without the row index"):
        IndexRows().apply(program)


def test_a_small_buffer_with_the_row_index_is_refused() -> None:
    program = indexed_program(decoder_of("ngram"))
    program.inputs["history"] = Buffer(("B", "S"))
    with pytest.raises(PassError, match=r"after_add_biases takes the row index and reads 'history', .* indexed=True"):
        IndexRows().apply(program)


def test_a_small_buffer_inside_of_a_tuple_is_refused() -> None:
    program = indexed_program(decoder_of("none"))
    program.inputs["target_caches"] = (*program.inputs["target_caches"], Buffer(("B",)))
    with pytest.raises(PassError, match=r"'target_caches' is a tuple.*indexed=True"):
        IndexRows().apply(program)
