"""DFlash heads for the tests: files in both layouts, and the published formula in plain PyTorch.

The formula shares nothing with specgraph: no module, no cache, no layer of any library. It runs the context and the
block of every step again from the first token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.checkpoints.layouts import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, VOCAB, Written, llama_keys
from tests.models import double_model

EPS = 1e-5
MASK, BLOCK = 7, 8
DRAFT_VOCAB = 60
WINDOW = 5


@functools.cache
def target() -> PreTrainedModel:
    return double_model("llama", 0, num_hidden_layers=4, tie_word_embeddings=False)


SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
    "self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,),
}  # fmt: skip


def tensors(
    *biases: str, layers: int = 2, features: int = 2, draft_vocab: int | None = None, embedding: bool = False,
    norms: bool = True,
) -> dict[str, Tensor]:  # fmt: skip
    """Random tensors of a head; ``biases`` names the linears of all layers that have one."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (HIDDEN, features * HIDDEN),
        "hidden_norm": (HIDDEN,),
        "norm": (HIDDEN,),
    }
    for index in range(layers):
        kept = {name: shape for name, shape in SHAPES.items() if norms or name[-6:] not in ("q_norm", "k_norm")}
        shapes |= {f"layers.{index}.{name}": shape for name, shape in kept.items()}
    shapes |= {"embed_tokens": (VOCAB, HIDDEN)} if embedding else {}
    shapes |= {"lm_head": (draft_vocab, HIDDEN)} if draft_vocab else {}
    generator = torch.Generator().manual_seed(4)

    def random(name: str, shape: tuple[int, ...]) -> Tensor:
        return 0.3 * torch.randn(shape, generator=generator) + ("norm" in name)

    found = {f"{name}.weight": random(name, shape) for name, shape in shapes.items()}
    found |= {f"layers.{i}.{name}.bias": random(name, SHAPES[name][:1]) for i in range(layers) for name in biases}
    if draft_vocab:
        kept_ids = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
        found["d2t"] = kept_ids - torch.arange(draft_vocab)
        found["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept_ids, True)
    return found


def z_lab(given: dict[str, Tensor], nested: dict[str, Any] | None = None, **changed: Any) -> Written:
    """A head as z-lab's files are."""
    keys = llama_keys(model_type="qwen3", num_hidden_layers=_layers(given), architectures=["DFlashDraftModel"],
                      block_size=BLOCK, num_target_layers=4)  # fmt: skip
    own = {"mask_token_id": MASK, "target_layer_ids": [0, 2], **(nested or {})}
    written = {**keys, "dflash_config": own, **changed}
    return Written({key: value for key, value in written.items() if value is not None}, given)


def speculators(given: dict[str, Tensor], layer: dict[str, Any] | None = None, **changed: Any) -> Written:
    """A head in the layout of speculators, whose ids of hidden states count the embedding."""
    inner = llama_keys(model_type="qwen3", num_hidden_layers=_layers(given), rope_theta=500.0) | (layer or {})
    keys = {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [1, 3], "block_size": BLOCK, "draft_vocab_size": VOCAB, "mask_token_id": MASK,
        "sample_from_anchor": False, "sliding_window_non_causal": False, "target_hidden_size": None,
        "transformer_layer_config": inner,
    }  # fmt: skip
    return Written({**keys, **changed}, given)


def _layers(given: dict[str, Tensor]) -> int:
    return 1 + max(int(name.split(".")[1]) for name in given if name.startswith("layers."))


@dataclass(frozen=True)
class Seen:
    """What rows of a block see in one layer."""

    window: int | None = None
    causal: bool = False
    anchored: bool = False


@dataclass(frozen=True)
class Given:
    """A written head, and what the formula must know: its masks and the base of its rotary embedding."""

    written: Written
    seen: tuple[Seen, ...] = (Seen(), Seen())
    theta: float = 10000.0
    mask_embedding: Tensor | None = None
    shifted: bool = False


def sliding_keys() -> dict[str, Any]:
    return {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW,
            "use_sliding_window": True}  # fmt: skip


MASK_EMBEDDING = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(9))
GIVEN: dict[str, Given] = {
    "z-lab": Given(z_lab(tensors())),
    "reduced vocabulary, own embedding, biases": Given(
        z_lab(tensors("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", draft_vocab=DRAFT_VOCAB, embedding=True),
              draft_vocab_size=DRAFT_VOCAB, rope_theta=50.0),
        theta=50.0,
    ),
    "mask embedding": Given(z_lab(tensors(), {"mask_token_id": None}), mask_embedding=MASK_EMBEDDING),
    "sliding": Given(z_lab(tensors(), **sliding_keys()), (Seen(WINDOW, causal=True), Seen())),
    "causal": Given(z_lab(tensors(), {"causal_head": True}), (Seen(causal=True),) * 2),
    "windows everywhere": Given(z_lab(tensors(), {"use_swa": True, "swa_window_size": WINDOW}), (Seen(WINDOW),) * 2),
    "one layer without norms": Given(z_lab(tensors(layers=1, norms=False), model_type="llama"), (Seen(),)),
    "speculators": Given(speculators(tensors()), theta=500.0),
    "speculators, sliding": Given(
        speculators(tensors(draft_vocab=DRAFT_VOCAB), sliding_keys(), draft_vocab_size=DRAFT_VOCAB),
        (Seen(WINDOW, causal=True, anchored=True), Seen()),
        500.0,
    ),
    "speculators, from the anchor": Given(speculators(tensors(), sample_from_anchor=True), theta=500.0, shifted=True),
}  # fmt: skip


@torch.no_grad()
def block_logits(name: str, accepted: tuple[int, ...], count: int) -> Tensor:
    """Logits ``[count, Vd]`` of ``count`` drafts behind the accepted tokens."""
    return formula(name, context_of(accepted), accepted[-1], count)


@torch.no_grad()
def context_of(accepted: tuple[int, ...]) -> Tensor:
    """The target's features ``[P, 2 * Ht]`` of all accepted tokens but the last."""
    tokens = torch.tensor([accepted[:-1]])
    known = target()(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([known[k][0] for k in (1, 3)], dim=-1)


def formula(name: str, features: Tensor, anchor: int, count: int) -> Tensor:
    """Logits ``[count, Vd]`` of the drafts of a block behind a context with ``features`` ``[P, 2 * Ht]``."""
    given = GIVEN[name]
    rows = all_rows(given, features, anchor, count)
    return linear(weights_of(given), "lm_head", rows[not given.shifted :])


def weights_of(given: Given) -> dict[str, Tensor]:
    """The tensors of a head, with the target's where it has none."""
    own = {"embed_tokens.weight": target().get_input_embeddings().weight.detach(),
           "lm_head.weight": target().get_output_embeddings().weight.detach()}  # fmt: skip
    return own | {key: tensor.double() for key, tensor in given.written.tensors.items()}


def all_rows(given: Given, features: Tensor, anchor: int, count: int) -> Tensor:
    """The rows ``[R, H]`` of a block of ``count`` drafts behind the last norm, that of the anchor included."""
    weights, masks = weights_of(given), count - given.shifted
    context = _norm(weights, "hidden_norm", linear(weights, "fc", features.double()))
    x = weights["embed_tokens.weight"][[anchor] + [MASK] * masks]
    if given.mask_embedding is not None:
        x = torch.cat([x[:1], given.mask_embedding.double().expand(masks, -1)])
    for index, seen in enumerate(given.seen):
        layer = {k.removeprefix(f"layers.{index}."): v for k, v in weights.items() if k.startswith(f"layers.{index}.")}
        attention = functools.partial(_attention, layer, context=context, seen=seen, theta=given.theta)
        x = x + _around(layer, "attention", attention, _norm(layer, "input_layernorm", x))
        mlp = functools.partial(_mlp, layer)
        x = x + _around(layer, "mlp", mlp, _norm(layer, "post_attention_layernorm", x))
    return _norm(weights, "norm", x)


def _mlp(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    gate, up = (linear(weights, f"mlp.{part}_proj", x) for part in ("gate", "up"))
    return linear(weights, "mlp.down_proj", gate / (1 + torch.exp(-gate)) * up)


def _around(weights: dict[str, Tensor], name: str, sublayer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A sublayer, between the two convolutions that DFlash2 has around it."""
    base = weights.get(f"{name}_conv.base_kernel")
    if base is None:
        return sublayer(x)
    added = linear(weights, f"{name}_conv.kernel_projection", x).view(len(x), *base.shape[:2], -1)
    return _convolved(base[1], added[:, 1], sublayer(_convolved(base[0], added[:, 0], x)))


def _convolved(base: Tensor, added: Tensor, x: Tensor) -> Tensor:
    """Every channel of a row mixed with the same channel of the rows before it, by ``base`` and by the row's own
    weights, which some channels share."""
    own = added.repeat_interleave(x.shape[1] // added.shape[2], dim=2)
    out = torch.zeros_like(x)
    for tap in range(min(len(x), len(base))):
        out[tap:] += (base[tap] + own[tap:, tap]) * x[: len(x) - tap]
    return out


def linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """A linear layer by its name, with the bias that it has."""
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def _norm(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight = weights.get(f"{name}.weight")
    return x if weight is None else weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def _attention(weights: dict[str, Tensor], x: Tensor, context: Tensor, seen: Seen, theta: float) -> Tensor:
    """Rows ``x`` of a block over the rows of the context and over themselves: 4 heads, two of which share keys."""
    rows, start = torch.cat([context, x]), len(context)
    parts = {}
    for part in "qkv":
        parts[part] = linear(weights, f"self_attn.{part}_proj", rows).view(len(rows), -1, HEAD_DIM).transpose(0, 1)
    queries, keys = (_rotate(_norm(weights, f"self_attn.{part}_norm", parts[part]), theta) for part in "qk")
    keys, values = (each.repeat_interleave(HEADS // KV_HEADS, dim=0) for each in (keys, parts["v"]))
    scores = queries[:, start:] @ keys.transpose(1, 2) / math.sqrt(HEAD_DIM)
    hidden = torch.tensor([[not _sees(seen, start, row, key) for key in range(len(rows))]
                           for row in range(start, len(rows))])  # fmt: skip
    mixed = scores.masked_fill(hidden, -math.inf).softmax(-1) @ values
    return linear(weights, "self_attn.o_proj", mixed.transpose(0, 1).flatten(1))


def _sees(seen: Seen, start: int, row: int, key: int) -> bool:
    """Whether the row at position ``row`` of a block that begins at ``start`` sees the key at position ``key``."""
    if seen.causal and key > row:
        return False
    if seen.window is None:
        return True
    return start - key <= seen.window if seen.anchored else abs(row - key) < seen.window


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Pairs of elements turned by their position; the angles are float32, as transformers computes them."""
    angles = torch.arange(x.shape[1])[:, None] * (1.0 / theta ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    a, b, cos, sin = x[..., :4], x[..., 4:], angles.cos().double(), angles.sin().double()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
