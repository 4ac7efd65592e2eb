"""Sequences of recurrent targets go on from copies of state that others have left, and nothing that they emit tells."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import specgraph
from specgraph import Session, SpeculativeDecoder
from specgraph.config import CacheConfig
from specgraph.drafters.base import DraftHead
from specgraph.errors import ConfigError, InputError
from specgraph.ir.state import each_buffer
from specgraph.kernels.recurrent.arguments import CHUNK
from specgraph.runtime.memory import sizing as memory
from specgraph.runtime.memory.pages import PagePool, Reservation
from specgraph.runtime.memory.sizes import StateSizes
from specgraph.runtime.memory.snapshots import Boundaries, SnapshotPool, Snapshots, snapshot_bytes
from tests.capturing import captured
from tests.decoding import CONFIG, compiled
from tests.drafters.mtp_files import OPTIONS as MTP_OPTIONS
from tests.drafters.mtp_files import random_modules
from tests.models import make_head, make_model, ragged_prompts

SHARED, OTHER = ragged_prompts((53, 21))
TAILS = ragged_prompts((1, 5, 18, 2))
PROMPTS = [torch.cat([SHARED[: 53 - 13 * index], tail]) for index, tail in enumerate(TAILS)]
PROMPTS += [SHARED, SHARED[:9], SHARED[:32], SHARED[:33], torch.cat([SHARED[:48], OTHER]), OTHER, PROMPTS[0]]
"""They share less than a chunk, whole chunks exactly, one token more, and several pages."""
EXTRA: dict[str, Any] = {"max_batch_size": 3, "max_length": 96}
DELTA = "olmo_hybrid"
Steps = list[list[tuple[list[int], list[float]]]]


@functools.cache
def decoder_of(
    architecture: str, kind: str, dtype: torch.dtype = torch.float64, *, chunk: int = 7, block: int = 4
) -> SpeculativeDecoder:
    model = make_model(architecture, dtype=dtype)
    cache = {**CONFIG["cache"], "prefill_chunk": chunk, "block_size": block}
    if kind not in {"eagle3", "mtp"}:
        return compiled(model, kind, 3, **EXTRA, cache=cache)
    given = {**CONFIG, "draft": {"kind": kind, "num_speculative_tokens": 3}, **EXTRA, "cache": cache}
    head: DraftHead = make_head(model) if kind == "eagle3" else random_modules(model, 1, **MTP_OPTIONS["qwen3_next"])
    return specgraph.compile_speculative(model, given, draft=head)


NO_LIMITS = {"pool_tokens": None, "snapshots": None, "memory_share": 0.9}


def opened(decoder: SpeculativeDecoder, *, reuse: bool = True, **cache: Any) -> Session:
    decoder._runners.cache = replace(decoder._runners.cache, reuse_prefixes=reuse, **NO_LIMITS | cache)
    return decoder.session(return_logprobs=True)


def options(index: int) -> dict[str, Any]:
    return {"max_new_tokens": 5 + index % 5, "temperature": float(index % 3 > 0), "seed": index, "eos_token_id": []}


def steps_of(session: Session, seed: int) -> Steps:
    """What each step of every sequence emits, where they arrive at random."""
    dice, left = random.Random(seed), list(range(len(PROMPTS)))
    dice.shuffle(left)
    names: dict[int, int] = {}
    steps: Steps = [[] for _ in PROMPTS]
    while left or not session._engine.idle:
        for _ in range(min(len(left), dice.choice((0, 1, 1, 3)))):
            index = left.pop()
            names[session.submit(PROMPTS[index], **options(index))] = index
        for event in session.step():
            if event.tokens:
                steps[names[event.id]].append((event.tokens, event.logprobs or []))
    return steps


def tokens_of(session: Session, prompt: Tensor, new: int = 6) -> list[int]:
    session.submit(prompt, max_new_tokens=new, eos_token_id=[])
    return [token for event in session for token in event.tokens]


def assert_nothing_is_lost(session: Session) -> None:
    pages = session._engine.pages
    assert pages.num_free == pages.count
    pool = pages.snapshots
    assert pool is not None and len(pool._free) + pool.num_known == pool.count
    assert all(page in pages._names for page in pool._known)


@pytest.mark.parametrize(
    ("architecture", "kind", "block"),
    [(DELTA, "none", 16), (DELTA, "ngram", 4), (DELTA, "eagle3", 16), ("qwen3_5_text", "mtp", 4), ("mamba", "ngram", 4),
     ("lfm2", "eagle3", 4), ("falcon_h1", "ngram", 6)],
)  # fmt: skip
def test_every_step_emits_what_it_does_without_reuse(architecture: str, kind: str, block: int) -> None:
    """Equal numbers of accepted drafts mean equal drafts: what drafters keep is right, too."""
    decoder = decoder_of(architecture, kind, block=block)
    with opened(decoder, reuse=False) as session:
        expected = steps_of(session, seed=0)
        assert session.stats.reused_tokens == 0
    for seed, cache in ((1, {}), (2, {"pool_tokens": 320, "snapshots": 2})):
        with opened(decoder, **cache) as session:
            if cache:  # what has ended serves those that come later, and some of it has to make room
                steps_of(session, seed + 10)
            assert steps_of(session, seed) == expected
            assert session.stats.reused_tokens
            assert_nothing_is_lost(session)


def test_in_float32_every_bit_is_the_same() -> None:
    """One by one and cut at boundaries, because the library's products depend on the number of rows.

    A prompt that ends one token behind a boundary is left out: from its beginning on, it ends with a longer window.
    """
    decoder = decoder_of(DELTA, "ngram", torch.float32, chunk=CHUNK + 1)

    def one_by_one(session: Session) -> Steps:
        found = []
        for index, prompt in enumerate(p for p in PROMPTS if len(p) % CHUNK != 1):
            session.submit(prompt, **options(index))
            found.append([(event.tokens, event.logprobs or []) for event in session if event.tokens])
        return found

    with opened(decoder, reuse=False) as session:
        expected = one_by_one(session)
    with opened(decoder) as session:
        for _ in range(2):
            assert one_by_one(session) == expected
        assert session.stats.prefix_hit_rate > 0.4


def test_the_second_of_a_kind_leaves_the_state_that_the_third_goes_on_from() -> None:
    tails = ragged_prompts((7, 5, 6, 9))
    with opened(decoder_of(DELTA, "none")) as session:
        reused = []
        for tail in tails:
            before = session.stats.reused_tokens
            tokens_of(session, torch.cat([SHARED[:38], tail]), new=2)
            reused.append(session.stats.reused_tokens - before)
        # The first has left a snapshot behind 32 of its 45 tokens, and the others would leave theirs there.
        assert reused == [0, 32, 32, 32] and session.capacity.snapshots == 1
    long = ragged_prompts((40, 41, 42, 43))
    with opened(decoder_of(DELTA, "none")) as session:
        reused = []
        for tail in long:
            before = session.stats.reused_tokens
            tokens_of(session, torch.cat([SHARED[:38], tail]), new=2)
            reused.append(session.stats.reused_tokens - before)
        assert reused == [0, 0, 32, 32]
        capacity = session.capacity
        assert capacity.snapshots == 4 + 1 and capacity.most_snapshots == 16
        assert capacity.snapshot_bytes == 16 * snapshot_bytes(decoder_of(DELTA, "none")._program)


@pytest.mark.parametrize(("architecture", "kind"), [(DELTA, "none"), ("qwen3_5_text", "mtp"), ("mamba", "ngram")])
def test_a_conversation_goes_on_behind_the_whole_prompt_before(architecture: str, kind: str) -> None:
    """A prompt of whole chunks ends at a boundary, and its last window leaves the state there."""
    decoder, tail = decoder_of(architecture, kind, chunk=512), OTHER[:5]
    for length in (15, 16, 32, 33, 47, 48):
        with opened(decoder) as session:
            first = tokens_of(session, SHARED[:length])
            second = torch.cat([SHARED[:length], torch.tensor(first), tail])
            found = tokens_of(session, second)
            assert (length, session.stats.reused_tokens) == (length, length // CHUNK * CHUNK)
        with opened(decoder, reuse=False) as session:
            assert tokens_of(session, second) == found


def test_no_prompt_is_cut_for_the_snapshot_at_its_end() -> None:
    decoder = decoder_of(DELTA, "none", chunk=512)
    for length in (16, 17, 31, 32, 33):
        with opened(decoder, reuse=False) as session:
            tokens_of(session, SHARED[:length], new=1)
            whole = session.stats.steps
        with opened(decoder) as session:
            tokens_of(session, SHARED[:length], new=1)
            assert (length, session.stats.steps) == (length, whole)


def test_without_snapshots_nothing_is_shared() -> None:
    with opened(decoder_of(DELTA, "none"), snapshots=0) as session:
        assert tokens_of(session, SHARED) == tokens_of(session, SHARED)
        assert session.stats.reused_tokens == 0 and session.capacity.most_snapshots == 0
    with pytest.raises(ConfigError, match=r"cache.snapshots must be 0 .* or more, got -1"):
        specgraph.compile_speculative(make_model("lfm2"), {**CONFIG, "cache": {"snapshots": -1}})


def test_snapshots_take_no_more_than_their_share_of_the_free_memory() -> None:
    program = decoder_of(DELTA, "none")._program
    size = snapshot_bytes(program)
    assert memory.most_snapshots(program, CacheConfig(), 8, 55 * size) == 5
    assert memory.most_snapshots(program, CacheConfig(), 8, 110 * size) == 11
    assert memory.most_snapshots(program, CacheConfig(snapshots=9), 8, 55 * size) == 9
    assert memory.most_snapshots(program, CacheConfig(reuse_prefixes=False), 8, 55 * size) == 0
    assert memory.most_snapshots(program, CacheConfig(), 8, math.inf) == 16
    assert memory.most_snapshots(program, CacheConfig(), 20, math.inf) == 40


def test_rows_take_no_more_than_half_of_the_memory_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(DELTA, "none")
    program, row = decoder._program, memory.state_bytes(decoder._program)
    page, cache = memory.page_bytes(program), CacheConfig(reuse_prefixes=False, memory_share=1.0)
    assert row > snapshot_bytes(program)  # a snapshot holds no cached rows
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10 * row)
    assert memory.most_rows(program, 5, 10 * row) == 5
    assert memory.most_rows(program, 6, 10 * row) == 4
    wanted = StateSizes(6, 1, 1 << 30, 1)
    sizes = memory.limited(program, cache, wanted, 6)
    assert sizes == replace(wanted, rows=4, num_pages=6 * row // page)
    sizes = memory.limited(program, replace(cache, reuse_prefixes=True), wanted, 6)
    copies = int(row / snapshot_bytes(program))
    pages = (6 * row - copies * snapshot_bytes(program)) // page
    assert sizes == replace(wanted, rows=4, snapshots=copies, num_pages=pages)
    with opened(decoder, memory_share=0.5) as session:  # room for 2 sequences beside each other, and others wait
        assert session.capacity.rows == 2
        assert all(len(own) for own in steps_of(session, seed=1))
    monkeypatch.setattr(memory, "free_bytes", lambda device: row)
    with pytest.raises(InputError, match=r"cache.memory_share allows 0.9, and recurrent state takes \d+ of these"):
        opened(decoder)


def test_other_weights_find_no_state() -> None:
    model = make_model(DELTA, dtype=torch.float64)
    decoder = compiled(model, "none", **EXTRA)
    with opened(decoder) as session:
        before, weight = tokens_of(session, SHARED, 9), model.get_input_embeddings().weight
        assert tokens_of(session, SHARED, 9) == before and session.stats.reused_tokens == 48
        assert session.capacity.snapshots == 1
        with torch.no_grad():
            weight.mul_(-1)  # PyTorch counts what is written in place
        changed = tokens_of(session, SHARED, 9)
        assert changed != before and session.stats.reused_tokens == 48
        weight.data.mul_(-1)  # but not this
        session.forget_prefixes()
        assert session.capacity.snapshots == 0
        assert tokens_of(session, SHARED, 9) == before and session.stats.reused_tokens == 48


def test_a_nan_in_what_nobody_uses_harms_nobody() -> None:
    decoder = decoder_of(DELTA, "ngram")
    with opened(decoder, reuse=False) as session:
        expected = steps_of(session, seed=0)
    with opened(decoder) as session:
        runner = session._engine._runner
        assert runner.memory.snapshots is not None
        for seed in (1, 2):
            used = {*runner.pages.snapshots._known.values()}  # type: ignore[union-attr]
            for pairs in runner.memory.snapshots._pairs.values():
                for there, kept in pairs:
                    for tensor, rows in ((there, set()), (kept, used)):
                        for row in {*range(len(tensor))} - rows:
                            if tensor.is_floating_point():
                                tensor[row] = torch.nan
            assert steps_of(session, seed) == expected
        assert session.stats.reused_tokens


def test_a_nan_is_not_handed_on_in_a_state() -> None:
    model = make_model(DELTA, dtype=torch.float64)
    weight = model.get_output_embeddings().weight
    with opened(compiled(model, "none", **EXTRA)) as session:
        good = weight.detach().clone()
        weight.data[5] = torch.nan
        session.submit(SHARED, max_new_tokens=9)
        assert [event.finish_reason for event in session][-1] == "error"
        weight.data.copy_(good)
        assert len(tokens_of(session, SHARED)) == 6
        assert session.stats.reused_tokens == 0
        assert_nothing_is_lost(session)


def test_states_that_are_kept_keep_their_snapshots() -> None:
    """A workspace outlives the calls of a decoder, as on a GPU; steps are replayed, and copies run between them."""
    decoder = compiled(make_model(DELTA, dtype=torch.float64), "ngram", 3, **EXTRA)
    expected = decoder.generate(PROMPTS, max_new_tokens=9, eos_token_id=[])
    captured(decoder)
    decoder._runners.cache = replace(decoder._runners.cache, reuse_prefixes=True)
    for _ in range(2):
        found = decoder.generate(PROMPTS, max_new_tokens=9, eos_token_id=[])
        assert all(map(torch.equal, found.new_tokens, expected.new_tokens))
    assert found.stats.reused_tokens
    assert "are for 16 snapshots of recurrent state" in decoder.report()
    decoder.forget_prefixes()
    assert decoder.generate(PROMPTS[8:9], max_new_tokens=9).stats.reused_tokens == 0


def test_scored_choices_share_the_state_of_their_context(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(DELTA, "none")
    given = [torch.cat([SHARED[:39], tail]) for tail in TAILS]
    decoder._runners.cache = replace(decoder._runners.cache, reuse_prefixes=False, **NO_LIMITS)
    expected = decoder.score(given, start=39).logprobs
    loaded: list[int] = []
    load = Snapshots.load

    def counted(self: Snapshots, pairs: Any) -> None:
        loaded.append(len(pairs))
        load(self, pairs)

    monkeypatch.setattr(Snapshots, "load", counted)
    decoder._runners.cache = replace(decoder._runners.cache, reuse_prefixes=True)
    found = decoder.score(given, start=39).logprobs
    assert all(map(torch.equal, found, expected)) and sum(loaded) == len(TAILS) - 1


def test_each_buffer_says_whether_a_snapshot_holds_it() -> None:
    """In a state, what is needed behind a boundary is the states, the last inputs, and where they stand."""
    with opened(decoder_of("mamba", "none")) as session:
        held: list[tuple[tuple[Any, ...], int | None]] = []
        runner = session._engine._runner
        held += [(b.shape, b.chunk) for _, b, _ in each_buffer(decoder_of("mamba", "none")._program, runner.state)]
        assert {chunk for _, chunk in held} == {None, CHUNK}
        assert sum(chunk is not None for _, chunk in held) == 1 + 2 * 2


# The pool by itself: pages of 2 tokens, and boundaries at every fourth


def pool_of(count: int, snapshots: int) -> PagePool:
    return PagePool(count, 2, snapshots=SnapshotPool(snapshots, Boundaries(4, 4)))


def filled(pool: PagePool, tokens: list[int]) -> Reservation:
    """A sequence that has left its snapshots."""
    prompt = torch.tensor(tokens, dtype=torch.int64)
    reserved = pool.reserve(prompt, len(tokens))
    assert reserved is not None
    for boundary in reserved.boundaries:
        pool.take_snapshot(reserved, prompt, boundary)
    pool.offer(reserved, prompt)
    return reserved


def test_a_prefix_is_shared_up_to_the_longest_boundary_with_a_snapshot() -> None:
    pool = pool_of(40, 4)
    first = filled(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert first.boundaries == (8,) and first.num_shared == 0 and not first.taken
    second = filled(pool, [1, 2, 3, 4, 5, 6, 0, 0, 0])  # three pages are known, and a boundary is behind two of them
    assert second.boundaries == (4, 8) and second.num_shared == 0 and second.snapshot is None
    third = filled(pool, [1, 2, 3, 4, 5, 0])
    assert third.num_shared == 2 and third.snapshot is not None and third.boundaries == ()
    longer = filled(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9])
    assert longer.num_shared == 4 and longer.pages[:4] == first.pages[:4]
    assert pool.snapshots is not None and pool.snapshots.num_known == 3


def test_a_prompt_that_would_be_cut_for_it_leaves_no_snapshot_at_its_end() -> None:
    pool = PagePool(40, 8, snapshots=SnapshotPool(4, Boundaries(8, 4)))
    assert [filled(pool, [first] * count).boundaries for first, count in ((1, 11), (2, 12), (3, 16))] == [
        (8,),
        (),
        (16,),
    ]
    # Where it stops following what is known, it is cut all the same.
    assert filled(pool, [2] * 9 + [4] * 5).boundaries == (8,)


def test_a_snapshot_that_was_not_used_for_long_makes_room_and_one_goes_with_its_page() -> None:
    pool = pool_of(20, 2)
    assert pool.snapshots is not None
    for first in (1, 2):
        pool.give_back(filled(pool, [first] * 5))
    pool.give_back(filled(pool, [1] * 6))  # uses the first, so the second is the older one
    pool.give_back(filled(pool, [3] * 5))
    assert [filled_again(pool, [first] * 5) for first in (1, 2, 3)] == [2, 0, 2]
    pool.give_back(filled(pool, [4] * 39))  # takes all pages
    assert pool.snapshots.num_known == 1 and filled_again(pool, [1] * 5) == 0


def filled_again(pool: PagePool, tokens: list[int]) -> int:
    """How many pages a sequence with these tokens shares, which leaves nothing."""
    reserved = pool.reserve(torch.tensor(tokens, dtype=torch.int64), len(tokens))
    assert reserved is not None
    pool.give_back(reserved)
    return reserved.num_shared


@pytest.mark.parametrize("seed", range(4))
def test_random_reservations_lose_no_snapshot(seed: int) -> None:
    dice = random.Random(seed)
    pool, held = pool_of(14, 3), list[tuple[Reservation, Tensor]]()
    snapshots = pool.snapshots
    assert snapshots is not None
    content: dict[int, tuple[int, ...]] = {}
    for _ in range(500):
        if held and dice.random() < 0.5:
            reserved, prompt = held.pop(dice.randrange(len(held)))
            if dice.random() < 0.7:
                pool.offer(reserved, prompt)
            pool.give_back(reserved)
        else:
            prompt = torch.tensor([dice.randrange(2) for _ in range(dice.randrange(1, 15))], dtype=torch.int64)
            reserved_now = pool.reserve(prompt, len(prompt) + dice.randrange(3))
            if reserved_now is not None:
                if reserved_now.snapshot is not None:  # what a copy holds is the state behind the shared tokens
                    assert content[reserved_now.snapshot] == tuple(prompt[: 2 * reserved_now.num_shared].tolist())
                for boundary in reserved_now.boundaries:
                    taken = pool.take_snapshot(reserved_now, prompt, boundary)
                    if taken is not None:
                        content[taken] = tuple(prompt[:boundary].tolist())
                held.append((reserved_now, prompt))
        pending = [slot for reserved, _ in held for slot in reserved.taken.values()]
        assert sorted([*snapshots._free, *snapshots._known.values(), *pending]) == [0, 1, 2]
        assert all(page in pool._names for page in snapshots._known)
        if dice.random() < 0.02:
            pool.forget()
