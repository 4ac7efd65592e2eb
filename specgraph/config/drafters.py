"""The keys of ``draft`` that each drafter of this package adds, a class for each.

The drafters import these classes. Nothing here imports torch, so the command line can list all keys at once. The
configuration class of a drafter from outside this package stands beside the drafter.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

from specgraph.config.draft import DraftConfig, ParallelDraftConfig, at_least_one
from specgraph.errors import ConfigError


@dataclass
class NoDraftConfig(DraftConfig):
    """Keys of ``draft`` for decoding without drafts. It adds none to those of all drafters."""

    kind: str = "none"


@dataclass
class LookupDraftConfig(DraftConfig):
    """Keys of drafters that look the end of a sequence up."""

    max_cached_tokens: int = 0
    """How many tokens of the outputs of earlier requests of this decoder are looked up, too, the last ones. 0: none.
    Only under `strict`."""

    def check(self) -> None:
        """Raise ``ConfigError`` for a number that makes no sense."""
        super().check()
        if self.max_cached_tokens < 0:
            raise ConfigError(f"draft.max_cached_tokens is 0 or a number of tokens, got {self.max_cached_tokens}.")


@dataclass
class NGramConfig(LookupDraftConfig):
    """Keys of ``draft`` that prompt lookup reads."""

    kind: str = "ngram"
    max_ngram: int = 4
    """the longest n-gram looked up."""
    min_ngram: int = 1
    """the shortest one."""

    def check(self) -> None:
        """Raise ``ConfigError`` for lengths that make no sense."""
        super().check()
        at_least_one("draft.min_ngram", self.min_ngram)
        if self.max_ngram < self.min_ngram:
            raise ConfigError(f"draft.max_ngram ({self.max_ngram}) is below draft.min_ngram.")


@dataclass
class SuffixConfig(LookupDraftConfig):
    """Keys of ``draft`` that suffix decoding reads."""

    kind: str = "suffix"
    max_match: int = 24
    """the cap on the length of a match, in tokens, at most 127; longer matches count as this long."""
    min_match: int = 1
    """the shortest match that may propose, in tokens."""
    max_spec_factor: float = 8.0
    """drafts per matched token; a step makes at most K."""
    max_spec_offset: float = 0.0
    """drafts in addition to these; may be negative."""
    min_token_prob: float = 0.1
    """drafts stop where the estimated probability that all of them are accepted falls below this."""

    def check(self) -> None:
        """Raise ``ConfigError`` for values that make no sense."""
        super().check()
        if not 1 <= self.min_match <= self.max_match <= 127:
            raise ConfigError(
                f"draft.min_match and draft.max_match must hold 1 <= min_match <= max_match <= 127, got "
                f"{self.min_match} and {self.max_match}."
            )
        if not 0 <= self.max_spec_factor <= 1e6 or not -1e6 <= self.max_spec_offset <= 1e6:
            raise ConfigError(
                "draft.max_spec_factor must be from 0 to 1e6 and draft.max_spec_offset from -1e6 to 1e6, got "
                f"{self.max_spec_factor} and {self.max_spec_offset}."
            )
        if not 0 <= self.min_token_prob <= 1:
            raise ConfigError(f"draft.min_token_prob is a probability from 0 to 1, got {self.min_token_prob}.")


@dataclass
class DraftModelConfig(ParallelDraftConfig):
    """Keys of ``draft`` for draft models."""

    kind: str = "draft_model"


@dataclass
class EarlyExitDraftConfig(DraftConfig):
    """Keys of ``draft`` for drafts from the target's first layers."""

    kind: str = "early_exit"
    exit_layer: int | None = None
    """how many of the target's layers drafts come from. It has to be given; LayerSkip checkpoints do not say it."""

    def check(self) -> None:
        """Raise ``ConfigError`` for a number that makes no sense."""
        super().check()
        if self.exit_layer is not None:
            at_least_one("draft.exit_layer", self.exit_layer)


@dataclass
class MedusaDraftConfig(DraftConfig):
    """Keys of ``draft`` for Medusa heads. They add none to those of all drafters."""

    kind: str = "medusa"

    trains: ClassVar[tuple[str, ...]] = ("medusa",)


@dataclass
class EagleDraftConfig(DraftConfig):
    """Keys of ``draft`` for EAGLE heads. A value overrides the checkpoint's; null keeps it."""

    kind: str = "eagle"
    rope_theta: float | None = None
    """the base of the rotary embedding; null: as the checkpoint says, else 10000."""

    trains: ClassVar[tuple[str, ...]] = ("eagle",)


@dataclass
class Eagle3DraftConfig(ParallelDraftConfig):
    """Keys of ``draft`` for EAGLE-3 heads. A value overrides the checkpoint's; null keeps it."""

    kind: str = "eagle3"
    feature_layers: list[int] | None = None
    """the indices k of the target's hidden states hs[k] it reads; null takes those of the checkpoint."""
    norm_before_residual: bool | None = None
    """the first layer's residual is the normed hidden state; null: as the checkpoint says, else false."""
    norm_output: bool | None = None
    """the hidden state that the next draft reads has gone through the last norm; null: as the checkpoint says, else
    false."""
    rope_theta: float | None = None
    """the base of the rotary embedding; null: as the checkpoint says, else 10000."""

    trains: ClassVar[tuple[str, ...]] = ("eagle3", "peagle")


@dataclass
class MtpDraftConfig(DraftConfig):
    """Keys of ``draft`` for MTP modules. A value overrides that of the checkpoint's layout; null keeps it."""

    kind: str = "mtp"
    num_modules: int | None = None
    """how many modules are used, from the first one on; null: all that the checkpoint holds."""
    beyond: str = "continue"
    """what makes drafts beyond the number of modules: the last module at the rows that follow (continue), or all
    modules in turns at the last row (turns)."""
    family: str | None = None
    """the hidden state that further modules read: chained (the output of the module before) or target."""
    target_hidden: str | None = None
    """the target's hidden state behind its final norm (final_norm) or before it (residual)."""
    fed_hidden: str | None = None
    """the output of a module that is read next: behind its own final norm (final_norm) or before it (residual)."""
    order: str | None = None
    """the first half of the projection's input: embedding or hidden."""
    rotary_position: str | None = None
    """the position of rotary embeddings: that of the row (row) or of the token that is read there (token)."""
    zero_first_embedding: bool | None = None
    """the embedding at row 0 is replaced by zeros."""
    layer_type: str | None = None
    """how the modules' decoder layers attend: one of the target's layer_types."""
    mlp_type: str | None = None
    """whether the modules' decoder layers have experts (sparse) or not (dense)."""

    trains: ClassVar[tuple[str, ...]] = ("mtp",)

    def check(self) -> None:
        """Raise ``ConfigError`` for a value that the drafter does not allow."""
        super().check()
        at_least_one("draft.num_modules", self.num_modules)
        hidden = ("final_norm", "residual")
        allowed = {
            "beyond": ("continue", "turns"),
            "family": ("chained", "target"),
            "target_hidden": hidden,
            "fed_hidden": hidden,
            "order": ("embedding", "hidden"),
            "rotary_position": ("row", "token"),
            "mlp_type": ("dense", "sparse"),
        }
        for name, values in allowed.items():
            given = getattr(self, name)
            if given is not None and given not in values:
                null = "" if name == "beyond" else ", or null"
                raise ConfigError(f"draft.{name} is {given!r}; it is one of {', '.join(values)}{null}.")


@dataclass
class DFlashDraftConfig(ParallelDraftConfig):
    """Keys of ``draft`` for DFlash heads. A value overrides the checkpoint's; null keeps it."""

    kind: str = "dflash"
    block_rows: int | None = None
    """how many rows of a block a step runs, the anchor included: at least those that K drafts need, at most those that
    the head was trained with; null: the most, or the least if the head is causal."""
    feature_layers: list[int] | None = None
    """the indices k of the target's hidden states hs[k] it reads; null takes those of the checkpoint."""
    rope_theta: float | None = None
    """the base of the rotary embedding; null: as the checkpoint says, else 10000."""
    anchored_window: bool | None = None
    """sliding windows are counted from the anchor for all rows of a block, and not from each row; null: true for the
    layout of speculators, else false."""

    trains: ClassVar[tuple[str, ...]] = ("dflash",)


@dataclass
class DFlash2DraftConfig(DFlashDraftConfig):
    """Keys of ``draft`` for DFlash2 heads. A value overrides the checkpoint's; null keeps it."""

    kind: str = "dflash2"

    trains: ClassVar[tuple[str, ...]] = ("dflash2",)


@dataclass
class DSparkDraftConfig(DFlashDraftConfig):
    """Keys of ``draft`` for DSpark heads. A value overrides the checkpoint's; null keeps it."""

    kind: str = "dspark"

    trains: ClassVar[tuple[str, ...]] = ("dspark",)


DRAFTERS: dict[str, type[DraftConfig]] = {
    cls.kind: cls
    for _, cls in sorted(vars().items())
    if isinstance(cls, type) and issubclass(cls, DraftConfig) and cls.__module__ == __name__
}
"""The configuration class of every drafter of this package, by kind."""

DraftKeys: type[DraftConfig] = dataclasses.make_dataclass(
    "DraftKeys",
    [("kind", str, dataclasses.field(default=DraftConfig.kind, metadata={"text": ""}))],
    bases=tuple(sorted(DRAFTERS.values(), key=lambda cls: -len(cls.__mro__))),  # a class before its parents
)
"""Every key of ``draft``, whichever drafter reads it. They are valid until it is known which drafter will run."""


def drafter_kinds() -> list[str]:
    """The kinds of drafters in this package."""
    return sorted(DRAFTERS)


def trained_by() -> dict[str, str]:
    """For each value of ``train draft=``, the kind of drafter whose head it trains."""
    return {name: kind for kind in drafter_kinds() for name in DRAFTERS[kind].trains}


def readers(key: str) -> list[str]:
    """The kinds of drafters that have a key of ``draft``."""
    return [kind for kind in drafter_kinds() if hasattr(DRAFTERS[kind], key)]


def drafter_options(draft: DraftConfig) -> DraftConfig:
    """``draft`` as an object of the drafter's own configuration class, which has only the keys of that drafter."""
    cls = DRAFTERS.get(draft.kind, type(draft))
    return cls(**{item.name: getattr(draft, item.name) for item in dataclasses.fields(cls)})


def own_drafter(name: str) -> Any:
    """The class of a user's drafter, by its full name.

    Raises:
        ConfigError: there is no such class, or it has no configuration class.
    """
    module, _, leaf = name.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), leaf)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"draft._target_={name}: {' '.join(str(error).split()).rstrip('.')}; give the full name of a class, "
            "module.Class, whose module can be imported."
        ) from error
    config = getattr(cls, "Config", None)
    if not (isinstance(config, type) and issubclass(config, DraftConfig)):
        raise ConfigError(
            f"draft._target_ names {name}, which is not a specgraph Drafter with a Config derived from DraftConfig."
        )
    return cls
