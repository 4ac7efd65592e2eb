"""``specgraph::route``: which experts every row of a mixture of experts meets, and with what weights, in one launch.

From the logits ``[R, E]`` of a router it computes ids and weights ``[R, K]`` of the ``K`` experts that are chosen::

    scores = f(logits)                                      f: softmax over the experts, sigmoid, or none
    choice = scores + bias                                  the bias, where there is one, only chooses
    choice = choice of the experts of the best groups       the others are -inf; a group's score is that of its best
                                                            expert or the sum of its best two
    ids = the K largest of choice, the largest first
    weights = scores[ids]                                   or the softmax over them
    weights = weights / (sum(weights) + epsilon) * scale

Written out in ATen these are up to 17 launches in each layer. Every function is computed in float32 and rounded to the
dtype that the model computes it in, because rounding can decide which of two experts is chosen.

**Ties.** Of equal choices that of the lowest expert comes first, and so it is with groups. Both forms keep to this;
``torch.topk`` promises no order. Zeros of both signs are equal, and NaN is larger than every number, as PyTorch has it.

A program computes one row with one warp, which holds all experts in registers, so that no warp waits for another. It
chooses by repeatedly taking the largest. For this, choices become integers of the same order, because a warp reduces
integers of 32 bits in one instruction. A row's bits do not depend on the other rows, since no program sees two of them
and sums have the order in which the experts were chosen, or one that follows from ``E`` alone
(:mod:`specgraph.kernels.linear.strides`).

The forms that are known are those of mixtures in transformers: ``mixtral``, ``qwen3_moe``, ``gpt_oss``, ``lfm2_moe``,
``deepseek_v3`` and those that were derived from them.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
from dataclasses import KW_ONLY, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.linear.strides import Rows, aligned
from specgraph.kernels.ops import declare, triton_or_reference

SCORINGS = ("softmax", "sigmoid", "none")
"""What makes scores of logits."""
GROUP_SCORES = ("max", "top2")
"""What makes the score of a group: its best expert, or the sum of its best two."""
MAX_EXPERTS = 512
"""The most experts that the kernel takes, which a warp holds with 16 registers each."""
_FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_TAKEN = tl.constexpr(-(1 << 31))
"""What takes part in no choice: no value has this key."""
_EXCLUDED = tl.constexpr(-0x7F800001)
"""The key of -inf."""
_NAN = tl.constexpr(0x7FFFFFFF)


@dataclass(slots=True)
class Route:
    """The chosen experts of every row: their weights ``[R, K]`` in ``weight_dtype``, and their ids, int64 ``[R, K]``.

    The largest choice comes first, and of equal ones the lowest expert.

    Attributes:
        logits: ``[R, E]``.
        bias: ``[E]`` or None: what is added to scores for the choice alone.
        top_k: ``K``, at most ``E``.
        scoring: one of :data:`SCORINGS`, computed in ``score_dtype``.
        score_dtype: the dtype of scores, and of what is computed from them; logits are converted to it.
        weight_dtype: that of the weights.
        groups: into how many groups of neighbours the experts are divided, which must be of one size.
        kept_groups: experts are chosen in so many of the groups.
        group_score: one of :data:`GROUP_SCORES`.
        softmax_chosen: whether weights are the softmax over the scores of the chosen experts.
        normalise: whether weights are divided by their sum. Not together with ``softmax_chosen``.
        epsilon: what is added to that sum.
        scale: by what weights are multiplied at last.
    """

    logits: Tensor
    bias: Tensor | None
    _: KW_ONLY
    top_k: int
    scoring: str
    score_dtype: torch.dtype
    weight_dtype: torch.dtype
    groups: int = 1
    kept_groups: int = 1
    group_score: str = "top2"
    softmax_chosen: bool = False
    normalise: bool = False
    epsilon: float = 0.0
    scale: float = 1.0

    @property
    def choice_dtype(self) -> torch.dtype:
        """The dtype of what is compared."""
        return self.score_dtype if self.bias is None else torch.promote_types(self.score_dtype, self.bias.dtype)


def route_reference(given: Route) -> tuple[Tensor, Tensor]:
    """:class:`Route` in plain PyTorch."""
    scores = _scores(given)
    choice = scores if given.bias is None else scores + given.bias
    if given.kept_groups < given.groups:
        choice = choice.masked_fill(~_in_kept_groups(given, choice), -torch.inf)
    ids = _largest(choice, given.top_k)
    weights = scores.gather(1, ids)
    if given.softmax_chosen:
        weights = weights.softmax(-1)
    if given.normalise:
        wide = torch.promote_types(weights.dtype, torch.float32)
        total = functools.reduce(torch.add, weights.to(wide).unbind(-1)).to(weights.dtype)
        weights = weights / (total + given.epsilon).unsqueeze(-1)
    if given.scale != 1:
        weights = weights * given.scale
    return weights.to(given.weight_dtype), ids


def _scores(given: Route) -> Tensor:
    logits = given.logits.to(given.score_dtype)
    if given.scoring == "none":
        return logits
    return logits.softmax(-1) if given.scoring == "softmax" else logits.sigmoid()


def _in_kept_groups(given: Route, choice: Tensor) -> Tensor:
    """Which experts of every row belong to groups that are kept, ``[R, E]``."""
    rows, experts = choice.shape
    grouped = choice.view(rows, given.groups, experts // given.groups)
    best = grouped.topk(1 if given.group_score == "max" else 2).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, _largest(best, given.kept_groups), value=True)
    return kept.repeat_interleave(grouped.shape[-1], -1)


def _largest(values: Tensor, count: int) -> Tensor:
    """The places of the largest values of every row, and of equal ones the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _keys(x):
    """Integers in the order of float32 values. NaN has the largest one, and zeros of both signs have the same."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, _NAN, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def _value(key):
    """The value of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _first(keys, places, BLOCK: tl.constexpr):
    """The largest key, and the first of the places that have it."""
    best = tl.max(keys, 0)
    return best, tl.min(tl.where(keys == best, places, BLOCK), 0)


@triton.jit
def _keep_groups(
    keys, experts, CHOICE: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """The keys ``[BLOCK]`` of all experts, of which those outside of the best groups have the key of -inf."""
    groups = tl.arange(0, BLOCK_G)  # [BLOCK_G]
    group_keys = tl.full([BLOCK_G], _TAKEN, tl.int32)
    for group in tl.static_range(GROUPS):
        own = tl.where(experts // SIZE == group, keys, _TAKEN)  # [BLOCK]
        best, place = _first(own, experts, BLOCK)
        score = _value(best)
        if PAIRS:
            second = tl.max(tl.where(experts == place, _TAKEN, own), 0)
            score = _rounded(score + _value(second), CHOICE)
        group_keys = tl.where(groups == group, _keys(score), group_keys)
    kept = experts < 0  # [BLOCK]
    for _ in tl.static_range(KEPT):
        _best, group = _first(group_keys, groups, BLOCK_G)
        kept = kept | (experts // SIZE == group)
        group_keys = tl.where(groups == group, _TAKEN, group_keys)
    return tl.where(kept | (keys == _TAKEN), keys, _EXCLUDED)


@triton.jit(do_not_specialize=["outer"])
def _route_kernel(
    weights, ids, logits, bias, outer, SCORE: tl.constexpr, CHOICE: tl.constexpr, EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, SCORING: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, PAIRS: tl.constexpr,
    SOFTMAX_CHOSEN: tl.constexpr, NORMALISE: tl.constexpr, EPSILON: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr, ALIGNMENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, which begins at a multiple of ``ALIGNMENT``. The grid is (rows)."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)  # [BLOCK]
    inside = experts < EXPERTS
    x = tl.load(logits + row * outer * ALIGNMENT + experts, mask=inside, other=float("-inf")).to(tl.float32)
    scores = _rounded(x, SCORE)  # [BLOCK]
    if SCORING == "softmax":
        powers = tl.exp(scores - tl.max(scores, 0))
        scores = _rounded(tl.div_rn(powers, tl.sum(powers, 0)), SCORE)
    if SCORING == "sigmoid":
        scores = _rounded(tl.div_rn(1.0, 1.0 + tl.exp(-scores)), SCORE)
    choice = scores
    if bias is not None:
        choice = _rounded(scores + tl.load(bias + experts, mask=inside, other=0.0).to(tl.float32), CHOICE)
    keys = tl.where(inside, _keys(choice), _TAKEN)  # [BLOCK]
    if KEPT < GROUPS:
        keys = _keep_groups(keys, experts, CHOICE, EXPERTS // GROUPS, GROUPS, KEPT, PAIRS, BLOCK, BLOCK_G)

    bits = scores.to(tl.int32, bitcast=True)  # [BLOCK]
    slots = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    chosen = tl.zeros([BLOCK_K], tl.int32)
    values = tl.zeros([BLOCK_K], tl.float32)
    largest = 0.0
    total = 0.0
    for slot in tl.static_range(TOP_K):
        _best, expert = _first(keys, experts, BLOCK)
        keys = tl.where(experts == expert, _TAKEN, keys)
        # Only the chosen one takes part, as an integer for the sake of the instruction.
        score = tl.max(tl.where(experts == expert, bits, _TAKEN), 0).to(tl.float32, bitcast=True)
        if SOFTMAX_CHOSEN:
            if slot == 0:
                largest = score
            score = tl.exp(score - largest)
        total += score
        values = tl.where(slots == slot, score, values)
        chosen = tl.where(slots == slot, expert, chosen)

    if SOFTMAX_CHOSEN:
        values = _rounded(tl.div_rn(values, total), SCORE)
    if NORMALISE:
        values = _rounded(tl.div_rn(values, _rounded(_rounded(total, SCORE) + EPSILON, SCORE)), SCORE)
    if SCALE != 1.0:
        values = _rounded(values * SCALE, SCORE)
    tl.store(weights + row * TOP_K + slots, values.to(weights.dtype.element_ty), mask=slots < TOP_K)
    tl.store(ids + row * TOP_K + slots, chosen.to(tl.int64), mask=slots < TOP_K)


def route_triton(given: Route) -> tuple[Tensor, Tensor]:
    """:class:`Route` in one kernel."""
    weights, ids = _route_fake(given)
    rows, experts = Rows.of(given.logits), given.logits.shape[1]
    _, outer, _ = rows.arguments()
    launch(
        _route_kernel, (rows.count,), weights, ids, rows.x, aligned(given.bias), outer,
        SCORE=_FLOATS[given.score_dtype], CHOICE=_FLOATS[given.choice_dtype], EXPERTS=experts, TOP_K=given.top_k,
        SCORING=given.scoring, GROUPS=given.groups, KEPT=given.kept_groups, PAIRS=given.group_score == "top2",
        SOFTMAX_CHOSEN=given.softmax_chosen, NORMALISE=given.normalise, EPSILON=given.epsilon, SCALE=given.scale,
        BLOCK=_block(experts), BLOCK_G=_block(given.groups), BLOCK_K=triton.next_power_of_2(given.top_k),
        ALIGNMENT=rows.alignment, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return weights, ids


def _block(count: int) -> int:
    """A power of two that holds so many, and a number for every lane of a warp, whose instruction reduces all lanes."""
    return max(triton.next_power_of_2(count), 32)


def _covers(given: Route) -> bool:
    dtypes = {given.logits.dtype, given.score_dtype, given.weight_dtype, given.choice_dtype}
    return dtypes <= _FLOATS.keys() and given.logits.shape[1] <= MAX_EXPERTS


def _route_fake(given: Route) -> tuple[Tensor, Tensor]:
    _check(given)
    shape = (given.logits.shape[0], given.top_k)
    return given.logits.new_empty(shape, dtype=given.weight_dtype), given.logits.new_empty(shape, dtype=torch.int64)


def _check(given: Route) -> None:
    check_shapes(given, logits="R E", bias="E")
    experts, groups, kept = given.logits.shape[1], given.groups, given.kept_groups
    scoring, score = given.scoring, given.group_score
    require(scoring in SCORINGS, lambda: f"scoring is one of {', '.join(SCORINGS)}, not {scoring!r}")
    require(score in GROUP_SCORES, lambda: f"group_score is one of {', '.join(GROUP_SCORES)}, not {score!r}")
    require(1 <= given.top_k <= experts, lambda: f"top_k is between 1 and the {experts} experts, not {given.top_k}")
    require(groups >= 1 and experts % groups == 0, lambda: f"{experts} experts are not {groups} groups of one size")
    require(1 <= kept <= groups, lambda: f"kept_groups is between 1 and the {groups} groups, not {kept}")
    pairs = kept < groups and score == "top2"
    require(not pairs or experts >= 2 * groups, lambda: "groups of one expert have no best two: give group_score='max'")
    require(
        not (given.normalise and given.softmax_chosen),
        lambda: "the softmax over the chosen experts has the sum 1 already: give softmax_chosen or normalise",
    )


ROUTE = declare("route", Route, _route_fake, triton_or_reference(route_triton, route_reference, covers=_covers))
