"""Runs the command ``bench``: makes or takes a target, measures, and prints the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from specgraph.bench import report
from specgraph.bench.config import BenchConfig
from specgraph.bench.cpu import GENERATE, bench_cpu
from specgraph.bench.first_token import bench_first_token
from specgraph.bench.models import SHAPES
from specgraph.bench.report import Plot, Row
from specgraph.bench.sessions import bench_sessions, file_workload, random_workload
from specgraph.bench.steps import bench_steps, random_prompts
from specgraph.bench.timing import measure_bandwidth, measure_matmul
from specgraph.bench.tune import bench_tune, plot_tuning, recommendation
from specgraph.config import Config
from specgraph.config.errors import did_you_mean
from specgraph.errors import ConfigError


def check_target(name: str) -> None:
    """Refuse a misspelt shape before transformers looks for a model of that name.

    Raises:
        ConfigError: there is no such shape; the message lists the shapes.
    """
    if name.endswith("-shape") and name not in SHAPES:
        raise ConfigError(f"There is no target={name}{did_you_mean(name, SHAPES)}; shapes are {', '.join(SHAPES)}.")


def dtype_on(name: str, device: torch.device) -> torch.dtype:
    """The dtype of random weights. ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)


def run(
    model: PreTrainedModel, options: BenchConfig, config: Config, prompts: Sequence[Tensor] | None
) -> dict[str, str]:
    """Measure what ``options.what`` names and print it. Returns the results that a sweep compares, by name.

    ``prompts`` are those of a file, 1-D int64 token ids each; without them, prompts are random.

    Raises:
        ConfigError: whole answers on a CPU are asked for, and the model is on a GPU.
    """
    device, what = model.device, options.what
    if what == "cpu" and device.type != "cpu":
        raise ConfigError(f"bench cpu measures on a CPU, and the model is on {device}; add device=cpu.")
    bandwidth = measure_bandwidth(device)
    rows, about, plot = _begin(model, options, config, prompts, bandwidth)
    found = report.gather(rows)
    if what == "tune":
        found.sort(key=lambda row: (row["batch"], -row["tokens_per_second"]))
    report.finish(options, report.about_run(options, device, model.dtype, bandwidth) | about, found, plot)
    if what == "tune":
        print("\nFastest:\n" + "\n".join(recommendation(found)))
        return {row.label: f"{row['tokens_per_second']:.1f}" for row in found}
    if what == "cpu":
        return {row.label: f"{row['to_generate']:.2f}" for row in found if row["decoder"] != GENERATE}
    return {"worst ratio to the limit": f"{max(row['ratio'] for row in found):.2f}"}


def _begin(
    model: PreTrainedModel, options: BenchConfig, config: Config, prompts: Sequence[Tensor] | None, bandwidth: float
) -> tuple[Iterator[Row], dict[str, Any], Plot | None]:
    """The rows, which are measured one by one, the facts about all of them, and the function that draws them."""
    vocab_size, lowering = int(model.config.get_text_config().vocab_size), {"lowering": config.lowering.name}
    match options.what:
        case "steps":
            about = report.about_repeats(options) | report.about_decoder(config)
            return bench_steps(model, options, config, bandwidth), about, report.plot_times
        case "first_token":
            rate = measure_matmul(model.device, model.dtype)
            about = {"draft": report.draft_name(config), **lowering, "matmul_tflop_per_s": rate / 1e12}
            return bench_first_token(model, options, config, bandwidth, rate), about, report.plot_ratios
        case "sessions":
            work = random_workload(options, vocab_size) if prompts is None else file_workload(options, prompts)
            about = {
                "prompts": "random" if prompts is None else options.prompts,
                "num_prompts": options.num_prompts,
                "prompt_tokens": sum(map(len, work.prompts)),
                "max_batch_size": config.max_batch_size,
            }
            return (
                bench_sessions(model, work, options, config, bandwidth),
                about | report.about_decoder(config),
                report.plot_ratios,
            )
        case "cpu":
            given = prompts or random_prompts(vocab_size, options.num_decoded, options.prompt_length)
            about = {"prompts": len(given), "new_tokens": options.new_tokens, "transformers": transformers.__version__}
            return bench_cpu(model, options, config, given), about | lowering, None
        case _:
            given = prompts or []
            about = {**lowering, "prompts": f"{len(given)} of {options.prompts}"}
            about |= {name: getattr(options, name) for name in ("temperature", "new_tokens", "steps")}
            return bench_tune(model, options, config, given, bandwidth), about, plot_tuning
