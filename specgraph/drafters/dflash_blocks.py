"""How rows of a block attend: in decoding, and in training, which runs the blocks behind many tokens of a text at once.

Decoding runs one block of each sequence. Its context lies in a cache, which an op reads that has no gradient. In
training, the context of a block is what the text before it gives, so that all blocks of a text share keys and values,
and each sees those below its own anchor. Attention is then plain PyTorch, with the scores of the text and those of the
block in one softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from specgraph.kernels.attention.block import Sight, sees

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, float, Sight], Tensor]
"""Attention of the rows of blocks: from their queries ``[N, Hq, T, D]``, keys and values ``[N, Hkv, T, D]``, the factor
on the scores, and the layer's mask to ``[N, T, Hq, D]``."""


def attend_in_block(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Sight) -> Tensor:
    """The op that stands for the attention over a block and its context while a head is traced; see :data:`Attend`."""
    return torch.ops.specgraph.block_attention(
        q, k, v, scale=scale, window=mask.window, causal=mask.causal, anchored=mask.anchored
    )


@dataclass(frozen=True, eq=False)
class TextBlocks:
    """Blocks of ``T`` rows behind some rows of each of ``B`` texts.

    Attributes:
        rows: int64 ``[B, A]``, for each block the last row ``t`` of its context. Its anchor is token ``t + 1``.
        positions: int64 ``[B * A, T]``, the positions of its own rows, from ``t + 1`` on.
    """

    rows: Tensor
    positions: Tensor

    @classmethod
    def behind(cls, tokens: Tensor, size: int, rows: Sequence[Tensor] | None = None) -> TextBlocks:
        """Blocks of ``size`` rows behind all rows of the texts ``tokens`` ``[B, S]``, or behind those in ``rows``.

        ``rows`` holds lists of indices into the ``B * S`` rows. Every text gets as many blocks as the one with the most
        of them, so that some blocks are behind other rows.
        """
        chosen = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        if rows is not None:
            wanted = torch.zeros(tokens.numel(), dtype=torch.bool, device=tokens.device)
            wanted[torch.cat(list(rows))] = True
            wanted = wanted.view_as(tokens)
            count = int(wanted.sum(1).max())
            chosen = wanted.int().argsort(dim=1, descending=True, stable=True)[:, :count]
        places = chosen.flatten().unsqueeze(1) + 1 + torch.arange(size, device=tokens.device)
        return cls(chosen, places)

    def tokens(self, tokens: Tensor, mask_token_id: int) -> Tensor:
        """The tokens ``[B * A, T]`` of the blocks in the texts ``tokens`` ``[B, S]``: the anchor, then mask tokens.

        Behind the last row of a text there is no anchor. Its block takes the first token, and no row that counts is in
        it.
        """
        block = torch.full_like(self.positions, mask_token_id)
        block[:, 0] = tokens.roll(-1, dims=1).gather(1, self.rows).flatten()
        return block

    def spread(self, hidden: Tensor, length: int) -> Tensor:
        """One row of each block, ``[B * A, H]``, at the row of the text that the block is behind: ``[B, S, H]``.

        ``length`` is ``S``. Rows without a block are zero.
        """
        found = self._by_text(hidden)
        empty = found.new_zeros(len(found), length, found.shape[2])
        return torch.scatter(empty, 1, self.rows.unsqueeze(2).expand_as(found), found)

    def attend(
        self, keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Sight
    ) -> Tensor:
        """An :data:`Attend` for these blocks, with ``N = B * A``, once ``keys`` and ``values`` are given.

        These are ``[B, Hkv, S, D]``, of the texts. The largest tensors are the scores ``[B, Hq, A, T, S + T]``.
        """
        length = keys.shape[2]
        # The blocks of a text stand behind the heads, and the queries that share keys become a group (g).
        k, v = (self._by_text(x).transpose(1, 2) for x in (k, v))
        q = self._by_text(torch.unflatten(q, 1, (keys.shape[1], -1))).transpose(1, 2)
        text, own = torch.einsum("bhagtd,bhsd->bhagts", q, keys), torch.einsum("bhagtd,bhaud->bhagtu", q, k)
        hidden = ~self._by_text(self._visible(length, mask))[:, None, :, None]
        weights = (scale * torch.cat([text, own], dim=-1)).masked_fill(hidden, -torch.inf).softmax(-1)
        mixed = torch.einsum("bhagts,bhsd->bahgtd", weights[..., :length], values)
        mixed = mixed + torch.einsum("bhagtu,bhaud->bahgtd", weights[..., length:], v)
        return mixed.flatten(2, 3).flatten(0, 1).transpose(1, 2)

    def _by_text(self, x: Tensor) -> Tensor:
        """``[B * A, ...]`` to ``[B, A, ...]``."""
        return torch.unflatten(x, 0, tuple(self.rows.shape))

    def _visible(self, length: int, mask: Sight) -> Tensor:
        """Which keys of a text of ``length`` tokens, and of its block, a row sees: bool ``[B * A, T, S + T]``."""
        text = torch.arange(length, device=self.positions.device).expand(len(self.positions), -1)
        visible = sees(self.positions, torch.cat([text, self.positions], dim=1), mask)
        visible[..., :length] &= (text < self.positions[:, :1]).unsqueeze(1)
        return visible
