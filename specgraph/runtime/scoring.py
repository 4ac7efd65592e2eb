"""Scores given tokens: runs sequences through a step that :class:`~specgraph.specialise.score_rows.ScoreRows` has made.

All tokens are known, so a sequence needs only prompt steps, which are cut and put together as those of ``generate``
are. Its last token is given to the row before it and not run, so it may stand behind the decoder's ``max_length``. All
its rows have logits, however, and these are what takes memory: a step has so few rows that they fit into
``MOST_LOGITS`` numbers. The steps are enqueued one behind the other, and their results are read at the end.

A sequence begins with pages that others have filled, as far as these hold the tokens in front of the first one that is
scored. It waits while another sequence is filling such pages. So the examples in front of many questions run once, and
so does a question in front of several answers. Pages that scoring has filled hold no rows of the drafter's, so they are
shared among scored sequences alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from specgraph.errors import InputError
from specgraph.kernels.verify.score import KINDS
from specgraph.runtime.execution.runner import Runner
from specgraph.runtime.memory.pages import Reservation
from specgraph.runtime.memory.state_rows import Admission
from specgraph.runtime.outputs.output import GenerateOutput
from specgraph.runtime.requests.parser import RequestParser
from specgraph.runtime.requests.request import Request
from specgraph.runtime.requests.sampling import CUTS
from specgraph.runtime.requests.values import PerSequence, per_sequence, whole
from specgraph.runtime.schedule.prefill import Chunk, PendingPrompt, shared_window
from specgraph.runtime.schedule.prompt_shapes import MOST_ROWS
from specgraph.specialise.score_rows import ScoreRows

MOST_LOGITS = 1 << 27
"""The most logits of a step, which has at least two rows nevertheless. In bf16 they take 256 MB, and with a vocabulary
of 128,000 they are those of 1,000 rows."""


@dataclass
class ScoreOutput:
    """The result of ``score``.

    Attributes:
        logprobs: one 1-D float32 tensor per sequence, with the log-probability of each of its tokens from ``starts``
            on, given the tokens before it.
        is_greedy: one 1-D bool tensor per sequence beside it: whether the token is the first with the largest of the
            logits that the log-probabilities are those of.
        starts: the place of the first scored token of every sequence.
    """

    logprobs: list[Tensor]
    is_greedy: list[Tensor]
    starts: list[int]

    @property
    def sums(self) -> Tensor:
        """The log-probability of the scored part of every sequence, float64 ``[B]``."""
        return torch.stack([values.double().sum() for values in self.logprobs])


def read_scoring(
    reader: RequestParser,
    sequences: Any,
    attention_mask: Any,
    start: PerSequence,
    logprobs: Any,
    **sampling: PerSequence,
) -> tuple[list[Request], list[int], ScoreRows]:
    """A checked call of ``score``: sequences, the place of the first scored token of each, and the step.

    Raises:
        InputError: an argument is out of range; the message says what is allowed.
    """
    if not isinstance(logprobs, str) or logprobs not in KINDS:
        raise InputError(f"logprobs is 'raw' or 'processed', not {logprobs!r}.")
    given = [name for name, value in sampling.items() if value is not None]
    if logprobs == "raw" and given:
        raise InputError(
            f"{', '.join(given)} would change nothing, since logprobs='raw' are the target's own; ask for "
            "logprobs='processed', or leave it out."
        )
    if isinstance(sequences, GenerateOutput):
        sequences, attention_mask, start = _unpadded(sequences, attention_mask, start)
    reader = replace(reader, limits=replace(reader.limits, max_length=reader.limits.max_length + 1))
    options = {"max_new_tokens": 0, "seed": 0, **sampling}
    requests = reader.call(sequences, attention_mask, options, seeded=False).requests
    unused: tuple[str, ...] = ()
    if logprobs == "processed":
        _check_processing(requests)
        unused = tuple(sorted(CUTS.keys() - set().union(*(request.initial_state for request in requests))))
    starts = _read_starts(requests, start)
    # The last token is read and not run, so it takes no room.
    return [replace(r, limit=r.prompt.numel() - 1) for r in requests], starts, ScoreRows(logprobs, unused)


def _unpadded(out: GenerateOutput, mask: Any, start: PerSequence) -> tuple[list[Tensor], None, PerSequence]:
    """The sequences of an output of ``generate``, of which by default the new tokens are scored."""
    if mask is not None:
        raise InputError("attention_mask goes with a tensor of sequences; what generate returned needs none.")
    joined = [torch.cat([prompt, new]) for prompt, new in zip(out.prompts, out.new_tokens, strict=True)]
    return joined, None, [len(prompt) for prompt in out.prompts] if start is None else start


def _check_processing(requests: Sequence[Request]) -> None:
    """Refuse what a ``generation_config`` asks for besides sampling options."""
    used = sorted(set().union(*(request.processing.state for request in requests)))
    if used:
        raise InputError(
            f"score has no {', '.join(used)}, which the model's generation_config asks for, so logprobs='processed' "
            "would leave it out; set it off, or ask for logprobs='raw'."
        )


def _read_starts(requests: Sequence[Request], start: PerSequence) -> list[int]:
    """The place of the first scored token of every sequence, by default the second token."""
    starts = [whole("start", value) for value in per_sequence("start", start, 1, len(requests))]
    for index, (first, request) in enumerate(zip(starts, requests, strict=True)):
        count = request.prompt.numel()
        if count < 2:
            raise InputError(
                f"Sequence {index} has a single token, and nothing before it says how probable that is; give at least "
                "two tokens, for example the BOS id first."
            )
        if not 1 <= first < count:
            raise InputError(
                f"start is {first} for sequence {index}, which has {count} tokens; the first token to score is one of "
                f"1 to {count - 1}, because it needs a token before it."
            )
    return starts


@dataclass
class _Place:
    """A sequence in a row of the state.

    Attributes:
        reserved: its pages.
        tokens: those of it that are yet to be run.
        filling: names of the pages that it is yet to fill, by the number of tokens that it takes.
    """

    number: int
    reserved: Reservation
    tokens: PendingPrompt
    filling: dict[int, int]


class Scoring:
    """One call of ``score``: sequences that wait, those in rows of a runner's state, and what steps said of them."""

    def __init__(
        self, runner: Runner, pass_: ScoreRows, step: fx.GraphModule, overhead: int, chunk: int, vocab_size: int
    ) -> None:  # fmt: skip
        """``step`` is what ``pass_`` has made, and costs ``overhead`` besides its rows, as a number of rows. A sequence
        has at most ``chunk`` rows in it."""
        # The logits of all rows of a step take no more memory than they should.
        self._most_rows = max(2, min(MOST_ROWS, MOST_LOGITS // vocab_size))
        self._runner, self._pass, self._step, self._overhead = runner, pass_, step, overhead
        self._chunk = max(2, min(chunk, self._most_rows))
        self._free_rows = list(range(runner.memory.sizes.rows))
        self._running: dict[int, _Place] = {}
        """By row."""
        self._names: dict[int, list[int]] = {}
        """Of every sequence, a name for each of its pages that others might share: a hash of all tokens up to there."""
        self._results: list[tuple[list[tuple[int, int, int]], tuple[Tensor, ...]]] = []
        """Of every step: which sequence each of its entries is, from which token on, and how many; and its results."""

    def run(self, requests: Sequence[Request], starts: Sequence[int]) -> ScoreOutput:
        """Score all tokens of ``requests`` from ``starts`` on."""
        waiting = deque(sorted(range(len(requests)), key=lambda number: -requests[number].prompt.numel()))
        try:
            with self._runner.active():
                while waiting or self._running:
                    self._admit(waiting, requests, starts)
                    self._enqueue(self._next_chunk())
            return self._read(requests, starts)
        finally:
            self._close()

    def _admit(self, waiting: deque[int], requests: Sequence[Request], starts: Sequence[int]) -> None:
        """Let sequences in while there are rows and pages for them."""
        entering, pages = [], self._runner.pages
        pages.check_weights()
        filling = {name for place in self._running.values() for name in place.filling.values()}
        for number in list(waiting):
            if not self._free_rows:
                break
            request, context = requests[number], requests[number].prompt[: starts[number]]
            names = self._names_of(number, request.prompt)
            if not filling.isdisjoint(names[: pages.num_shareable(context)]):
                continue
            reserved = pages.reserve(context, request.limit, target_only=True)
            if reserved is None:
                if not self._running:
                    raise _too_long(request, self._runner)
                break
            waiting.remove(number)
            row, begin = self._free_rows.pop(), reserved.num_shared * pages.block_size
            ends = {(page + 1) * pages.block_size: name for page, name in enumerate(names)}
            own = {end: name for end, name in ends.items() if end > begin}
            filling.update(own.values())
            tokens = PendingPrompt(request.prompt, begin, request.limit, [*reserved.boundaries], pages.within)
            self._running[row] = _Place(number, reserved, tokens, own)
            entering.append(Admission(row, request, reserved.pages, begin, reserved.snapshot))
        if entering:
            self._runner.admit(entering)

    def _next_chunk(self) -> Chunk:
        prompts, batch = {row: place.tokens for row, place in self._running.items()}, self._runner.memory.sizes.rows
        return shared_window(prompts, self._chunk, 2, batch, self._overhead, self._most_rows)

    def _names_of(self, number: int, prompt: Tensor) -> list[int]:
        if number not in self._names:
            name, names = 0, []
            for own in self._runner.pages.filled(prompt):
                name = hash((name, own))
                names.append(name)
            self._names[number] = names
        return self._names[number]

    def _enqueue(self, chunk: Chunk) -> None:
        """Run one more window, and free the rows of those sequences that end with it."""
        places = [self._running[row] for row in chunk.state_rows]
        begins = [place.tokens.done - count for place, count in zip(places, chunk.forced, strict=True)]
        results = self._runner.score(self._pass, self._step, chunk, begins)
        reached = [(self._running[row], row, boundary) for row, boundary in chunk.reached]
        self._runner.keep_states(
            ((place.reserved, place.tokens.tokens, row, boundary) for place, row, boundary in reached), target_only=True
        )
        # The row of token t says how probable token t + 1 is.
        told = [(own.number, begin + 1, n) for own, begin, n in zip(places, begins, chunk.forced, strict=True)]
        self._results.append((told, results))
        for row, place in zip(chunk.state_rows, places, strict=True):
            self._offer(place)
            if not place.tokens.left:
                self._leave(row)

    def _offer(self, place: _Place) -> None:
        """Let others have the pages that are full when the steps under way have run. Their own steps run later."""
        pages = self._runner.pages
        done, tokens = place.tokens.done, place.tokens.tokens
        pages.offer(place.reserved, tokens[: done + pages.lookahead], target_only=True)
        place.filling = {end: name for end, name in place.filling.items() if end > done}

    def _leave(self, row: int) -> None:
        self._runner.pages.give_back(self._running.pop(row).reserved)
        self._free_rows.append(row)

    def _read(self, requests: Sequence[Request], starts: Sequence[int]) -> ScoreOutput:
        """Wait for all steps, and put their results together."""
        sizes = [request.prompt.numel() for request in requests]
        logprobs = [torch.zeros(size, dtype=torch.float32, device="cpu") for size in sizes]
        is_greedy = [torch.zeros(size, dtype=torch.bool, device="cpu") for size in sizes]
        for told, results in self._results:
            values, greedy, bad = (result.cpu() for result in results)  # of graphs, all are float32
            anywhere = bad.any(1).tolist()
            for (number, begin, count), own, best, broken in zip(told, values, greedy, anywhere, strict=False):
                if broken:
                    self._runner.pages.forget()  # nobody shall find a NaN there
                    raise self._runner.not_a_number(number)
                logprobs[number][begin : begin + count] = own[:count]
                is_greedy[number][begin : begin + count] = best[:count].bool()
        cut = [
            [own[first:].clone() for own, first in zip(whole, starts, strict=True)] for whole in (logprobs, is_greedy)
        ]
        return ScoreOutput(cut[0], cut[1], list(starts))

    def _close(self) -> None:
        """Leave the state as it was found: no sequence is active, and nobody has pages."""
        for row in list(self._running):
            self._leave(row)
        self._runner.stop(self._free_rows)


def _too_long(request: Request, runner: Runner) -> InputError:
    pages: Any = runner.pages
    return InputError(
        f"A sequence of {request.prompt.numel()} tokens does not fit into the {pages.count} pages of the KV cache, "
        f"which have {pages.block_size} tokens each; give shorter sequences, or a larger pool (cache.pool_tokens)."
    )
