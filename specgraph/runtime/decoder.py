"""The decoder: drives a compiled step graph over a batch of prompts."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from specgraph.config import Config
from specgraph.errors import InputError
from specgraph.ir.program import Program
from specgraph.kernels.state import CONFIDENCE
from specgraph.kernels.verify import LOSSLESS_RULES
from specgraph.passes.pipeline import Callback, StageReport, run_passes, unique
from specgraph.passes.report import render_report
from specgraph.passes.specialise_step import SpecialiseStep
from specgraph.progress import Progress
from specgraph.runtime.defaults import GenerationDefaults
from specgraph.runtime.engine import Engine, Policy
from specgraph.runtime.outputs import GenerateOutput, Stats, Stream, StreamChunk
from specgraph.runtime.pages import num_pages
from specgraph.runtime.prompt_shapes import Overhead
from specgraph.runtime.reading import Reader
from specgraph.runtime.requests import Batch, EosIds, Limits, PerSequence, Request, read_logprobs
from specgraph.runtime.runner import Runners
from specgraph.runtime.session import Session
from specgraph.runtime.state import sizes_for
from specgraph.runtime.steps import Step
from specgraph.runtime.stopping import Criterion, Stopping, read_criteria
from specgraph.runtime.workspace import Mode

Criteria = Criterion | Sequence[Criterion] | None
SESSION_EOS_IDS = 8
"""For how many EOS ids a sequence of a session has room, unless the model has more."""


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
        self._reader = Reader(defaults, limits)
        self._callbacks = list(callbacks)
        self._lock = threading.Lock()
        self._steps: dict[Mode, fx.GraphModule] = {}
        self._compiled = self._program.compile_modules()
        num_parameters = sum(tensor.numel() for tensor in self._program.tensors())
        self._overhead = Overhead.of(num_parameters, self._program.target.device.type)
        self._runners = Runners(self._program, config.max_batch_size, config.cache)

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence, prompt included."""
        return self._reader.limits.max_length

    def generate(
        self,
        input_ids: Tensor | Sequence[Tensor],
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: PerSequence = None,
        eos_token_id: EosIds = None,
        temperature: PerSequence = None,
        top_k: PerSequence = None,
        top_p: PerSequence = None,
        min_p: PerSequence = None,
        seed: PerSequence = None,
        return_logprobs: bool | str = False,
        stopping_criteria: Criteria = None,
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
            stopping_criteria: one of transformers' ``StoppingCriteria``, or several, which may end a sequence after any
                token. They run on the host, and every step waits for them.

        Raises:
            InputError: an argument is out of range; the message says what is allowed.
            NumericsError: the target's logits were NaN.
        """
        batch = self._reader.batch(
            input_ids, attention_mask, max_new_tokens=max_new_tokens, eos_token_id=eos_token_id,
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, return_logprobs=return_logprobs,
        )  # fmt: skip
        count, stopping = len(batch.requests), _stopping(stopping_criteria, input_ids, batch)
        stats, reasons = self._new_stats(count), ["length"] * len(batch.requests)
        tokens: list[list[int]] = [[] for _ in range(count)]
        logprobs: list[list[float]] = [[] for _ in range(count)]
        thought: list[Sequence[float]] = [()] * count
        steps = self._run(batch, show=self.config.debug.progress, alone=True, stopping=stopping)
        with self._plain_mode(), contextlib.closing(steps):  # entered once, and not for every step
            for step in steps:
                _count(stats, step, thought)
                for output in step.outputs:
                    tokens[output.number] += output.tokens
                    logprobs[output.number] += output.logprobs
                    if output.finish_reason is not None:
                        reasons[output.number] = output.finish_reason
        new_tokens = _tensors(tokens, torch.int64)
        values = _tensors(logprobs, torch.float32) if batch.logprobs != "none" else None
        return GenerateOutput(_pad(batch, new_tokens), new_tokens, values, stats, reasons)

    def stream(
        self,
        input_ids: Tensor | Sequence[Tensor],
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: PerSequence = None,
        eos_token_id: EosIds = None,
        temperature: PerSequence = None,
        top_k: PerSequence = None,
        top_p: PerSequence = None,
        min_p: PerSequence = None,
        seed: PerSequence = None,
        return_logprobs: bool | str = False,
        stopping_criteria: Criteria = None,
    ) -> Stream:
        """Like :meth:`generate`, but yields what each step emits. Arguments are checked before the first step.

        ``stats`` of what is returned has the counts so far.
        """
        batch = self._reader.batch(
            input_ids, attention_mask, max_new_tokens=max_new_tokens, eos_token_id=eos_token_id,
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, return_logprobs=return_logprobs,
        )  # fmt: skip
        stats = self._new_stats(len(batch.requests))
        return Stream(self._chunks(batch, stats, _stopping(stopping_criteria, input_ids, batch)), stats)

    def session(self, *, return_logprobs: bool | str = False) -> Session:
        """A session, to which sequences are submitted at any time. It has a state of its own until it is closed.

        Its KV cache has room for ``max_batch_size`` sequences of ``max_length``, or for ``cache.pool_tokens``, but
        takes no more than ``cache.memory_share`` of the memory that is free now.

        Args:
            return_logprobs: as for :meth:`generate`, for all sequences.

        Raises:
            InputError: there is no memory for a KV cache.
        """
        logprobs = read_logprobs(return_logprobs)
        stack = contextlib.ExitStack()
        engine = stack.enter_context(self._engine(self._session_sizes(), logprobs, fair=True))
        return Session(engine, self._reader, self._step, stack.close, logprobs=logprobs != "none")

    def forget_prefixes(self) -> None:
        """Share no page any more that an earlier call of ``generate`` or ``stream`` has filled.

        To be called when weights were changed in a way that leaves no mark, such as through ``.data``. What an
        optimiser or ``copy_`` writes is noticed. Sessions that are open have a call of their own.
        """
        self._runners.forget_prefixes()

    def report(self) -> str:
        """What every pass did: time, matches, nodes, near misses, bytes shared, as Markdown."""
        return render_report(self.stages, self._reports, self._notes, self._runners.describe())

    def dump(self, folder: str | Path, *, weights: bool | None = None) -> Path:
        """Write one numbered folder per pass with runnable Python, and ``report.md``. See :func:`specgraph.dump.dump`.

        ``weights`` saves the parameters beside the graphs; None does so up to 256 MB.
        """
        from specgraph.dump import dump

        return dump(self.stages, Path(folder), report=self.report(), weights=weights)

    def __reduce__(self) -> Any:
        raise InputError(
            "A decoder cannot be pickled or copied: it holds compiled code and memory of its device. Compile the model "
            "where a decoder is needed; threads can share one."
        )

    def _make_step(self, mode: Mode) -> fx.GraphModule:
        """The step for one kind of log-probabilities and one K, without the sampling options that are off.

        It is a stage like the others: verified, reported and dumped.
        """
        with self._lock:
            if mode not in self._steps:
                pass_ = SpecialiseStep(*mode)
                stages, reports = run_passes(self._program, [pass_], self._callbacks)
                self.stages[unique(pass_.name, self.stages)] = program = stages[pass_.name]
                self._reports += reports
                self._steps[mode] = program.executable(self._compiled)
            return self._steps[mode]

    def _new_stats(self, batch: int) -> Stats:
        steps: list[list[int]] = [[] for _ in range(batch)]
        says = CONFIDENCE in self._program.inputs
        confidence: list[list[list[float]]] = [[] for _ in range(batch if says else 0)]
        return Stats(self._program.drafter.num_speculative_tokens, steps, confidence=confidence)

    def _chunks(self, batch: Batch, stats: Stats, stopping: Stopping | None) -> Generator[StreamChunk, None, None]:
        count = len(batch.requests)
        finished = [not request.has_room for request in batch.requests]
        thought: list[Sequence[float]] = [()] * count
        with contextlib.closing(
            self._run(batch, show=False, stopping=stopping)
        ) as steps:  # so that the state is free when this is closed
            for step in steps:
                _count(stats, step, thought)
                tokens: list[list[int]] = [[] for _ in range(count)]
                logprobs: list[list[float]] = [[] for _ in range(count)]
                for output in step.outputs:
                    tokens[output.number], logprobs[output.number] = [*output.tokens], [*output.logprobs]
                    finished[output.number] |= output.finish_reason is not None
                if step.ran:
                    yield StreamChunk(tokens, list(finished), None if batch.logprobs == "none" else logprobs)

    def _run(
        self, batch: Batch, *, show: bool | None, alone: bool = False, stopping: Stopping | None = None
    ) -> Generator[Step, None, None]:
        """Decode all sequences of a batch, by their places in it, as many at a time as there is room for.

        ``show``: whether to show how many prompt tokens were run; None does so on a terminal. ``alone``: whether no
        code of others runs between two steps.
        """
        if not any(request.has_room for request in batch.requests):
            return
        rows = min(self.config.max_batch_size, len(batch.requests))
        sizes = sizes_for(batch.requests, rows, self._runners.block_size)
        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(self._engine(sizes, batch.logprobs, fair=False))
            progress = stack.enter_context(_progress(batch, show))
            if alone and stopping is None:
                stack.enter_context(engine.active())
            for number in _longest_first(batch.requests):
                engine.submit(number, batch.requests[number])
            steps = self._run_steps(engine)
            for step in steps if stopping is None else stopping.watch(engine, steps):
                progress.advance(step.prompt_tokens)
                for output in step.outputs:
                    if output.error is not None:
                        raise output.error
                yield step

    def _run_steps(self, engine: Engine) -> Iterator[Step]:
        """The steps of an engine, with the caller's modes in between."""
        while (step := self._step(engine)) is not None:
            yield step

    def _step(self, engine: Engine) -> Step | None:
        with self._plain_mode():
            return engine.step()

    def _session_sizes(self) -> dict[str, int]:
        """Room for the longest sequences in every row, before memory is looked at."""
        rows, longest = self.config.max_batch_size, self._reader.limits.max_length
        pages = num_pages(longest, self._runners.block_size)
        ids = max(SESSION_EOS_IDS, len(self._reader.defaults.eos_ids))
        return {"B": rows, "M": pages, "N": rows * pages, "S": longest, "E": ids}

    @contextlib.contextmanager
    def _engine(self, sizes: Mapping[str, int], logprobs: str, *, fair: bool) -> Iterator[Engine]:
        """An engine with a state of its own, which is free for others afterwards."""
        with self._plain_mode():
            runner = self._runners.take(sizes)
        always_draws = self.config.verify.rule not in LOSSLESS_RULES
        policy = Policy(self.config.cache.prefill_chunk, fair, self._drafts_by_load())
        engine = Engine(runner, self._make_step, policy, self._overhead, logprobs, always_draws)
        try:
            yield engine
        finally:
            with self._plain_mode():
                engine.close()
            self._runners.give_back(runner)

    def _drafts_by_load(self) -> dict[int, int | None]:
        """K by the number of sequences in a decode step, None where it is the drafter's own."""
        most, table = self._program.drafter.num_speculative_tokens, self.config.draft.num_speculative_tokens_by_load
        return {count: drafts if drafts < most else None for count, drafts in (table or {}).items()}

    def _plain_mode(self) -> contextlib.AbstractContextManager[None]:
        return plain_mode(self._program.target.device)


def plain_mode(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Neither autocast, nor inference mode, nor gradients: a caller's modes must not change tokens or the state.

    ``device`` is the current one inside: kernels are launched there, whichever GPU the caller has chosen. Nothing is
    entered where all of this is so already, since that takes a tenth as long.
    """
    changed = torch.is_inference_mode_enabled() or torch.is_grad_enabled() or torch.is_autocast_enabled(device.type)
    elsewhere = device.type == "cuda" and torch.cuda.current_device() != device.index
    return _entered_plain_mode(device) if changed or elsewhere else contextlib.nullcontext()


@contextlib.contextmanager
def _entered_plain_mode(device: torch.device) -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False), current(device):
        yield


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """``device`` as the current GPU, if it is one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _progress(batch: Batch, show: bool | None) -> Progress:
    return Progress("prefill", sum(request.prompt.numel() for request in batch.requests if request.has_room), show)


def _stopping(given: Criteria, input_ids: Tensor | Sequence[Tensor], batch: Batch) -> Stopping | None:
    criteria = read_criteria(given)
    return Stopping(criteria, list(input_ids), batch.requests) if criteria else None


def _longest_first(requests: Sequence[Request]) -> list[int]:
    """The places of requests in the order in which they begin: those that may go on for longest come first.

    So the last to end do not end alone. No token depends on the order.
    """
    return sorted(range(len(requests)), key=lambda n: requests[n].prompt.numel() - requests[n].limit)


def _count(stats: Stats, step: Step, thought: list[Sequence[float]]) -> None:
    """Add a step. ``thought`` is the confidence in the drafts that each sequence verifies in its next one."""
    stats.steps += step.ran
    stats.reused_tokens += step.reused_tokens
    if step.decoding:
        stats.decode_seconds += step.seconds
    else:
        stats.prefill_seconds += step.seconds
    for number, tokens, _, decoding, confidence, *_ in step.outputs:
        if decoding:
            stats.emitted_per_step[number].append(len(tokens))
            if stats.confidence:
                stats.confidence[number].append([*thought[number][: step.drafts]])
        thought[number] = confidence


def _tensors(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> list[Tensor]:
    """A 1-D tensor for each row."""
    flat = torch.tensor([*itertools.chain.from_iterable(rows)], dtype=dtype, device="cpu")
    return [row.clone() for row in torch.split(flat, [*map(len, rows)])]


def _pad(batch: Batch, new_tokens: list[Tensor]) -> Tensor:
    """Prompt and continuation of every sequence in one tensor."""
    parts = [
        (request.prompt.new_full((left,), batch.pad_id), request.prompt, new)
        for left, request, new in zip(batch.left_padding, batch.requests, new_tokens, strict=True)
    ]
    # One call each for all sequences: there may be thousands.
    flat = torch.cat([*itertools.chain.from_iterable(parts)])
    rows = [*torch.split(flat, [sum(map(len, part)) for part in parts])]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=batch.pad_id)
