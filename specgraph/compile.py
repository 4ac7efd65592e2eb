"""``compile_speculative``: from a model and a configuration to a decoder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from specgraph import drafters
from specgraph.config import Config, ConfigLike, build_passes, load_config
from specgraph.decoder import SpeculativeDecoder
from specgraph.defaults import read_generation_config
from specgraph.drafters import Drafter
from specgraph.errors import ConfigError, UnsupportedModelError
from specgraph.frontend import first_program
from specgraph.numerics import NumericsCallback
from specgraph.passes.base import Pass
from specgraph.pipeline import Callback, StageReport, run_passes
from specgraph.program import Program
from specgraph.progress import Progress
from specgraph.requests import Limits
from specgraph.selfcheck import self_check
from specgraph.tokenizers import check_same_tokenizer
from specgraph.tracing import TracedModel, check_is_causal_lm, trace
from specgraph.verifier import verify_program

FALLBACK_MAX_LENGTH = 4096


def compile_speculative(
    model: PreTrainedModel, cfg: ConfigLike = None, *, draft: PreTrainedModel | str | Path | None = None
) -> SpeculativeDecoder:
    """Compile a causal LM of transformers into a lossless speculative decoder.

    The model itself is not changed, and its weights are not copied.

    Args:
        model: the target, on its device and in its dtype; both are fixed by compiling.
        cfg: nothing (drafts by n-gram lookup), a preset name such as ``"draft_model"`` or ``"none"``, the path of a
            YAML file, or a mapping / ``DictConfig`` with the keys of :class:`specgraph.config.Config`.
        draft: the draft model, loaded or as a path; implies the ``draft_model`` drafter.

    Raises:
        UnsupportedModelError: the model cannot be decoded correctly; says what is missing.
        ConfigError: an unknown key, preset or pass, or a value out of range; says what is allowed.
        PassError: a pass cannot run or matched an unexpected number of times.
        NumericsError: with ``check_numerics``, two stages differ.
    """
    check_is_causal_lm(model)
    config = _with_draft(load_config(cfg), draft)
    defaults = read_generation_config(model)
    passes = build_passes(config)
    with Progress("compile", len(passes) + 3, config.debug.progress) as progress:
        begin = time.perf_counter()
        progress.advance(0, "tracing the target")
        target = trace(model)
        notes = [f"tracing {target.name}: {time.perf_counter() - begin:.2f} s, {target.num_layers} attention layers"]
        limits = _limits(config, target)
        progress.advance(1, "tracing the draft")
        loaded = load_draft(config, model, target, draft) if config.draft.kind == "draft_model" else None
        traced_draft = None if loaded is None else trace(loaded)
        drafter = make_drafter(config, target, traced_draft)
        progress.advance(1, "comparing cached decoding with the model")
        if config.debug.self_check:
            notes.append(self_check(model, target, limits, config))
            if loaded is not None and traced_draft is not None:
                notes.append(self_check(loaded, traced_draft, limits, config))
        progress.advance(1, "passes")
        callbacks = _callbacks(config, progress)
        stages, reports = run_passes(first_program(target, drafter, traced_draft), passes, callbacks)
    check_complete(list(stages.values())[-1])
    decoder = SpeculativeDecoder(stages, reports, config, defaults, limits, notes)
    if config.debug.dump_dir is not None:
        decoder.dump(config.debug.dump_dir)
    return decoder


def check_complete(program: Program) -> None:
    """Refuse a pipeline that leaves out what a decoder runs."""
    for fact, name in (("kv_cache", "insert_kv_cache"), ("draft", "insert_draft"), ("verify", "insert_verify")):
        if fact not in program.facts:
            raise ConfigError(f"pipeline.order ends without {fact!r}, so there is nothing to decode with; add {name}.")


def make_drafter(config: Config, target: TracedModel, draft: TracedModel | None) -> Drafter:
    """The drafter a configuration names."""
    options = config.draft
    if draft is not None:
        return drafters.draft_model(draft, options.num_speculative_tokens)
    if options.kind == "ngram":
        return drafters.ngram(options.num_speculative_tokens, options.max_ngram, options.min_ngram, target.device)
    return drafters.none()


def load_draft(
    config: Config, model: PreTrainedModel, target: TracedModel, draft: PreTrainedModel | str | Path | None
) -> PreTrainedModel:
    """The draft as a loaded model with the target's tokenizer, on the target's device.

    A path is loaded in the target's dtype; a loaded model stays as it is.
    """
    given = draft if draft is not None else config.draft.model
    if given is None:
        raise ConfigError("The draft_model drafter needs a model: pass draft=... or set draft.model to its folder.")
    if isinstance(given, str | Path):
        given = _read_draft(given, target)
    try:
        check_is_causal_lm(given)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"draft: {error}") from None
    check_same_tokenizer(model, given)
    device = next(given.parameters()).device
    if device != target.device:
        raise ConfigError(f"The draft is on {device}, the target on {target.device}; move one of them.")
    return given


def _read_draft(path: str | Path, target: TracedModel) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=target.dtype)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"The draft {str(path)!r} cannot be loaded as a causal LM: {reason}") from None
    moved: PreTrainedModel = loaded.to(target.device).eval()
    return moved


def _with_draft(config: Config, draft: object) -> Config:
    """A draft given as an argument selects the draft_model drafter."""
    if draft is None:
        return config
    if config.draft.kind == "none":
        raise ConfigError("draft= was given, but draft.kind is 'none'; leave one of them out.")
    return replace(config, draft=replace(config.draft, kind="draft_model"))


def _limits(config: Config, target: TracedModel) -> Limits:
    known = target.max_positions
    if config.max_length is not None and known is not None and config.max_length > known:
        raise ConfigError(
            f"max_length is {config.max_length}, but {target.name} is right for at most {known} positions; lower it."
        )
    longest = config.max_length or known or FALLBACK_MAX_LENGTH
    return Limits(target.vocab_size, longest, config.max_batch_size)


def _callbacks(config: Config, progress: Progress) -> list[Callback]:
    """What watches the passes: progress, the verifier, the comparison of stages."""
    callbacks: list[Callback] = [_observe(lambda report: progress.advance(1, report.name))]
    if config.pipeline.verify:
        callbacks.append(lambda pass_, before, after, report: verify_program(after))
    if config.check_numerics:
        callbacks.append(NumericsCallback())
    return callbacks


def _observe(show: Callable[[StageReport], None]) -> Callback:
    def callback(pass_: Pass, before: Program, after: Program, report: StageReport) -> None:
        show(report)

    return callback
