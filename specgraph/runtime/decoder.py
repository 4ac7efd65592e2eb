"""The decoder: drives a compiled step graph over a batch of prompts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, fx

from specgraph.config import Config
from specgraph.errors import NumericsError
from specgraph.ir.program import Program
from specgraph.kernels.verify import LOSSLESS_RULES
from specgraph.passes.pipeline import Callback, StageReport, run_passes, unique
from specgraph.passes.report import render_report
from specgraph.passes.specialise_step import SpecialiseStep
from specgraph.progress import Progress
from specgraph.runtime.cuda_graphs import Results
from specgraph.runtime.defaults import GenerationDefaults
from specgraph.runtime.outputs import GenerateOutput, Stats, StreamChunk
from specgraph.runtime.requests import (
    Limits,
    PerSequence,
    Request,
    Sampling,
    check_prompts,
    read_eos,
    read_limits,
    read_logprobs,
    read_prompts,
    read_sampling,
)
from specgraph.runtime.runner import Runner, Runners
from specgraph.runtime.state import Prefill


@dataclass(frozen=True)
class _Step:
    """One run of the step graph, for all sequences of the request. ``emitted`` holds unforced tokens only."""

    emitted: list[list[int]]
    logprobs: list[list[float]]
    decoding: list[bool]
    confidence: list[list[float]]
    """What the drafter thinks of the drafts that each sequence verifies next; empty if it does not say."""
    seconds: float


@dataclass(frozen=True)
class _UnderWay:
    """A step that the device may still be running.

    Attributes:
        rows: the sequences that it runs.
        forced: how many next tokens each of them is given; nothing in a decode step.
        started: those whose prompt it ends, or has been ended before.
    """

    results: Results
    rows: list[int]
    forced: list[int]
    started: set[int]


class SpeculativeDecoder:
    """Emits what the target alone would emit, several tokens per step.

    Made by :func:`specgraph.compile_speculative`. Calls share no state, so a decoder can be used again after an
    error or an interrupt, several ``stream`` iterators may run side by side, and so may threads. (On a GPU the KV cache
    and the graphs of the largest request are kept for the next; requests side by side bring their own.)

    Attributes:
        stages: the program after every pass, by name; ``trace`` is the first. Every kind of request that was met adds
            one, ``specialise_step``.
        config: the configuration it was compiled with.
    """

    def __init__(
        self,
        stages: Mapping[str, Program],
        reports: Sequence[StageReport],
        config: Config,
        defaults: GenerationDefaults,
        limits: Limits,
        notes: Sequence[str] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.stages = dict(stages)
        self.config = config
        self._reports = list(reports)
        self._notes = list(notes)
        self._program = list(self.stages.values())[-1]
        self._defaults = defaults
        self._limits = limits
        self._callbacks = list(callbacks)
        self._lock = threading.Lock()
        self._steps: dict[tuple[str, tuple[str, ...]], fx.GraphModule] = {}
        self._compiled = self._program.compile_modules()
        self._runners = Runners(self._program, config.max_batch_size)

    def generate(
        self,
        input_ids: Tensor | Sequence[Tensor],
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        temperature: PerSequence = None,
        top_k: PerSequence = None,
        top_p: PerSequence = None,
        min_p: PerSequence = None,
        seed: PerSequence = None,
        return_logprobs: bool | str = False,
    ) -> GenerateOutput:
        """Continue every prompt until an EOS, ``max_new_tokens`` or the decoder's ``max_length``.

        Args:
            input_ids: int ``[B, S]``, padded on the left or right, or a list of 1-D tensors of any lengths.
            attention_mask: ``[B, S]``, nonzero where ``input_ids`` is not padding.
            max_new_tokens: tokens to add at most; None takes the model's generation_config, or 20 as transformers does.
            eos_token_id: one id or several that end a sequence; the model's if None, none if an empty list.
            temperature: 0 is greedy. A number, or one per sequence, as are the next four.
            top_k: keep the k most likely tokens; 0 is off.
            top_p: keep the smallest set of tokens with this probability; 1 is off.
            min_p: keep tokens with at least this share of the top probability; 0 is off.
            seed: a number gives sequence ``b`` the seed hash(seed, b); a list is used as it is; None draws fresh ones.
                The output depends on the seeds and the prompts alone, not on drafts, batch size or order.
            return_logprobs: True or ``"raw"`` for the log-softmax of the target's logits at the emitted tokens,
                ``"processed"`` for that of the processed ones.

        Raises:
            InputError: an argument is out of range; the message says what is allowed.
            NumericsError: the target's logits were NaN.
        """
        request = self._request(input_ids, attention_mask, max_new_tokens, eos_token_id, temperature, top_k, top_p,
                                min_p, seed, return_logprobs)  # fmt: skip
        stats = self._new_stats(len(request.prompts))
        tokens: list[list[int]] = [[] for _ in request.prompts]
        logprobs: list[list[float]] = [[] for _ in request.prompts]
        thought: list[list[float]] = [[] for _ in request.prompts]
        for step in self._run(request):
            _count(stats, step, thought)
            for row, new in enumerate(step.emitted):
                tokens[row] += new
                logprobs[row] += step.logprobs[row]
        new_tokens = [torch.tensor(row, dtype=torch.int64, device="cpu") for row in tokens]
        values = None
        if request.logprobs != "none":
            values = [torch.tensor(row, dtype=torch.float32, device="cpu") for row in logprobs]
        return GenerateOutput(_pad(request, new_tokens), new_tokens, values, stats)

    def stream(
        self,
        input_ids: Tensor | Sequence[Tensor],
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        temperature: PerSequence = None,
        top_k: PerSequence = None,
        top_p: PerSequence = None,
        min_p: PerSequence = None,
        seed: PerSequence = None,
        return_logprobs: bool | str = False,
    ) -> Iterator[StreamChunk]:
        """Like :meth:`generate`, but yields what each step emits. Arguments are checked before the first step."""
        request = self._request(input_ids, attention_mask, max_new_tokens, eos_token_id, temperature, top_k, top_p,
                                min_p, seed, return_logprobs)  # fmt: skip
        return self._chunks(request)

    def report(self) -> str:
        """What every pass did: time, matches, nodes, near misses, bytes shared, as Markdown."""
        return render_report(self.stages, self._reports, self._notes)

    def dump(self, folder: str | Path, *, weights: bool | None = None) -> Path:
        """Write one numbered folder per pass with runnable Python, and ``report.md``. See :func:`specgraph.dump.dump`.

        ``weights`` saves the parameters beside the graphs; None does so up to 256 MB.
        """
        from specgraph.dump import dump

        return dump(self.stages, Path(folder), report=self.report(), weights=weights)

    def _request(
        self, input_ids: Tensor | Sequence[Tensor], attention_mask: Tensor | None, max_new_tokens: int | None,
        eos_token_id: int | Sequence[int] | None, temperature: PerSequence, top_k: PerSequence, top_p: PerSequence,
        min_p: PerSequence, seed: PerSequence, return_logprobs: bool | str,
    ) -> Request:  # fmt: skip
        defaults, limits = self._defaults, self._limits
        eos_ids = read_eos(eos_token_id, defaults.eos_ids, limits.vocab_size)
        prompts, left = read_prompts(input_ids, attention_mask, defaults.pad_id, eos_ids)
        check_prompts(prompts, limits)
        sampling = read_sampling(
            len(prompts),
            temperature=defaults.temperature if temperature is None else temperature,
            top_k=defaults.top_k if top_k is None else top_k,
            top_p=defaults.top_p if top_p is None else top_p,
            min_p=defaults.min_p if min_p is None else min_p,
            seed=seed,
        )
        ends = read_limits(prompts, max_new_tokens, defaults, limits.max_length)
        pad_id = defaults.pad_id if defaults.pad_id is not None else (eos_ids or [0])[0]
        return Request(prompts, left, ends, sampling, eos_ids, pad_id, read_logprobs(return_logprobs))

    def _make_step(self, logprobs: str, unused: tuple[str, ...]) -> fx.GraphModule:
        """The step for one kind of log-probabilities, without the sampling options that are off.

        It is a stage like the others: verified, reported and dumped.
        """
        with self._lock:
            if (logprobs, unused) not in self._steps:
                pass_ = SpecialiseStep(logprobs, unused)
                stages, reports = run_passes(self._program, [pass_], self._callbacks)
                self.stages[unique(pass_.name, self.stages)] = program = stages[pass_.name]
                self._reports += reports
                self._steps[logprobs, unused] = program.executable(self._compiled)
            return self._steps[logprobs, unused]

    def _unused_inputs(self, sampling: Sampling) -> tuple[str, ...]:
        """State the step can do without: options that are off, and seeds where no noise is drawn."""
        draws = not sampling.greedy() or self.config.verify.rule not in LOSSLESS_RULES
        return sampling.unused() if draws else (*sampling.unused(), "seeds")

    def _new_stats(self, batch: int) -> Stats:
        steps: list[list[int]] = [[] for _ in range(batch)]
        return Stats(self._program.drafter.num_speculative_tokens, steps, confidence=[[] for _ in range(batch)])

    def _chunks(self, request: Request) -> Iterator[StreamChunk]:
        lengths = [p.numel() for p in request.prompts]
        finished = [limit <= length for limit, length in zip(request.limits, lengths, strict=True)]
        for step in self._run(request):
            for row, new in enumerate(step.emitted):
                lengths[row] += len(new)
                ended = bool(new) and new[-1] in request.eos_ids
                finished[row] = finished[row] or ended or lengths[row] >= request.limits[row]
            values = None if request.logprobs == "none" else step.logprobs
            yield StreamChunk(step.emitted, list(finished), values)

    def _run(self, request: Request) -> Iterator[_Step]:
        """Run the step graph until every sequence has ended."""
        width = self._program.drafter.num_speculative_tokens + 1
        prefill = Prefill(request, self.config.cache.prefill_chunk, width)
        if not prefill.pending():
            return
        mode = (request.logprobs, self._unused_inputs(request.sampling))
        with self._plain_mode():
            runner = self._runners.take(self._make_step(*mode), request, mode)
        try:
            yield from self._steps_of(runner, prefill, len(request.prompts))
        finally:
            self._runners.give_back(runner)

    def _steps_of(self, runner: Runner, prefill: Prefill, count: int) -> Iterator[_Step]:
        """Enqueue steps and read them ``runner.lag`` steps later, in order."""
        under_way: deque[_UnderWay] = deque()
        alive: set[int] = set()  # sequences past their prompt that are not known to have ended
        begin = time.perf_counter()
        with Progress("prefill", prefill.total(), self.config.debug.progress) as progress:
            while True:
                with self._plain_mode(), runner.active():
                    under_way.append(_enqueue(runner, prefill, alive, progress))
                alive |= under_way[-1].started
                if len(under_way) <= runner.lag:
                    continue
                step, ended = _read(under_way.popleft(), count, begin)
                begin = time.perf_counter()
                alive -= ended
                yield step
                # What is enqueued behind the last step has no active sequence, so it is not read.
                if not alive and not prefill.pending():
                    return

    def _plain_mode(self) -> contextlib.AbstractContextManager[None]:
        return plain_mode(self._program.target.device)


def _enqueue(runner: Runner, prefill: Prefill, alive: set[int], progress: Progress) -> _UnderWay:
    """One more step: over a chunk of the prompts as long as there are any, then over what the last one laid out.

    All prompts come first, so that the sequences then decode together.
    """
    if not prefill.pending():
        rows = sorted(alive)
        return _UnderWay(runner.decode(rows), rows, [], set(rows))
    chunk = prefill.chunk()
    results = runner.wide(chunk)
    progress.advance(chunk.num_tokens)
    return _UnderWay(results, chunk.rows, chunk.forced, {*chunk.rows} - {*prefill.pending()})


@contextlib.contextmanager
def plain_mode(device: torch.device) -> Iterator[None]:
    """Neither autocast, nor inference mode, nor gradients: a caller's modes must not change tokens or the state.

    ``device`` is the current one inside: kernels are launched there, whichever GPU the caller has chosen.
    """
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False), current(device):
        yield


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """``device`` as the current GPU, if it is one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _read(under_way: _UnderWay, count: int, begin: float) -> tuple[_Step, set[int]]:
    """Wait for a step, and lay its results out for all ``count`` sequences; also tells which have ended with it."""
    rows, read = under_way.rows, under_way.results.read(len(under_way.rows))
    if any(read.bad):
        raise NumericsError(
            f"The target's logits are NaN in sequence {rows[read.bad.index(True)]}. Check the weights and the dtype; "
            "the decoder itself is still usable."
        )
    decoding = not under_way.forced
    forced = under_way.forced or [0] * len(rows)
    logprobs: list[list[float]] = [[] for _ in range(count)]
    confidence: list[list[float]] = [[] for _ in range(count)]
    step = _Step([[] for _ in range(count)], logprobs, [False] * count, confidence, time.perf_counter() - begin)
    for place, row in enumerate(rows):
        # The last tokens were read. How many of them come before those that were not forced?
        before = max(0, len(read.tokens[place]) + forced[place] - read.num_emitted[place])
        step.emitted[row][:] = read.tokens[place][before:]
        step.logprobs[row][:] = read.logprobs[place][before:]
        step.decoding[row] = decoding and read.num_emitted[place] > 0
        step.confidence[row][:] = read.confidence[place]
    return step, {row for row, left in zip(rows, read.num_rows, strict=True) if not left} & under_way.started


def _count(stats: Stats, step: _Step, thought: list[list[float]]) -> None:
    """Add a step. ``thought`` is the confidence in the drafts that each sequence verifies in its next one."""
    stats.steps += 1
    if any(step.decoding):
        stats.decode_seconds += step.seconds
    else:
        stats.prefill_seconds += step.seconds
    for row, decoding in enumerate(step.decoding):
        if decoding:
            stats.emitted_per_step[row].append(len(step.emitted[row]))
            stats.confidence[row].append(thought[row])
        thought[row] = step.confidence[row] or thought[row]


def _pad(request: Request, new_tokens: list[Tensor]) -> Tensor:
    """Prompt and continuation of every sequence in one tensor."""
    rows = [
        torch.cat([prompt.new_full((left,), request.pad_id), prompt, new])
        for left, prompt, new in zip(request.left_padding, request.prompts, new_tokens, strict=True)
    ]
    width = max(row.numel() for row in rows)
    return torch.stack([torch.nn.functional.pad(row, (0, width - row.numel()), value=request.pad_id) for row in rows])
