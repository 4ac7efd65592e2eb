"""Medusa: K heads that read one hidden state of the target, and predict one token each.

At row ``t``, all heads read ``h_t``, the hidden state that the target's vocabulary projection reads. Head ``i`` applies
residual blocks ``x + SiLU(W x + b)`` and a vocabulary projection of its own, and predicts token ``t + 2 + i``. A Medusa
drafter keeps nothing between steps, because its drafts are a function of the last accepted row's hidden state.

Source: Cai et al. 2024, Medusa (arXiv 2401.10774); names of FasterDecoding/Medusa, and of its repacked form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from specgraph.checkpoints.checkpoint import Checkpoint, Choice
from specgraph.checkpoints.files import Files, StoredTensor
from specgraph.checkpoints.loading import HeadLoader
from specgraph.checkpoints.vocabulary import read_target_ids
from specgraph.config.drafters import MedusaDraftConfig
from specgraph.drafters.base import DraftHead, Target
from specgraph.drafters.heads import HeadDrafter, Record
from specgraph.drafters.plan import HeadPlan
from specgraph.drafters.step import DraftStep
from specgraph.errors import ConfigError
from specgraph.ir.exporting import export_module
from specgraph.ir.model_info import ModelInfo
from specgraph.kernels import step as functions

PREFIX = "medusa_head."
"""The prefix of the heads' names in a checkpoint that holds a whole model."""
RELEASED = re.compile(r"^(\d+)\.(\d+)\.(?:weight|(linear)\.(weight|bias))$")
"""Names of the released layout: the head, the layer and, if the layer is a residual block, its tensor. The parameters
of :class:`Medusa` have the same names."""
BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
PROJECTION = re.compile(r"^lm_heads\.(\d+)\.weight$")
"""The names of the vocabulary projections in the repacked form."""
TOKEN_MAP = "token_map"
"""The name of a tensor int64 ``[Vd]`` with the target ids of a reduced vocabulary."""


class ResidualBlock(nn.Module):
    """``x + SiLU(W x + b)``."""

    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` to the same shape."""
        return hidden + F.silu(self.linear(hidden))


class Medusa(nn.ModuleList):
    """A list of heads, each made of residual blocks and a vocabulary projection. A slice of it has some of the heads.

    ``draft_to_target`` is a buffer, int64 ``[Vd]``, with the target id of every draft id, or None.
    """

    def __init__(self, heads: Iterable[nn.Module] = ()) -> None:
        super().__init__(heads)
        self.draft_to_target: Tensor | None
        self.register_buffer("draft_to_target", None)

    @classmethod
    def of(cls, num_heads: int, num_blocks: int, hidden_size: int, vocab_size: int, bias: bool = True) -> Medusa:
        """Make ``num_heads`` heads of ``num_blocks`` blocks each. ``vocab_size`` is ``Vd``; blocks may have a bias."""
        blocks = [[ResidualBlock(hidden_size, bias) for _ in range(num_blocks)] for _ in range(num_heads)]
        return cls(nn.Sequential(*some, nn.Linear(hidden_size, vocab_size, bias=False)) for some in blocks)

    @property
    def projection(self) -> Tensor:
        """The vocabulary projection ``[Vd, H]`` of the first head."""
        return cast(nn.Linear, cast(nn.Sequential, self[0])[-1]).weight

    # Training, as :class:`~specgraph.drafters.shifted.ShiftedHead` describes it

    def step_logits(self, hidden: Tensor, step: int) -> Tensor:
        """Logits ``[R, Vd]`` of rows ``[R, H]`` that :meth:`unroll` gave for draft number ``step``."""
        head: Any = self[step]
        return head[-1](hidden)

    def unroll(
        self, tokens: Tensor, features: tuple[Tensor, ...], steps: int, mask_token_id: int | None,
        rows: Sequence[Tensor] | None = None,
    ) -> Iterator[Tensor]:  # fmt: skip
        """For each head, the rows ``[B, S, H]`` that its projection reads. No head depends on another one."""
        heads: Any = self
        return (heads[step][:-1](features[0]) for step in range(steps))

    def match_scale(self, hidden: Tensor) -> None:
        """Do nothing, because a new head passes on the hidden state that it reads, which has the right scale."""


class _Together(nn.Module):
    """The heads as one module, which is called once for all drafts."""

    def __init__(self, heads: nn.ModuleList) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, hidden: Tensor) -> Tensor:
        """``[B, 1, H]`` to the logits ``[B, K, Vd]`` of all heads."""
        return torch.cat([head(hidden) for head in self.heads], dim=1)


@dataclass(frozen=True, eq=False)
class MedusaDrafter(HeadDrafter):
    """Calls all heads once, on the hidden state of the last accepted row.

    Attributes:
        vocab_size: ``Vd``, the number of logits of each head.
        dtype: the dtype of the logits.
    """

    vocab_size: int = 0
    dtype: torch.dtype = torch.float32

    Config = MedusaDraftConfig
    reads = "Medusa heads"
    head = Medusa

    def build(self, step: DraftStep) -> int:
        """Append one call that gives the logits of all drafts, and draw the drafts from them."""
        (hidden,) = step.features()
        row = step.call(functions.take_rows, hidden, step.last, 1, name="last_hidden")
        logits = step.draft(hidden=row, name="head_logits")
        step.draw(logits, 0, self.vocab_size, self.dtype, name="proposals")
        return 1

    @classmethod
    def recognise(cls, files: Files) -> Checkpoint | None:
        """Recognise Medusa heads by the names of their tensors, or by the key ``medusa_num_heads``."""
        stored = StoredHeads.of(files.tensors)
        if not stored.num_heads and "medusa_num_heads" not in files.config:
            return None
        return Checkpoint.of(files, cls.kind, "repacked" if stored.repacked else "medusa", "medusa")

    @classmethod
    def choices(cls, checkpoint: Checkpoint, options: Any, target_layers: int | None) -> tuple[Choice, ...]:
        """The numbers of heads and blocks, counted from the tensors because configurations are often wrong."""
        stored = StoredHeads.of(checkpoint.tensors)
        found = {"num_heads": stored.num_heads, "num_blocks": stored.num_blocks, TOKEN_MAP: TOKEN_MAP in stored.tensors}
        return tuple(Choice(name, value, "tensors") for name, value in found.items())

    @classmethod
    def load(cls, checkpoint: Checkpoint, options: Any, model: PreTrainedModel, info: ModelInfo) -> DraftHead:
        """Load the heads that make the drafts; further ones are checked, and not read."""
        stored = StoredHeads.of(checkpoint.tensors)
        if not stored.num_heads:
            raise ConfigError(
                f"{checkpoint.path} holds no Medusa heads, whose tensors have names such as 0.0.linear.weight; give "
                "the path of the file that does, which is often medusa_lm_head.pt."
            )
        loader = HeadLoader(checkpoint, stored.tensors, model, info, "a set of Medusa heads", re.compile(TOKEN_MAP),
                            stored.shown)  # fmt: skip
        ids = read_target_ids(loader, TOKEN_MAP) if TOKEN_MAP in stored.tensors else None
        vocab = info.vocab_size if ids is None else len(ids)
        biases = any(name.endswith(".bias") for name in stored.tensors)  # the repacked form may have none
        with torch.device("meta"):
            module = Medusa.of(stored.num_heads, stored.num_blocks, info.hidden_size, vocab, biases)
        loader.check(module)
        first = cast(Medusa, module[: options.num_speculative_tokens])
        loader.fill(first)
        first.draft_to_target = ids
        return DraftHead(first.eval(), (info.num_layers,))

    @classmethod
    def inputs_of(cls, module: Medusa) -> tuple[Tensor, int, int]:
        """Heads read one hidden state, as wide as their projection."""
        return module.projection, module.projection.shape[1], 1

    @classmethod
    def bind(cls, head: DraftHead, options: Any, target: Target) -> Self:
        """The drafter that runs the first ``num_speculative_tokens`` heads.

        Raises:
            ConfigError: there are fewer heads.
        """
        module: Medusa = head.module
        count, weight, num_speculative_tokens = len(module), module.projection, options.num_speculative_tokens
        if num_speculative_tokens > count:
            raise ConfigError(
                f"draft.num_speculative_tokens is {num_speculative_tokens}, but there are {count} Medusa heads, one "
                f"for each token; set it to {count} or less."
            )
        hidden, dims = weight.new_zeros(3, 1, weight.shape[1]), {0: torch.export.Dim("batch", min=1)}
        graph = export_module(_Together(module[:num_speculative_tokens]), (hidden,), {"hidden": dims}, "draft")
        return cls(num_speculative_tokens, {"draft": graph}, {}, head.features, module.draft_to_target,
                   vocab_size=len(weight), dtype=weight.dtype)  # fmt: skip

    @classmethod
    @torch.no_grad()
    def new_head(cls, algorithm: str, plan: HeadPlan) -> DraftHead:
        """Untrained heads, one for each draft of the plan, with one block for each of its layers.

        The weights of the blocks are zero and the projections are copies of the target's, so that a new head passes on
        the hidden state that it reads.
        """
        cls.check_plan(plan, "Medusa heads read")
        rows, size = plan.projection.shape
        module = Medusa.of(plan.steps, plan.layers.num_hidden_layers, size, rows).to(plan.projection.device)
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.zeros(()) if ".linear." in name else plan.projection)
        if plan.vocabulary is not None:
            module.draft_to_target = plan.vocabulary.to(plan.projection.device)
        return DraftHead(module, plan.features)

    @classmethod
    def random(cls, model: PreTrainedModel, options: MedusaDraftConfig) -> DraftHead:
        """One head with one block for each draft, whose projection is none that the target has."""
        plan = cls.plan_random(model, options)
        rows, size = plan.projection.shape
        module = Medusa.of(plan.steps, 1, size, rows).to(plan.projection)
        return DraftHead(module.eval().requires_grad_(False), plan.features)

    @staticmethod
    def saved_config(head: DraftHead, record: Record) -> dict[str, Any]:
        """The configuration of the released layout."""
        return {"medusa_num_heads": len(head.module), "medusa_num_layers": len(head.module[0]) - 1,
                "base_model_name_or_path": record.target_name}  # fmt: skip

    @classmethod
    def saved_tensors(cls, head: DraftHead) -> dict[str, Tensor]:
        """The tensors of the released layout, with :data:`TOKEN_MAP` if the heads draft a part of the vocabulary."""
        ids = head.module.draft_to_target
        return {**dict(head.module.named_parameters()), **({} if ids is None else {TOKEN_MAP: ids})}


@dataclass(frozen=True, eq=False)
class StoredHeads:
    """The heads that a checkpoint holds.

    Attributes:
        tensors: the tensors of the heads, by the names of :class:`Medusa`; other tensors keep their names.
        num_heads, num_blocks: the number of heads, and of residual blocks in each, by the highest index in the names.
        prefix: the prefix of the names in the file.
        repacked: whether the file has the repacked form.
    """

    tensors: dict[str, StoredTensor]
    num_heads: int
    num_blocks: int
    prefix: str
    repacked: bool

    @classmethod
    def of(cls, tensors: Mapping[str, StoredTensor]) -> StoredHeads:
        """The heads of a checkpoint. If names have the prefix, tensors without it belong to another model."""
        prefix = PREFIX if any(name.startswith(PREFIX) for name in tensors) else ""
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        blocks = [int(match[2]) + 1 for name in own if (match := BLOCK.match(name))]
        repacked = bool(blocks) or any(map(PROJECTION.match, own))
        if repacked:
            last = rf"\1.{max(blocks, default=0)}.weight"
            own = {BLOCK.sub(r"\1.\2.linear.\3", PROJECTION.sub(last, name)): own[name] for name in own}
        found = [match for name in own if (match := RELEASED.match(name))]
        num_heads = max((int(match[1]) + 1 for match in found), default=0)
        num_blocks = max((int(match[2]) + bool(match[3]) for match in found), default=0)
        return cls(own, num_heads, num_blocks, prefix, repacked)

    def shown(self, name: str) -> str:
        """The name that a parameter has in the file, or would have if the file held it."""
        match = RELEASED.match(name)
        if self.repacked and match is not None:
            head, layer, block, leaf = match.groups()
            name = f"blocks.{head}.layers.{layer}.{leaf}" if block else f"lm_heads.{head}.weight"
        return self.prefix + name
