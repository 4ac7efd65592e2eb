"""The base class of drafters that run a head, with how a head is bound, loaded, made and saved."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specgraph.checkpoints.checkpoint import Checkpoint
from specgraph.checkpoints.loading import shared_notes
from specgraph.checkpoints.writing import without_shared, write_checkpoint
from specgraph.drafters.base import Draft, Drafter, DraftHead, Target, check_place
from specgraph.drafters.plan import HeadPlan, plain_layer
from specgraph.errors import ConfigError
from specgraph.ir.model_info import ModelInfo


@dataclass(frozen=True)
class Record:
    """Facts about the training of a head, which are saved with it.

    Attributes:
        target_name: the name or folder of the target.
        algorithm: how the head was trained.
        num_speculative_tokens: K it was trained for.
        target_architectures: the class names of the target.
    """

    target_name: str
    algorithm: str
    num_speculative_tokens: int
    target_architectures: Sequence[str] = ()


class HeadDrafter(Drafter):
    """A drafter that runs a head. The class attribute ``new_layers`` is the number of layers of a new one."""

    needs: ClassVar[str | None] = "head"
    new_layers = 1

    @classmethod
    @abstractmethod
    def load(cls, checkpoint: Checkpoint, options: Any, model: PreTrainedModel, info: ModelInfo) -> DraftHead:
        """Build the head of a checkpoint on the target's device and in its dtype.

        If the checkpoint lacks a tensor that the head may borrow, or has one that equals the target's, the head uses
        the target's own tensor and not a copy. ``options`` is an instance of :attr:`Config`.

        Raises:
            ConfigError: the checkpoint does not fit the target or itself; names the tensor, the expected and found
                shape.
        """

    @classmethod
    @abstractmethod
    def bind(cls, head: DraftHead, options: Any, target: Target) -> Self:
        """The drafter that runs a loaded head.

        Raises:
            ConfigError: the head does not make so many drafts.
        """

    @classmethod
    def inputs_of(cls, module: Any) -> tuple[Tensor, int, int]:
        """A parameter of a head, the width of the hidden states that the head reads, and how many of them it reads."""
        return module.lm_head.weight, module.config.target_hidden_size, module.config.num_features

    @classmethod
    def takes(cls, given: object) -> bool:
        """Whether a loaded draft is a head of this kind. The module of one kind may derive from that of another."""
        return isinstance(given, DraftHead) and type(given.module) is cls.head

    @classmethod
    def check_fit(cls, checkpoint: Checkpoint, options: Any, model: PreTrainedModel, info: ModelInfo) -> None:
        """Load the head onto the target's device, which is ``meta`` for a target without weights."""
        cls.load(checkpoint, options, model, info)

    @classmethod
    def make(cls, options: Any, target: Target, given: Any) -> Draft:
        """Bind a loaded head, or load one from a checkpoint first."""
        notes: tuple[str, ...] = ()
        if isinstance(given, Checkpoint):
            checkpoint, given = given, cls.load(given, options, target.model, target.info)
            notes = (checkpoint.about, *cls.shared(checkpoint, options, given.module, target.model))
        weight, width, count = cls.inputs_of(given.module)
        check_place(given, weight, target.info, width=width, count=count)
        with torch.no_grad():
            return Draft(cls.bind(given, options, target), notes=notes)

    @classmethod
    def shared(cls, checkpoint: Checkpoint, options: Any, module: Any, model: PreTrainedModel) -> tuple[str, ...]:
        """A line for every tensor of a loaded head that is the target's own."""
        return shared_notes(checkpoint.tensors, module, model)

    @classmethod
    def feature_layers(cls, num_layers: int) -> tuple[int, ...]:
        """The hidden states that a new head reads of a target with so many layers: the last one, behind its norm."""
        return (num_layers,)

    @classmethod
    def plan_random(cls, model: PreTrainedModel, options: Any) -> HeadPlan:
        """A plan for a random head of one layer, as wide as the target's, that drafts the whole vocabulary."""
        text: Any = model.config.get_text_config()
        embedding: Any = model.get_input_embeddings()
        features = cls.feature_layers(text.num_hidden_layers)
        return HeadPlan(model, plain_layer(text, len(embedding.weight)), features, steps=options.num_speculative_tokens)

    @classmethod
    def random(cls, model: PreTrainedModel, options: Any) -> DraftHead:
        """A random head after :meth:`plan_random`. With ``draft.parallel``, it can draft in parallel."""
        head = cls.new_head(cls.called(bool(getattr(options, "parallel", None))), cls.plan_random(model, options))
        head.module.eval().requires_grad_(False)
        return head

    @classmethod
    @abstractmethod
    def new_head(cls, algorithm: str, plan: HeadPlan) -> DraftHead:
        """An untrained head in float32 on the target's device, for one of :attr:`Config`'s ``trains``.

        Raises:
            ConfigError: a size does not fit.
        """

    @classmethod
    def check_plan(cls, plan: HeadPlan, reads: str, drafts: str | None = None) -> None:
        """Refuse other hidden states than :meth:`feature_layers` names, and a part of the vocabulary if ``drafts``.

        ``reads`` and ``drafts`` begin the sentences of the errors, such as ``Medusa heads read``.
        """
        if drafts is not None and plan.vocabulary is not None:
            raise ConfigError(f"{drafts} the whole vocabulary; leave head.draft_vocab_size out.")
        text: Any = plan.model.config.get_text_config()
        features = cls.feature_layers(text.num_hidden_layers)
        if plan.features != features:
            raise ConfigError(
                f"{reads} the target's last hidden state, hs[{features[0]}]; leave head.feature_layers out."
            )

    @staticmethod
    @abstractmethod
    def saved_config(head: DraftHead, record: Record) -> dict[str, Any]:
        """The ``config.json`` of a head in the layout that this drafter writes.

        Raises:
            ConfigError: the layout cannot express the head.
        """

    @classmethod
    def saved_tensors(cls, head: DraftHead) -> dict[str, Tensor]:
        """The tensors of a head by their names in the file, with ``d2t`` if it drafts a part of the vocabulary."""
        tensors: dict[str, Tensor] = dict(head.module.named_parameters(remove_duplicate=False))
        ids = head.module.draft_to_target
        if ids is not None:
            tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        return tensors

    @classmethod
    def save_head(
        cls, head: DraftHead, folder: str | Path, *, target_name: str, algorithm: str, num_speculative_tokens: int,
        shared: Iterable[Tensor] = (), target_architectures: Sequence[str] = (),
    ) -> Path:  # fmt: skip
        """Write ``config.json`` and ``model.safetensors`` to ``folder``, for :meth:`recognise` to know.

        Args:
            head: the head; its tensors keep their dtypes.
            folder: the folder to write to; it is made if it is missing.
            target_name, algorithm, num_speculative_tokens, target_architectures: as in :class:`Record`.
            shared: the target's own tensors; a tensor of the head that is one of them is left out.

        Raises:
            ConfigError: the layout cannot express the head.
        """
        record = Record(target_name, algorithm, num_speculative_tokens, target_architectures)
        config = cls.saved_config(head, record)
        return write_checkpoint(folder, config, without_shared(cls.saved_tensors(head), shared))
