"""The interface of drafters: the class that the registry finds, and the objects that it is given.

A drafter is one class in one file, ``specgraph/drafters/<kind>.py``. Its configuration class stands in
``specgraph/config/drafters.py``, or beside a drafter from outside this package. The class of the drafter is the
registry entry: it recognises and loads the checkpoints that are for it. An instance is bound to one target: it holds
the traced modules, says what it reads of the target, and writes its nodes into the step graph.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from specgraph.checkpoints.checkpoint import Checkpoint, Choice
from specgraph.checkpoints.files import Files
from specgraph.config import DraftConfig
from specgraph.errors import ConfigError
from specgraph.frontend.tracing import TracedModel
from specgraph.ir.drafter import BoundDrafter
from specgraph.ir.model_info import ModelInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel


DraftLike: TypeAlias = "PreTrainedModel | DraftHead | Checkpoint | str | Path"
"""The types of values that ``draft=`` takes."""


@dataclass(frozen=True, eq=False)
class DraftHead:
    """A loaded head and how it is used.

    Attributes:
        module: on the target's device and in its dtype; its parameters are not copied. Its class says which drafter
            runs it.
        features: indices ``k`` of the target hidden states ``hs[k]`` it reads, in the order it takes them in.
        mask_token_id: the mask token of a head that can draft in parallel.
        parallel: it was trained for that, which is then the default.
    """

    module: Any
    features: tuple[int, ...]
    mask_token_id: int | None = None
    parallel: bool = False


@dataclass(frozen=True, eq=False)
class Target:
    """The target that a drafter is bound to, as a model and as it was traced.

    ``max_length`` is the longest sequence of the decoder; None leaves it to the target. ``rule`` is the one by which
    drafts will be verified.
    """

    model: PreTrainedModel
    traced: TracedModel
    max_length: int | None = None
    rule: str = "strict"

    @property
    def info(self) -> ModelInfo:
        """Facts about the target."""
        return self.traced.info


def chooses_drafts(options: DraftConfig, rule: str, device: torch.device) -> bool:
    """Whether K is chosen for every step: where that is asked for, and on a CPU for drafts that the host may look at,
    unless a K was given."""
    if options.num_speculative_tokens_by_load is not None:
        return False
    # Under other rules than strict tokens depend on K. If that depends on times, too, a seed does not repeat a run.
    return bool(options.adaptive) or (options.adaptive is None and rule == "strict" and device.type == "cpu")


class Drafter(BoundDrafter):
    """A drafter of the registry.

    Class attributes: ``Config`` is its configuration class, ``kind`` its name in the configuration, by default that of
    ``Config``, ``reads`` what checkpoints it reads, in words, ``needs`` what ``draft=`` must give it (None: nothing),
    ``fallback`` whether it recognises what no other drafter does, ``head`` the class of the modules that a
    :class:`DraftHead` holds for it.
    """

    kind: ClassVar[str]
    Config: ClassVar[type[DraftConfig]] = DraftConfig
    reads: ClassVar[str | None] = None
    needs: ClassVar[str | None] = None
    fallback: ClassVar[bool] = False
    head: ClassVar[type[nn.Module] | None] = None

    def __init_subclass__(cls) -> None:
        if "Config" in vars(cls) and "kind" not in vars(cls):
            cls.kind = cls.Config.kind

    @classmethod
    def called(cls, parallel: bool) -> str:
        """The name of the drafter in reports. ``parallel`` says whether it drafts all tokens in one call."""
        return cls.kind

    @property
    def name(self) -> str:
        """The name of the drafter in reports."""
        return self.called(self.parallel)

    @property
    def model(self) -> ModelInfo:
        """Facts about the network that makes the drafts, or about the first of several that are alike."""
        return next(iter(self.models.values()))

    @property
    def shifted(self) -> bool:
        """Whether row ``t`` of its chain takes token ``t + 1`` and a hidden state."""
        return self.chained and bool(self.features)

    # The registry entry

    @classmethod
    @abstractmethod
    def make(cls, options: Any, target: Target, given: Any) -> Draft:
        """Bind the drafter to ``target``.

        Args:
            options: an instance of :attr:`Config`.
            target: the traced target.
            given: what ``draft=`` gave: a :class:`~specgraph.checkpoints.checkpoint.Checkpoint` that :meth:`recognise`
                returned, a loaded draft that :meth:`takes` accepts, the name of a model, or None.

        Raises:
            ConfigError: the draft does not fit the target, or an option the draft.
        """

    @classmethod
    def recognise(cls, files: Files) -> Checkpoint | None:
        """The checkpoint in ``files`` if this drafter runs it, judged by its configuration and its tensors' names."""
        return None

    @classmethod
    def recognise_inside(cls, files: Files) -> Checkpoint | None:
        """Like :meth:`recognise`, also where the files hold a whole model that could be a draft model.

        Only the drafter that the configuration names is asked.
        """
        return cls.recognise(files)

    @classmethod
    def takes(cls, given: object) -> bool:
        """Whether a loaded draft is for this drafter."""
        return False

    @classmethod
    def choices(cls, checkpoint: Checkpoint, options: Any, target_layers: int | None) -> tuple[Choice, ...]:
        """How a checkpoint would be used: every option, its value and where it is from, for ``inspect``."""
        return ()

    @classmethod
    def check_fit(cls, checkpoint: Checkpoint, options: Any, model: PreTrainedModel, info: ModelInfo) -> None:
        """Raise ``ConfigError`` if a checkpoint does not fit a target whose weights are not loaded."""
        raise ConfigError(f"{checkpoint.path}: {cls.kind} runs no checkpoints.")

    @classmethod
    def random(cls, model: PreTrainedModel, options: Any) -> DraftHead | None:
        """A head with random weights for ``bench``; None if this drafter needs none, or has none of that kind."""
        return None


@dataclass(frozen=True, eq=False)
class Draft:
    """A bound drafter, and the model behind it if it is a causal LM of its own: that is checked as the target is."""

    drafter: Drafter
    model: PreTrainedModel | None = None
    traced: TracedModel | None = None
    notes: tuple[str, ...] = ()


def check_place(head: DraftHead, weight: Tensor, info: ModelInfo, *, width: int, count: int = 1) -> None:
    """Refuse a head on another device or in another dtype than its target, or that reads other hidden states.

    Args:
        head: it.
        weight: one of its parameters.
        info: facts about the target.
        width: of each hidden state that the head reads.
        count: how many of them it reads.

    Raises:
        ConfigError: says what both have.
    """
    if (weight.device, weight.dtype) != (info.device, info.dtype):
        raise ConfigError(
            f"The head is {weight.dtype} on {weight.device}, the target {info.dtype} on {info.device}; move one of "
            "them."
        )
    if width != info.hidden_size:
        raise ConfigError(
            f"The head reads hidden states of width {width}, and those of {info.name} have {info.hidden_size}; it is "
            "for another target, so choose a head that is for this one."
        )
    if count != len(head.features):
        raise ConfigError(
            f"The head reads {count} hidden states of its target, and its features name {list(head.features)}; name as "
            "many as it reads."
        )
