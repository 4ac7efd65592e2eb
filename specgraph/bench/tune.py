"""Finds the drafter, K and rule that decode a file of prompts fastest, for each number of sequences.

How many tokens a step emits depends on the prompts and the draft, and hardly on the number of sequences. So it is
measured once for each drafter, K and rule, over whole answers. The time of a step depends on the number of sequences
and hardly on the text, and is measured for each. Tokens per second follow from the two. Where K is chosen for every
step (``auto``), both depend on each other, and are measured in the same steps of whole answers.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import operator
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from specgraph.bench.config import BenchConfig
from specgraph.bench.drafts import checkpoint_of, needs_head, with_draft, with_rule
from specgraph.bench.report import Cell, Row
from specgraph.bench.steps import Timed, check_positions, needed_length, time_steps, with_drafts
from specgraph.compiler.compile import compile_speculative
from specgraph.config import Config
from specgraph.config.compose import AUTO
from specgraph.errors import ConfigError, SpecgraphError
from specgraph.ir.traffic import STAGE, step_traffic
from specgraph.plots import draw_acceptance, draw_times, new_figure, save
from specgraph.runtime.decoder import SpeculativeDecoder
from specgraph.runtime.outputs.stats import Stats

PLAIN = "none"
CLOSE = 0.02
"""Speeds that differ by less than this share are called equally good: step times vary by as much from run to run."""


_speed: Callable[[Row], float] = operator.itemgetter("tokens_per_second")


class _Choice(NamedTuple):
    draft: str
    rule: str
    k: int | str

    @property
    def keys(self) -> str:
        """The arguments of the command line that choose this."""
        if self.draft == PLAIN:
            return "draft=none"
        return f"draft={self.draft} draft.num_speculative_tokens={self.k} verify={self.rule}"


def check_tune(options: BenchConfig) -> None:
    """Refuse what cannot be compared, before a model is loaded.

    Raises:
        ConfigError: there are no prompts, or a draft or rule has nothing that can be measured.
    """
    if options.prompts is None:
        raise ConfigError(
            "bench tune measures how many drafts are accepted, which depends on the text: give prompts=FILE, as for "
            "generate."
        )
    if len(options.rules) > 1 and options.temperature == 0:
        raise ConfigError(
            f"At temperature 0 the rules {', '.join(options.rules)} accept the same drafts; leave rules out, or give a "
            "temperature above 0."
        )
    if "synthetic" in options.rules:
        raise ConfigError(
            "The rule synthetic accepts drafts by chance, so there is nothing to choose by; leave it out."
        )
    for draft in options.drafts:
        if needs_head(draft):
            raise ConfigError(
                f"drafts has {draft}, whose head would be random, and nothing would be accepted; give the folder of a "
                "checkpoint."
            )


def bench_tune(
    model: PreTrainedModel, options: BenchConfig, config: Config, prompts: Sequence[Tensor], bandwidth: float
) -> Iterator[Row]:
    """Measure every draft, rule, K and number of sequences, plain decoding first. Each choice compiles a decoder.

    What a draft does not allow, such as more drafts than it has heads, is printed.

    Args:
        model: the target.
        options: the lists to go through, and how long to measure.
        config: all other options of the decoders.
        prompts: 1-D int64 token ids each.
        bandwidth: bytes per second, for the limits.

    Raises:
        SpecgraphError: a draft allows none of the choices, or the prompts do not fit into the target's positions.
    """
    options = dataclasses.replace(options, prompt_length=max(map(len, prompts)))
    plain: dict[int, float] = {}
    for draft in dict.fromkeys([PLAIN, *options.drafts]):
        choices, errors = _choices(draft, options), []
        for choice in choices:
            try:
                decoder = _compile(model, choice, config, options)
            except SpecgraphError as error:
                errors.append(error)
                print(f"Not possible: {choice.keys}: {error}", flush=True)
                continue
            yield from _measure(decoder, choice, prompts, options, bandwidth, plain)
            del decoder
            gc.collect()  # frees the graphs and the GPU memory of this decoder before the next one needs memory
        if len(errors) == len(choices):
            raise errors[-1]


def _choices(draft: str, options: BenchConfig) -> list[_Choice]:
    if draft == PLAIN:
        return [_Choice(PLAIN, "strict", 0)]
    return [_Choice(draft, rule, k) for rule, k in itertools.product(options.rules, options.counts)]


def _compile(model: PreTrainedModel, choice: _Choice, config: Config, options: BenchConfig) -> SpeculativeDecoder:
    """A decoder that is long enough for whole answers and for the steps that are timed."""
    own = with_rule(with_drafts(with_draft(config, choice.draft), choice.k), choice.rule)
    k = own.draft.num_speculative_tokens
    longest = max(needed_length(options, k), options.prompt_length + options.new_tokens + k + 1)
    keys = f"A prompt of {options.prompt_length} tokens, steps={options.steps} and new_tokens={options.new_tokens}"
    check_positions(model, options, longest, f"{keys} at K = {choice.k}")
    own = dataclasses.replace(own, max_length=longest, max_batch_size=max(options.batches))
    return compile_speculative(model, own, draft=checkpoint_of(choice.draft))


def _measure(
    decoder: SpeculativeDecoder, choice: _Choice, prompts: Sequence[Tensor], options: BenchConfig, bandwidth: float,
    plain: dict[int, float],
) -> Iterator[Row]:  # fmt: skip
    """Measure a choice at every number of sequences. ``plain`` gets the speeds of the first choice, plain decoding.

    A row has, beside the number of sequences and the choice:

    - emitted tokens per decode step and sequence, over whole answers, and their standard error
    - the median time of a decode step (the mean where K is chosen), and the time that reading its bytes takes
    - emitted tokens of all sequences per second, and the ratio of this to that of plain decoding
    - for each draft position, the share of decode steps that accepted it
    """
    stats: Stats = decoder.generate(
        list(prompts), max_new_tokens=options.new_tokens, temperature=options.temperature, seed=0
    ).stats
    program = decoder.stages[STAGE]
    for batch in options.batches:
        # The first run compiles kernels and captures graphs, and learns what steps take.
        if isinstance(choice.k, str):
            _time_answers(decoder, prompts, batch, options)
            timed, drafts = _time_answers(decoder, prompts, batch, options)
            seconds, per_step = statistics.fmean(timed.seconds), timed.tokens_per_step
        else:
            some = list(itertools.islice(itertools.cycle(prompts), batch))
            time_steps(decoder, some, choice.k, options, options.temperature, first=True)
            timed, drafts = time_steps(decoder, some, choice.k, options, options.temperature), choice.k
            seconds, per_step = statistics.median(timed.seconds), stats.acceptance_length if choice.k else 1.0
        traffic = step_traffic(program, batch, timed.context, drafts, timed.tokens_per_step)
        speed = batch * per_step / seconds
        drafted = f", K = {choice.k}, {choice.rule}" if choice.k else ""
        yield Row(
            f"batch {batch}, {Path(choice.draft).name}{drafted}",
            f"{per_step:.2f} tokens per step, {1e3 * seconds:.3f} ms",
            {
                "batch": Cell(batch, "batch"),
                "draft": Cell(choice.draft, "draft"),
                "rule": Cell(choice.rule, "rule"),
                "k": Cell(choice.k, "K"),
                "tokens_per_step": Cell(per_step, "tokens/step", ".2f"),
                "error": Cell(stats.acceptance_length_stderr if choice.k else 0.0, "+-", ".2f"),
                "ms": Cell(1e3 * seconds, "ms/step", ".3f"),
                "limit_ms": Cell(1e3 * traffic.total / bandwidth, "limit ms", ".3f"),
                "tokens_per_second": Cell(speed, "tokens/s", ".1f"),
                "to_plain": Cell(speed / plain.setdefault(batch, speed), "x plain", ".2f"),
                "acceptance": Cell(stats.acceptance_per_position if choice.k else []),
            },
        )


def _time_answers(
    decoder: SpeculativeDecoder, prompts: Sequence[Tensor], batch: int, options: BenchConfig
) -> tuple[Timed, int]:
    """Decode whole answers, ``batch`` at a time, and measure the steps in which the most sequences go on.

    Returns them, and the mean of K, rounded.

    Raises:
        ConfigError: no answer has a step.
    """
    every, found, chosen = itertools.cycle(prompts), list[tuple[int, float, int, int]](), Counter[int]()
    for _ in range(math.ceil(len(prompts) / batch)):
        some = list(itertools.islice(every, batch))
        stream = decoder.stream(some, max_new_tokens=options.new_tokens, temperature=options.temperature, seed=0)
        lengths, before = [*map(len, some)], 0.0
        for chunk in stream:
            now, counts = time.perf_counter(), [*map(len, chunk.tokens)]
            going = [length for length, count in zip(lengths, counts, strict=True) if count]
            if before and going and not chunk.prompt_tokens:
                found.append((len(going), now - before, sum(counts), sum(going)))
            lengths, before = [*map(operator.add, lengths, counts)], now
        chosen += stream.stats.steps_by_drafts
    if not found:
        raise ConfigError("Every answer ends with its first token, so no step can be measured; raise new_tokens.")
    most = max(going for going, *_ in found)
    _, seconds, tokens, contexts = zip(*(step for step in found if step[0] == most), strict=True)
    rows = most * len(seconds)
    timed = Timed([*seconds], sum(tokens) / rows, sum(contexts) / rows)
    return timed, round(sum(chosen.elements()) / chosen.total())


def recommendation(rows: Sequence[Row]) -> list[str]:
    """For each number of sequences the fastest choice, as arguments of the command line, and what is as good as it.

    The last line has nothing but the arguments of the draft and rule that are best over all, with K by load or
    ``auto``.
    """
    lines = [_best(batch, [row for row in rows if row["batch"] == batch]) for batch in _batches(rows)]
    return [*lines, *_for_all(rows)]


def _batches(rows: Sequence[Row]) -> list[int]:
    return sorted({row["batch"] for row in rows})


def _best(batch: int, rows: Sequence[Row]) -> str:
    best = max(rows, key=_speed)
    speed = f"{_speed(best):.1f} tokens/s, {best['to_plain']:.2f} x plain"
    found = f"batch {batch}: {_choice(best).keys} ({speed})"
    others = [row for row in sorted(rows, key=_speed, reverse=True) if row is not best and _is_close(row, best)]
    close = "; ".join(_choice(row).keys for row in others)
    return f"{found}; as good within the error: {close}" if close else found


def _is_close(row: Row, best: Row) -> bool:
    """Whether two errors of the tokens per step, or the variation of times, explain the difference."""
    share: float = sum(2 * r["error"] / r["tokens_per_step"] for r in (row, best) if not math.isnan(r["error"]))
    return _speed(row) >= _speed(best) * (1 - max(share, CLOSE))


def _for_all(rows: Sequence[Row]) -> tuple[str, str]:
    """The draft and rule whose best K for each number of sequences, or chosen K, gives the highest mean speed-up."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault((row["draft"], row["rule"], row["k"] == AUTO), []).append(row)
    found = [
        {b: max((r for r in own if r["batch"] == b), key=_speed) for b in _batches(own)} for own in groups.values()
    ]
    best = max(found, key=_mean_speedup)
    first = next(iter(best.values()))
    if first["draft"] == PLAIN:
        return "for all of these, since no draft gains anything, to be pasted:", "draft=none"
    keys = [f"draft={first['draft']}", f"verify={first['rule']}", _drafts_by_load(best)]
    return f"for all of these, on average {_mean_speedup(best):.2f} x plain, to be pasted:", shlex.join(keys)


def _mean_speedup(by_batch: dict[int, Row]) -> float:
    return statistics.geometric_mean(row["to_plain"] for row in by_batch.values())


def _drafts_by_load(best: dict[int, Row]) -> str:
    """K as the command line takes it: a number, or a table by the least number of sequences for which each is right."""
    table: dict[int, int | str] = {}
    for batch, row in best.items():
        if not table or row["k"] != list(table.values())[-1]:
            table[batch if table else 1] = row["k"]
    if len(table) == 1:
        return f"draft.num_speculative_tokens={table[1]}"
    return f"draft.num_speculative_tokens={{{','.join(f'{load}:{k}' for load, k in table.items())}}}"


def _choice(row: Row) -> _Choice:
    return _Choice(row["draft"], row["rule"], row["k"])


def plot_tuning(path: str, title: str, rows: Sequence[Row]) -> None:
    """Draw acceptance by position for each draft and rule at the largest K, and the step times of everything."""
    figure = new_figure(12, max(4, 1 + 0.25 * len(rows)))
    left, right = figure.subplots(1, 2)
    longest = sorted((row for row in rows if row["acceptance"]), key=lambda row: len(row["acceptance"]))
    names = {f"{Path(row['draft']).name}, {row['rule']}": row["acceptance"] for row in longest}
    draw_acceptance(left, dict(sorted(names.items())))
    draw_times(right, [row.label for row in rows], [row["ms"] for row in rows], [row["limit_ms"] for row in rows])
    figure.suptitle(title)
    save(figure, path)
