"""One module of multi-token prediction (MTP), as a module of PyTorch.

Module ``m`` (0, 1, ...) has rows like the target. At row ``p`` it reads the embedding of the token at ``p + m + 1`` and
a hidden state of row ``p``, norms both, projects the pair to the width of the model, runs one decoder layer of the
target's own class, and norms the result. The vocabulary projection then predicts the token at ``p + m + 2``.

The decoder layer is run by a model of the target's own base class that has this one layer. So masks, rotary embeddings
and experts are the model's own, and no architecture is copied.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2) for the modules; :mod:`specgraph.drafters.mtp_layouts` for what
checkpoints do differently.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from specgraph.drafters.shifted import chain_mask

Hidden = Literal["final_norm", "residual"]
BLOCK = "block.layers.0."
"""The names of the decoder layer's parameters begin with this."""


@dataclass(frozen=True)
class MtpOptions:
    """How modules are used. Published checkpoints and their implementations disagree about each of these.

    Attributes:
        family: what hidden state module ``m > 0`` reads: ``chained``, the output of module ``m - 1`` at the same row,
            or ``target``, the target's hidden state, as module 0 does.
        target_hidden: the target's hidden state behind its final norm (``final_norm``), or before (``residual``).
        fed_hidden: what is fed to the next module, or back to the last one: the output behind the module's own final
            norm, or before it.
        order: which half of the projection's input comes first, ``embedding`` or ``hidden``.
        rotary_position: the position that rotary embeddings get at row ``p``: the row's, ``p`` (``row``), or that of
            the token which the module reads there, ``p + m + 1`` (``token``). Only differences count, which are the
            same within a module.
        zero_first_embedding: whether the embedding at row 0 is replaced by zeros.
        layer_type: how the decoder layer attends, one of the target's ``layer_types``; None: as
            :mod:`specgraph.drafters.mtp_layers` says.
        mlp_type: whether it has experts (``sparse``) or not (``dense``); None: as the target's layer that it is like.
    """

    family: Literal["chained", "target"] = "chained"
    target_hidden: Hidden = "final_norm"
    fed_hidden: Hidden = "final_norm"
    order: Literal["embedding", "hidden"] = "embedding"
    rotary_position: Literal["row", "token"] = "row"
    zero_first_embedding: bool = False
    layer_type: str | None = None
    mlp_type: Literal["dense", "sparse"] | None = None


class MtpModule(nn.Module):
    """One module.

    Attributes:
        embed_tokens: the embedding, often the target's own module.
        embed_norm, hidden_norm: the norms of the embedding and of the hidden state.
        projection: ``[H, 2 * H]``.
        block: a base model of the target's class with one decoder layer, and without an embedding and a norm.
        norm: the final norm.
        lm_head: the vocabulary projection ``[V, H]``; often the target's own parameter.
        position_offset: what is added to the positions of rows for rotary embeddings.
    """

    def __init__(self, model: PreTrainedModel, block: PreTrainedModel, options: MtpOptions, index: int) -> None:
        """Make module number ``index`` for ``model`` around ``block``, a result of
        :func:`~specgraph.drafters.mtp_layers.make_block`.

        Parameters are made on the device of ``block`` and are not initialised, except for ``embed_tokens`` and
        ``lm_head``, which are those of ``model``.
        """
        super().__init__()
        parts: Any = block
        size = block.config.get_text_config().hidden_size
        self.options = options
        self.position_offset = index + 1 if options.rotary_position == "token" else 0
        self.embed_tokens: Any = _borrowed(model.get_input_embeddings())
        self.lm_head: Any = _borrowed(model.get_output_embeddings())
        self.embed_norm, self.hidden_norm, self.norm = (copy.deepcopy(parts.norm) for _ in range(3))
        first = next(block.parameters())
        self.projection = nn.Linear(2 * size, size, bias=False, device=first.device, dtype=first.dtype)
        parts.norm, parts.embed_tokens = nn.Identity(), nn.Identity()
        self.block: Any = block

    @torch.no_grad()
    def start_from_hidden(self) -> None:
        """Initialise the half of the projection that reads the hidden state with the identity."""
        size = len(self.projection.weight)
        begin = 0 if self.options.order == "hidden" else size
        self.projection.weight[:, begin : begin + size].copy_(torch.eye(size))

    def as_mask(self, seen: Tensor, beyond: int, dtype: torch.dtype) -> Tensor:
        """The mask that the block's attention takes for rows ``beyond`` positions behind those of the text.

        Args:
            seen: which keys each row sees, bool ``[1, 1, S, S * (beyond + 1)]``, without a sliding window.
            beyond: 1 for the first of these rows.
            dtype: of the mask if the block's attention is eager, which adds it to the scores.
        """
        attention: Any = self.block.layers[0].self_attn
        window = getattr(attention, "sliding_window", None) or getattr(self.block.config, "sliding_window", None)
        kinds = getattr(self.block.config, "layer_types", None) or ["sliding_attention"]
        if window is not None and kinds[0] == "sliding_attention":
            row = torch.arange(seen.shape[2], device=seen.device)
            key = row.repeat(beyond + 1) + torch.arange(beyond + 1, device=seen.device).repeat_interleave(len(row))
            seen = seen & (row.unsqueeze(1) + beyond - key < window)
        if self.block.config._attn_implementation != "eager":
            return seen
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)

    def forward(self, tokens: Tensor, positions: Tensor, hidden: Tensor, **options: Any) -> Tensor:
        """Run the block: int64 ``[B, T]`` twice and ``[B, T, H]`` to ``[B, T, H]``, without the final norm.

        ``options`` go to the base model of transformers, such as a cache.
        """
        embedding = self.embed_tokens(tokens)
        if self.options.zero_first_embedding:
            embedding = torch.where(positions.unsqueeze(-1) == 0, torch.zeros_like(embedding), embedding)
        pair = [self.embed_norm(embedding), self.hidden_norm(hidden)]
        if self.options.order == "hidden":
            pair.reverse()
        if self.position_offset:
            positions = positions + self.position_offset
        options.setdefault("use_cache", False)
        projected = self.projection(torch.cat(pair, dim=-1))
        with _entering(self.block.layers[0], projected):
            out = self.block(inputs_embeds=projected, position_ids=positions, **options)
        return out.last_hidden_state

    def normed(self, hidden: Tensor) -> Tensor:
        """Rows ``[B, R, H]`` that :meth:`forward` gave, behind the final norm."""
        return self.norm(hidden)


@contextlib.contextmanager
def _entering(layer: nn.Module, rows: Tensor) -> Iterator[None]:
    """Let ``layer`` read ``rows`` while the context lasts, whatever it is called with.

    Base models may scale what they take as embeddings, as Granite does. This is no part of a module, whose layer reads
    the result of its projection.
    """
    handle = layer.register_forward_pre_hook(lambda _, args: (rows, *args[1:]))
    try:
        yield
    finally:
        handle.remove()


def _borrowed(module: nn.Module) -> nn.Module:
    """A module that has the same parameters, and can get others and another mode without changing ``module``."""
    borrowed = copy.copy(module)
    borrowed._parameters, borrowed._buffers = dict(module._parameters), dict(module._buffers)
    return borrowed


class Mtp(nn.ModuleList):
    """The modules of a target, in order."""

    draft_to_target = None
    """All of the target's tokens are drafted."""

    @property
    def options(self) -> MtpOptions:
        """How the modules are used."""
        first: Any = self[0]
        return first.options

    # Training, as :class:`~specgraph.drafters.shifted.ShiftedHead` describes it

    def step_logits(self, hidden: Tensor, step: int) -> Tensor:
        """Logits ``[R, V]`` of rows ``[R, H]`` that :meth:`unroll` gave for draft number ``step``."""
        module: Any = self[min(step, len(self) - 1)]
        return module.lm_head(module.norm(hidden))

    def unroll(
        self, tokens: Tensor, features: tuple[Tensor, ...], steps: int, mask_token_id: int | None,
        rows: Sequence[Tensor] | None = None,
    ) -> Iterator[Tensor]:  # fmt: skip
        """For draft 0, 1, ... of every position of a text, the rows ``[B, S, H]`` from which decoding would draw it.

        Step ``i`` runs module ``i`` at every row ``t``, with the token ``x[t+1+i]``. Further steps run the last module
        one position later each, with its own output of the step before. Their row ``t`` sees the keys of the last
        module's own step up to ``t``, and the keys of its own chain.

        Args:
            tokens: int64 ``[B, S]``.
            features: the target's hidden state ``[B, S, H]``.
            steps: the number of drafts.
            mask_token_id: None, since modules do not draft in parallel.
            rows: the rows that are used; all are computed, because later rows see earlier ones.
        """
        (first,), last, length = features, len(self) - 1, tokens.shape[1]
        positions = torch.arange(length, device=tokens.device).unsqueeze(0)
        mask = chain_mask(length, max(1, steps - last), tokens.device)[..., -length:, :]
        hidden, cache = first, DynamicCache()
        for step in range(steps):
            module: Any = self[min(step, last)]
            beyond = max(0, step - last)
            chain = {"past_key_values": cache} if step >= last else {}
            if beyond:  # before, the model makes its own mask, which is causal
                chain["attention_mask"] = module.as_mask(mask[..., : (beyond + 1) * length], beyond, first.dtype)
            read = first if self.options.family == "target" and step <= last else hidden
            out = module(tokens.roll(-1 - step, dims=1), positions + beyond, read, **chain)
            yield out
            hidden = module.norm(out) if self.options.fed_hidden == "final_norm" else out

    def match_scale(self, hidden: Tensor) -> None:
        """Do nothing, because the hidden state that a module reads is normed."""
