"""``compile_speculative``, which makes a decoder from a model and a configuration."""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specgraph.compiler.build_passes import build_passes
from specgraph.compiler.numerics import check_drafts, compare_stages
from specgraph.compiler.selfcheck import check_draft, self_check, short_self_check
from specgraph.compiler.text_models import text_model
from specgraph.config import Config, ConfigLike, check_no_keys, choose_lowering, load_config, settle_lowering
from specgraph.drafters.base import Drafter, DraftHead, DraftLike, Target
from specgraph.drafters.registry import make_draft, with_draft
from specgraph.dump import check_folder
from specgraph.errors import ConfigError, SpecgraphWarning, UnsupportedModelError
from specgraph.frontend.first_program import first_program
from specgraph.frontend.tracing import TracedModel, check_is_causal_lm, check_no_hooks, trace
from specgraph.ir.compiling import start_compiler
from specgraph.ir.linear import packed_tensors
from specgraph.ir.program import Program
from specgraph.ir.verifier import verify_program
from specgraph.passes.base import Pass
from specgraph.passes.insert_draft import InsertDraft
from specgraph.passes.insert_recurrent_state import recurrent_ops
from specgraph.passes.pipeline import Callback, StageReport, run_passes
from specgraph.passes.shard import Shard
from specgraph.progress import Progress
from specgraph.runtime.decoder import SpeculativeDecoder
from specgraph.runtime.execution.plain_mode import current
from specgraph.runtime.model_guard import ModelGuard
from specgraph.runtime.requests.generation_config import read_generation_config
from specgraph.runtime.requests.request import Limits
from specgraph.schemes.layers import arrange_weights
from specgraph.specialise.index_rows import IndexRows

FALLBACK_MAX_LENGTH = 4096


def compile_speculative(
    model: PreTrainedModel, cfg: ConfigLike = None, *, draft: DraftLike | None = None, **others: Any
) -> SpeculativeDecoder:
    """Compile a causal LM of transformers into a lossless speculative decoder.

    The model itself computes the same as before, and its weights are not copied. (On a GPU, the weights of layers that
    read the same input are moved into one tensor, of which the model's parameters become views, and the numbers of int4
    weights are sorted, which a state dict does not show; also if compiling fails later. A decoder that was compiled
    before, without this, says so at its next call.) Meanwhile other threads may run the model, or compile. Values that
    are written into the weights later reach the decoder; after any other change of the model, its next call says what
    was changed and to compile again.

    Args:
        model: the target. Its present device and dtype are those of the decoder (but ``parallel.devices`` may name
            GPUs for a model on the CPU, of which each then gets its part). Of a multimodal model
            (``...ForConditionalGeneration``), this is its text model, for prompts of text.
        cfg: None (drafts come from n-gram lookup), the name of a preset such as ``"draft_model"`` or ``"none"``, the
            path of a YAML file, or a mapping or ``DictConfig`` with the keys of :class:`specgraph.config.Config`.
        draft: a draft model or head, either loaded or as the path of a checkpoint. It decides which drafter runs.
        others: there are none; the error says where a key of the configuration goes.

    Raises:
        UnsupportedModelError: the model cannot be decoded correctly; the message says what is missing.
        ConfigError: a key, preset or pass does not exist, or a value is out of range; the message says what is allowed.
        PassError: a pass cannot run, or matched an unexpected number of times.
        NumericsError: ``check_numerics`` is on, and two stages differ.
    """
    check_no_keys("compile_speculative", others)
    given, model = model, text_model(model)
    check_is_causal_lm(model)
    check_one_device(given)
    check_no_hooks(model)
    check_dtypes(model)
    config, draft = with_draft(load_config(cfg), draft)
    gpus = shared_gpus(config, model.device)
    place = gpus[0] if gpus else model.device
    lowering, reason = choose_lowering(config.lowering.name, place, model.dtype)
    if lowering == "gpu" and place.type == "cpu":
        warnings.warn(
            "lowering=gpu was asked for, and the target is on a CPU, where kernels run as their slow references in "
            "PyTorch; leave it out, or move the model to a GPU.",
            SpecgraphWarning,
            stacklevel=2,
        )
    config = settle_lowering(config, place, model.dtype)
    check_parallel(config, place)
    read_generation_config(model)  # so that what cannot be honoured is refused before anything takes long
    passes = build_passes(config, place)
    if config.debug.dump_dir is not None:
        check_folder(config.debug.dump_dir)
    if config.lowering.remainder == "inductor" and place.type == "cpu":
        start_compiler()
    with (
        Progress("compile", len(passes) + 3, config.debug.progress) as progress,
        torch.inference_mode(False),
        torch.autocast(model.device.type, enabled=False),
        current(model.device),
        _host_default(),
    ):
        begin = time.perf_counter()
        progress.advance(0, "tracing the target")
        arrange_weights(model)
        target = trace(model, config.max_length)
        seconds, info = time.perf_counter() - begin, target.info
        notes = [f"tracing {info.name}: {seconds:.2f} s, {info.attention_layers} attention layers"]
        limits = _limits(config, target)
        notes += [info.rope.describe()] if info.rope is not None else []
        progress.advance(1, "loading and tracing the draft")
        made = make_draft(config, Target(model, target, limits.max_length, config.verify.rule), draft)
        check_adaptive(config, made.drafter)
        if config.draft.max_context is not None:
            but = "" if config.draft.first is None else f" but those of {config.draft.first}"
            limit = config.draft.max_context
            notes.append(f"draft.max_context: a sequence of more than {limit} tokens has no drafts{but}")
        notes += [*made.notes, f"lowering: {lowering}, because {reason}"]
        progress.advance(1, "comparing cached decoding with the model")
        if config.debug.self_check:
            if gpus and model.device.type == "cpu":
                with current(place):
                    notes.append(short_self_check(model, target, limits, config, gpus))
            else:
                notes.append(self_check(model, target, limits, config, config.parallel.tensor))
            if made.model is not None and made.traced is not None:
                notes.append(self_check(made.model, made.traced, limits, config))
            else:
                check_draft(made.drafter)
        progress.advance(1, "passes")
        callbacks = _callbacks(config, progress)
        first = first_program(target, made.drafter)
        of_ranks = []
        for rank, gpu in enumerate(gpus or [model.device]):
            with current(gpu):
                of_ranks.append(_all_stages(first, passes_of(rank, gpu, passes) if gpus else passes, callbacks))
        (stages, reports), *beside = of_ranks
        if config.debug.self_check and made.model is None:
            # The program of one of several GPUs does not run alone, that of all of them does.
            until = next(place for place, own in enumerate(passes, 1) if isinstance(own, InsertDraft))
            check_drafts((run_passes(first, passes[:until])[0] if gpus else stages)[InsertDraft.name])
    # Variants of the step leave options out that the example of the comparison has, and progress is at its end.
    watching = [callback for callback in callbacks[1:] if callback is not compare_stages]
    last = [each[IndexRows.name] for each, _ in of_ranks]
    guard = ModelGuard(_given(given, draft), stages["trace"], last)
    decoder = SpeculativeDecoder(stages, reports, config, given, limits, guard, notes, watching, beside)
    if config.debug.dump_dir is not None:
        decoder.dump(config.debug.dump_dir)
    return decoder


def _all_stages(
    first: Program, passes: Sequence[Pass], callbacks: Sequence[Callback]
) -> tuple[dict[str, Program], list[StageReport]]:
    """The program after every pass, the last of which lets a step run some sequences of many; and what passes say."""
    stages, reports = run_passes(first, passes, callbacks)
    check_complete(list(stages.values())[-1])
    indexed, index_reports = run_passes(list(stages.values())[-1], [IndexRows()], callbacks)
    return {**stages, IndexRows.name: indexed[IndexRows.name]}, [*reports, *index_reports]


def check_adaptive(config: Config, drafter: Drafter) -> None:
    """Refuse what says how many drafts there are, where there are none."""
    if config.draft.max_context is not None and not drafter.num_speculative_tokens:
        raise ConfigError(
            f"draft.max_context={config.draft.max_context} says how long a sequence may be that has drafts, and the "
            f"drafter {drafter.name} makes none. Leave it out, or choose a drafter."
        )
    if config.draft.adaptive and not drafter.num_speculative_tokens:
        raise ConfigError(
            f"draft.adaptive=true chooses how many drafts a step verifies, and the drafter {drafter.name} makes none. "
            "Leave it out, or choose a drafter."
        )


def _given(model: PreTrainedModel, draft: DraftLike | None) -> dict[str, nn.Module]:
    """The models that a caller holds and may change, by what errors call them. The target's name is empty."""
    module = draft.module if isinstance(draft, DraftHead) else draft
    return {"": model, **({"draft": module} if isinstance(module, nn.Module) else {})}


def check_parallel(config: Config, device: torch.device) -> None:
    """Refuse lowerings that do not know several devices, the first of which is ``device``."""
    count = config.parallel.tensor
    if count == 1:
        return
    given = f"parallel.tensor={count} was given"
    if device.type == "cpu" and config.lowering.kernels:
        raise ConfigError(
            f"{given} with lowering={config.lowering.name} and kernels, which join layers of several devices of a CPU; "
            "give lowering=eager or inductor, without lowering.kernels."
        )
    if device.type != "cpu" and not config.lowering.cuda_graph:
        raise ConfigError(
            f"{given} for GPUs without CUDA graphs, and only graphs of all GPUs are launched together; give "
            "lowering=gpu, and leave lowering.cuda_graph out."
        )
    if device.type != "cpu" and config.check_numerics:
        raise ConfigError(f"{given} with check_numerics, which runs stages on one GPU; leave one of them out.")


def shared_gpus(config: Config, device: torch.device) -> list[torch.device]:
    """The GPUs that share the target; none if it runs on one device, or on devices of a CPU.

    The model is on the first of them, or on the CPU. From there, every GPU gets its part alone, so that a model need
    not fit a GPU.

    Raises:
        ConfigError: one of them does not exist or cannot reach another one, or the model is not on the first.
    """
    count, names = config.parallel.tensor, config.parallel.devices
    if count == 1 or (device.type == "cpu" and (names is None or "cpu" in names)):
        return []
    there = torch.cuda.device_count()
    following = [torch.device("cuda", index) for index in range(there) if index != device.index]
    gpus = [torch.device(name) for name in names] if names else [device, *following][:count]
    if device.type != "cpu" and gpus[0] != device:
        raise ConfigError(
            f"parallel.devices begins with {gpus[0]}, and the model is on {device}; move it there, or, so that no GPU "
            "holds the whole of it, leave it on the CPU and name GPUs."
        )
    if len(gpus) < count or any(gpu.index >= there for gpu in gpus):
        raise ConfigError(
            f"parallel.tensor={count} asks for {names or count} GPUs, and there are {there}; give as many as there are."
        )
    for a, b in itertools.permutations(gpus, 2):
        if not torch.cuda.can_device_access_peer(a, b):
            raise ConfigError(
                f"{a} cannot reach the memory of {b}, which parallel.tensor={count} needs; give parallel.devices GPUs "
                "that can, as `nvidia-smi topo -p2p r` shows them, or leave parallel out."
            )
    return gpus


def passes_of(rank: int, device: torch.device, passes: Sequence[Pass]) -> list[Pass]:
    """The passes that make the program of one of several GPUs."""
    return [replace(own, rank=rank, device=device) if isinstance(own, Shard) else own for own in passes]


def check_one_device(model: PreTrainedModel) -> None:
    """Refuse a model whose weights are on several devices or were not loaded."""
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1 or "meta" in devices:
        raise UnsupportedModelError(
            f"{type(model).__name__} has weights on {', '.join(devices)}, and specgraph runs a model on one device "
            '(meta holds none); load it on one, as by from_pretrained(..., device_map={"": 0}), or use a smaller model.'
        )


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_dtypes(model: PreTrainedModel) -> None:
    """Refuse a model with packed weights of no known scheme: its layers unpack them by code that cannot be traced.

    transformers calls a model quantised, too, whose weights it has dequantised while it loaded them.
    """
    buffers = model.named_buffers() if getattr(model, "is_quantized", False) else ()
    kept = itertools.chain(model.named_parameters(), ((name, value) for name, value in buffers if value.dim() > 1))
    packed = set(map(id, packed_tensors(model)))
    other = next(((name, value) for name, value in kept if id(value) not in packed and not _is_plain(value)), None)
    if other is None:
        return
    method = getattr(getattr(model.config, "quantization_config", None), "quant_method", None)
    how = f" by {getattr(method, 'value', method)}" if method is not None else ""
    kind = type(other[1]).__name__ if other[1].dtype in _DTYPES else other[1].dtype
    raise UnsupportedModelError(
        f"{type(model).__name__} is quantised{how}: {other[0]} is {kind}, and specgraph runs weights in float64, "
        "float32, bfloat16 or float16; load it without a quantization_config, as by from_pretrained(..., "
        "dtype=torch.bfloat16), or with one that says dequantize=True; specgraph.quantise then packs its weights."
    )


def _is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor may be a weight or a mask, and holds nothing packed."""
    allowed = _DTYPES if isinstance(value, torch.nn.Parameter) else (*_DTYPES, torch.bool)
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.dtype in allowed


def _host_default() -> contextlib.AbstractContextManager[object]:
    """A context in which tensors are made on the CPU by default, whatever ``torch.set_default_device`` has set."""
    return contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def check_complete(program: Program) -> None:
    """Refuse a pipeline without one of the passes that a decoder needs."""
    for fact, name in (("kv_cache", "insert_kv_cache"), ("verify", "insert_verify")):
        if fact not in program.facts:
            raise ConfigError(f"pipeline.order ends without {fact!r}, so there is nothing to decode with; add {name}.")
    for name, module in program.modules.unchanged.items():
        if recurrent_ops(module.graph):
            raise ConfigError(
                f"pipeline.order ends without 'recurrent_state', so layers of {name} would forget what came before; "
                "add insert_recurrent_state."
            )


def _limits(config: Config, target: TracedModel) -> Limits:
    known, name = target.info.max_positions, target.info.name
    if config.max_length is not None and known is not None and config.max_length > known:
        raise ConfigError(
            f"max_length is {config.max_length}, but {name} is right for at most {known} positions; lower it."
        )
    longest, drafts = config.max_length or known or FALLBACK_MAX_LENGTH, config.draft.num_speculative_tokens
    if config.draft.kind != "none" and drafts >= longest:
        raise ConfigError(
            f"draft.num_speculative_tokens is {drafts}, but a sequence has at most {longest} tokens (max_length); ask "
            "for fewer."
        )
    rope = target.info.rope
    return Limits(target.info.vocab_size, longest, known if rope is None else rope.most, rope)


def _callbacks(config: Config, progress: Progress) -> list[Callback]:
    """The callbacks of the pipeline: progress, the verifier, and the comparison of stages."""
    callbacks: list[Callback] = [lambda pass_, before, after, report: progress.advance(1, report.name)]
    if config.pipeline.verify:
        callbacks.append(lambda pass_, before, after, report: verify_program(after))
    if config.check_numerics:
        callbacks.append(compare_stages)
    return callbacks
