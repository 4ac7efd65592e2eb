"""Measures the table by which parallel drafting became known: gpt-oss-120b in mxfp4 on one card, for one request.

    python -m benchmarks.published_table [--drafts eagle3 peagle] [--ks 3 4 5 6 7 8] [--routing even 0.4] [--steps 50]
        [--json FILE.jsonl] [--target gpt-oss-120b-shape]
    python -m benchmarks.published_table --show FILE.jsonl

The target and the heads have random weights (:mod:`benchmarks.published_drafts` gives the shapes of the heads). The
target is made once, packed, on the device. ``--routing`` is ``even`` for rows that choose their experts independently,
or the share of its experts that a row is to keep from the row before (:mod:`benchmarks.routing`). Drafts and tokens are
sampled, since a random head that drafts greedily repeats its tokens, and rows with the same token choose the same
experts.

Times are medians of steps that are replayed as CUDA graphs. The experts are then counted in other steps, which run call
by call, so counting takes no part in the times. A line of ``--json`` is added as soon as it is measured, and ``--show``
makes one table of the lines of several runs.

Columns of the table, beside the draft, K and the routing that was asked for:

- kept: the share of the experts of a row that the row before has, too, as it was counted.
- experts: the number of experts that a layer of the target reads in a step, as it was counted, and in brackets that of
  rows which choose evenly and independently.
- GB: those experts, all other weights of the target and the head, and keys and values.
- ms: of a step, then of reading these bytes at the bandwidth that ``bench`` measures, and the ratio of both.
- ms per token: of a step, divided by ``--tokens``. These are the tokens that a step gives, the target's own included.
- draft: the time of the calls of the head alone (:class:`~benchmarks.published_drafts.DraftCalls`), and its share of
  the step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks import published_drafts
from benchmarks.published_drafts import DraftCalls, published_head
from benchmarks.routing import Chosen, NotedExperts, separate_rows, set_routing
from specgraph.bench.config import BenchConfig
from specgraph.bench.models import random_target
from specgraph.bench.run import dtype_on
from specgraph.bench.steps import needed_length, random_prompts, time_steps, with_drafts
from specgraph.bench.timing import measure_bandwidth
from specgraph.cli.loading import device_and_dtype
from specgraph.compiler.compile import compile_speculative
from specgraph.config import Config, load_config
from specgraph.errors import InputError
from specgraph.ir.program import TARGET_MODULES, Program
from specgraph.ir.traffic import STAGE, step_reads, step_traffic
from specgraph.runtime.decoder import SpeculativeDecoder
from specgraph.specialise.index_rows import IndexRows

EVEN = "even"
COUNTED = 8
"""How many steps the experts are counted in."""
HEADER = ("draft", "K", "routing", "kept", "experts", "GB", "ms", "ms of bytes", "ratio", "ms per token", "draft ms",
          "draft share")  # fmt: skip
PUBLISHED = (
    "Published for one H200 (vLLM, January 2026), ms per output token: EAGLE-3 3.15 at K = 3 and 4.33 at K = 8, "
    "P-EAGLE 2.7 to 2.9 at K = 3 to 8."
)


@dataclass(frozen=True)
class Line:
    """What was measured for one draft, K and routing.

    Attributes:
        draft, k, routing: as they were asked for.
        kept: the share of a row's experts that the row before has, too.
        distinct, even: the experts that a layer read in a step, and those of even and independent rows.
        bytes: what a step read.
        seconds, draft_seconds: of a step, and of the calls of its head.
        bandwidth: bytes per second.
        tokens: what a step is taken to give.
        compile_seconds: until the first step has run; 0 if it ran for another routing.
        device: its name.
    """

    draft: str
    k: int
    routing: str
    kept: float
    distinct: float
    even: float
    bytes: int
    seconds: float
    draft_seconds: float
    bandwidth: float
    tokens: float
    compile_seconds: float
    device: str

    @property
    def cells(self) -> list[str]:
        """The cells of the table."""
        limit = self.bytes / self.bandwidth
        return [
            self.draft, str(self.k), self.routing, f"{self.kept:.2f}", f"{self.distinct:.1f} ({self.even:.1f})",
            f"{self.bytes / 1e9:.3f}", f"{1e3 * self.seconds:.3f}", f"{1e3 * limit:.3f}", f"{self.seconds / limit:.2f}",
            f"{1e3 * self.seconds / self.tokens:.3f}", f"{1e3 * self.draft_seconds:.3f}",
            f"{self.draft_seconds / self.seconds:.1%}",
        ]  # fmt: skip


def measure(model: PreTrainedModel, given: argparse.Namespace, bandwidth: float) -> Iterator[Line]:
    """Compile a decoder for each draft and K, and measure it for each routing, while there is time."""
    for draft, k in itertools.product(given.drafts, given.ks):
        if time.perf_counter() > given.end:
            print(f"{draft} at K = {k}: no time left; give --drafts or --ks in another run", flush=True)
            continue
        options = BenchConfig(target=given.target, steps=given.steps, warmup=given.warmup)
        config = dataclasses.replace(config_of(draft, k, given.tokens), max_length=needed_length(options, k))
        head = published_head(model, config.draft, published_drafts.SHAPES[draft])
        decoder = None
        for index, routing in enumerate(given.routing):
            set_routing(model, None if routing == EVEN else float(routing))
            prompts = random_prompts(int(model.config.vocab_size), 1, options.prompt_length, seed=index)
            begin = time.perf_counter()
            decoder = ready(decoder, model, config, head, prompts, options, given.temperature)
            compiled = time.perf_counter() - begin
            timed = time_steps(decoder, prompts, k, options, given.temperature)
            seconds = statistics.median(timed.seconds)
            print(f"{draft} at K = {k}, {routing}: {1e3 * seconds:.3f} ms per step", flush=True)
            try:
                chosen, calls = count(decoder, model, prompts, k, given.temperature)
                draft_seconds = calls.seconds(model.device, given.repeats)
            except Exception:  # the time of a step is printed already, and the other drafts may do
                traceback.print_exc()
                continue
            sizes = model.config.num_local_experts, model.config.num_experts_per_tok
            read = bytes_read(decoder.stages[STAGE], chosen.distinct / sizes[0], timed.context, k)
            yield Line(
                draft, k, routing, chosen.kept, chosen.distinct, even_experts(*sizes, k + 1), read, seconds,
                draft_seconds, bandwidth, given.tokens, compiled, name_of(model.device),
            )  # fmt: skip
            del calls
        del decoder, head
        gc.collect()  # frees the graphs and the memory of this decoder before the next one needs memory


def config_of(draft: str, k: int, tokens: float) -> Config:
    """The configuration for one request. Drafts are accepted by chance, about as often as ``tokens`` a step need."""
    keys = {"draft": draft, "verify": "synthetic", "verify.acceptance_rate": acceptance_for(tokens, k)}
    keys |= {"max_batch_size": 1, "debug.self_check": False}  # random weights need no comparison with the model's own
    return with_drafts(load_config(keys), k)


def acceptance_for(tokens: float, k: int) -> float:
    """The rate with which each of ``k`` drafts must be accepted for ``tokens`` a step, the target's own included."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(k + 1)) < tokens else (low, middle)
    return low


def ready(
    decoder: SpeculativeDecoder | None, model: PreTrainedModel, config: Config, head: Any, prompts: Sequence[Tensor],
    options: BenchConfig, temperature: float,
) -> SpeculativeDecoder:  # fmt: skip
    """A decoder whose kernels and graphs are there: the one before, or a new one if that reads copies of the biases."""
    k = config.draft.num_speculative_tokens
    if decoder is not None:
        with contextlib.suppress(InputError):  # it says that a weight was written of which it reads a copy
            time_steps(decoder, prompts, k, options, temperature, first=True)
            return decoder
    decoder = compile_speculative(model, config, draft=head)
    time_steps(decoder, prompts, k, options, temperature, first=True)
    return decoder


def count(
    decoder: SpeculativeDecoder, model: PreTrainedModel, prompts: Sequence[Tensor], k: int, temperature: float
) -> tuple[Chosen, DraftCalls]:
    """The experts that ``COUNTED`` steps choose, which run call by call, and the calls of the head in the last one."""
    program, calls = decoder.stages[IndexRows.name], DraftCalls()
    captured, program.captured = program.captured, False
    try:
        with contextlib.ExitStack() as stack:
            for mode, step in decoder._step_cache.steps.items():
                if not mode.packed:  # the others run prompts
                    stack.enter_context(calls.noted(step))
            experts = stack.enter_context(NotedExperts())
            options = {"eos_token_id": [], "temperature": temperature, "seed": 0}
            stream = decoder.stream(prompts, max_new_tokens=COUNTED * (k + 1), **options)
            for number, _ in enumerate(stream):
                if number == COUNTED:
                    break
            stream.close()
    finally:
        program.captured = captured
    return experts.of_rows(k + 1, model.config.num_experts_per_tok), calls


def bytes_read(program: Program, share: float, context: float, k: int) -> int:
    """The bytes that a step reads if it reads this share of the target's experts, and all other weights once a call."""
    drafted = step_traffic(program, 1, context, k)
    own = [weights for call in step_reads(program) if call.module in TARGET_MODULES for weights in call.reads.weights]
    target = sum(size if of_row == 1.0 else size * share for size, of_row in own)
    return round(target + drafted.draft_weights + drafted.cache)


def even_experts(experts: int, chosen: int, rows: int) -> float:
    """How many experts rows choose on average, if they choose evenly and independently."""
    return experts * (1 - (1 - chosen / experts) ** rows)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def table(lines: Sequence[Line]) -> str:
    """The lines as Markdown, with what they were measured on, and what follows from them."""
    rules = ["---"] + ["---:"] * (len(HEADER) - 1)
    rows = [" | ".join(cells) for cells in (HEADER, rules, *(line.cells for line in lines))]
    places = sorted({f"{line.device}, {line.bandwidth / 1e12:.2f} TB/s" for line in lines})
    tokens = sorted({f"{line.tokens:g}" for line in lines})
    title = f"{'; '.join(places)}. One request; {' or '.join(tokens)} tokens a step for ms per token."
    parts = ["\n".join(f"| {row} |" for row in rows), PUBLISHED, *findings(lines)]
    return "\n\n".join([title, *parts])


def findings(lines: Sequence[Line]) -> Iterator[str]:
    """Sentences that compare lines: how much the calls of a head grow with K, and even routing that is not even."""
    for draft in dict.fromkeys(line.draft for line in lines):
        own = sorted((line for line in lines if line.draft == draft), key=lambda line: line.k)
        least, most = own[0], own[-1]
        first, last = (statistics.fmean(line.draft_seconds for line in own if line.k == k) for k in (least.k, most.k))
        if least.k < most.k:
            yield f"The calls of {draft} in a step take {last / first - 1:+.1%} from K = {least.k} to {most.k}."
    for line in lines:
        if line.routing == EVEN and abs(line.distinct / line.even - 1) > 0.05:
            yield (
                f"{line.draft} at K = {line.k} was not even: {line.distinct:.1f} experts were read where even rows "
                f"read {line.even:.1f}."
            )


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", nargs="+", choices=[*published_drafts.SHAPES], default=[*published_drafts.SHAPES])
    parser.add_argument("--ks", nargs="+", type=int, default=[3, 4, 5, 6, 7, 8])
    parser.add_argument("--routing", nargs="+", default=[EVEN, "0.4"], help="even, or a share of experts that is kept")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=50, help="of the calls of a head")
    parser.add_argument("--tokens", type=float, default=2.5, help="that a step is taken to give")
    parser.add_argument("--temperature", type=float, default=1.0, help="of drafts and tokens; with 0, drafts repeat")
    parser.add_argument("--target", default="gpt-oss-120b-shape", help="a shape of bench, of a gpt_oss model")
    parser.add_argument("--weights", default="mxfp4", help="how the target's experts are packed")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=500.0, help="start no other draft or K after them")
    parser.add_argument("--json", type=Path, help="add the lines to this file")
    parser.add_argument("--show", type=Path, nargs="+", help="measure nothing, and print the lines of these files")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> list[Line]:
    """Measure, or read what was measured, and print the table. Returns its lines."""
    given = arguments(words)
    if given.show:
        texts = [text for path in given.show for text in path.read_text().splitlines()]
        lines = [Line(**json.loads(text)) for text in texts]
        print(table(lines))
        return lines
    begin = time.perf_counter()
    given.end = begin + given.seconds
    device = torch.device(device_and_dtype(given.device, "auto")[0])
    bandwidth = measure_bandwidth(device)
    model = random_target(given.target, device, dtype_on("auto", device), weights=given.weights)
    separate_rows(model)
    print(f"{given.target} is made after {time.perf_counter() - begin:.0f} s", flush=True)
    lines = []
    for line in measure(model, given, bandwidth):
        lines.append(line)
        if given.json:
            with given.json.open("a") as file:
                file.write(json.dumps(asdict(line)) + "\n")
        print(f"{time.perf_counter() - begin:.0f} s (compiling {line.compile_seconds:.0f}): {' | '.join(line.cells)}",
              flush=True)  # fmt: skip
    print(f"\n{table(lines)}" if lines else "\nNothing was measured.")
    return lines


if __name__ == "__main__":
    main()
