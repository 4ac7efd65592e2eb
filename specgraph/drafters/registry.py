"""Finds drafters: by their name in the configuration, by a checkpoint, or by a loaded draft.

A drafter of this package is known by its file, one of a user by the full name of its class. Nothing lists names.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from specgraph.checkpoints.checkpoint import Checkpoint, architectures
from specgraph.checkpoints.files import open_files
from specgraph.checkpoints.unsupported import name_unsupported
from specgraph.config import Config
from specgraph.config.draft import drafter_kinds
from specgraph.config.load import drafter_options, own_drafter
from specgraph.drafters.base import Draft, Drafter, DraftLike, Target
from specgraph.errors import ConfigError


def drafter_class(kind: str) -> type[Drafter]:
    """The drafter of a kind, or of a class's full name.

    Raises:
        ConfigError: there is no such class.
    """
    if "." in kind:
        own: type[Drafter] = own_drafter(kind)
        return own
    module = importlib.import_module(f"specgraph.drafters.{kind}")
    return next(
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Drafter) and getattr(value, "kind", None) == kind
    )


def drafter_classes() -> list[type[Drafter]]:
    """Every drafter of this package; those that take what no other claims come last."""
    return sorted(map(drafter_class, drafter_kinds()), key=lambda cls: cls.fallback)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open the folder or the weights file of a draft and say what it is.

    Raises:
        ConfigError: files are missing or damaged, or the draft is of a kind that is not supported, which is named.
    """
    files, classes = open_files(path), drafter_classes()
    for cls in classes:
        unsupported = name_unsupported(files) if cls.fallback else None
        if unsupported is not None:
            raise ConfigError(f"{files.path} is {unsupported}, which specgraph does not read; it reads {readable()}.")
        found = cls.recognise(files)
        if found is not None:
            return found
    shown = ", ".join(list(files.tensors)[:3])
    raise ConfigError(
        f"{files.path} is no draft that specgraph knows (architectures {architectures(files.config)}, tensors {shown} "
        f"...); it reads {readable()}."
    )


def readable() -> str:
    """What checkpoints are read, in words."""
    return ", ".join(cls.reads for cls in drafter_classes() if cls.reads)


def with_draft(config: Config, draft: DraftLike | None) -> tuple[Config, DraftLike | None]:
    """The configuration with the kind of drafter that a draft, given as an argument or by ``draft.model``, is.

    Beside it the draft itself, for :func:`make_draft`: opened, if it is the path of a checkpoint.

    Raises:
        ConfigError: a draft was given and the drafter takes none, or the checkpoint cannot be opened.
    """
    given, kind = draft if draft is not None else config.draft.model, config.draft.kind
    if kind == "none":
        if draft is not None:
            raise ConfigError("draft= was given, but draft.kind is 'none'; leave one of them out.")
        return config, None
    cls = drafter_class(kind)
    if given is None:
        if cls.needs is not None:
            raise ConfigError(
                f"The {kind} drafter needs a {cls.needs}: pass draft=... or set draft.model to its folder."
            )
        return config, None
    if "." in kind:
        return config, given
    if isinstance(given, str | Path) and Path(given).exists():
        given = open_checkpoint(given)
    return replace(config, draft=replace(config.draft, kind=_kind_of(given))), given


def _kind_of(given: DraftLike) -> str:
    """The kind of drafter that runs a draft."""
    if isinstance(given, Checkpoint):
        return given.kind
    return next(cls.kind for cls in drafter_classes() if cls.takes(given))


def make_draft(config: Config, target: Target, draft: DraftLike | None) -> Draft:
    """The drafter for a traced target; takes what :func:`with_draft` returned."""
    options: Any = drafter_options(config.draft)
    return drafter_class(config.draft.kind).make(options, target, draft)
