"""The decoder: drives a compiled step graph over a batch of prompts."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from specgraph.config import Config
from specgraph.errors import InputError
from specgraph.ir.program import Program
from specgraph.kernels.state import CONFIDENCE
from specgraph.passes.pipeline import Callback, StageReport
from specgraph.passes.report import render_report, report_record
from specgraph.progress import Progress
from specgraph.runtime.execution.engine_factory import EngineFactory
from specgraph.runtime.execution.runner_pool import RunnerPool
from specgraph.runtime.execution.steps import Step
from specgraph.runtime.execution.stopping import Stopping
from specgraph.runtime.memory.state_rows import sizes_for
from specgraph.runtime.model_guard import ModelGuard
from specgraph.runtime.outputs.collector import Collector
from specgraph.runtime.outputs.output import GenerateOutput, Stream, StreamChunk
from specgraph.runtime.outputs.stats import Stats
from specgraph.runtime.outputs.streamer import streamed
from specgraph.runtime.requests.arguments import CHAT, TAKEN, check_names
from specgraph.runtime.requests.chats import encode_chats
from specgraph.runtime.requests.generation_config import read_generation_config
from specgraph.runtime.requests.grammar import Grammars
from specgraph.runtime.requests.limits import EosIds
from specgraph.runtime.requests.parser import GenerateCall, RequestParser
from specgraph.runtime.requests.request import Limits, Request
from specgraph.runtime.requests.sampling import read_logprobs
from specgraph.runtime.requests.stopping import Criterion
from specgraph.runtime.requests.text import Tokenizers, check_text_options, encode_texts
from specgraph.runtime.requests.values import PerSequence, read_bound, read_flag, refuse_others
from specgraph.runtime.scoring import ScoreOutput, Scoring, read_scoring
from specgraph.runtime.session import Session
from specgraph.specialise.mode import Mode
from specgraph.specialise.step_cache import Stages, StepCache

Criteria = Criterion | Sequence[Criterion] | None


class SpeculativeDecoder:
    """Emits what the target alone would emit, several tokens per step.

    Made by :func:`specgraph.compile_speculative`. Calls share no state, so a decoder can be used again after an
    error or an interrupt, several ``stream`` iterators may run side by side, and so may threads. (On a GPU the KV cache
    and the graphs of the largest request are kept for the next; requests side by side bring their own.)

    Attributes:
        stages: the program after every pass, by name; ``trace`` is the first. An unknown name is a ``KeyError`` that
            says which there are. Every kind of request that was met adds
            those of the passes that make its step, such as ``specialise_step`` and ``pack_rows``.
        ranks: the stages of each GPU, where several share the target; ``stages`` are those of the first.
        config: the configuration it was compiled with.
        model: the target.
    """

    def __init__(
        self,
        stages: Mapping[str, Program],
        reports: Sequence[StageReport],
        config: Config,
        model: PreTrainedModel,
        limits: Limits,
        guard: ModelGuard,
        notes: Sequence[str] = (),
        callbacks: Sequence[Callback] = (),
        others: Sequence[tuple[Mapping[str, Program], Sequence[StageReport]]] = (),
    ) -> None:
        self.stages = Stages(stages)
        self.config, self.model = config, model
        self._reports = list(reports)
        self._notes = list(notes)
        self._program = list(self.stages.values())[-1]
        token_types = "token_type_ids" in inspect.signature(model.forward).parameters
        tokenizers, grammars = Tokenizers(model), Grammars(limits.vocab_size)
        draws = config.verify.rule == "synthetic"
        defaults = functools.partial(read_generation_config, model)
        self._reader = RequestParser(defaults, limits, guard, tokenizers, grammars, token_types, draws)
        self._step_cache = StepCache(self._program, self.stages, self._reports, list(callbacks))
        self.ranks = [self.stages, *(Stages(own) for own, _ in others)]
        self._reports_of_others = [list(told) for _, told in others]
        programs = [list(own.values())[-1] for own in self.ranks[1:]]
        caches = [
            StepCache(program, own, told, list(callbacks))
            for program, own, told in zip(programs, self.ranks[1:], self._reports_of_others, strict=True)
        ]
        self._runners = RunnerPool(self._program, config.max_batch_size, config.cache, others=programs, steps=caches)
        self._engines = EngineFactory(self._program, config, self._runners, self._step_cache.step)

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence, prompt included."""
        return self._reader.limits.max_length

    @property
    def limits(self) -> Limits:
        """What it can take, and how much longer its sequences could be."""
        return self._reader.limits

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._reader.limits.vocab_size

    def generate(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
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
        trace: bool = False,
        **others: Any,
    ) -> GenerateOutput:
        """Continue every prompt until an EOS, ``max_new_tokens`` or the decoder's ``max_length``.

        Args:
            input_ids: int ``[B, S]``, padded on the left or right, or a list of 1-D tensors or lists of any lengths, or
                what a tokenizer returns.
            attention_mask: ``[B, S]``, 0 where ``input_ids`` is padding and 1 elsewhere.
            max_new_tokens: tokens to add at most, up to the decoder's ``max_length``; None takes the model's
                generation_config, or 20 as transformers does.
            eos_token_id: one id or several that end a sequence; the model's if None, none if an empty list.
            temperature: 0 is greedy. A number, or one per sequence, as are the next four.
            top_k: keep the k most likely tokens; 0 is off.
            top_p: keep the smallest set of tokens with this probability; 1 is off.
            min_p: keep tokens with at least this share of the top probability; 0 is off.
            seed: a number gives sequence ``b`` the seed hash(seed, b); a list is used as it is; None draws fresh ones.
                Under ``strict``, the output depends on the seeds and the prompts alone, not on drafts, batch size or
                order.
            return_logprobs: True or ``"raw"`` for the log-softmax of the target's logits at the emitted tokens,
                ``"processed"`` for that of the processed ones.
            stopping_criteria: one of transformers' ``StoppingCriteria``, or several, which may end a sequence after any
                token. They run on the host, and every step waits for them.
            trace: whether ``trace`` of the output shall say what happened to every draft
                (:class:`~specgraph.runtime.outputs.trace.Trace`).
            others: arguments of transformers' ``generate``: ``generation_config`` (what it leaves out is the model's,
                as that is now), ``do_sample`` (False is greedy, whatever the temperature), ``max_length``, which counts
                prompt and padding, ``num_return_sequences``, ``pad_token_id``, ``stop_strings`` with their
                ``tokenizer``, ``max_time`` and a ``streamer``. What changes logits on the device: the attributes of
                :class:`~specgraph.runtime.requests.processing.Processing`, one value or a list with one per sequence.
                What the host does, while every step waits for it: ``logits_processor``, ``prefix_allowed_tokens_fn``,
                ``json_schema``, ``regex`` or ``grammar`` (of Lark, with the tokenizer), from the beginning or behind
                ``structure_after``, a text or a token id; ``output_scores`` and ``output_logits``. What concerns a
                cache or an assistant is accepted and changes nothing; :mod:`specgraph.runtime.requests.arguments` lists
                what is refused, and why.

        Raises:
            InputError: an argument is out of range, unknown or not supported; the message says what is allowed. Or a
                sequence cannot go on, because its options leave it no token.
            NumericsError: the target's logits were NaN. If a sequence fails while it is decoded, the others go on to
                their ends first, and the attribute ``output`` of the error has them all.
        """
        own = {
            "max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id, "temperature": temperature, "top_k": top_k,
            "top_p": top_p, "min_p": min_p, "seed": seed, "return_logprobs": return_logprobs,
            "stopping_criteria": stopping_criteria, "trace": trace,
        }  # fmt: skip
        return self._collected(self._reader.call(input_ids, attention_mask, own | others))

    def generate_as_transformers(self, input_ids: Tensor, attention_mask: Any, **options: Any) -> GenerateOutput:
        """Like :meth:`generate`, for an attached model: where no token is left, what happens is what transformers does.

        A function of allowed tokens has the last word then, and a greedy choice takes the first token of all.
        """
        return self._collected(self._reader.call(input_ids, attention_mask, options, as_transformers=True))

    def stream(self, input_ids: Any = None, attention_mask: Any = None, **options: Any) -> Stream:
        """Like :meth:`generate`, but yields what each step emits. Arguments are checked before the first step.

        A sequence that fails has the finish reason ``error``. Its error is raised when all others have ended.

        ``stats`` of what is returned has the counts so far, and ``trace`` what happened to the drafts.
        """
        call = self._reader.stream(input_ids, attention_mask, options)
        collector = self._collector(call)
        return Stream(self._chunks(call, collector), collector.stats, collector.trace)

    def text(self, prompts: str | Sequence[str], *, tokenizer: Any = None, **options: Any) -> Any:
        """Continue a text, or each of a list: the new text, or a list of them, without special tokens.

        Args:
            prompts: what is to be continued.
            tokenizer: the model's; None loads it from where the model came from.
            options: as for :meth:`generate`. With ``num_return_sequences``, the texts of all prompts are in one list.

        Raises:
            InputError: as :meth:`generate`, or there is no tokenizer.
        """
        alone = isinstance(prompts, str)
        own = self._reader.tokenizers.get(tokenizer)
        return self._texts(own, encode_texts(own, [prompts] if alone else prompts), options, alone=alone)

    def chat(
        self, messages: Sequence[Any], *, tokenizer: Any = None, tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Answer a conversation, or each of a list: the text of the answer, or a list of them.

        Args:
            messages: mappings with ``role`` and ``content``, or a list of such conversations. A message of the
                assistant may have ``tool_calls`` alone.
            tokenizer: the model's, with a chat template; None loads it from where the model came from.
            tools: what the model may call in all of these conversations: JSON schemas, or Python functions, as
                transformers takes them. Calls in an answer are part of its text.
            chat_template_kwargs: further variables of the chat template, such as ``{"enable_thinking": False}``.
            options: as for :meth:`text`.

        Raises:
            InputError: as :meth:`generate`, or there is no tokenizer or no chat template.
        """
        several = isinstance(messages, list | tuple) and messages and not isinstance(messages[0], Mapping)
        own = self._reader.tokenizers.get(tokenizer)
        check_names(options, TAKEN, CHAT)
        rows = encode_chats(own, messages if several else [messages], tools, chat_template_kwargs)
        return self._texts(own, rows, options, alone=not several)

    def session(
        self, *, return_logprobs: bool | str = False, return_text: bool = False, tokenizer: Any = None,
        max_waiting: int | None = None, **others: Any,
    ) -> Session:  # fmt: skip
        """A session, to which sequences are submitted at any time. It has a state of its own until it is closed.

        Its KV cache has room for ``max_batch_size`` sequences of ``max_length``, or for ``cache.pool_tokens``, but
        takes no more than ``cache.memory_share`` of the memory that is free now. On a CPU it has room for less, unless
        one of these keys is given (:func:`specgraph.runtime.memory.sizing.modest`), and pages take memory as they are
        used.

        Args:
            return_logprobs: as for :meth:`generate`, for all sequences.
            return_text: whether events also have the texts of their tokens.
            tokenizer: the model's, for texts and stop strings; None loads it from where the model came from, if texts
                are wanted.
            max_waiting: the most sequences that may wait for a row; ``submit`` refuses more. None is any number.
            others: there are none; their names are in the error.

        Raises:
            InputError: there is no memory for a KV cache, or no tokenizer.
        """
        takes = "it takes return_logprobs, return_text, tokenizer and max_waiting"
        refuse_others("session", others, f"{takes}, and its size is of the configuration")
        logprobs = read_logprobs(return_logprobs)
        texts = bool(read_flag("return_text", return_text))
        own = self._reader.tokenizers.get(tokenizer) if texts or tokenizer is not None else None
        most = read_bound("max_waiting", max_waiting)
        stack = contextlib.ExitStack()
        sizes = self._engines.session_sizes(self.max_length, len(self._reader.read_defaults().eos_ids))
        engine = stack.enter_context(self._engines.engine(sizes, Mode(logprobs), fair=True))
        return Session(
            engine, self._reader, self._engines.step, stack.close, logprobs=logprobs != "none", texts=texts,
            tokenizer=own, max_waiting=most,
        )  # fmt: skip

    def score(
        self, sequences: Any, attention_mask: Any = None, *, start: PerSequence = None, logprobs: str = "raw",
        temperature: PerSequence = None, top_k: PerSequence = None, top_p: PerSequence = None,
        min_p: PerSequence = None, **others: Any,
    ) -> ScoreOutput:  # fmt: skip
        """The log-probabilities of given tokens, bit for bit those that :meth:`generate` reports for them.

        With ``numerics: bitwise`` on a GPU these bits depend on a token and those before it alone: neither on the batch
        and on how sequences are cut into chunks, nor on the drafter. See :mod:`specgraph.runtime.scoring`.

        Args:
            sequences: what :meth:`generate` returned, or prompts with what follows them, as it takes prompts. Without a
                mask, pad ids at the ends of a tensor count as padding, so a list is safer.
            attention_mask: ``[B, S]``, 0 where ``sequences`` are padding.
            start: the place of the first token to score, padding not counted, such as the length of the prompt: one for
                all sequences, or for each. None is 1, the second token, since the first has no probability. For what
                ``generate`` returned, None is the first new token.
            logprobs: ``"raw"`` or ``"processed"``, as ``return_logprobs`` of :meth:`generate`.
            temperature, top_k, top_p, min_p: for ``"processed"``, as for :meth:`generate`.
            others: there are none; their names are in the error.

        Raises:
            InputError: an argument is out of range; the message says what is allowed.
            NumericsError: the target's logits were NaN.
        """
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        refuse_others("score", others, f"it takes start, logprobs, {', '.join(sampling)}")
        requests, starts, pass_ = read_scoring(self._reader, sequences, attention_mask, start, logprobs, **sampling)
        sizes = sizes_for(requests, self.config.max_batch_size, self._runners.block_size)
        overhead, chunk = self._engines.overhead.prompt, self.config.cache.prefill_chunk
        with self._engines.plain_mode(), self._runners.lend(sizes) as runner:
            scoring = Scoring(runner, pass_, self._step_cache.scoring(pass_), overhead, chunk, self.vocab_size)
            return scoring.run(requests, starts)

    def forget_prefixes(self) -> None:
        """Share no page any more that an earlier call of ``generate`` or ``stream`` has filled.

        To be called when weights were changed in a way that leaves no mark, such as through ``.data``. What an
        optimiser or ``copy_`` writes is noticed. Sessions that are open have a call of their own.
        """
        self._runners.forget_prefixes()

    def forget_outputs(self) -> None:
        """Let no request that begins from now on draft from outputs of before now (``draft.max_cached_tokens``)."""
        self._runners.earlier.forget()

    def report(self) -> str:
        """What every pass did: time, matches, nodes, near misses, bytes shared, as Markdown."""
        last = [*self._runners.describe(), *self._engines.describe()]
        return render_report(self.stages, self._reports, self._notes, last)

    def dump(self, folder: str | Path, *, weights: bool | None = None) -> Path:
        """Write one numbered folder per pass with runnable Python, and ``report.md``. See :func:`specgraph.dump.dump`.

        Where several GPUs share the target, those are of the first, and ``device_1`` and so on are dumps of the others.
        ``weights`` saves the parameters beside the graphs; None does so up to 256 MB.
        """
        from specgraph.dump import dump

        rule = self.config.verify.rule
        record = report_record(self.stages, self._reports, self._notes, rule)
        written = dump(self.stages, folder, report=self.report(), record=record, weights=weights)
        for rank, (stages, reports) in enumerate(zip(self.ranks[1:], self._reports_of_others, strict=True), 1):
            record, report = report_record(stages, reports, [], rule), render_report(stages, reports, [])
            dump(stages, written / f"device_{rank}", report=report, record=record, weights=weights)
        return written

    def __reduce__(self) -> Any:
        raise InputError(
            "A decoder cannot be pickled or copied: it holds compiled code and memory of its device. Compile the model "
            "where a decoder is needed; threads can share one."
        )

    def _collector(self, call: GenerateCall) -> Collector:
        batch, drafter = len(call.requests), self._program.drafter
        steps: list[list[int]] = [[] for _ in range(batch)]
        says = CONFIDENCE in self._program.inputs
        confidence: list[list[list[float]]] = [[] for _ in range(batch if says else 0)]
        count = drafter.num_speculative_tokens
        about = {
            "target": self._program.target.name, "drafter": drafter.name, "rule": self.config.verify.rule,
            "num_speculative_tokens": count,
            "temperatures": [request.sampling.temperature for request in call.requests],
        }  # fmt: skip
        return Collector(call, Stats(count, steps, confidence=confidence), about)

    def _collected(self, call: GenerateCall) -> GenerateOutput:
        """Decode a call. An error of a sequence is raised when all others have ended, and brings what they have."""
        collector = self._collector(call)
        # The mode is entered once, and not for every step.
        running = self._run(call, self.config.debug.progress, alone=True)
        with self._engines.plain_mode(), contextlib.closing(running) as steps:
            for step in steps:
                collector.add(step)
        output, error = collector.output(), collector.first_error()
        if error is not None:
            error.output = output
            raise error
        return output

    def _texts(self, tokenizer: Any, prompts: list[list[int]], options: dict[str, Any], *, alone: bool) -> Any:
        check_text_options(options)
        new_tokens = self.generate(prompts, tokenizer=tokenizer, **options).new_tokens
        texts = [tokenizer.decode(new, skip_special_tokens=True) for new in new_tokens]
        return texts[0] if alone and len(texts) == 1 else texts

    def _chunks(self, call: GenerateCall, collector: Collector) -> Generator[StreamChunk, None, None]:
        with contextlib.closing(self._run(call, show=False)) as steps:  # so that the state is free when this is closed
            for step in steps:
                chunk = collector.chunk(step)
                if step.ran:
                    yield chunk
        error = collector.first_error()
        if error is not None:
            raise error

    def _run(self, call: GenerateCall, show: bool | None, *, alone: bool = False) -> Generator[Step, None, None]:
        """Decode all sequences of a call, by their places in it, as many at a time as there is room for.

        ``show``: whether to show how many prompt tokens were run; None does so on a terminal. ``alone``: whether no
        code of others runs between two steps, but for criteria and streamers.
        """
        alone = alone and not call.criteria and call.streamer is None
        with contextlib.closing(self._decode(call, show, alone=alone)) as steps:
            yield from steps if call.streamer is None else streamed(call, steps)

    def _decode(self, call: GenerateCall, show: bool | None, *, alone: bool) -> Generator[Step, None, None]:
        requests = call.requests
        if not any(request.has_room for request in requests):
            return
        sizes = sizes_for(requests, min(self.config.max_batch_size, len(requests)), self._runners.block_size)
        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(self._engines.engine(sizes, call.mode, fair=False))
            total = sum(request.prompt.numel() for request in requests if request.has_room)
            progress = stack.enter_context(Progress("prefill", total, show))
            if alone:
                stack.enter_context(engine.active())
            stopping = Stopping(engine)
            for number in _longest_first(requests):
                stopping.add(number, requests[number], call.criteria)
                engine.submit(number, requests[number])
            while (step := self._engines.step(engine)) is not None:
                progress.advance(step.prompt_tokens)
                yield stopping.cut(step)


def _longest_first(requests: Sequence[Request]) -> list[int]:
    """The places of requests in the order in which they begin: those that may go on for longest come first.

    So the last to end do not end alone. No token depends on the order.
    """
    return sorted(range(len(requests)), key=lambda n: requests[n].prompt.numel() - requests[n].limit)
