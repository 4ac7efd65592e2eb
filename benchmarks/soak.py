"""Decodes very many short requests in one session, and checks that nothing of them stays behind.

    python -m benchmarks.soak target=path/of/a/model draft=path/of/a/head [num_requests=20000] [max_batch_size=64]

Requests arrive at random, in bursts and with pauses. They differ in their lengths, sampling options and EOS ids; some
are cancelled while they wait, run their prompt or decode, and some are refused because they are too large. After the
first fifth of them, and at the end, the session is drained. Then every row and page must be free, and the process must
hold as much as before. The tokens of a sample must be those that ``generate`` gives for a request alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import random
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.command import read_options, target_of
from specgraph.bench.config import BenchConfig
from specgraph.bench.report import about_decoder, about_run, heading, write_json
from specgraph.bench.steps import counts_of, head_of, with_drafts
from specgraph.compiler.compile import compile_speculative
from specgraph.config import Config
from specgraph.errors import InputError, SpecgraphError
from specgraph.progress import Progress
from specgraph.runtime.decoder import SpeculativeDecoder
from specgraph.runtime.outputs.stats import Capacity
from specgraph.runtime.session import Session
from specgraph.tables import text_table

LONGEST = 96
"""The session's ``max_length`` unless the configuration says otherwise. Requests are half as long at most."""
POOL_TOKENS = 32
"""The session has pages for so many tokens per row unless the configuration says otherwise. Longer requests are common,
so requests wait for pages as well as for rows."""
MOST = 24
"""The longest prompt, and the most new tokens."""
SAMPLING: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.02},
)
REFUSED, CANCELLED = 0.02, 0.08
"""The shares of requests that are too large, and that are to be cancelled."""
QUEUE = 3
"""Nothing more arrives while this many requests per row are under way."""
SAMPLE = 200
"""Requests that are decoded again alone."""

# What may be held more at the end than after the first fifth. A leak grows with the number of requests; what does not
# is what a rare event needs for the first time (a graph that is captured, a table that Python enlarges).
MORE_OBJECTS = 0.01, 50
"""Objects of each type that the garbage collector knows, per request and in any case."""
MORE_BLOCKS = 0.05, 2000
"""Blocks of Python's allocator, per request and in any case. They include numbers and strings."""
MORE_RESIDENT = 1 << 10, 16 << 20
"""Bytes of resident memory, per request and in any case. The C allocator keeps pieces of what is freed, which depend on
the order of requests, also after it was asked to give back what it can."""
MORE_DEVICE = 64, 1 << 20
"""Bytes of tensors on a GPU, per request and in any case. The smallest tensor takes 512."""


@dataclass
class SoakOptions(BenchConfig):
    """How many requests are submitted, beside what other scripts take."""

    num_requests: int = 20000


@dataclass(frozen=True)
class Held:
    """The resources that a process holds.

    Attributes:
        objects: objects by type, as far as the garbage collector knows them.
        blocks: blocks of Python's allocator.
        resident: bytes of its memory that are in use; 0 where the system does not say.
        device: bytes of tensors on the GPU; 0 on a CPU.
    """

    objects: Counter[str]
    blocks: int
    resident: int
    device: int

    @staticmethod
    def now(device: torch.device) -> Held:
        """The resources that are held after garbage has been collected."""
        gc.collect()
        blocks = sys.getallocatedblocks()
        objects = Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())
        tensors = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        return Held(objects, blocks, _resident(), tensors)

    def growth(self, before: Held, requests: int) -> list[Growth]:
        """The resources that are held more than ``before``, with the allowed growth after so many requests."""
        kinds = {
            "Python blocks": (before.blocks, self.blocks, MORE_BLOCKS),
            "resident bytes": (before.resident, self.resident, MORE_RESIDENT),
            "bytes on the GPU": (before.device, self.device, MORE_DEVICE),
            "Python objects": (before.objects.total(), self.objects.total(), MORE_BLOCKS),
        }
        found = [Growth(name, then, now, _allowed(more, requests)) for name, (then, now, more) in kinds.items()]
        worst = max(self.objects, key=lambda name: self.objects[name] - before.objects[name])
        most = _allowed(MORE_OBJECTS, requests)
        return [*found, Growth(f"objects of {worst}", before.objects[worst], self.objects[worst], most)]


@dataclass(frozen=True)
class Growth:
    """How much of one thing was held after the first fifth and at the end, and how much more is allowed."""

    name: str
    before: int
    after: int
    allowed: int

    @property
    def leaks(self) -> bool:
        """Whether it grew by more than what is allowed."""
        return self.after - self.before > self.allowed


def _allowed(more: tuple[float, int], requests: int) -> int:
    return max(round(more[0] * requests), int(more[1]))


def _resident() -> int:
    # Freed memory that the C allocator of glibc still holds is no leak. Other systems have no such function.
    getattr(ctypes.CDLL(None), "malloc_trim", bool)(0)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


@dataclass(frozen=True)
class Requests:
    """Random requests. Each follows from its number alone, so that none of them needs to be kept.

    Attributes:
        vocab_size: token ids are below it.
        max_length: the session's.
        eos_ids: ids that the target emits often.
    """

    vocab_size: int
    max_length: int
    eos_ids: Sequence[int] = ()

    def get(self, number: int) -> dict[str, Any]:
        """The arguments of ``submit``."""
        dice = random.Random(number)
        return {
            "prompt": [dice.randrange(self.vocab_size) for _ in range(dice.randint(1, MOST))],
            "max_new_tokens": dice.randint(0, MOST),
            "eos_token_id": dice.sample(self.eos_ids, min(3, len(self.eos_ids))) if dice.random() < 0.5 else [],
            "seed": number,
            **dice.choice(SAMPLING),
        }

    def refused(self, number: int) -> bool:
        """Whether that request is replaced by one that no session takes."""
        return random.Random(f"refused {number}").random() < REFUSED

    def too_large(self, number: int) -> dict[str, Any]:
        """The request that has to be refused: a prompt that is too long, or too many EOS ids."""
        if number % 2:
            return {"prompt": [0] * (self.max_length + 1)}
        return {"prompt": [0], "max_new_tokens": 1, "eos_token_id": list(range(64))}


class Sample:
    """The tokens of some requests, in memory that does not grow."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.places = {number: place for place, number in enumerate(numbers)}
        self._tokens = array("q", bytes(8 * MOST * len(numbers)))
        self._counts = array("q", bytes(8 * len(numbers)))
        self._cancelled = array("q", bytes(8 * len(numbers)))

    def add(self, number: int, tokens: Sequence[int], *, cancelled: bool) -> None:
        """Keep what a step emitted for a request, if it is in the sample."""
        if number in self.places:
            place = self.places[number]
            begin = place * MOST + self._counts[place]
            self._tokens[begin : begin + len(tokens)] = array("q", tokens)
            self._counts[place] += len(tokens)
            self._cancelled[place] |= cancelled

    def differs(self, number: int, alone: list[int]) -> bool:
        """Whether a request got other tokens than ``alone``. Those of a cancelled one are the first of them."""
        place = self.places[number]
        found = self._tokens[place * MOST : place * MOST + self._counts[place]].tolist()
        return found != (alone[: len(found)] if self._cancelled[place] else alone)


@dataclass
class Soak:
    """Drives a session.

    Attributes:
        refused: requests that were refused.
    """

    session: Session
    requests: Requests
    sample: Sample
    refused: int = 0
    _under_way: dict[int, int] = field(default_factory=dict)
    _doomed: dict[int, int] = field(default_factory=dict)

    def run(self, numbers: range, progress: Progress) -> None:
        """Submit requests, and decode until all of them have ended."""
        dice, rows = random.Random(numbers.start), self.session.capacity.rows
        arrivals, step = (*[0] * 6, 1, 2, 4, rows), 0
        while numbers or self._under_way:
            arriving = dice.choice(arrivals) if len(self._under_way) < QUEUE * rows else 0
            for number in numbers[:arriving]:
                self._submit(number, step, dice)
            progress.advance(len(numbers[:arriving]))
            self._cancel(step)
            self._read()
            numbers, step = numbers[arriving:], step + 1
        self._doomed.clear()

    def _submit(self, number: int, step: int, dice: random.Random) -> None:
        if self.requests.refused(number):
            try:
                self.session.submit(**self.requests.too_large(number))
            except InputError:
                self.refused += 1
            return
        known = self.session.submit(**self.requests.get(number))
        self._under_way[known] = number
        if dice.random() < CANCELLED:
            self._doomed[known] = step + dice.randrange(16)

    def _cancel(self, step: int) -> None:
        """Cancel what is due. Some of it has ended by then."""
        for known in [known for known, when in self._doomed.items() if when <= step]:
            del self._doomed[known]
            self.session.cancel(known)

    def _read(self) -> None:
        for event in self.session.step():
            number, reason = self._under_way[event.id], event.finish_reason
            if event.error is not None:
                raise event.error
            self.sample.add(number, event.tokens, cancelled=reason == "cancelled")
            if reason is not None:
                del self._under_way[event.id]


@dataclass(frozen=True)
class SoakRow:
    """The result of a soak.

    Attributes:
        k: drafts per step and sequence; 0 without a drafter.
        requests: how many there were; ``refused`` of them were too large.
        ended: the others by their finish reason.
        new_tokens, steps, seconds, acceptance_length: of the session.
        capacity: the rows and pages that were free at the end.
        held: what was held after the first fifth and at the end.
        compared: how many requests were decoded again alone; ``differing`` of them got other tokens.
    """

    k: int
    requests: int
    refused: int
    ended: dict[str, int]
    new_tokens: int
    steps: int
    seconds: float
    acceptance_length: float
    capacity: Capacity
    held: list[Growth]
    compared: int
    differing: int

    def faults(self) -> list[str]:
        """The failures, as parts of a sentence."""
        free = self.capacity
        found = [f"{h.name} grew from {h.before} to {h.after}" for h in self.held if h.leaks]
        if (free.free_rows, free.free_pages) != (free.rows, free.pages):
            found.append(f"{free.free_rows} of {free.rows} rows and {free.free_pages} of {free.pages} pages are free")
        if self.differing:
            found.append(f"{self.differing} of {self.compared} requests got other tokens than alone")
        return found


def soak_text(row: SoakRow) -> str:
    """The result of a soak, as two tables."""
    ended = ", ".join(f"{count} {reason}" for reason, count in sorted(row.ended.items()))
    counts = {
        "K": str(row.k),
        "requests": f"{row.requests}, of which {row.refused} were refused",
        "ended": ended,
        "tokens": f"{row.new_tokens} in {row.steps} steps, {row.acceptance_length:.2f} per decode step and sequence",
        "seconds": f"{row.seconds:.1f}",
        "free rows": f"{row.capacity.free_rows} of {row.capacity.rows}",
        "free pages": f"{row.capacity.free_pages} of {row.capacity.pages}",
        "other tokens than alone": f"{row.differing} of {row.compared}",
    }
    held = [[h.name, *(f"{n:,}" for n in (h.before, h.after, h.after - h.before, h.allowed))] for h in row.held]
    columns = ["held", "after a fifth", "at the end", "more", "allowed"]
    return text_table(counts.items()) + "\n\n" + text_table(held, columns, align="right")


def bench_soak(model: PreTrainedModel, options: SoakOptions, config: Config) -> Iterator[SoakRow]:
    """Soak one session for every K; a decoder is compiled for each."""
    pool = config.cache.pool_tokens or POOL_TOKENS * config.max_batch_size
    cache = dataclasses.replace(config.cache, pool_tokens=pool)
    config = dataclasses.replace(config, cache=cache, max_length=config.max_length or LONGEST)
    for k in counts_of(options, config):
        own = with_drafts(config, k)
        decoder = compile_speculative(model, own, draft=head_of(model, own))
        yield soak(decoder, k, options.num_requests)


def soak(decoder: SpeculativeDecoder, k: int, count: int) -> SoakRow:
    """Decode ``count`` requests in a session of a decoder, and say what stayed behind."""
    target, first = decoder.stages["trace"].target, count // 5
    assert decoder.config.max_length is not None, "the length of prompts that are refused"
    _make_steps(decoder)
    requests = _with_eos(decoder, Requests(target.vocab_size, decoder.config.max_length))
    taken = [number for number in range(count) if not requests.refused(number)]
    sample = Sample(sorted(random.Random(0).sample(taken, min(SAMPLE, len(taken)))))
    begin = time.perf_counter()
    with decoder.session() as session, Progress("soak", count, decoder.config.debug.progress) as progress:
        driven = Soak(session, requests, sample)
        driven.run(range(first), progress)
        before = Held.now(target.device)
        driven.run(range(first, count), progress)
        held, stats, capacity = Held.now(target.device).growth(before, count - first), session.stats, session.capacity
    seconds = time.perf_counter() - begin
    return SoakRow(
        k=k,
        requests=count,
        refused=driven.refused,
        ended=dict(stats.ended),
        new_tokens=stats.new_tokens,
        steps=stats.steps,
        seconds=seconds,
        acceptance_length=stats.acceptance_length,
        capacity=capacity,
        held=held,
        compared=len(sample.places),
        differing=sum(sample.differs(number, _alone(decoder, requests.get(number))) for number in sample.places),
    )


def _alone(decoder: SpeculativeDecoder, request: dict[str, Any]) -> list[int]:
    """The tokens of a request by itself."""
    given = {**request, "seed": [request["seed"]]}
    tokens: list[int] = decoder.generate([torch.tensor(given.pop("prompt"))], **given).new_tokens[0].tolist()
    return tokens


def _make_steps(decoder: SpeculativeDecoder) -> None:
    """Meet every mix of sampling options, so that no graph of a step is made for the first time later on."""
    names = {name for options in SAMPLING for name in options}
    off = dict.fromkeys(names, 0.0) | {"top_p": 1.0}
    for mix in (*([options] for options in SAMPLING), SAMPLING):
        each: dict[str, Any] = {name: [(off | options)[name] for options in mix] for name in names}
        decoder.generate([torch.tensor([0])] * len(mix), max_new_tokens=2, eos_token_id=[], seed=0, **each)


def _with_eos(decoder: SpeculativeDecoder, requests: Requests) -> Requests:
    """Take the most frequent tokens of some requests for EOS ids, so that many sequences meet one."""
    emitted = Counter(token for number in range(-16, 0) for token in _alone(decoder, requests.get(number)))
    return dataclasses.replace(requests, eos_ids=[token for token, _ in emitted.most_common(6)])


def main(words: Sequence[str]) -> list[SoakRow]:
    """Soak sessions, and print what was found.

    Raises:
        SpecgraphError: something stayed behind, or a request got other tokens than alone.
    """
    defaults = {"what": "soak", "draft": "eagle3", "verify": "strict", "debug.self_check": False}
    config, options = read_options(words, SoakOptions, defaults)
    model = target_of(options)
    about = about_run(options, model.device, model.dtype) | about_decoder(config)
    about |= {"max_batch_size": config.max_batch_size}
    print(heading(about))
    found: list[SoakRow] = []
    for row in bench_soak(model, options, config):
        found.append(row)
        print("\n" + soak_text(row), flush=True)
    if options.json is not None:
        write_json(options.json, about, [dataclasses.asdict(row) for row in found])
    faults = [fault for row in found for fault in row.faults()]
    if faults:
        raise SpecgraphError(f"The soak of {options.num_requests} requests failed: {'; '.join(faults)}.")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
