"""Runs the command ``bench``: makes or takes a target, measures, and prints the results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from specgraph.bench.config import BenchConfig
from specgraph.bench.cpu import CpuRow, bench_cpu
from specgraph.bench.first_token import FirstTokenRow, bench_first_token
from specgraph.bench.models import SHAPES, random_target
from specgraph.bench.report import (
    about_decoder,
    about_repeats,
    about_run,
    draft_name,
    finish,
    gather,
    plot_ratios,
    plot_times,
)
from specgraph.bench.sessions import SessionRow, bench_sessions, file_workload, random_workload
from specgraph.bench.steps import StepRow, bench_steps, random_prompts
from specgraph.bench.timing import measure_bandwidth, measure_matmul
from specgraph.bench.tune import TuneRow, bench_tune, plot_tuning, recommendation
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
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def make_target(options: BenchConfig, device: torch.device) -> PreTrainedModel:
    """A target of a named shape, with random weights."""
    return random_target(options.target, device, dtype_on(options.dtype, device))


def run_steps(model: PreTrainedModel, options: BenchConfig, config: Config) -> list[StepRow]:
    """Measure and print whole steps of a loaded model."""
    device = next(model.parameters()).device
    bandwidth = measure_bandwidth(device)
    found = gather(bench_steps(model, options, config, bandwidth), lambda row: f"{row.label}: {row.ms:.3f} ms per step")
    about = about_run(options, device, model.dtype, bandwidth) | about_repeats(options) | about_decoder(config)
    finish(options, about, found, plot_times)
    return found


def run_first_token(model: PreTrainedModel, options: BenchConfig, config: Config) -> list[FirstTokenRow]:
    """Measure and print requests for one token of a loaded model."""
    device = next(model.parameters()).device
    bandwidth, rate = measure_bandwidth(device), measure_matmul(device, model.dtype)
    found = gather(
        bench_first_token(model, options, config, bandwidth, rate), lambda row: f"{row.label}: {row.ms:.2f} ms"
    )
    about = about_run(options, device, model.dtype, bandwidth)
    about |= {"draft": draft_name(config), "lowering": config.lowering.name, "matmul_tflop_per_s": rate / 1e12}
    finish(options, about, found, plot_ratios)
    return found


def run_sessions(
    model: PreTrainedModel, prompts: Sequence[Tensor] | None, options: BenchConfig, config: Config
) -> list[SessionRow]:
    """Measure and print sessions of a loaded model, over ``prompts`` or over random ones."""
    device = next(model.parameters()).device
    bandwidth = measure_bandwidth(device)
    vocab_size = model.config.get_text_config().vocab_size
    workload = random_workload(options, vocab_size) if prompts is None else file_workload(options, prompts)
    found = gather(
        bench_sessions(model, workload, options, config, bandwidth),
        lambda row: f"K = {row.k}, {row.how}: {row.tokens_per_second:.1f} tokens/s",
    )
    about = {
        "what": options.what,
        "prompts": "random" if prompts is None else options.prompts,
        "num_prompts": options.num_prompts,
        "prompt_tokens": sum(map(len, workload.prompts)),
        "max_batch_size": config.max_batch_size,
    }
    about |= about_run(options, device, model.dtype, bandwidth) | about_decoder(config)
    finish(options, about, found, plot_ratios)
    return found


def run_cpu(
    model: PreTrainedModel, options: BenchConfig, config: Config, prompts: Sequence[Tensor] | None
) -> list[CpuRow]:
    """Measure and print whole answers to ``prompts`` on a CPU; None makes random ones.

    Raises:
        ConfigError: the model is on a GPU.
    """
    if model.device.type != "cpu":
        raise ConfigError(f"bench cpu measures on a CPU, and the model is on {model.device}; add device=cpu.")
    if prompts is None:
        prompts = random_prompts(model.config.get_text_config().vocab_size, options.num_decoded, options.prompt_length)
    found = gather(
        bench_cpu(model, options, config, prompts),
        lambda row: f"{row.decoder}, {row.threads} threads: {row.tokens_per_second:.1f} tokens/s",
    )
    about = about_run(options, model.device, model.dtype, measure_bandwidth(model.device))
    about |= {"prompts": len(prompts), "new_tokens": options.new_tokens, "transformers": transformers.__version__}
    about |= {"lowering": config.lowering.name}
    finish(options, about, found)
    return found


def run_tune(model: PreTrainedModel, options: BenchConfig, config: Config, prompts: Sequence[Tensor]) -> list[TuneRow]:
    """Measure and print drafts, rules and K on ``prompts``, and what to choose for each number of sequences."""
    device = next(model.parameters()).device
    bandwidth = measure_bandwidth(device)
    refused: list[str] = []
    found = gather(
        bench_tune(model, options, config, prompts, bandwidth, refused),
        lambda row: (
            f"batch {row.batch}, {row.draft}, K = {row.k}, {row.rule}: {row.tokens_per_step:.2f} tokens per step, "
            f"{row.ms:.3f} ms"
        ),
    )
    found.sort(key=lambda row: (row.batch, -row.tokens_per_second))
    about = about_run(options, device, model.dtype, bandwidth) | {"lowering": config.lowering.name}
    about |= {"prompts": f"{len(prompts)} of {options.prompts}", "temperature": options.temperature}
    finish(options, about | {"new_tokens": options.new_tokens, "steps": options.steps}, found, plot_tuning)
    if refused:
        print("\nNot possible:\n" + "\n".join(refused))
    print("\nFastest:\n" + "\n".join(recommendation(found)))
    return found
