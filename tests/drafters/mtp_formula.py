"""MTP modules for the tests: random ones for any target, and what they draft by their definition, without a cache.

The definition runs every row of every module again from the first token, through the modules' own decoder layers in
transformers. Of specgraph's step graph, its kept rows and its caches it knows nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from specgraph.drafters.base import DraftHead
from specgraph.drafters.mtp import Mtp, MtpDrafter
from specgraph.drafters.mtp_layers import make_block
from specgraph.drafters.mtp_module import MtpModule, MtpOptions
from tests.detectors import NextLogits
from tests.models import MORE, double_model, exact_norms


@functools.cache
def target(architecture: str = "llama") -> PreTrainedModel:
    """One that computes in float64 throughout: routers of experts round to float32."""
    dense = {"mlp_layer_types": ["dense", "dense"]} if architecture in MORE else {}
    return double_model(architecture, 0, **dense)


CHAINED, FED = MtpOptions(), MtpOptions(family="target")
OTHER = MtpOptions(fed_hidden="residual", order="hidden", rotary_position="token", zero_first_embedding=True)
MIMO_V2 = MtpOptions(family="target", layer_type="sliding_attention", mlp_type="dense")
STEP = MtpOptions(target_hidden="residual", fed_hidden="residual", layer_type="sliding_attention", mlp_type="dense")


@functools.cache
def modules(architecture: str, count: int, options: MtpOptions = CHAINED, own_heads: bool = False) -> DraftHead:
    """Random modules with different weights, computing in float64 throughout."""
    model = target(architecture)
    made = Mtp(MtpModule(model, make_block(model, "cpu", options), options, index) for index in range(count))
    shared = {id(p) for p in model.parameters()}
    generator = torch.Generator().manual_seed(11)
    for name, parameter in made.named_parameters():
        if id(parameter) not in shared:
            noise = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = noise + (1.0 if "norm" in name else 0.0)
    if own_heads:
        for module in made:
            projection: Any = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
            projection.weight.data = 0.3 * torch.randn(
                projection.weight.shape, generator=generator, dtype=torch.float64
            )
            module.lm_head = projection
    exact_norms(made)
    return DraftHead(
        made.eval().requires_grad_(False), (MtpDrafter.hidden_layer(options, model.config.num_hidden_layers),)
    )


def definition(architecture: str, head: DraftHead, beyond: str = "continue") -> NextLogits:
    """:func:`drafted_logits` for one of the targets of the tests."""
    return drafted_logits(target(architecture), head, beyond)


def drafted_logits(  # noqa: C901 (functions that share their caches)
    model: PreTrainedModel, head: DraftHead, beyond: str = "continue"
) -> NextLogits:
    """The logits of the next draft, from the accepted tokens and the drafts before it."""
    used, options = head.module, head.module.options

    @functools.cache
    @torch.no_grad()
    def hidden_states(tokens: tuple[int, ...]) -> Tensor:
        base: Any = model.base_model
        entered: list[Tensor] = []
        hook = base.norm.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
        normed: Tensor = base(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state
        hook.remove()
        return normed if options.target_hidden == "final_norm" else entered[0]

    def fed(module: MtpModule, rows: Tensor) -> Tensor:
        normed: Tensor = module.norm(rows) if options.fed_hidden == "final_norm" else rows
        return normed

    @functools.cache
    @torch.no_grad()
    def rows_of(index: int, text: tuple[int, ...], verified: int) -> tuple[Tensor, Tensor]:
        """What module ``index`` reads at every row up to the last of ``text``, and what its layers give there."""
        module, first = used[index], hidden_states(text[:verified][:-1])
        if index and options.family == "chained":
            before = used[index - 1]
            first = fed(before, rows_of(index - 1, text[:-1], verified)[1][:, : verified - 1])
        hidden = first
        tokens = torch.tensor([text[index + 1 :]])
        while True:
            # Behind the last verified row a module reads its own output.
            count = hidden.shape[1]
            out = module(tokens[:, :count], torch.arange(count)[None], hidden)
            if count == tokens.shape[1]:
                return hidden, out
            hidden = torch.cat([hidden, fed(module, out)[:, -1:]], dim=1)

    @functools.cache
    @torch.no_grad()
    def in_turn(drafted: int, text: tuple[int, ...], verified: int) -> tuple[Tensor, Tensor]:
        """What draft number ``drafted`` reads and gives at the last row, if modules take turns there."""
        row, count = verified - 2, len(used)
        if drafted < count:
            hidden, out = rows_of(drafted, text[: verified + drafted], verified)
            return hidden[:, -1:], out[:, -1:]
        module, before = used[drafted % count], used[(drafted - 1) % count]
        cache = DynamicCache()
        # The rows before are those of the module's own call, and the last one is the new one.
        index = drafted % count
        regular = rows_of(index, text[: verified + index], verified)[0]
        module(torch.tensor([text[index + 1 : verified + index]]), torch.arange(row + 1)[None], regular,
               past_key_values=cache)  # fmt: skip
        hidden = regular[:, -1:]
        if options.family == "chained":
            hidden = fed(before, in_turn(drafted - 1, text[:-1], verified)[1])
        mask = torch.ones(1, 1, 1, row + 2, dtype=torch.bool).index_fill(3, torch.tensor([row]), False)
        token, place = torch.tensor([text[verified + drafted - 1 :]]), torch.tensor([[row]])
        return hidden, module(token, place, hidden, past_key_values=cache, attention_mask=mask)

    @torch.no_grad()
    def one(accepted: tuple[int, ...], drafted: tuple[int, ...]) -> Tensor:
        index = min(len(drafted), len(used) - 1)
        if beyond == "turns":
            index, rows = len(drafted) % len(used), in_turn(len(drafted), accepted + drafted, len(accepted))[1]
        else:
            rows = rows_of(index, accepted + drafted, len(accepted))[1]
        logits: Tensor = used[index].lm_head(used[index].norm(rows[:, -1]))[0]
        return logits

    def next_logits(accepted: Sequence[list[int]], drafted: Sequence[list[int]]) -> Tensor:
        return torch.stack([one(tuple(a), tuple(d)) for a, d in zip(accepted, drafted, strict=True)])

    return next_logits
