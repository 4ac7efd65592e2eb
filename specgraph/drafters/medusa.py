"""Medusa: K heads over one hidden state of the target, each for a token further ahead.

Head ``i`` at row ``t`` takes ``h_t``, what the target's vocabulary projection reads, through residual blocks
``x + SiLU(W x + b)`` and a projection of its own, and predicts token ``t + 2 + i``. Nothing is kept between steps: the
drafts are a function of the last accepted row's hidden state.

Source: Cai et al. 2024, Medusa (arXiv 2401.10774); names of FasterDecoding/Medusa, and of its repacked form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from specgraph.checkpoints.checkpoint import Checkpoint, Choice
from specgraph.checkpoints.files import Files, StoredTensor
from specgraph.checkpoints.loading import HeadLoader
from specgraph.checkpoints.target import TargetTensors
from specgraph.checkpoints.writing import write_checkpoint
from specgraph.config import DraftConfig
from specgraph.drafters.base import Draft, Drafter, DraftHead, Target, check_place
from specgraph.drafters.plan import HeadPlan, random_plan
from specgraph.drafters.step import DraftStep
from specgraph.errors import ConfigError
from specgraph.ir.graphs import export_module
from specgraph.ir.model_info import ModelInfo
from specgraph.kernels import step as functions

PREFIX = "medusa_head."
"""In front of every name where the heads lie inside a whole model."""
NAMES = (
    (re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)$"), r"blocks.\1.\2.\3"),
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$"), r"blocks.\1.\2.\3"),
    (re.compile(r"(\d+)\.\d+\.weight$"), r"lm_heads.\1.weight"),
    (re.compile(r"lm_heads\.(\d+)\.weight$"), r"lm_heads.\1.weight"),
)
"""Names in files, of the released form and of the repacked one, and the module's."""
TOKEN_MAP = "token_map"
"""int64 ``[Vd]``, the target ids of a reduced vocabulary."""


@dataclass
class MedusaDraftConfig(DraftConfig):
    """Keys of ``draft`` that Medusa heads read: there are none of their own."""

    kind: str = "medusa"

    trains: ClassVar[tuple[str, ...]] = ("medusa",)


class Medusa(nn.Module):
    """The heads: ``blocks[i]`` are the residual blocks of head ``i``, ``lm_heads[i]`` is its vocabulary projection.

    Buffer: ``draft_to_target`` int64 ``[Vd]``, the target id of every draft id, or None.
    """

    def __init__(self, num_heads: int, num_blocks: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        size = hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(size, size) for _ in range(num_blocks)) for _ in range(num_heads)
        )
        self.lm_heads = nn.ModuleList(nn.Linear(size, vocab_size, bias=False) for _ in range(num_heads))
        self.draft_to_target: Tensor | None
        self.register_buffer("draft_to_target", None)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[B, 1, H]`` to logits ``[B, K, Vd]`` of all heads."""
        return torch.cat([self.step_logits(self.refine(hidden, i), i) for i in range(len(self.lm_heads))], dim=1)

    @property
    def weight(self) -> Tensor:
        """The projection ``[Vd, H]`` of the first head."""
        first = self.lm_heads[0]
        assert isinstance(first, nn.Linear)
        return first.weight

    @property
    def num_blocks(self) -> int:
        """Residual blocks of every head."""
        first = self.blocks[0]
        assert isinstance(first, nn.ModuleList)
        return len(first)

    def refine(self, hidden: Tensor, head: int) -> Tensor:
        """What the blocks of one head make of ``[..., H]``."""
        blocks = self.blocks[head]
        assert isinstance(blocks, nn.ModuleList)
        for block in blocks:
            hidden = hidden + F.silu(block(hidden))
        return hidden

    # Training, as :class:`~specgraph.drafters.shifted.ShiftedHead` describes it

    def step_logits(self, hidden: Tensor, step: int) -> Tensor:
        """Logits ``[..., Vd]`` of draft number ``step``."""
        logits: Tensor = self.lm_heads[step](hidden)
        return logits

    def unroll(
        self, tokens: Tensor, features: tuple[Tensor, ...], steps: int, mask_token_id: int | None
    ) -> Iterator[Tensor]:
        """The rows ``[B, S, H]`` in front of every head's projection; no head depends on the one before."""
        (hidden,) = features
        return (self.refine(hidden, step) for step in range(steps))

    def match_scale(self, hidden: Tensor) -> None:
        """Nothing: a new head's blocks change nothing, and its projection is a copy of the target's."""


@dataclass(frozen=True, eq=False)
class MedusaDrafter(Drafter):
    """Calls all heads once, on the hidden state of the last accepted row.

    Attributes:
        vocab_size: ``Vd``.
        dtype: of the logits.
    """

    vocab_size: int = 0
    dtype: torch.dtype = torch.float32

    kind: ClassVar[str] = "medusa"
    Config: ClassVar[type[DraftConfig]] = MedusaDraftConfig
    reads: ClassVar[str | None] = "Medusa heads"
    needs: ClassVar[str | None] = "head"
    head: ClassVar[type[nn.Module] | None] = Medusa

    def build(self, step: DraftStep) -> int:
        """One call for all drafts."""
        (hidden,) = step.features()
        last = step.call(functions.last_row, step.num_emitted, name="last")
        row = step.call(functions.take_rows, step.along_path(hidden, "path_hidden"), last, 1, name="last_hidden")
        logits = step.draft(hidden=row, name="draft_logits_0")
        step.draw(logits, 0, self.vocab_size, self.dtype, name="proposals")
        return 1

    @classmethod
    def recognise(cls, files: Files) -> Checkpoint | None:
        """By the names of its tensors, or by keys of its configuration."""
        ours = [name for name in files.tensors if module_name(name) is not None]
        if not any(name.startswith("lm_heads.") for name in map(module_name, ours) if name):
            return None
        layout = "repacked" if any(name.startswith(("blocks.", "lm_heads.")) for name in ours) else "medusa"
        return Checkpoint.of(files, cls.kind, layout, "medusa")

    @classmethod
    def choices(
        cls, checkpoint: Checkpoint, options: MedusaDraftConfig, target_layers: int | None
    ) -> tuple[Choice, ...]:
        """What is counted: configurations are often wrong about it."""
        heads, blocks = _counts(_stored(checkpoint))
        reduced = TOKEN_MAP in checkpoint.tensors
        return (Choice("num_heads", heads, "tensors"), Choice("num_blocks", blocks, "tensors"),
                Choice("reduced vocabulary", reduced, "tensors"))  # fmt: skip

    @classmethod
    def check_fit(
        cls, checkpoint: Checkpoint, options: MedusaDraftConfig, model: PreTrainedModel, info: ModelInfo
    ) -> None:
        """Make them, on whatever device the target is."""
        load_heads(checkpoint, model, info)

    @classmethod
    def make(cls, options: MedusaDraftConfig, target: Target, given: Any) -> Draft:
        """From heads, loaded or as a checkpoint."""
        notes: tuple[str, ...] = ()
        if isinstance(given, Checkpoint):
            given, notes = load_heads(given, target.model, target.info), (given.about,)
        check_place(given, given.module.weight, target.info)
        return Draft(cls.bind(given, options.num_speculative_tokens), notes=notes)

    @classmethod
    @torch.no_grad()
    def bind(cls, head: DraftHead, num_speculative_tokens: int) -> MedusaDrafter:
        """The drafter that runs the first ``num_speculative_tokens`` heads.

        Raises:
            ConfigError: there are fewer.
        """
        module: Medusa = head.module
        count, weight = len(module.lm_heads), module.weight
        if num_speculative_tokens > count:
            raise ConfigError(
                f"draft.num_speculative_tokens is {num_speculative_tokens}, but there are {count} Medusa heads, one "
                f"for each token; set it to {count} or less."
            )
        first = _first(module, num_speculative_tokens)
        hidden = weight.new_zeros(3, 1, weight.shape[1])
        graph = export_module(first, (hidden,), {"hidden": {0: torch.export.Dim("batch", min=1)}}, "draft")
        return cls(num_speculative_tokens, {"draft": graph}, {}, head.features, module.draft_to_target,
                   vocab_size=len(weight), dtype=weight.dtype)  # fmt: skip

    @classmethod
    def new_head(cls, algorithm: str, plan: HeadPlan) -> DraftHead:
        """A head with one block for every step: the block changes nothing yet, the projection is the target's."""
        rows, size = plan.projection.shape
        module = Medusa(plan.steps, 1, size, rows).to(plan.projection.device)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(plan.projection if name.startswith("lm_heads.") else torch.zeros(()))
        if plan.vocabulary is not None:
            module.register_buffer("draft_to_target", plan.vocabulary.to(plan.projection.device))
        return DraftHead(module, plan.features)

    @classmethod
    def random(cls, model: PreTrainedModel, options: MedusaDraftConfig) -> DraftHead:
        """As many heads as there are drafts."""
        text: Any = model.config.get_text_config()
        features = cls.feature_layers(text.num_hidden_layers)
        head = cls.new_head(cls.kind, random_plan(model, features, options.num_speculative_tokens))
        head.module.eval().requires_grad_(False)
        return head

    @classmethod
    def save_head(
        cls, head: DraftHead, folder: str | Path, *, target_name: str, algorithm: str, num_speculative_tokens: int,
        shared: Iterable[Tensor] = (), target_architectures: Sequence[str] = (),
    ) -> Path:  # fmt: skip
        """With the released names, as safetensors."""
        module: Medusa = head.module
        blocks = module.num_blocks
        tensors: dict[str, Tensor] = {}
        for name, value in module.named_parameters():
            kind, index, *rest = name.split(".")
            released = f"{index}.{rest[0]}.linear.{rest[1]}" if kind == "blocks" else f"{index}.{blocks}.weight"
            tensors[released] = value
        if module.draft_to_target is not None:
            tensors[TOKEN_MAP] = module.draft_to_target
        config = {"medusa_num_heads": len(module.lm_heads), "medusa_num_layers": blocks,
                  "base_model_name_or_path": target_name}  # fmt: skip
        return write_checkpoint(folder, config, tensors)


def module_name(name: str) -> str | None:
    """The module's name for a tensor of a file; None for a tensor that is not a head's."""
    for pattern, ours in NAMES:
        found = pattern.fullmatch(name.removeprefix(PREFIX))
        if found is not None:
            return found.expand(ours)
    return None


def load_heads(checkpoint: Checkpoint, model: PreTrainedModel, info: ModelInfo) -> DraftHead:
    """Build the heads on the target's device and in its dtype.

    Raises:
        ConfigError: the checkpoint does not fit the target or itself; names the tensor, the expected and found shape.
    """
    stored, spelled = _stored(checkpoint), _spelled(checkpoint)
    loader = HeadLoader(checkpoint, stored, TargetTensors.of(model, info), "Medusa heads",
                        shown=lambda name: spelled.get(name, name))  # fmt: skip
    (heads, blocks), mapped = _counts(stored), checkpoint.tensors.get(TOKEN_MAP)
    vocab = info.vocab_size if mapped is None else mapped.shape[0]
    with torch.device("meta"):
        module = Medusa(heads, blocks, info.hidden_size, vocab)
    loader.check(module)
    loader.fill(module)
    if mapped is not None:
        module.register_buffer("draft_to_target", _token_map(loader, mapped))
    return DraftHead(module.eval(), (info.num_layers,))


def _stored(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """The heads' tensors by the module's names."""
    named = ((module_name(name), tensor) for name, tensor in checkpoint.tensors.items())
    return {name: tensor for name, tensor in named if name is not None}


def _spelled(checkpoint: Checkpoint) -> dict[str, str]:
    """The file's name of every tensor, by the module's."""
    return {ours: name for name in checkpoint.tensors if (ours := module_name(name)) is not None}


def _counts(stored: Mapping[str, object]) -> tuple[int, int]:
    """Heads, and the residual blocks of each."""
    heads = [int(name.split(".")[1]) for name in stored if name.startswith("lm_heads.")]
    blocks = [int(name.split(".")[2]) for name in stored if name.startswith("blocks.")]
    return max(heads, default=-1) + 1, max(blocks, default=-1) + 1


def _token_map(loader: HeadLoader, mapped: StoredTensor) -> Tensor:
    """The target ids of a reduced vocabulary, int64 ``[Vd]``."""
    ids, info = mapped.read().long(), loader.target.info
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < info.vocab_size:
        raise ConfigError(
            f"{TOKEN_MAP} of {loader.checkpoint.path} names ids outside the target's vocabulary of {info.vocab_size}; "
            "the heads were made for another target."
        )
    return ids.to(info.device)


def _first(module: Medusa, count: int) -> Medusa:
    """The first heads alone, with the same parameters."""
    with torch.device("meta"):
        part = Medusa(0, 0, 1, 1)
    part.blocks, part.lm_heads = module.blocks[:count], module.lm_heads[:count]
    return part.eval()
