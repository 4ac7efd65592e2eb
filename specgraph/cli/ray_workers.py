"""Decodes prompts in several processes with Ray Data: each has a decoder, and GPUs of its own if there are any.

It makes no difference which process decodes a prompt, because its seed goes with it. If a process dies, Ray starts
another one, which decodes again what the first had not handed over.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specgraph.cli.check_options import decoder_options
from specgraph.cli.decode_prompts import InOrder, Outcome, Prompt, draw_seeds, reads_seeds
from specgraph.cli.keys import GenerateConfig
from specgraph.cli.loading import shared_place
from specgraph.cli.writers import Writer
from specgraph.compiler.compile import compile_speculative
from specgraph.config import Config
from specgraph.errors import ConfigError, SpecgraphError
from specgraph.progress import Progress
from specgraph.runtime.outputs.stats import Stats
from specgraph.schemes.load import load_causal_lm

ROUNDS = 4
"""A worker gets this many times as many prompts at once as it decodes together, so that no row of its batch is idle."""


@dataclass(frozen=True)
class Job:
    """The arguments with which a worker makes its decoder and calls it.

    Attributes:
        options: the keys of the command.
        config: the configuration of the decoder.
        place: the device and the dtype of the model.
        tokenizer: of the model.
    """

    options: GenerateConfig
    config: Config
    place: tuple[str, str]
    tokenizer: Any


class Worker:
    """One decoder, which Ray calls with a table of prompts."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._decoder: Any = None

    def __call__(self, table: Any) -> Any:
        """The answers, in a table with a row for each prompt: its place among all, the new tokens, why they end, and
        the tokens of every step.

        The decoder is made in the first call: an error there is one of this call, where an error of the constructor
        would make Ray try again for ever.
        """
        import pyarrow

        if self._decoder is None:
            self._decoder = self._compiled()
        prompts, seeds = table["ids"].to_pylist(), table["seed"].to_pylist()
        given = decoder_options(self._job.options, self._job.tokenizer)
        seeds = seeds if reads_seeds(self._job.options, self._decoder) else None
        out = self._decoder.generate(prompts, seed=seeds, **given)
        drafts = [out.stats.num_speculative_tokens] * len(prompts)
        return pyarrow.table({
            "place": table["place"], "tokens": [new.tolist() for new in out.new_tokens], "drafts": drafts,
            "reason": out.finish_reasons, "steps": out.stats.emitted_per_step,
        })  # fmt: skip

    def _compiled(self) -> Any:
        options, (device, dtype) = self._job.options, shared_place(self._job.config, self._job.place)
        model: Any = load_causal_lm(options.model, dtype, f"model={options.model}", options.trust_remote_code)
        return compile_speculative(model.to(device), self._job.config)


def decode_with_ray(job: Job, prompts: Sequence[Prompt], write: Writer | None = None) -> Outcome:
    """Continue every prompt as ``decode_prompts`` does, in ``workers`` processes.

    Raises:
        ConfigError: Ray is not there, or has too few CPUs or GPUs.
        SpecgraphError: a worker could not compile the model, or its decoder refused a prompt.
    """
    seeds = draw_seeds(job.options.seed, len(prompts))
    empty: list[list[int]] = [[] for _ in prompts]
    outcome = Outcome(job.config, [*empty], Stats(0, [*empty]), 0.0, seeds, "the start of the workers")
    reasons: list[str | None] = [None] * len(prompts)
    ready, begin = InOrder(outcome, prompts, write), time.perf_counter()
    with Progress("prompts", len(prompts), job.config.debug.progress) as progress, _running():
        for answer in _answers(job, prompts, seeds):
            place = answer["place"]
            outcome.tokens[place], reasons[place] = answer["tokens"], answer["reason"]
            outcome.stats.emitted_per_step[place] = answer["steps"]
            outcome.stats.num_speculative_tokens = answer["drafts"]
            progress.advance()
            ready(reasons)
    outcome.seconds = time.perf_counter() - begin
    return outcome


def _answers(job: Job, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The rows of the workers' tables, each as soon as a worker has handed it over."""
    ray = _library()
    gpus = job.config.parallel.tensor if job.place[0].startswith("cuda") else 0
    workers = _workers(job.options.workers, ray.cluster_resources(), gpus)
    size = min(ROUNDS * job.config.max_batch_size, -(-len(prompts) // workers))
    data = ray.data.from_arrow(list(_tables(prompts, seeds, size)))
    answers = data.map_batches(
        Worker, fn_constructor_args=(job,), batch_format="pyarrow", batch_size=size, num_cpus=1, num_gpus=gpus,
        compute=ray.data.ActorPoolStrategy(size=workers),
    )  # fmt: skip
    try:
        yield from answers.iter_rows()
    except ray.exceptions.RayError as error:
        raise _own(error) from error


@contextlib.contextmanager
def _running() -> Iterator[None]:
    """Ray, which is started here unless it runs already. It prints what goes wrong, such as a worker that dies, on
    standard output, where only answers belong, so that goes to standard error meanwhile."""
    ray = _library()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
            stack.callback(ray.shutdown)
        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        yield


def _tables(prompts: Sequence[Prompt], seeds: Sequence[int], size: int) -> Iterator[Any]:
    """Tables of ``size`` prompts, of which a worker gets one at a time."""
    import pyarrow

    for at in range(0, len(prompts), size):
        some = range(at, min(at + size, len(prompts)))
        ids = [prompts[place].ids.tolist() for place in some]
        yield pyarrow.table({"place": [*some], "ids": ids, "seed": [seeds[place] for place in some]})


def _workers(asked: int | None, there: dict[str, float], gpus: int) -> int:
    """The number of workers with so many ``gpus`` each. By default, as many as there is room for, or one on a CPU."""
    kind, takes = ("GPU", gpus) if gpus else ("CPU", 1)
    most = int(there.get(kind, 0)) // takes
    wanted = asked if asked is not None else max(1, most) if gpus else 1
    if wanted > most:
        raise ConfigError(
            f"workers={wanted}, but Ray has {int(there.get(kind, 0))} {kind}s, and each worker takes "
            f"{'one' if takes == 1 else takes}; ask for fewer."
        )
    return wanted


def _own(error: BaseException) -> SpecgraphError:
    """The error of specgraph that made Ray fail; without one, a ConfigError with the last line of Ray's error."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, SpecgraphError):
        cause = getattr(cause, "cause", None) or cause.__cause__
    said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return cause if isinstance(cause, SpecgraphError) else ConfigError(f"A worker of engine=ray has failed: {said}")


def _library() -> Any:
    try:
        import pyarrow  # noqa: F401
        import ray
        import ray.data
    except ImportError as error:
        raise ConfigError("engine=ray needs Ray; install it with pip install -e '.[ray]'.") from error
    return ray
