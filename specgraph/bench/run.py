"""Runs the command ``bench``: makes or takes a target, measures, and prints the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from specgraph.bench import report
from specgraph.bench.config import BenchConfig
from specgraph.bench.cpu import CpuRow, bench_cpu
from specgraph.bench.first_token import FirstTokenRow, bench_first_token
from specgraph.bench.kernels import KernelRow, bench_kernels
from specgraph.bench.linears import LinearRow, bench_linears, describe_crossovers
from specgraph.bench.models import SHAPES, random_target, shape_config
from specgraph.bench.options import OptionRow, bench_options, option_lines
from specgraph.bench.recurrent import recurrent_calls
from specgraph.bench.sessions import SessionRow, bench_sessions, file_workload, random_workload
from specgraph.bench.sizes import Sizes
from specgraph.bench.soak import SoakRow, bench_soak, soak_text
from specgraph.bench.steps import StepRow, bench_steps, random_prompts
from specgraph.bench.timing import measure_bandwidth, measure_matmul
from specgraph.bench.tune import TuneRow, bench_tune, recommendation
from specgraph.config import Config
from specgraph.config.errors import did_you_mean
from specgraph.drafters.registry import drafter_class
from specgraph.errors import ConfigError, SpecgraphError
from specgraph.tables import text_table


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


def run_steps(model: PreTrainedModel, options: BenchConfig, config: Config) -> list[StepRow]:
    """Measure and print whole steps of a loaded model."""
    device = next(model.parameters()).device
    bandwidth = measure_bandwidth(device)
    about = _about(options, device, model.dtype, bandwidth) | _repeats(options) | _decoder(config)
    found: list[StepRow] = []
    for row in bench_steps(model, options, config, bandwidth):
        found.append(row)
        print(f"batch {row.batch}, K = {row.k}: {row.ms:.3f} ms per step", flush=True)
    _finish(options, about, found)
    return found


def run_first_token(model: PreTrainedModel, options: BenchConfig, config: Config) -> list[FirstTokenRow]:
    """Measure and print requests for one token of a loaded model."""
    device = next(model.parameters()).device
    bandwidth, rate = measure_bandwidth(device), measure_matmul(device, model.dtype)
    about = _about(options, device, model.dtype, bandwidth)
    about |= {"draft": _draft(config), "lowering": config.lowering.name, "matmul_tflop_per_s": rate / 1e12}
    found: list[FirstTokenRow] = []
    for row in bench_first_token(model, options, config, bandwidth, rate):
        found.append(row)
        print(f"{row.prompt_length} tokens x {row.batch}: {row.ms:.2f} ms", flush=True)
    _finish(options, about, found)
    return found


def run_sessions(
    model: PreTrainedModel, prompts: Sequence[Tensor] | None, options: BenchConfig, config: Config
) -> list[SessionRow]:
    """Measure and print sessions of a loaded model, over ``prompts`` or over random ones."""
    device = next(model.parameters()).device
    bandwidth = measure_bandwidth(device)
    vocab_size = model.config.get_text_config().vocab_size
    workload = random_workload(options, vocab_size) if prompts is None else file_workload(options, prompts)
    about = {
        "what": options.what,
        "prompts": "random" if prompts is None else options.prompts,
        "num_prompts": options.num_prompts,
        "prompt_tokens": sum(map(len, workload.prompts)),
        "max_batch_size": config.max_batch_size,
    }
    found: list[SessionRow] = []
    for row in bench_sessions(model, workload, options, config, bandwidth):
        found.append(row)
        print(f"K = {row.k}, {row.how}: {row.tokens_per_second:.1f} tokens/s", flush=True)
    _finish(options, about | _about(options, device, model.dtype, bandwidth) | _decoder(config), found)
    return found


def run_options(model: PreTrainedModel, options: BenchConfig, config: Config) -> list[OptionRow]:
    """Measure and print decode steps of a loaded model with each option, and a table in Markdown."""
    device = next(model.parameters()).device
    about = _about(options, device, model.dtype) | _decoder(config)
    about |= {name: getattr(options, name) for name in ("prompt_length", "new_tokens", "rounds")}
    found: list[OptionRow] = []
    for row in bench_options(model, options, config):
        found.append(row)
        print(f"batch {row.batch}, K = {row.k}, {row.option}: {row.ms:.3f} ms per step", flush=True)
    _finish(options, about, found)
    print("\n" + "\n".join(option_lines(found)))
    return found


def run_soak(model: PreTrainedModel, options: BenchConfig, config: Config) -> list[SoakRow]:
    """Soak sessions of a loaded model, and print what was found.

    Raises:
        SpecgraphError: something stayed behind, or a request got other tokens than alone.
    """
    device = next(model.parameters()).device
    about = _about(options, device, model.dtype) | _decoder(config) | {"max_batch_size": config.max_batch_size}
    print(_heading(about))
    found: list[SoakRow] = []
    for row in bench_soak(model, options, config):
        found.append(row)
        print("\n" + soak_text(row), flush=True)
    if options.json is not None:
        report.write_json(options.json, about, found)
    faults = [fault for row in found for fault in row.faults()]
    if faults:
        raise SpecgraphError(f"The soak of {options.num_requests} requests failed: {'; '.join(faults)}.")
    return found


def run_kernels(options: BenchConfig, device: torch.device) -> list[KernelRow]:
    """Measure and print single kernels with the shapes of a target."""
    dtype = dtype_on(options.dtype, device)
    config = _config(options.target)
    recurrent = recurrent_calls(config, dtype)
    bandwidth = measure_bandwidth(device)
    found: list[KernelRow] = []
    for row in bench_kernels(Sizes.of(config), options, device, dtype, bandwidth, recurrent):
        found.append(row)
        print(f"{row.kernel}, {row.shape}: {row.us:.2f} us", flush=True)
    _finish(options, _about(options, device, dtype, bandwidth) | _repeats(options), found)
    return found


def run_linears(options: BenchConfig, device: torch.device) -> list[LinearRow]:
    """Measure and print the linears of a target in our kernels and a library's, and the tables that follow."""
    dtype = dtype_on(options.dtype, device)
    bandwidth = measure_bandwidth(device)
    found: list[LinearRow] = []
    for row in bench_linears(Sizes.of(_config(options.target)), options, device, dtype, bandwidth):
        found.append(row)
        print(f"{row.kernel}, {row.shape}: {row.times}", flush=True)
    _finish(options, _about(options, device, dtype, bandwidth) | _repeats(options), found)
    print("\n" + "\n".join(describe_crossovers(found)))
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
    found: list[CpuRow] = []
    for row in bench_cpu(model, options, config, prompts):
        found.append(row)
        print(f"{row.decoder}, {row.threads} threads: {row.tokens_per_second:.1f} tokens/s", flush=True)
    about = _about(options, model.device, model.dtype, measure_bandwidth(model.device))
    about |= {"prompts": len(prompts), "new_tokens": options.new_tokens, "transformers": transformers.__version__}
    about |= {"lowering": config.lowering.name}
    _finish(options, about, found)
    return found


def run_tune(model: PreTrainedModel, options: BenchConfig, config: Config, prompts: Sequence[Tensor]) -> list[TuneRow]:
    """Measure and print drafts, rules and K on ``prompts``, and what to choose for each number of sequences."""
    device = next(model.parameters()).device
    bandwidth = measure_bandwidth(device)
    found: list[TuneRow] = []
    refused: list[str] = []
    for row in bench_tune(model, options, config, prompts, bandwidth, refused):
        found.append(row)
        name = f"batch {row.batch}, {row.draft}, K = {row.k}, {row.rule}"
        print(f"{name}: {row.tokens_per_step:.2f} tokens per step, {row.ms:.3f} ms", flush=True)
    found.sort(key=lambda row: (row.batch, -row.tokens_per_second))
    about = _about(options, device, model.dtype, bandwidth) | {"lowering": config.lowering.name}
    about |= {"prompts": f"{len(prompts)} of {options.prompts}", "temperature": options.temperature}
    _finish(options, about | {"new_tokens": options.new_tokens, "steps": options.steps}, found)
    if refused:
        print("\nNot possible:\n" + "\n".join(refused))
    print("\nFastest:\n" + "\n".join(recommendation(found)))
    return found


def make_target(options: BenchConfig, device: torch.device) -> PreTrainedModel:
    """A target of a named shape, with random weights."""
    return random_target(options.target, device, dtype_on(options.dtype, device))


def _config(target: str) -> PretrainedConfig:
    if target in SHAPES:
        return shape_config(target)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(target)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ConfigError(f"target={target} has no configuration of a causal LM: {reason}.") from None
    return config


def _about(
    options: BenchConfig, device: torch.device, dtype: torch.dtype, bandwidth: float | None = None
) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "what": options.what,
        "target": options.target,
        "device": name,
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        **({} if bandwidth is None else {"bandwidth_gb_per_s": bandwidth / 1e9}),
    }


def _repeats(options: BenchConfig) -> dict[str, Any]:
    return {"prompt_length": options.prompt_length, "steps": options.steps}


def _decoder(config: Config) -> dict[str, Any]:
    return {
        "draft": _draft(config),
        "verify": config.verify.rule,
        "acceptance_rate": config.verify.acceptance_rate,
        "lowering": config.lowering.name,
        "numerics": config.numerics,
    }


def _draft(config: Config) -> str:
    if config.draft.model is not None:
        return config.draft.model
    drafter = drafter_class(config.draft.kind)
    name = drafter.called(bool(getattr(config.draft, "parallel", None)))
    return name if drafter.head is None else f"{name} (random)"


def _finish(options: BenchConfig, about: dict[str, Any], rows: report.Rows) -> None:
    """Print what was measured and the table, and write the JSON and the plot if they were asked for."""
    print("\n" + _heading(about))
    if not rows:
        raise ConfigError("None of the kernels is installed; install specgraph again.")
    print("\n" + report.table(rows))
    if options.json is not None:
        report.write_json(options.json, about, rows)
    if options.plot is not None:
        limited = cast(report.Limited, rows)  # the configuration refuses plots of others
        report.plot(options.plot, f"{about['target']}, {about['dtype']}, {about['device']}", limited)


def _heading(about: dict[str, Any]) -> str:
    return text_table([(name, f"{value:,.1f}" if "_per_s" in name else str(value)) for name, value in about.items()])
