"""Times decode steps of requests that ask for more than tokens: processors, structure, scores.

    python -m benchmarks.options target=llama-3-8b-shape draft=eagle3 [new_tokens=80] [rounds=5] [json=FILE]

The options take turns in every round, so that a clock that drifts slows all of them down alike.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.command import read_options, target_of
from specgraph.bench.config import BenchConfig
from specgraph.bench.report import Cell, Row, about_decoder, about_run, finish, gather
from specgraph.bench.steps import check_positions, counts_of, head_of, random_prompts, with_drafts
from specgraph.compiler.compile import compile_speculative
from specgraph.config import Config
from specgraph.ir.traffic import STAGE
from specgraph.runtime.decoder import SpeculativeDecoder

Asked = dict[str, Any]
"""Arguments of ``generate``."""
NOTHING, THESE, HOST = "nothing", "these four", "a Python processor that does nothing"


class _Round(NamedTuple):
    """One request: the milliseconds of a decode step, those of the host in it, and how many steps there were."""

    ms: float
    host_ms: float | None
    steps: int


def every_option(vocab_size: int) -> dict[str, Asked]:
    """The options that are measured, by the names of the rows; ``regex`` only if its library is installed."""
    four = {
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [*range(min(20, vocab_size - 1))],
    }
    count = len(four["suppress_tokens"])  # type: ignore[arg-type]
    names = {"suppress_tokens": f"suppress_tokens, {count} of them"}
    asked: dict[str, Asked] = {NOTHING: {}, **{names.get(name, name): {name: value} for name, value in four.items()}}
    asked |= {THESE: dict(four), "trace": {"trace": True}}
    if find_spec("llguidance") is not None:
        asked["regex"] = endless_regex(vocab_size)
    return asked | {"output_logits": {"output_logits": True}, HOST: {"logits_processor": _unchanged}}


def endless_regex(vocab_size: int) -> Asked:
    """A regular expression that takes every token, and that no sequence brings to its end.

    So it also holds where ``verify=synthetic`` accepts whatever was drafted. A model of a named shape has no tokenizer,
    so a token is a word here, and the EOS is the only one that is not allowed.
    """
    words = {_word(token): token for token in range(vocab_size - 1)} | {"0": vocab_size - 1}
    return {"regex": "[a-z]*!", "tokenizer": _tokenizer(words), "eos_token_id": [vocab_size - 1]}


def _tokenizer(words: Mapping[str, int]) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are whole words. It is read from a file, for which transformers alone is enough."""
    model = {"type": "WordLevel", "vocab": words, "unk_token": "0"}
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"version": "1.0", "model": model, "decoder": decoder, "added_tokens": []}, file)
        file.flush()
        return PreTrainedTokenizerFast(tokenizer_file=file.name)


def _word(number: int) -> str:
    """A word of the letters a to z, another one for each number."""
    number, word = number + 1, ""
    while number:
        number, letter = divmod(number - 1, 26)
        word = chr(ord("a") + letter) + word
    return word


def _unchanged(tokens: Tensor, scores: Tensor) -> Tensor:
    return scores


def bench_options(model: PreTrainedModel, options: BenchConfig, config: Config) -> Iterator[Row]:
    """Measure every K, batch size and option. A decoder is compiled for each K.

    Raises:
        ConfigError: the requests do not fit into the target's positions.
    """
    cache = dataclasses.replace(config.cache, reuse_prefixes=False)
    config = dataclasses.replace(config, cache=cache, max_batch_size=max(options.batches))
    for k in counts_of(options, config):
        longest = options.prompt_length + options.new_tokens + k + 1
        check_positions(model, options, longest, f"prompt_length={options.prompt_length} and new_tokens="
                                                 f"{options.new_tokens} at K = {k}")  # fmt: skip
        own = dataclasses.replace(with_drafts(config, k), max_length=longest)
        head = head_of(model, own)
        decoder = compile_speculative(model, own, draft=head)
        for batch in options.batches:
            yield from measure(decoder, options, batch, k)
        del decoder, head
        gc.collect()  # frees the graphs and the GPU memory of this decoder before the next one needs memory


def measure(decoder: SpeculativeDecoder, options: BenchConfig, batch: int, k: int) -> list[Row]:
    """All options at one batch size, after two requests of each, which compile kernels and capture graphs.

    The second captures those again for which the first of a later option has taken larger tensors.
    """
    vocab_size = decoder.stages[STAGE].target.vocab_size
    prompts, asked = random_prompts(vocab_size, batch, options.prompt_length), every_option(vocab_size)
    for call in [*asked.values()] * 2:
        _request(decoder, prompts, options, call)
    rounds = [
        {name: _request(decoder, prompts, options, call) for name, call in asked.items()}
        for _ in range(options.rounds)
    ]  # fmt: skip
    plain = statistics.median(turn[NOTHING].ms for turn in rounds)
    return [_row(name, [turn[name] for turn in rounds], plain, batch, k) for name in asked]


def _request(decoder: SpeculativeDecoder, prompts: Sequence[Tensor], options: BenchConfig, call: Asked) -> _Round:
    """One request. All have the same seeds, so ``verify=synthetic`` accepts the same drafts for each of them."""
    given = {"eos_token_id": [], **call}
    stats = decoder.generate(prompts, max_new_tokens=options.new_tokens, temperature=0.0, seed=0, **given).stats
    steps = max(map(len, stats.emitted_per_step))  # all begin together, so one of them is in every decode step
    waited = 1e3 * stats.host_seconds / stats.host_steps if stats.host_steps else None
    return _Round(1e3 * stats.decode_seconds / max(steps, 1), waited, steps)


def _row(name: str, turns: Sequence[_Round], plain: float, batch: int, k: int) -> Row:
    ms = statistics.median(turn.ms for turn in turns)
    waited = [turn.host_ms for turn in turns if turn.host_ms is not None]
    over = None if name == NOTHING else 100 * (ms / plain - 1)
    return option_row(batch, k, name, ms, over, statistics.median(waited) if waited else None, turns[0].steps)


def option_row(
    batch: int, k: int, option: str, ms: float, over: float | None, host_ms: float | None, steps: int
) -> Row:  # fmt: skip
    """The row of one option at one batch size and K.

    Args:
        batch: the number of sequences.
        k: drafts per step and sequence; 0 without a drafter.
        option: what was asked for.
        ms: the time of a decode step: the mean of a request, and of these the median over the rounds.
        over: by how many percent that is more than the same for a request that asks for nothing; None for that one.
        host_ms: how much of it the host worked while the step waited; None where no step waits for the host.
        steps: the decode steps of each request.
    """
    return Row(
        f"batch {batch}, K = {k}, {option}",
        f"{ms:.3f} ms per step",
        {
            "batch": Cell(batch, "batch"),
            "k": Cell(k, "K"),
            "option": Cell(option, "option"),
            "ms": Cell(ms, "ms/step", ".3f"),
            "over": Cell(over, "% over nothing", ".1f"),
            "host_ms": Cell(host_ms, "host ms", ".3f"),
            "steps": Cell(steps, "steps"),
        },
    )


def option_lines(rows: Sequence[Row]) -> list[str]:
    """The lines of a Markdown table: a line for every option, and a column for every K and batch size."""
    places = list(dict.fromkeys((row["k"], row["batch"]) for row in rows))
    found = {(row["option"], row["k"], row["batch"]): row for row in rows}
    heads = [f"{f'K = {k}' if k else 'plain'}, batch {batch}" for k, batch in places]
    lines = [f"| | {' | '.join(heads)} | host, ms |", "|---" * (len(places) + 2) + "|"]
    for option in dict.fromkeys(row["option"] for row in rows):
        own = [found[option, *place] for place in places]
        cells = [_code(option), *map(_time, own), _range(own)]
        lines.append(f"| {' | '.join(cells).rstrip()} |")
    return lines


def _code(option: str) -> str:
    """An option, of which the name of an argument stands in backquotes."""
    name, comma, rest = option.partition(",")
    return option if " " in name or name == NOTHING else f"`{name}`{comma}{rest}"


def _time(row: Row) -> str:
    return f"{row['ms']:.3f}" if row["over"] is None else f"{row['ms']:.3f} ({row['over']:+.1f}%)"


def _range(rows: Sequence[Row]) -> str:
    """The least and the most time of the host, which is one number if they are as good as equal."""
    shown = [f"{ms:.1f}" for ms in sorted(row["host_ms"] for row in rows if row["host_ms"] is not None)]
    return " to ".join(dict.fromkeys((shown[0], shown[-1]))) if shown else ""


def main(words: Sequence[str]) -> list[Row]:
    """Measure and print decode steps with each option, and a table in Markdown."""
    given = {"what": "options", "draft": "eagle3", "verify": "synthetic", "batch_sizes": [1, 8]}
    config, options = read_options(words, BenchConfig, {**given, "debug.self_check": False})
    model = target_of(options)
    rows = bench_options(model, options, config)
    found = gather(rows)
    about = about_run(options, model.device, model.dtype) | about_decoder(config)
    about |= {name: getattr(options, name) for name in ("prompt_length", "new_tokens", "rounds")}
    finish(options, about, found)
    print("\n" + "\n".join(option_lines(found)))
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
