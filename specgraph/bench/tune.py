"""Finds the drafter, K and rule that decode a file of prompts fastest, for each number of sequences.

How many tokens a step emits depends on the prompts and the draft, and hardly on the number of sequences. So it is
measured once for each drafter, K and rule, over whole answers. The time of a step depends on the number of sequences
and hardly on the text, and is measured for each. Tokens per second follow from the two.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import operator
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from specgraph.bench.config import BenchConfig
from specgraph.bench.drafts import checkpoint_of, needs_head, with_draft, with_rule
from specgraph.bench.report import Cell, Row
from specgraph.bench.steps import check_positions, needed_length, time_steps, with_drafts
from specgraph.compiler.compile import compile_speculative
from specgraph.config import Config
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
    k: int

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
    return [_Choice(draft, rule, k) for rule, k in itertools.product(options.rules, options.num_speculative_tokens)]


def _compile(model: PreTrainedModel, choice: _Choice, config: Config, options: BenchConfig) -> SpeculativeDecoder:
    """A decoder that is long enough for whole answers and for the steps that are timed."""
    longest = max(needed_length(options, choice.k), options.prompt_length + options.new_tokens + choice.k + 1)
    keys = f"A prompt of {options.prompt_length} tokens, steps={options.steps} and new_tokens={options.new_tokens}"
    check_positions(model, options, longest, f"{keys} at K = {choice.k}")
    config = dataclasses.replace(config, max_length=longest, max_batch_size=max(options.batches))
    own = with_drafts(with_draft(config, choice.draft), choice.k)
    return compile_speculative(model, with_rule(own, choice.rule), draft=checkpoint_of(choice.draft))


def _measure(
    decoder: SpeculativeDecoder, choice: _Choice, prompts: Sequence[Tensor], options: BenchConfig, bandwidth: float,
    plain: dict[int, float],
) -> Iterator[Row]:  # fmt: skip
    """Measure a choice at every number of sequences. ``plain`` gets the speeds of the first choice, plain decoding.

    A row has, beside the number of sequences and the choice:

    - emitted tokens per decode step and sequence, over whole answers, and their standard error
    - the median time of a decode step, and the time that reading its bytes takes
    - emitted tokens of all sequences per second, and the ratio of this to that of plain decoding
    - for each draft position, the share of decode steps that accepted it
    """
    stats: Stats = decoder.generate(
        list(prompts), max_new_tokens=options.new_tokens, temperature=options.temperature, seed=0
    ).stats
    program = decoder.stages[STAGE]
    for batch in options.batches:
        some = list(itertools.islice(itertools.cycle(prompts), batch))
        # The first run compiles kernels and captures graphs.
        time_steps(decoder, some, choice.k, options, options.temperature, first=True)
        timed = time_steps(decoder, some, choice.k, options, options.temperature)
        seconds = statistics.median(timed.seconds)
        traffic = step_traffic(program, batch, timed.context, choice.k, timed.tokens_per_step)
        per_step = stats.acceptance_length if choice.k else 1.0
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


def recommendation(rows: Sequence[Row]) -> list[str]:
    """For each number of sequences the fastest choice, as arguments of the command line, and what is as good as it.

    With several numbers of sequences, a last line has the draft and rule that are best over all, with K by load.
    """
    lines = [_best(batch, [row for row in rows if row["batch"] == batch]) for batch in _batches(rows)]
    return [*lines, _for_all(rows)] if len(lines) > 1 else lines


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


def _for_all(rows: Sequence[Row]) -> str:
    """The draft and rule whose best K for each number of sequences gives the highest mean speed-up."""
    found = {}
    for draft, rule in dict.fromkeys((row["draft"], row["rule"]) for row in rows):
        own = [row for row in rows if (row["draft"], row["rule"]) == (draft, rule)]
        found[draft, rule] = {b: max((row for row in own if row["batch"] == b), key=_speed) for b in _batches(rows)}
    best = max(
        found.values(), key=lambda by_batch: statistics.geometric_mean(row["to_plain"] for row in by_batch.values())
    )
    first = next(iter(best.values()))
    mean = statistics.geometric_mean(row["to_plain"] for row in best.values())
    if first["draft"] == PLAIN:
        return "for all of these: draft=none; no draft gains anything"
    keys = f"draft={first['draft']} verify={first['rule']} {_drafts_by_load(best)}"
    return f"for all of these: {keys} (on average {mean:.2f} x plain)"


def _drafts_by_load(best: dict[int, Row]) -> str:
    """K as the command line takes it: a number, or a table by the least number of sequences for which each is right."""
    table: dict[int, int] = {}
    for batch, row in best.items():
        if not table or row["k"] != list(table.values())[-1]:
            table[batch if table else 1] = row["k"]
    if len(table) == 1:
        return f"draft.num_speculative_tokens={table[1]}"
    return f"'draft.num_speculative_tokens={{{','.join(f'{load}:{k}' for load, k in table.items())}}}'"


def _choice(row: Row) -> _Choice:
    return _Choice(row["draft"], row["rule"], row["k"])


def plot_tuning(path: str, title: str, rows: Sequence[Row]) -> None:
    """Draw acceptance by position for each draft and rule at the largest K, and the step times of everything."""
    figure = new_figure(12, max(4, 1 + 0.25 * len(rows)))
    left, right = figure.subplots(1, 2)
    longest = sorted((row for row in rows if row["k"]), key=lambda row: row["k"])
    names = {f"{Path(row['draft']).name}, {row['rule']}": row["acceptance"] for row in longest}
    draw_acceptance(left, dict(sorted(names.items())))
    draw_times(right, [row.label for row in rows], [row["ms"] for row in rows], [row["limit_ms"] for row in rows])
    figure.suptitle(title)
    save(figure, path)
