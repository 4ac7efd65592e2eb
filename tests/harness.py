"""Plays accept and reject histories against a compiled step, records what it did, and plants bugs in it.

``forced_run`` drives the stage after ``insert_draft``, where emitted tokens are inputs, with random histories;
``real_run`` drives a whole decoder with its own verification. Both record the same things, so that the same detectors
(see ``tests/drafters/test_draft_model.py``) judge both.

Histories, runs and planted bugs read each other's fields, so they are in one file.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, fx

from specgraph import SpeculativeDecoder
from specgraph.drafters.step import SAMPLING, VERIFIED
from specgraph.ir.graphs import calls
from specgraph.ir.program import Program
from specgraph.ir.state import State, allocate
from specgraph.kernels import step
from specgraph.kernels.attention import attention
from specgraph.kernels.state import Buffer
from specgraph.kernels.step.finalize import StepUpdate
from specgraph.passes.base import Pass, PassResult
from specgraph.runtime.execution.inputs import load_chunk
from specgraph.runtime.memory.pages import PagePool
from specgraph.runtime.memory.state_rows import Admission, StateRowInitializer, sizes_for
from specgraph.runtime.requests.request import Request
from specgraph.runtime.requests.sampling import Sampling
from specgraph.runtime.schedule.prefill import Chunk, PendingPrompt, shared_window
from tests.decoding import CONFIG
from tests.recurrent_drafts import poison_unsettled_rows, recurrent_state

OVERHEAD = 16
"""What a prompt step costs besides its rows, in rows, where a test cuts prompts itself."""
GUARD_BLOCKS = 2
"""Blocks of a forced run's cache that no sequence owns."""
UNWRITTEN = 5
"""What a forced run's history holds where nothing was recorded: a token like any other, which must not be found."""


@dataclass(frozen=True)
class Options:
    """Sampling options of the three sequences; one greedy, two drawn, so that every test mixes them."""

    temperature: tuple[float, ...] = (0.0, 0.8, 1.3)
    top_k: tuple[int, ...] = (0, 0, 20)
    seeds: tuple[int, ...] = (11, -5, (1 << 40) + 3)

    def fill(self, state: State, rows: Sequence[int]) -> None:
        """Write the options of sequences ``rows`` into a state."""
        for name in ("temperature", "top_k", "seeds"):
            if name in state:
                values = [getattr(self, name)[row] for row in rows]
                state[name].copy_(torch.tensor(values, dtype=state[name].dtype))


@dataclass
class Step:
    """One run of the step graph and what followed from it.

    ``start`` and ``num_rows`` are those it ran with; ``accepted``, ``drafts`` (``[B, K]``), ``draft_logits``,
    ``caches`` (the draft's) and ``history`` (n-gram's) those it left. ``slots`` are the slots ``[B, T]`` of every cache
    write, in order, by owner.
    """

    width: int
    start: list[int]
    num_rows: list[int]
    num_emitted: list[int]
    accepted: list[list[int]]
    drafts: Tensor
    draft_logits: Tensor | None
    caches: tuple[Tensor, ...]
    history: Tensor | None
    slots: dict[str, list[Tensor]]
    kept: dict[str, Tensor] = field(default_factory=dict)
    """What else the drafter keeps of every sequence, by name."""


KNOWN = (
    "start", "num_rows", "num_forced", "eos_ids", "block_table", "max_length", "history", "draft_logits", *SAMPLING
)  # fmt: skip
"""The state of sequences that is a drafter's input or that a detector of its own compares."""


def own_state(program: Program, state: State) -> dict[str, Tensor]:
    """What else a drafter keeps of every sequence, ``[B, ...]`` by name."""
    own = [n for n, spec in program.inputs.items() if isinstance(spec, Buffer) and spec.owner == "sequence"]
    return {name: state[name].clone() for name in own if name not in KNOWN} | recurrent_state(program, state)


@dataclass
class Run:
    """A recorded run: the program of the stage after drafting, where every sequence may end, and the steps."""

    program: Program
    limits: list[int]
    block_table: Tensor
    options: Options
    steps: list[Step] = field(default_factory=list)
    accept_counts: list[int] = field(default_factory=list)
    """Accepted drafts of every decoding step and sequence."""
    state: State = field(default_factory=dict)

    @functools.cached_property
    def module(self) -> torch.nn.Module:
        """The program's step graph, ready to be called."""
        return self.program.step()

    @property
    def k(self) -> int:
        """Drafts per step."""
        return self.program.drafter.num_speculative_tokens

    @property
    def parallel(self) -> bool:
        """Whether all drafts come from one call."""
        return any(self.program.graph.find_nodes(op="call_function", target=step.expand_draft_inputs))

    def real_rows(self, accepted: int) -> int:
        """Rows of its cache that a draft holds for so many accepted tokens; a shifted one runs none for the first."""
        return accepted - self.program.drafter.shifted

    def usable(self, row: int, accepted: int) -> int:
        """How many drafts a sequence with so many accepted tokens can use: one more token must fit behind them."""
        return max(0, min(self.k, self.limits[row] - 1 - accepted))


@contextlib.contextmanager
def slot_spy(state: State) -> Iterator[dict[str, list[Tensor]]]:
    """Record the slots of every cache write: under ``target``, ``draft``, or ``other``."""
    seen: dict[str, list[Tensor]] = {"target": [], "draft": [], "other": []}
    owners = {cache.data_ptr(): "target" for cache in state.get("target_caches", ())}
    owners |= {cache.data_ptr(): "draft" for cache in draft_caches(state)}
    original = attention.write_cache

    def record(cache: Tensor, values: Tensor, slots: Tensor) -> None:
        seen[owners.get(cache.data_ptr(), "other")].append(slots.clone())
        original(cache, values, slots)

    with mock.patch.object(attention, "write_cache", record):
        yield seen


def draft_caches(state: State) -> list[Tensor]:
    """The page pools of all modules of a drafter, in the order of the step's inputs."""
    names = [name for name in state if name.endswith("_caches") and name != "target_caches"]
    return [cache for name in names for cache in state[name]]


def scattered_table(blocks: Sequence[int], seed: int, guard: int = 0) -> Tensor:
    """A block table whose sequences own random, interleaved blocks; padded with -1."""
    order = torch.randperm(sum(blocks) + guard, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(blocks), max(blocks)), -1)
    for row, count in enumerate(blocks):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    return table


def blank_state(program: Program, limits: Sequence[int], seed: int, guard: int = GUARD_BLOCKS) -> State:
    """State for sequences of up to ``limits`` tokens in scattered blocks."""
    size = program.block_size
    blocks = [-(-limit // size) for limit in limits]
    sizes = {"B": len(limits), "T": 1, "M": max(blocks), "N": sum(blocks) + guard, "S": max(limits), "E": 1}
    state = allocate(program, sizes, torch.device("cpu"))
    state["block_table"].copy_(scattered_table(blocks, seed, guard))
    state["max_length"].copy_(torch.tensor(limits))
    if "history" in state:
        state["history"].fill_(UNWRITTEN)
    return state


@dataclass
class Move:
    """What one sequence does in a step: the rows of its window, how many are real, what it emits, and how many of the
    window's tokens behind the first are known to stay, as those of a prompt are.
    """

    window: list[int] = field(default_factory=lambda: [0])
    num_rows: int = 0
    emitted: list[int] = field(default_factory=list)
    num_forced: int = 0


class History:
    """Random accept and reject decisions: how prompts are cut, who pauses, how many drafts are taken, what follows."""

    def __init__(self, prompts: Sequence[Tensor], limits: Sequence[int], seed: int, alphabet: int) -> None:
        self._random = random.Random(seed)
        self._alphabet = alphabet
        # What follows a prompt is given as well: it is the first token that a target would have drawn.
        self._known = [[*prompt.tolist(), self._random.randrange(alphabet)] for prompt in prompts]
        self._limits = limits
        self.accepted = [known[:1] for known in self._known]
        self.accept_counts: list[int] = []

    def move(self, row: int, drafts: list[int]) -> Move:
        """The next move of a sequence whose current drafts (-1: none) are given."""
        room = self._limits[row] - len(self.accepted[row])
        if room == 0 or self._random.random() < 0.15:
            return Move()
        pending = self._known[row][len(self.accepted[row]) :]
        return self._prefill(row, pending) if pending else self._decode(row, drafts, room)

    def _prefill(self, row: int, pending: list[int]) -> Move:
        count = self._random.randint(1, len(pending))
        emitted = pending[:count]
        shown = pending[:count] if count < len(pending) else pending[:-1]
        return Move([self.accepted[row][-1], *shown], count, emitted, count - 1)

    def _decode(self, row: int, drafts: list[int], room: int) -> Move:
        proposed = drafts.index(-1) if -1 in drafts else len(drafts)
        most = min(proposed, room - 1)
        taken = self._random.choice([0, most, self._random.randint(0, most)])
        rejected = drafts[taken] if taken < proposed else None
        following = self._random.choice([t for t in range(self._alphabet) if t != rejected])
        self.accept_counts.append(taken)
        window = [self.accepted[row][-1], *(max(0, d) for d in drafts)]
        return Move(window, most + 1, [*drafts[:taken], following])


def _rectangle(rows: Sequence[Sequence[int]], width: int, fill: int) -> Tensor:
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


def forced_run(
    program: Program, prompts: Sequence[Tensor], limits: Sequence[int], *, seed: int, steps: int = 14,
    alphabet: int = 101, poison: bool = False, options: Options | None = None,
) -> Run:  # fmt: skip
    """Play a random history against the stage after ``insert_draft``.

    With ``poison``, every draft cache row that holds no accepted token is NaN before each step, and so is every cached
    row of a recurrent layer that is not settled.
    """
    options = options or Options()
    history = History(prompts, limits, seed, alphabet)
    state = blank_state(program, limits, seed)
    options.fill(state, range(len(prompts)))
    run = Run(program, list(limits), state["block_table"], options, state=state)
    drafts = torch.full((len(prompts), run.k), -1)
    for _ in range(steps):
        moves = [history.move(row, drafts[row].tolist()) for row in range(len(prompts))]
        if poison:
            _poison(run, history.accepted)
        outputs, ran, seen = _call(run.module, state, moves, history.accepted)
        for row, move in enumerate(moves):
            history.accepted[row] = history.accepted[row] + move.emitted
        active = torch.tensor([bool(move.emitted) for move in moves]).unsqueeze(1)
        drafts = torch.where(active, torch.cat(outputs[1:], dim=1), drafts)
        run.steps.append(_record(run, ran, history.accepted, drafts, seen))
    run.accept_counts = history.accept_counts
    return run


Ran = tuple[int, list[int], list[int], list[int]]


def _call(
    module: torch.nn.Module, state: State, moves: Sequence[Move], accepted: Sequence[Sequence[int]]
) -> tuple[tuple[Tensor, ...], Ran, dict[str, list[Tensor]]]:
    """One step with the given moves."""
    width = max(len(move.window) for move in moves) + (sum(len(m.emitted) for m in moves) % 2)
    ran = (width, [len(a) - 1 for a in accepted], [m.num_rows for m in moves], [len(m.emitted) for m in moves])
    state["start"].copy_(torch.tensor(ran[1]))
    state["num_rows"].copy_(torch.tensor(ran[2]))
    if "num_forced" in state:
        state["num_forced"].copy_(torch.tensor([move.num_forced for move in moves]))
    given = {**state, VERIFIED: _rectangle([m.emitted for m in moves], width, -1)}
    with torch.no_grad(), slot_spy(state) as seen:
        outputs = module(window=_rectangle([m.window for m in moves], width, 0), **given)
    return outputs, ran, seen


def _record(run: Run, ran: Ran, accepted: Sequence[list[int]], drafts: Tensor, seen: dict[str, list[Tensor]]) -> Step:
    state = run.state
    logits = state["draft_logits"].clone() if "draft_logits" in state else None
    caches = tuple(cache.clone() for cache in draft_caches(state))
    history = state["history"].clone() if "history" in state else None
    kept = own_state(run.program, state)
    return Step(*ran, [list(a) for a in accepted], drafts.clone(), logits, caches, history, seen, kept)


def _poison(run: Run, accepted: Sequence[Sequence[int]]) -> None:
    counts = [run.real_rows(len(tokens)) for tokens in accepted]
    owned = [slot for row, count in enumerate(counts) for slot in slots_of(run, row, range(count))]
    for cache in draft_caches(run.state):
        rows = cache.flatten(0, 1)
        keep = rows[owned].clone()
        rows.fill_(torch.nan)
        rows[owned] = keep
    poison_unsettled_rows(run.program, run.state)


def slots_of(run: Run, row: int, positions: Sequence[int]) -> list[int]:
    """The cache slots of a sequence's positions, computed without the product's functions."""
    size = run.program.block_size
    table = run.block_table[row].tolist()
    return [table[p // size] * size + p % size for p in positions]


def fresh_start(
    run: Run, row: int, tokens: Sequence[int]
) -> tuple[list[Tensor], Tensor, Tensor | None, dict[str, Tensor]]:
    """One sequence alone in a new state, all accepted tokens in one call.

    Returns the draft's caches at the tokens' positions, its drafts ``[K]``, its ``draft_logits`` ``[K, V]`` and what
    else it keeps.
    """
    limits = [run.limits[row]]
    state = blank_state(run.program, limits, seed=0, guard=0)
    run.options.fill(state, [row])
    other = Run(run.program, limits, state["block_table"], run.options)
    move = Move([*tokens[:-1], 0], len(tokens) - 1, list(tokens[1:]), len(tokens) - 2)
    outputs, _, _ = _call(run.module, state, [move], [tokens[:1]])
    rows = slots_of(other, 0, range(other.real_rows(len(tokens))))
    caches = [cache.flatten(0, 1)[rows] for cache in draft_caches(state)]
    logits = state["draft_logits"][0] if "draft_logits" in state else None
    kept = {name: value[0] for name, value in own_state(run.program, state).items()}
    return caches, torch.cat(outputs[1:], dim=1)[0], logits, kept


def real_run(
    decoder: SpeculativeDecoder, prompts: Sequence[Tensor], limits: Sequence[int], *, eos_ids: Sequence[int] = (),
    options: Options | None = None,
) -> Run:  # fmt: skip
    """Decode with the last stage, its own verification included, and record every step."""
    options = options or Options()
    rows = len(prompts)
    sampling = [Sampling(options.temperature[row], options.top_k[row], seed=options.seeds[row]) for row in range(rows)]
    program = decoder._program  # variants of the step, which requests make, are further stages
    state, prefill = begun(
        program, [Request(*own, tuple(eos_ids)) for own in zip(prompts, limits, sampling, strict=True)]
    )
    blocks = (state["block_table"] >= 0).sum(1).tolist()
    state["block_table"].copy_(scattered_table(blocks, seed=1))
    run = Run(drafting_stage(decoder), list(limits), state["block_table"], options, state=state)
    _decode(run, program.step(), prefill, decoder.config.cache.prefill_chunk, prompts)
    return run


class Prefill:
    """Prompts that are yet to be run in windows of prompts alone; for its arguments see :func:`shared_window`."""

    def __init__(self, width: int, batch: int, overhead: int) -> None:
        self._sizes = width, batch, overhead
        self._prompts: dict[int, PendingPrompt] = {}

    def add(self, row: int, prompt: Tensor) -> None:
        self._prompts[row] = PendingPrompt(prompt, 0, prompt.numel(), [], 1)

    def pending(self) -> list[int]:
        return [row for row, prompt in self._prompts.items() if prompt.left]

    def chunk(self, most: int) -> Chunk:
        return shared_window(self._prompts, most, *self._sizes)


def begun(program: Program, requests: Sequence[Request]) -> tuple[State, Prefill]:
    """A state in whose rows these sequences begin, and their prompts."""
    sizes = sizes_for(requests, len(requests), program.block_size)
    state = allocate(program, sizes.by_letter(), torch.device("cpu"))
    pages = PagePool(sizes.num_pages, program.block_size)
    reserved = [pages.reserve(request.prompt, request.limit) for request in requests]
    entering = [Admission(row, requests[row], own.pages) for row, own in enumerate(reserved) if own]
    StateRowInitializer(program, state).admit(entering)
    prefill = Prefill(program.drafter.num_speculative_tokens + 1, len(requests), OVERHEAD)
    for row, request in enumerate(requests):
        if request.has_room:
            prefill.add(row, request.prompt)
    return state, prefill


def _decode(run: Run, module: torch.nn.Module, prefill: Prefill, chunk: int, prompts: Sequence[Tensor]) -> None:
    state, accepted = run.state, [prompt[:1].tolist() for prompt in prompts]
    while prefill.pending() or bool(state["num_rows"].any()):
        pending = prefill.pending()
        if pending:
            rows, window = load_chunk(state, prefill.chunk(chunk))
        else:
            rows = state["num_rows"].nonzero()[:, 0]
            window = state["next_window"][rows]
        start, num_rows = state["start"].tolist(), _of_all(state, rows, state["num_rows"][rows])
        with torch.no_grad(), slot_spy(state) as seen:
            emitted, num_emitted = module(window=window, **{**state, "rows": rows})[:2]
        counts = _of_all(state, rows, num_emitted)
        for place, row in enumerate(rows.tolist()):
            accepted[row] = accepted[row] + emitted[place, : counts[row]].tolist()
        run.accept_counts += [counts[row] - 1 for row in rows.tolist() if counts[row] and row not in pending]
        ran = (window.shape[1], start, num_rows, counts)
        slots = {name: [_spread(state, rows, own) for own in written] for name, written in seen.items()}
        run.steps.append(_record(run, ran, accepted, _next_drafts(state), slots))


def _next_drafts(state: State) -> Tensor:
    """The drafts ``[B, K]`` that the next step verifies; -1 where none was made, which the window pads with zeros."""
    drafts = state["next_window"][:, 1:]
    made = torch.arange(drafts.shape[1]) < state["num_rows"].unsqueeze(1) - 1
    return torch.where(made, drafts, -1)


def _spread(state: State, rows: Tensor, slots: Tensor) -> Tensor:
    """The slots of the sequences that a call runs among those of all sequences: the others write none."""
    return slots.new_full((len(state["num_rows"]), *slots.shape[1:]), -1).index_copy(0, rows, slots)


def _of_all(state: State, rows: Tensor, counts: Tensor) -> list[int]:
    """The counts of the sequences that a call runs among those of all sequences: the others have none."""
    every: list[int] = torch.zeros_like(state["num_rows"]).index_copy(0, rows, counts).tolist()
    return every


def drafting_stage(decoder: SpeculativeDecoder) -> Program:
    """The stage before ``insert_verify``, with a planted bug if there is one."""
    names = ("plant_bug", "lookup_first", "parallel_draft", "insert_draft")
    return next(decoder.stages[name] for name in names if name in decoder.stages)


# Planted bugs


def _replace(program: Program, right: Callable[..., Any], wrong: Callable[..., Any]) -> int:
    """Call ``wrong`` wherever the step or a module calls ``right``."""
    count = 0
    for graph in (program.graph, *(module.graph for module in program.modules.values())):
        for node in graph.find_nodes(op="call_function", target=right):
            node.target, count = wrong, count + 1
    for module in program.modules.values():
        module.recompile()
    return count


def _changed_result(name: str, wrong: Callable[..., Any], *inputs: str) -> Callable[[Program], int]:
    """Another value of a result of ``finalize_step``, computed from it and from inputs of the step."""

    def plant(program: Program) -> int:
        (update,) = calls(program.graph, step.finalize_step)
        found = [user for user in update.users if user.args[1] == StepUpdate._fields.index(name)]
        for node in found:
            with program.graph.inserting_after(node):
                changed = program.graph.call_function(wrong, (node, *map(program.input, inputs)))
            node.replace_all_uses_with(changed, delete_user_cb=lambda user, own=changed: user is not own)
        return len(found)

    return plant


def _late_noise(draft_logits: Tensor | None, logits: Tensor, length: Tensor, *rest: Any, **options: Any) -> Tensor:
    return step.propose_(draft_logits, logits, length + 1, *rest, **options)  # type: ignore[return-value]


def _raw_logits_kept(
    draft_logits: Tensor, logits: Tensor, length: Tensor, num_emitted: Tensor, *rest: Any, row: int, **options: Any
) -> Tensor:
    token = step.propose_(draft_logits, logits, length, num_emitted, *rest, row=row, **options)
    active = (num_emitted > 0).unsqueeze(1)
    rows = options["rows"]
    draft_logits[rows, row] = torch.where(active, logits[:, 0], draft_logits[rows, row])
    return token  # type: ignore[return-value]


def _late_positions(chain: list[Tensor]) -> list[Tensor]:
    return [position + 1 for position in chain]


def _last_row_skipped(num_rows: Tensor) -> Tensor:
    return (num_rows - 1).clamp_min(0)


def _rejected_rows_too(num_rows: Tensor) -> Tensor:
    return torch.where(num_rows > 0, 1 << 20, 0)


def _inactive_rows_too(num_rows: Tensor) -> Tensor:
    return num_rows.clamp_min(1)


def _window_instead(rows: Tensor, window: Tensor) -> Tensor:
    return torch.cat([window, rows[:, -1:]], dim=1)


def _last_of_the_window(last: Tensor) -> Tensor:
    return _rejected_rows_too(last + 1)


def _row_before(values: Tensor, first: Tensor, count: int) -> Tensor:
    return step.take_rows(values, first - 1, count)


def _chain_not_written(program: Program) -> int:
    """No rows in the chained calls."""
    chained = program.with_role("draft")[1:]
    for node in chained:
        with program.graph.inserting_before(node):
            none = program.graph.call_function(torch.zeros_like, (program.one("num_emitted"),))
        node.kwargs = {**node.kwargs, "num_rows": none}
    return len(chained)


def _other_inputs(
    count: int | None = None, **changed: Callable[[Program, fx.Node], fx.Node]
) -> Callable[[Program], int]:
    """Other inputs of the first ``count`` draft calls, or of the chained ones if ``count`` is None."""

    def plant(program: Program) -> int:
        found = program.with_role("draft")
        chosen = found[1:] if count is None else found[:count]
        for node in chosen:
            with program.graph.inserting_before(node):
                node.kwargs = {**node.kwargs, **{name: make(program, node) for name, make in changed.items()}}
        return len(chosen)

    return plant


def _function(function: Callable[..., Any], *names: str) -> Callable[[Program, fx.Node], fx.Node]:
    """A node that calls ``function`` on inputs of the draft call, or of the step."""

    def make(program: Program, node: fx.Node) -> fx.Node:
        inputs = [node.kwargs[name] if name in node.kwargs else program.one(name) for name in names]
        return program.graph.call_function(function, tuple(inputs))

    return make


def _target_hidden(program: Program, node: fx.Node) -> fx.Node:
    """The target's features of the last accepted row."""
    (features,) = calls(program.graph, "draft_features")
    return program.graph.call_function(step.take_rows, (features, node.kwargs["row"], 1))


def _features_swapped(program: Program) -> int:
    (features,) = calls(program.graph, "draft_features")
    features.args = tuple(reversed(features.args))
    return 1


def _changed_masks(**changed: Callable[[Any], Any]) -> Callable[[Program], int]:
    """Other arguments of ``expand_draft_inputs``."""

    def plant(program: Program) -> int:
        (node,) = calls(program.graph, step.expand_draft_inputs)
        names = ("tokens", "num_rows", "hidden", "mask_hidden", "max_drafts")
        arguments = dict(zip(names, node.args, strict=True)) | node.kwargs
        with program.graph.inserting_before(node):
            node.args, node.kwargs = (), arguments | {name: make(arguments[name]) for name, make in changed.items()}
        return 1

    return plant


def _without_one(rows: Tensor) -> Tensor:
    return torch.where(rows > 1, rows - 1, rows)


def _nothing_kept(kept_tokens: Tensor, kept_hidden: Tensor, num_kept: Tensor, *rest: Tensor) -> Any:
    return step.rerun(kept_tokens, kept_hidden, torch.zeros_like(num_kept), *rest)


def _kept_one_row_early(*state: Tensor) -> None:
    step.keep_rows_(*state[:-1], (state[-1] - 1).clamp_min(0))


def _same_tokens(tokens: Tensor, num_rows: Tensor, draft: Tensor) -> Tensor:
    return torch.where(torch.arange(tokens.shape[1]) == num_rows.unsqueeze(1) - 1, draft, tokens)


def _draft_left_out(tokens: Tensor, num_rows: Tensor, draft: Tensor) -> Tensor:
    return tokens.roll(-1, dims=1)


BUGS: dict[str, Callable[[Program], int]] = {
    "noise off by one position": lambda p: _replace(p, step.propose_, _late_noise),
    "chained position off by one": _changed_result("chain", _late_positions),
    "catch-up skips the last row": _changed_result("num_rows", _last_row_skipped),
    "chained rows not written": _chain_not_written,
    "rejected rows written": _changed_result("num_rows", _rejected_rows_too),
    "inactive rows written": _changed_result("num_rows", _inactive_rows_too),
    "window instead of emitted": _changed_result("rows", _window_instead, "window"),
    "proposals from the row before": lambda p: _replace(p, step.take_rows, _row_before),
    "raw logits kept": lambda p: _replace(p, step.propose_, _raw_logits_kept),
    "the last row of the window": _changed_result("last", _last_of_the_window),
    # Shifted drafters, chained
    "features in another order": _features_swapped,
    "window instead of emitted, shifted": _changed_result("rows", lambda rows, window: window.clone(), "window"),
    "target hidden in the chain": _other_inputs(hidden=_target_hidden),
    "catch-up skips the last row, shifted": _other_inputs(1, num_rows=_function(_without_one, "num_rows")),
    "rejected rows written, shifted": _other_inputs(1, num_rows=_function(_rejected_rows_too, "num_emitted")),
    # Recurrent layers
    "chained rows are settled": _other_inputs(num_forced=_function(torch.zeros_like, "num_emitted")),
    "the newest token is settled": _other_inputs(1, num_forced=_function(torch.clone, "num_emitted")),
    # Several modules
    "provisional rows stay": lambda p: _replace(p, step.rerun, _nothing_kept),
    "kept one row early": lambda p: _replace(p, step.keep_rows_, _kept_one_row_early),
    "same tokens for every module": lambda p: _replace(p, step.next_module_tokens, _same_tokens),
    "modules do not see drafts": lambda p: _replace(p, step.next_module_tokens, _draft_left_out),
    # In parallel
    "rows one position late": _other_inputs(1, positions=_function(lambda p: p + 1, "positions")),
    "another mask token": _changed_masks(mask_token_id=lambda token: token + 1),
    "no mask hidden": _changed_masks(mask_hidden=lambda node: node.graph.call_function(torch.zeros_like, (node,))),
    "mask rows not written": _other_inputs(1, num_rows=_function(torch.clone, "num_emitted")),
}


@dataclass(frozen=True)
class PlantBug(Pass):
    """Breaks the drafter on purpose. Options: ``bug``, a key of :attr:`bugs`, which files with own bugs replace."""

    bug: str = ""

    name: ClassVar[str] = "plant_bug"
    requires: ClassVar[frozenset[str]] = frozenset({"draft"})
    bugs: ClassVar[dict[str, Callable[[Program], int]]] = BUGS

    def apply(self, program: Program) -> PassResult:
        """A bug that finds nothing to break is an error of the test."""
        matches = self.bugs[self.bug](program)
        assert matches > 0, f"nothing to plant {self.bug!r} in"
        return PassResult(matches)


def drafting_config(
    draft: dict[str, Any], rule: str = "strict", bug: str | None = None, *, bugs: type[PlantBug] = PlantBug,
    parallel: bool = False, recurrent: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """A configuration without kernels, whose drafter is broken if ``bug`` names one of ``bugs``.

    ``draft`` are the keys of that group. ``parallel`` puts ``parallel_draft`` into the order, and ``recurrent`` puts
    ``insert_recurrent_state`` there.
    """
    state = ["insert_kv_cache", *["insert_recurrent_state"] * recurrent]
    before = ["expose_features", *state, "insert_draft", *["parallel_draft"] * parallel]
    planted = {"plant_bug": {"_target_": f"{bugs.__module__}.{bugs.__qualname__}", "bug": bug}} if bug else {}
    order = [*before, *planted, "insert_verify"]
    return {**CONFIG, "draft": draft, "verify": {"rule": rule}, "pipeline": {"order": order, "verify": False},
            "passes": planted}  # fmt: skip
