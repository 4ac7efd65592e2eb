"""``specgraph::add_biases``: a number is added to the logits of tokens that would complete given words.

A *word* is a sequence of tokens. Its last token gets the word's bias in every row whose context ends with the tokens
before it; a word of one token gets it everywhere. The bias of a word may hold only until a number of tokens has been
generated. Several words may give a token its bias, and these add up. A bias of minus infinity forbids a token. So
forbidden words, tokens that are suppressed, at the beginning or always, and an EOS that is forbidden until a sequence
is long enough are all words of this kind. Results are float32, or float64 for float64 logits.

The words of sequence ``b`` lie one behind the other in ``bias_tokens[b]``, and ``bias_ends[b]`` says where each of them
ends. A sequence may have fewer words than there is room for.

Programs. One launch copies the logits. The second has a program per row and block of words, and finds the words whose
beginning is there: their biases ``[B, R, L]``. The third has such programs, too. Each adds up all biases of the last
token of each of its words, in the order of the words, and writes the logit. Words with the same last token write the
same value, so that no order matters. Rows of 128,000 logits take longer to copy than some hundred words take to check.

A row is computed alone, so its bits do not depend on other rows, nor on the number of drafts.

Source: ``SequenceBiasLogitsProcessor`` and ``NoBadWordsLogitsProcessor`` of transformers.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.attention.tiles import loop_bound
from specgraph.kernels.launch import contiguous, dense_rows
from specgraph.kernels.processors.context import (
    CONTEXT,
    Context,
    check,
    copied,
    declare_processor,
    load_context,
    row_context,
)

BLOCK = 64
"""Words of a program."""


@dataclass(slots=True)
class AddBiases(Context):
    """Add the biases of words to the logits of their last tokens.

    Args:
        prompt_length: int64 ``[B]``; tokens at positions from here on were generated.
        bias_tokens: int64 ``[B, P]``, the tokens of all words of a sequence, one word behind the other.
        bias_ends: int64 ``[B, L]``, where each word ends in ``bias_tokens``; it begins where the word before it ends.
            Behind the last word of a sequence there are zeros.
        bias_values: float ``[B, L]``, what is added.
        bias_until: int64 ``[B, L]``, the number of generated tokens from which on the word's bias does not hold.

    Returns:
        ``[B, R, V]``, float32, or float64 for float64 logits.
    """

    SHAPES: ClassVar = {
        **Context.SHAPES, "prompt_length": "B", "bias_tokens": "B P",
        **dict.fromkeys(("bias_ends", "bias_values", "bias_until"), "B L"),
    }
    prompt_length: Tensor
    bias_tokens: Tensor
    bias_ends: Tensor
    bias_values: Tensor
    bias_until: Tensor


def add_biases_reference(given: AddBiases) -> Tensor:
    """:class:`AddBiases` in plain PyTorch, on what there is of words and tokens."""
    sizes = (given.bias_ends - torch.nn.functional.pad(given.bias_ends[:, :-1], (1, 0))).clamp_min(0)
    words, longest = max([1, *(sizes > 0).sum(1).tolist()]), max([1, *sizes.flatten().tolist()])
    known = replace(
        given, history=given.history[:, : max([1, *given.start.tolist()])], bias_ends=given.bias_ends[:, :words],
        bias_values=given.bias_values[:, :words], bias_until=given.bias_until[:, :words],
    )
    return _biased(known, longest)


def _biased(given: AddBiases, longest: int) -> Tensor:
    """``longest``: no word has more tokens."""
    check(given)
    out, (batch, count, vocab) = copied(given.logits), given.logits.shape
    begins = torch.nn.functional.pad(given.bias_ends[:, :-1], (1, 0))
    size = given.bias_ends - begins
    length = given.lengths()
    generated = length - given.prompt_length.unsqueeze(1)
    holds = (size > 0).unsqueeze(1) & (generated.unsqueeze(2) < given.bias_until.unsqueeze(1))
    context = given.by_position()
    for back in range(1, longest):
        wanted = given.bias_tokens.gather(1, (given.bias_ends - 1 - back).clamp_min(0)).unsqueeze(1)
        place = length - back
        found = context.gather(1, place.clamp(0, context.shape[1] - 1)).unsqueeze(2)
        equal = (found == wanted) & (place >= 0).unsqueeze(2)
        holds &= equal | (size <= back).unsqueeze(1)
    last = given.bias_tokens.gather(1, (given.bias_ends - 1).clamp_min(0)).unsqueeze(1).expand(-1, count, -1)
    inside = holds & (last >= 0) & (last < vocab)
    biases = torch.where(inside, given.bias_values.to(out.dtype).unsqueeze(1), 0.0)
    total = torch.zeros(batch, count, vocab + 1, dtype=out.dtype, device=out.device)
    return out.add_(total.scatter_add_(2, torch.where(inside, last, vocab), biases)[..., :vocab])


@triton.jit(do_not_specialize=["count", "width", "words"])
def _match_kernel(
    found_ptr, history_ptr, rows_ptr, window_ptr, start_ptr, num_forced_ptr, prompt_length_ptr, tokens_ptr, ends_ptr,
    values_ptr, until_ptr, stride, longest, count, width, words, total, BLOCK: tl.constexpr,
):
    """The biases of a block of words in one row. The grid is (blocks, R, B)."""
    r, b = tl.program_id(1), tl.program_id(2)
    row, start, length = row_context(rows_ptr, start_ptr, num_forced_ptr, b, r, longest, count, width)
    # Words are lanes: [BLOCK].
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = word < words
    end = tl.load(ends_ptr + b * words + word, mask=known, other=0).to(tl.int32)
    begin = tl.load(ends_ptr + b * words + word - 1, mask=known & (word > 0), other=0).to(tl.int32)
    generated = length - tl.load(prompt_length_ptr + b)
    until = tl.load(until_ptr + b * words + word, mask=known, other=0)
    holds = known & (end > begin) & (generated < until)
    # ---- holds = the tokens before the word's last one end the context: compared from the last of them on
    longest_word = tl.max(tl.where(holds, end - begin, 0), 0)
    for back in range(1, loop_bound(longest_word)):
        compared = holds & (end - begin > back)
        wanted = tl.load(tokens_ptr + b * total + end - 1 - back, mask=compared, other=-2)
        place = tl.full((BLOCK,), 0, tl.int32) + length - back
        at = load_context(history_ptr + row * stride, window_ptr + b * width, place, start, length, compared)
        holds = holds & ((end - begin <= back) | (at == wanted))
    value = tl.load(values_ptr + b * words + word, mask=holds, other=0.0).to(tl.float32)
    tl.store(found_ptr + (b * count + r) * words + word, value, mask=known)


@triton.jit(do_not_specialize=["count", "words"])
def _add_kernel(out_ptr, logits_ptr, found_ptr, tokens_ptr, ends_ptr, count, vocab, words, total, BLOCK: tl.constexpr):
    """Write the logits of the last tokens of a block of words in one row. The grid is (blocks, R, B)."""
    r, b = tl.program_id(1), tl.program_id(2)
    line = b * count + r
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(ends_ptr + b * words + word, mask=word < words, other=0)
    begin = tl.load(ends_ptr + b * words + word - 1, mask=(word < words) & (word > 0), other=0)
    token = tl.load(tokens_ptr + b * total + end - 1, mask=end > begin, other=-1)
    inside = (token >= 0) & (token < vocab)
    # ---- bias = sum over all words with the same last token, in the order of the words: [BLOCK]
    bias = tl.zeros((BLOCK,), tl.float32)
    for other in range(loop_bound(words)):
        other_end = tl.load(ends_ptr + b * words + other)
        other_token = tl.load(tokens_ptr + b * total + other_end - 1, mask=other_end > 0, other=-1)
        value = tl.load(found_ptr + line * words + other)
        bias += tl.where(token == other_token, value, 0.0)
    at = line.to(tl.int64) * vocab + token
    x = tl.load(logits_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, x + bias, mask=inside)


def add_biases_triton(given: AddBiases) -> Tensor:
    """:class:`AddBiases` in three launches."""
    logits = given.logits.contiguous()
    batch, count, vocab = logits.shape
    words, total = given.bias_ends.shape[1], given.bias_tokens.shape[1]
    out = copied(logits)
    if out.numel() == 0:
        return out
    found = torch.empty(batch, count, words, dtype=torch.float32, device=logits.device)
    history, context = dense_rows(given.history), contiguous(given, *CONTEXT, "prompt_length")
    tokens, ends, *rest = contiguous(given, "bias_tokens", "bias_ends", "bias_values", "bias_until")
    grid = (triton.cdiv(words, BLOCK), count, batch)
    _match_kernel[grid](
        found, history, *context, tokens, ends, *rest, history.stride(0), history.shape[1], count,
        given.window.shape[1], words, total, BLOCK=BLOCK, num_warps=2,
    )
    _add_kernel[grid](out, logits, found, tokens, ends, count, vocab, words, total, BLOCK=BLOCK, num_warps=2)
    return out


ADD_BIASES = declare_processor("add_biases", AddBiases, add_biases_triton, add_biases_reference)
