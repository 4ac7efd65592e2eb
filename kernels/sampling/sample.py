"""Drawing tokens with counter-based noise, and the processing of logits before it: the definitions.

Noise is a pure function of (seed, stream, key, row, token id), never of a generator's state, so that a token's noise
does not change with the batch, the number of drafts or the order of evaluation. It comes from Philox4x32-7 (Salmon et
al. 2011, "Parallel random numbers: as easy as 1, 2, 3": the fewest rounds that pass all of BigCrush), written in int64
arithmetic that a GPU kernel reproduces bit for bit. Its key is the seed; its counter is (block, low word of ``key``,
``row``, stream and high word of ``key``).

Tokens are drawn by Gumbel-max: the first argmax of log-weights plus Gumbel noise ``-log(e)``, ``e`` exponential. Noise
is indexed by *target* token id, so a draft over a reduced vocabulary shares the target's noise where their vocabularies
meet. A token takes word ``id % 4`` of block ``id // 4``, so one block serves four neighbouring tokens. All 32 bits of a
word count, because a token that has a probability of 2**-30 is drawn only where its exponential is that small.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels.sampling.constants import (
    GREEDY_BELOW,
    KEY_STEPS,
    MULTIPLIERS,
    PHILOX_ROUNDS,
    STREAM_BITS,
    STREAM_TARGET,
)

SHARED_NOISE_RULES = ("strict", "typical", "synthetic")
"""Rules whose drafts and next tokens use the target's own noise, keyed by position."""
STEP_NOISE_RULES = ("probabilistic", "block")
"""Rules whose noise is keyed by the step, because noise of discarded rows has influenced acceptance.

It must not be used again. The *key of a step* is the position that its first row which is not forced emits: that of the
first token that the step does not know before it runs. A step that has such a row emits this token in any case, so the
next key is larger, and no two steps of a sequence share noise. The key does not depend on how a prompt is cut into
steps, nor on how much of it needs no step because its pages are shared.
"""
RULES = ("strict", "probabilistic", "block", "typical", "synthetic")

_WORD = 0xFFFFFFFF


def check_rule(rule: str) -> None:
    """Raise ``ValueError`` unless ``rule`` is one of :data:`RULES`."""
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}; got {rule!r}.")


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int = PHILOX_ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32: four random 32-bit words for each counter and key.

    Words are int64 tensors in ``[0, 2**32)`` that broadcast against each other. Products wrap modulo ``2**64``, which
    keeps both of their 32-bit halves correct.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        even, odd = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        low = odd & _WORD, even & _WORD
        c0, c2 = _high_word(odd, c1 ^ k0), _high_word(even, c3 ^ k1)
        c1, c3 = low
        k0, k1 = (k0 + KEY_STEPS[0]) & _WORD, (k1 + KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _high_word(product: Tensor, mask: Tensor) -> Tensor:
    """The upper half of a product, xor ``mask``; in place where that can be, since it is memory that takes long."""
    high = product.bitwise_right_shift_(32).bitwise_and_(_WORD)
    return high.bitwise_xor_(mask) if high.shape == mask.shape else high ^ mask


def _words(seeds: Tensor, stream: int, key: Tensor, row: Tensor | None, block: Tensor) -> tuple[Tensor, ...]:
    """The four words ``[B, R, len(block)]`` of every block."""
    seed, position = seeds.view(-1, 1, 1), key.unsqueeze(-1)
    row_index = torch.zeros_like(position) if row is None else row.unsqueeze(-1)
    last = (stream + ((position >> 32) << STREAM_BITS)) & _WORD
    return philox((block, position & _WORD, row_index & _WORD, last), (seed & _WORD, (seed >> 32) & _WORD))


def _uniform_of(word: Tensor) -> Tensor:
    """Convert words to float32 uniforms, which use 23 bits of each word.

    ``(bits + 0.5) * 2**-23`` is exact in float32 and lies in ``[2**-24, 1 - 2**-24]``.
    """
    return ((word >> 9).to(torch.float32) + 0.5) * 2.0**-23


def _exponential(word: Tensor) -> Tensor:
    """Exponentials ``-log1p(-u)`` of words, computed in place because noise is the largest tensor of a step.

    The uniform ``u = word * 2**-32 + 2**-33`` is rounded to float32, and lies in ``[2**-33, 1 - 2**-24]``.
    """
    u = word.to(torch.float32).mul_(2.0**-32).add_(2.0**-33).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_()


def uniform(seeds: Tensor | None, stream: int, key: Tensor, row: Tensor | None = None) -> Tensor:
    """One uniform of the open interval (0, 1) per row.

    Args:
        seeds: int64 ``[B]``, all 64 bits count; None gives 0.5 everywhere.
        stream: one of the ``STREAM_`` constants of :mod:`specgraph.kernels.sampling.constants`.
        key: int64 ``[B, R]``, an absolute token position.
        row: int64 ``[B, R]`` in ``[0, 2**32)``, or None for 0.

    Returns:
        float32 ``[B, R]``, never 0 or 1.
    """
    if seeds is None:
        return torch.full(key.shape, 0.5, dtype=torch.float32, device=key.device)
    first_block = torch.zeros(1, dtype=torch.int64, device=key.device)
    return _uniform_of(_words(seeds, stream, key, row, first_block)[0]).squeeze(-1)


def _token_words(seeds: Tensor, stream: int, key: Tensor, row: Tensor | None, ids: Tensor | int) -> Tensor:
    """Every token's word. If ``ids`` is a number, all four words of a block are used."""
    if isinstance(ids, Tensor):
        words = torch.stack(_words(seeds, stream, key, row, ids // 4), dim=-1)
        return words.gather(-1, (ids % 4).unsqueeze(-1).expand(*words.shape[:-1], 1)).squeeze(-1)
    block = torch.arange((ids + 3) // 4, device=key.device)
    return torch.stack(_words(seeds, stream, key, row, block), dim=-1).flatten(-2)[..., :ids]


def exponentials(seeds: Tensor, stream: int, key: Tensor, row: Tensor | None, token_ids: Tensor | int) -> Tensor:
    """Independent exponentials of rate 1 for the given token ids.

    Args:
        seeds, stream, key, row: as for :func:`uniform`.
        token_ids: int64 ``[V']``, target token ids; or a number ``V'`` for the ids ``0 .. V' - 1``. A number is about
            four times cheaper because all four words of a block are used.

    Returns:
        float32 ``[B, R, V']``, positive.
    """
    return _exponential(_token_words(seeds, stream, key, row, token_ids))


def gumbel(seeds: Tensor, stream: int, key: Tensor, row: Tensor | None, token_ids: Tensor | int) -> Tensor:
    """Gumbel noise ``-log(e)`` of :func:`exponentials`, with the same arguments: float32 ``[B, R, V']``, finite."""
    return exponentials(seeds, stream, key, row, token_ids).log_().neg_()


def clean_logits(logits: Tensor) -> Tensor:
    """Logits that a softmax can take: float32 (float64 stays), with NaN as -inf and +inf as the largest number.

    A row that has nothing but -inf gives token 0 all of the mass. Takes ``[..., V]`` of any float dtype and returns a
    new tensor of the same shape.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    cleaned = logits.to(exact).nan_to_num(nan=-torch.inf, posinf=torch.finfo(exact).max, neginf=-torch.inf)
    empty = cleaned.amax(-1) == -torch.inf
    cleaned[..., 0].masked_fill_(empty, 0.0)
    return cleaned


def process_logits(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Log-weights to sample from: temperature, then top-k, then top-p, then min-p, as transformers' warpers do.

    Args:
        logits: ``[B, R, V]`` of any float dtype. NaN counts as -inf. A row with nothing else is a point mass at token
            0.
        temperature: float ``[B]``. 0 gives a point mass at the first argmax (0 there, -inf elsewhere).
        top_k: int64 ``[B]``: keep the k largest and ties with the k-th. 0 is off. None is off for all sequences.
        top_p: float ``[B]`` in (0, 1]: keep the smallest set of most likely tokens that holds this mass, and ties with
            its last token (transformers keeps some of these ties, depending on its sort). 1 is off.
        min_p: float ``[B]`` in [0, 1]: keep tokens that are at least this fraction as likely as the most likely one. 0
            is off. The comparison is one of logarithms: the floor is the largest log-weight plus ``log(min_p)``.

    Returns:
        ``[B, R, V]`` float32, or float64 if ``logits`` are float64: unnormalised log-weights, -inf for removed tokens.
    """
    weights = clean_logits(logits)
    greedy = (temperature < GREEDY_BELOW).view(-1, 1, 1)
    divisor = temperature.to(weights.dtype).view(-1, 1, 1).masked_fill(greedy, 1.0)
    others = torch.arange(weights.shape[-1], device=weights.device) != weights.argmax(-1, keepdim=True)
    point = torch.zeros_like(weights).masked_fill_(others, -torch.inf)
    weights = torch.where(greedy, point, (weights / divisor).clamp(max=torch.finfo(weights.dtype).max))
    if top_k is not None or top_p is not None:
        weights = _keep_top(weights, top_k, top_p)
    if min_p is not None:
        floor = weights.amax(-1, keepdim=True) + min_p.double().log().to(weights.dtype).view(-1, 1, 1)
        weights = weights.masked_fill(weights < floor, -torch.inf)
    return weights


def _keep_top(weights: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Top-k, then top-p of what is left, from one sort: remove everything below the smallest value that is kept."""
    ordered = weights.sort(dim=-1).values
    if top_k is not None:
        vocab = weights.shape[-1]
        index = (vocab - top_k.clamp(1, vocab)).view(-1, 1, 1).expand(-1, weights.shape[1], 1)
        floor = ordered.gather(-1, index).masked_fill((top_k <= 0).view(-1, 1, 1), -torch.inf)
        weights = weights.masked_fill(weights < floor, -torch.inf)
        ordered = ordered.masked_fill(ordered < floor, -torch.inf)
    if top_p is not None:
        # In float64 rounding does not decide. It could at top_p = 1, but that is "off" and must leave all tokens.
        wanted = top_p.double().view(-1, 1, 1)
        cut = (ordered.double().softmax(-1).cumsum(-1) <= 1 - wanted) & (wanted < 1)
        first_kept = cut[..., :-1].sum(-1, keepdim=True)
        weights = weights.masked_fill(weights < ordered.gather(-1, first_kept), -torch.inf)
    return weights


def sample(
    processed: Tensor,
    seeds: Tensor | None,
    key: Tensor,
    row: Tensor | None = None,
    stream: int = STREAM_TARGET,
    token_ids: Tensor | None = None,
) -> Tensor:
    """Draw one token per row by Gumbel-max: the first argmax of ``processed + gumbel``.

    Args:
        processed: ``[B, R, V]`` log-weights, float32 or float64.
        seeds, key, row, stream: as for :func:`uniform`. Without seeds there is no noise, which makes no difference
            where every temperature is 0.
        token_ids: int64 ``[V]``: the target token id whose noise each entry uses. None: the entry's index.

    Returns:
        int64 ``[B, R]``: indices into ``V``, always in ``[0, V)``.
    """
    if seeds is None:
        return processed.argmax(-1)
    noise = gumbel(seeds, stream, key, row, processed.shape[-1] if token_ids is None else token_ids)
    return (processed + noise).argmax(-1)
