"""The commands, which run when their configuration has been composed."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transformers import PreTrainedModel

from specgraph import dump as dumps
from specgraph.checkpoints.gguf import is_gguf
from specgraph.cli.check_options import RAY, check_engine, check_options
from specgraph.cli.command_table import options_of
from specgraph.cli.decode_prompts import (
    PeerOutcome,
    Prompt,
    check_batch_size,
    decode_prompts,
    decode_with_transformers,
    encode,
)
from specgraph.cli.keys import GenerateConfig, InspectConfig
from specgraph.cli.loading import (
    check_drafts,
    check_folder,
    device_and_dtype,
    limits_of,
    load_model,
    load_tokenizer,
    shared_place,
)
from specgraph.cli.prompts import read_chat_options, read_prompts
from specgraph.cli.read_dumps import diff, explore
from specgraph.cli.summary import compare_rows, summary_rows
from specgraph.cli.writers import check_format, check_trace, notes, write_trace, writer
from specgraph.compiler.build_passes import build_passes
from specgraph.compiler.compile import compile_speculative
from specgraph.config import Config, DraftConfig, to_config
from specgraph.plots import check_plot, plot_acceptance
from specgraph.progress import progress_bars
from specgraph.runtime.outputs.stats import Stats
from specgraph.schemes.load import load_causal_lm
from specgraph.tables import text_table

if TYPE_CHECKING:
    from specgraph.bench.config import BenchConfig

_CURVES: dict[str, dict[str, Sequence[float]]] = {}
"""The curves that the jobs of a sweep have drawn so far, by the file of the plot and the name of the curve."""


def run(name: str, cfg: DictConfig, *, first: bool = True) -> dict[str, str]:
    """Run one command, print its results, and return what it measured, by name.

    Args:
        name: of the command.
        cfg: its configuration.
        first: whether this is no job of a sweep, or the first one.

    Raises:
        SpecgraphError: the configuration, the model or the prompts were refused.
    """
    if first:
        _CURVES.clear()
    with progress_bars(sys.stderr.isatty()):
        return _COMMANDS[name](cfg)


def generate(cfg: DictConfig) -> dict[str, str]:
    """Continue prompts. Print the texts, and then how many drafts were accepted and the speed."""
    config, options = _split("generate", cfg)
    config.max_batch_size = 1 if options.stream else check_batch_size(options, config)
    check_format(options.format, stream=options.stream)
    check_trace(options.trace, stream=options.stream)
    if options.plot is not None:
        check_plot(options.plot)
    check_engine(options)
    chat_options = read_chat_options(options)
    texts = read_prompts(options.prompt, options.prompts, options.template, options.limit, chat_options)
    place = device_and_dtype(options.device, options.dtype)
    check_folder(options.model)
    limits = limits_of(options.model, config, options.trust_remote_code)
    tokenizer = load_tokenizer(options.model, options.trust_remote_code)
    prompts = encode(tokenizer, texts)
    check_options(options, limits, tokenizer, [prompt.ids for prompt in prompts])
    if options.engine == RAY:
        return _generate_with_ray(options, config, place, tokenizer, prompts)
    if not options.compare:  # transformers would run on the CPU
        place = shared_place(config, place)
    model = load_model(options.model, *place, options.trust_remote_code)
    decoder = compile_speculative(model, config)
    outcome = decode_prompts(
        decoder, tokenizer, prompts, options, write=writer(options.format, tokenizer, stream=options.stream)
    )
    rows = summary_rows(outcome)
    if outcome.trace is not None:
        rows["trace"] = write_trace(outcome.trace, str(options.trace), tokenizer, notes(options.format))
    if options.plot is not None:
        rows["plot"] = _draw_acceptance(options.plot, options.model, decoder.config, outcome.stats)
    if options.compare:
        plain = dataclasses.replace(config, draft=DraftConfig(kind="none"))
        plain.debug = dataclasses.replace(config.debug, dump_dir=None, self_check=False)
        plain.check_numerics = False
        quiet = dataclasses.replace(
            options, stream=False, trace=None, plot=None, batch_size=1 if options.stream else options.batch_size
        )
        again = decode_prompts(compile_speculative(model, plain), tokenizer, prompts, quiet, outcome.seeds)
        rows |= compare_rows(outcome, again, _peers(model, decoder.config, prompts, quiet))
    if config.debug.dump_dir is not None:
        rows["graphs"] = config.debug.dump_dir
    print("\n" + text_table(rows.items()), file=notes(options.format))
    return rows


def _draw_acceptance(path: str, model: str, config: Config, stats: Stats) -> str:
    """Draw the acceptance of this run and of earlier jobs of the sweep. Returns the text for the table of results."""
    if stats.num_speculative_tokens == 0:
        return "not drawn, since there are no drafts"
    curves = _CURVES.setdefault(path, {})
    name = f"{config.draft.model or config.draft.kind}, K = {stats.num_speculative_tokens}, {config.verify.rule}"
    curves[name] = stats.acceptance_per_position
    plot_acceptance(path, model, curves)
    return path


def _generate_with_ray(
    options: GenerateConfig, config: Config, place: tuple[str, str], tokenizer: Any, prompts: Sequence[Prompt]
) -> dict[str, str]:
    from specgraph.cli.ray_workers import Job, decode_with_ray

    job = Job(options, config, place, tokenizer)
    rows = summary_rows(decode_with_ray(job, prompts, writer(options.format, tokenizer)))
    print("\n" + text_table(rows.items()), file=notes(options.format))
    return rows


def _peers(
    model: PreTrainedModel, config: Config, prompts: Sequence[Prompt], options: GenerateConfig
) -> list[PeerOutcome]:
    """The same prompts by transformers' ``generate`` and, if the draft is a model, by its assisted generation.

    There is no comparison with stop strings or a time limit: behind their ends, a batch of transformers' does not tell
    padding from tokens.
    """
    if options.stop_strings is not None or options.max_time is not None:
        return []
    peers = [decode_with_transformers(model, prompts, options, check_batch_size(options, config))]
    if config.draft.kind == "draft_model" and config.draft.model is not None:
        loaded: Any = load_causal_lm(config.draft.model, model.dtype, f"draft.model={config.draft.model}")
        assistant: PreTrainedModel = loaded.to(model.device)
        peers.append(decode_with_transformers(model, prompts, options, 1, assistant))
    return peers


def dump(cfg: DictConfig) -> dict[str, str]:
    """Compile and write the graphs of every stage."""
    config, options = _split("dump", cfg)
    place = device_and_dtype(options.device, options.dtype)
    check_folder(options.model)
    dumps.check_folder(options.out)
    place = shared_place(config, place)
    decoder = compile_speculative(load_model(options.model, *place, options.trust_remote_code), config)
    folder = decoder.dump(options.out, weights=options.weights)
    print(decoder.report())
    print(f"{len(decoder.stages)} stages in {folder}: {', '.join(decoder.stages)}")
    return {"stages": str(len(decoder.stages)), "graphs": str(folder)}


def inspect(cfg: DictConfig) -> dict[str, str]:
    """Print what a checkpoint is, its options and tensors, and whether it fits the target if one is given."""
    from specgraph.drafters.inspect import inspect_checkpoint

    options: InspectConfig = options_of("inspect", cfg)
    if options.target is not None:
        check_folder(options.target, "target")
    found = inspect_checkpoint(options.path, options.draft, options.target)
    print(found)
    return {key: value for key, value in found.facts.items() if key != "checkpoint"}


def bench(cfg: DictConfig) -> dict[str, str]:
    """Time steps, the first token, sessions or whole answers, or compare drafts. Print what was measured."""
    from specgraph.bench import run
    from specgraph.bench.config import check_bench_config, check_kind
    from specgraph.bench.models import SHAPES
    from specgraph.bench.tune import check_tune

    check_kind(cfg.what)
    options: BenchConfig = options_of("bench", cfg)
    config = _compiled_part(cfg)
    check_bench_config(options)
    run.check_target(options.target)
    place = device_and_dtype(options.device, options.dtype)
    if options.target not in SHAPES:
        check_folder(options.target, "target")
    if options.what == "tune":
        check_tune(options)
    if options.what in ("cpu", "tune"):
        check_drafts(options.drafts)
    prompts = _file_prompts(options, options.num_decoded if options.what in ("cpu", "tune") else None)
    return run.run(bench_model(options, *place), options, config, prompts)


def bench_model(options: BenchConfig, device: str, dtype: str) -> PreTrainedModel:
    """The target that ``bench`` measures: of a known shape with random weights, or loaded."""
    from specgraph.bench.models import SHAPES, random_target
    from specgraph.bench.run import dtype_on

    if options.target in SHAPES:
        place = torch.device(device)
        return random_target(options.target, place, dtype_on(dtype, place), weights=options.weights)
    return load_model(options.target, device, dtype, options.trust_remote_code, "target")


def _file_prompts(options: BenchConfig, limit: int | None = None) -> list[Tensor] | None:
    """The token ids of the first prompts of a file, if ``bench`` was given one."""
    if options.prompts is None:
        return None
    texts = read_prompts(None, options.prompts, options.template, limit)
    return [prompt.ids for prompt in encode(load_tokenizer(options.target, options.trust_remote_code), texts)]


def train(cfg: DictConfig) -> dict[str, str]:
    """Train a head for a target. Progress is shown on standard error."""
    from specgraph.training import train_head
    from specgraph.training.config import check_dtype, check_head_config

    options: Any = OmegaConf.to_object(cfg)
    check_head_config(options)  # before a model is loaded
    place = device_and_dtype(options.device, options.dtype)
    check_dtype(*place)
    check_folder(options.model)
    model = load_model(options.model, *place, options.trust_remote_code)
    report = train_head(model, load_tokenizer(options.model, options.trust_remote_code), options)
    print(report)
    measured = {"acceptance length": f"{report.measured.acceptance_length:.3f}", "loss": f"{report.measured.loss:.4f}"}
    return {**measured, "seconds": f"{report.seconds:.0f}"}


_COMMANDS = {"generate": generate, "dump": dump, "explore": explore, "diff": diff, "inspect": inspect, "bench": bench,
             "train": train}  # fmt: skip


def _split(name: str, cfg: DictConfig) -> tuple[Config, Any]:
    """The part of a command's configuration that ``compile_speculative`` takes, and the whole of it, both checked."""
    options = options_of(name, cfg)
    if options.gguf_file is not None:
        options.model = str(Path(options.model) / options.gguf_file)
    return _compiled_part(cfg), options


def _compiled_part(cfg: DictConfig) -> Config:
    """The part of a command's configuration that ``compile_speculative`` takes, checked."""
    config = to_config(cfg)
    build_passes(config)  # refuses a misspelt option before a model is loaded
    if config.draft.model is not None and is_gguf(config.draft.model):
        said = "the weights of the GGUF file are dequantised to the dtype of the model"
        print(f"draft={config.draft.model}: {said}", file=sys.stderr)
    return config
