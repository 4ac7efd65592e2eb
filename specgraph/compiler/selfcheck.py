"""Compares cached decoding of a traced model with the model's own forward pass, on random tokens.

Tracing sees one forward pass without a cache. A model that mixes tokens outside of its attention, or that does not take
positions from ``position_ids``, can be traced, but decodes wrongly with a cache. This check finds such models.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import operator
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specgraph.config import Config
from specgraph.drafters.none import NoDrafter
from specgraph.errors import NumericsError, UnsupportedModelError
from specgraph.frontend.first_layers import first_layers
from specgraph.frontend.first_program import first_program
from specgraph.frontend.recurrent import hooked_recurrence
from specgraph.frontend.tracing import ATTENTION, TracedModel, trace
from specgraph.ir.drafter import BoundDrafter
from specgraph.ir.exporting import own_copy
from specgraph.ir.linear import linears
from specgraph.ir.model_info import Rope
from specgraph.ir.program import Program
from specgraph.ir.state import State, allocate
from specgraph.kernels.attention.paged import Tiling
from specgraph.passes.expose_features import ExposeFeatures
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.insert_recurrent_state import InsertRecurrentState
from specgraph.passes.pipeline import run_passes
from specgraph.passes.shard import Shard
from specgraph.runtime.requests.request import Limits

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
"""The largest relative difference of a hidden state that is allowed, ``|a - b| / |b|`` per row. Norms and rotary
embeddings run in float32 even in a float64 model. A wrong mask or position gives differences of 0.05 to 1."""
LOGIT_ROWS = 8
"""The number of last tokens whose logits are compared. A row of logits depends on that row's hidden state alone, since
tracing refuses other heads, and hidden states are compared for all tokens. With a vocabulary of 262,144, the logits of
all tokens would take several times the memory of a small model's weights."""


def self_check(model: PreTrainedModel, traced: TracedModel, limits: Limits, config: Config, devices: int = 1) -> str:
    """Compare every hidden state of a traced model with the forward pass of ``model`` itself, on random tokens.

    The traced model runs in chunks of different lengths with a paged cache, and ``model`` without a cache. The chunks
    include a single row, and together they are longer than two pages, a KV split of attention and, up to
    ``debug.self_check_tokens``, every sliding window.

    Rounding alone may change a token more than a mistake does. In half precision, one of random tokens grows ten times
    as large as the others in Gemma 3 270M, out of differences. And where activations are rounded to few bits, the last
    bit of one decides to which of two numbers it is rounded. So where such a model differs, a copy in a wider dtype is
    traced and compared, and that decides: in float32, or in float64 if activations are quantised.

    ``devices`` share the traced model's layers, as ``parallel.tensor`` says.

    Returns a line for the report.

    Raises:
        UnsupportedModelError: names the first hidden state that differs.
        NumericsError: the model itself gives NaN.
    """
    windows = {n.kwargs["window"] for n in traced.body.graph.nodes if n.target is ATTENTION and n.kwargs.get("window")}
    wanted = max([2 * config.cache.block_size + 5, Tiling().kv_split + 5, *(w + 9 for w in windows)])
    length = min(wanted, limits.max_length, traced.info.max_positions or wanted, config.debug.self_check_tokens)
    refusal, precision = _difference(model, traced, length, config, devices), ""
    wider = _wider(traced)
    if refusal is not None and wider is not None:
        wide, rope = own_copy(model, shared=()).to(wider), traced.info.rope
        again = trace(wide, rope.length if rope else None)
        refusal = _difference(wide, again, length, config, devices)
        precision = f" in {str(wider).removeprefix('torch.')}"
    if refusal is not None:
        raise UnsupportedModelError(refusal)
    skipped = sorted(w for w in windows if w >= length)
    crossed = f"; sliding windows not crossed (debug.self_check_tokens): {skipped}" if skipped else ""
    shared = f", as {devices} devices share it," if devices > 1 else ""
    return (
        f"cached decoding of {traced.info.name}{shared} agrees with its own forward over {length} random tokens"
        f"{precision}{crossed}"
    )


def short_self_check(
    model: PreTrainedModel, traced: TracedModel, limits: Limits, config: Config, devices: Sequence[torch.device]
) -> str:  # fmt: skip
    """:func:`self_check` for a model on the CPU of which GPUs are to run parts: on the first of these, of a copy with
    the model's first layers. Where that copy cannot be made, or is refused, the whole model decides, on the CPU.

    Nothing of the copy is left in the GPU's memory, which is for its part of the model.
    """
    found = _checked_copy(model, limits, config, devices)
    gc.collect()  # a copy and its graphs refer to each other
    return found or self_check(model, traced, limits, config, len(devices))


def _checked_copy(
    model: PreTrainedModel, limits: Limits, config: Config, devices: Sequence[torch.device]
) -> str | None:  # fmt: skip
    """What the copy with the first layers shows; None if there is none, or if it is refused."""
    short = first_layers(model, devices[0])
    if short is None:
        return None
    layers, count = (each.config.get_text_config().num_hidden_layers for each in (short, model))
    try:
        line = self_check(short, trace(short, config.max_length), limits, config, len(devices))
    except UnsupportedModelError:
        return None
    return f"{line}, of a copy with its first {layers} of {count} layers, on {devices[0]}"


def _wider(traced: TracedModel) -> torch.dtype | None:
    """The dtype that decides where a model differs; None if its own does."""
    own = torch.finfo(traced.info.dtype).bits
    if own < 64 and any(linear.scheme.quantises_rows for linear in linears(traced.body.graph)):
        return torch.float64
    return torch.float32 if own == 16 else None


def _difference(model: PreTrainedModel, traced: TracedModel, length: int, config: Config, devices: int) -> str | None:
    """What differs first over ``length`` random tokens, as a refusal; None if nothing does."""
    # They do not depend on the global random state.
    tokens = torch.randint(traced.info.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(traced.info.device)
    with torch.no_grad():
        try:
            expected = _own_forward(model, tokens, traced.info.rope)
            actual = _cached_forward(traced, tokens, config.cache.block_size, devices)
        except (RuntimeError, IndexError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UnsupportedModelError(
                f"{traced.info.name} does not run on {length} random tokens: {reason}"
            ) from error
    _check_numbers(model, expected)
    for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        if (refusal := _compare(traced, index, ours, theirs)) is not None:
            return refusal
    return None


def _check_numbers(model: PreTrainedModel, states: list[Tensor]) -> None:
    """Say where a NaN comes from, which no comparison could."""
    if not any(bool(state.isnan().any()) for state in states):
        return
    broken = [name for name, parameter in model.named_parameters() if bool(parameter.isnan().any())]
    others = f" (and {len(broken) - 1} other parameters)" if len(broken) > 1 else ""
    source = f"{broken[0]}{others} holds NaN" if broken else f"it overflows in {model.dtype}, since no weight holds NaN"
    raise NumericsError(
        f"{type(model).__name__}'s own forward pass gives NaN: {source}. Load the model again, or in another dtype."
    )


def check_draft(drafter: BoundDrafter) -> None:
    """Refuse a draft with NaN in its weights, of which no draft would ever be accepted.

    Raises:
        NumericsError: names the module and the weight.
    """
    for part, module in drafter.modules.items():
        for name, tensor in module.named_parameters():
            # A sum is NaN where a term is; it may be for another reason, so the terms are looked at then.
            if bool(tensor.detach().sum().isnan()) and bool(tensor.isnan().any()):
                raise NumericsError(
                    f"The draft's {name} ({part}) holds NaN, so none of its drafts would be accepted; load it again, "
                    "or in another dtype."
                )


def _own_forward(model: PreTrainedModel, tokens: Tensor, rope: Rope | None = None) -> list[Tensor]:
    """Every hidden state and the logits of a plain forward pass, in which the frequencies of ``rope`` count.

    Where these are of longer sequences than ``tokens``, a second sequence beside them has the last of its positions, so
    that the model takes them by itself.
    """
    # transformers leaves hooks on a model that is asked for hidden states, and some models write into their buffers.
    own = own_copy(model, shared=nn.Parameter).eval()
    # transformers' recurrent functions compute in float32, which a check in float64 would take for a mistake.
    exact = hooked_recurrence(own) if model.dtype == torch.float64 else contextlib.nullcontext()
    beside: dict[str, Tensor] = {}
    if rope is not None and rope.length is not None:
        own(input_ids=tokens[:, :1], use_cache=False)  # a dynamic base that has grown further would stay
        positions = torch.arange(rope.length, device=tokens.device)
        count = tokens.shape[1]
        beside, tokens = {"position_ids": torch.stack([positions[:count], positions[-count:]])}, tokens.expand(2, -1)
    with exact:
        keep = {"logits_to_keep": LOGIT_ROWS} if "logits_to_keep" in inspect.signature(own.forward).parameters else {}
        out = own(input_ids=tokens, use_cache=False, output_hidden_states=True, return_dict=True, **keep, **beside)
    return [state[:1] for state in (*out.hidden_states, out.logits[:, -LOGIT_ROWS:])]


def _cached_forward(traced: TracedModel, tokens: Tensor, block_size: int, devices: int) -> list[Tensor]:
    """Every hidden state, computed in chunks of 1, 2, 3, 5, 8, ... rows with a cache, and the last logits."""
    layers = tuple(range(traced.info.num_layers + 1))
    passes = [ExposeFeatures(layers), Shard(devices), InsertKVCache(block_size), InsertRecurrentState()]
    program = list(run_passes(first_program(traced, NoDrafter()), passes)[0].values())[-1]
    logits = program.one("logits")
    program.set_output(*program.with_role("feature"), *logits.all_input_nodes)
    program.graph.erase_node(logits)
    length = tokens.shape[1]
    blocks = -(-length // block_size)
    state = allocate(program, {"B": 1, "M": blocks, "N": blocks}, traced.info.device)
    if "block_table" in state:
        # The pages are in reverse order, so that code which ignores the block table gives wrong results.
        state["block_table"].copy_(torch.arange(blocks - 1, -1, -1).unsqueeze(0))
    state["max_length"].fill_(length)
    *features, hidden = (torch.cat(parts, dim=1) for parts in zip(*_chunks(program, state, tokens), strict=True))
    return [*features, program.modules.unchanged["lm_head"](hidden[:, -LOGIT_ROWS:])]


def _chunks(program: Program, state: State, tokens: Tensor) -> list[tuple[Tensor, ...]]:
    step, results, begin, width, following = program.step(), [], 0, 1, 2
    while begin < tokens.shape[1]:
        window = tokens[:, begin : begin + width]
        rows = window.shape[1]
        # One row is padding, which must be neither written nor seen.
        padded = torch.cat([window, window.new_zeros(1, 1)], dim=1)
        state["start"].fill_(begin)
        for name in {"num_rows", "num_forced"} & {*state}:
            state[name].fill_(rows)
        outputs = step(window=padded, **state)
        results.append(tuple(map(operator.itemgetter((slice(None), slice(rows))), outputs)))
        begin, width, following = begin + rows, following, width + following
    return results


def _compare(traced: TracedModel, index: int, ours: Tensor, theirs: Tensor) -> str | None:
    """A refusal if more rows of a hidden state differ than rounding explains."""
    difference = (ours.double() - theirs.double()).norm(dim=-1) / theirs.double().norm(dim=-1).clamp_min(1e-30)
    tolerance = TOLERANCE[traced.info.dtype]
    # In half precision, rounding alone may change the expert to which a router sends a token.
    routed = any(linear.expert_ids is not None for linear in linears(traced.body.graph))
    allowed = 0.1 if routed and torch.finfo(traced.info.dtype).bits == 16 else 0.0
    wrong = ~(difference <= tolerance)
    if wrong.double().mean() <= allowed:
        return None
    layers = traced.info.num_layers
    where = "the logits" if index > layers else f"hs[{index}], the output of layer {index - 1}" if index else "hs[0]"
    row = int(wrong[0].nonzero()[0])
    return (
        f"{traced.info.name} decodes differently with a KV cache: {where} differs first, at token {row} by "
        f"{difference[0, row]:.1e} (tolerance {tolerance:.0e}). It mixes tokens outside of its attention, uses a mask "
        "that its attention does not get, or takes positions from elsewhere than position_ids, so specgraph refuses it."
    )
