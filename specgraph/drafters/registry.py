"""Finds the class of a drafter from its name in the configuration, from a checkpoint, or from a loaded draft.

No list of drafters is kept. A drafter of this package is found by the name of its file, and a drafter of a user by the
full name of its class.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from specgraph.checkpoints.checkpoint import Checkpoint, architectures
from specgraph.checkpoints.files import open_files
from specgraph.checkpoints.gguf import is_gguf
from specgraph.checkpoints.unsupported import name_unsupported
from specgraph.config import Config
from specgraph.config.draft import LOOKUPS, DraftConfig
from specgraph.config.drafters import drafter_kinds, drafter_options, own_drafter
from specgraph.drafters.base import Draft, Drafter, DraftLike, Target
from specgraph.drafters.window import limit_window
from specgraph.errors import ConfigError


def drafter_class(kind: str) -> type[Drafter]:
    """The class of a drafter, from its kind or from the full name of the class.

    Raises:
        ConfigError: there is no such class.
    """
    if "." in kind:
        return own_drafter(kind)
    if kind not in drafter_kinds():
        raise ConfigError(f"draft.kind is one of {', '.join(drafter_kinds())}, not {kind!r}.")
    module = importlib.import_module(f"specgraph.drafters.{kind}")
    return next(
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Drafter) and getattr(value, "kind", None) == kind
    )


def drafter_classes() -> list[type[Drafter]]:
    """All drafter classes of this package. Those with ``fallback``, which must be asked last, come last."""
    return sorted(map(drafter_class, drafter_kinds()), key=lambda cls: cls.fallback)


def open_checkpoint(path: str | Path, kind: str | None = None) -> Checkpoint:
    """Open the folder or the weights file of a draft, and recognise it.

    Args:
        path: the folder or the file.
        kind: the drafter that the configuration names, which is asked first. It may find what it runs in the files of
            a whole model.

    Raises:
        ConfigError: files are missing or damaged, or the draft is of a kind that is not supported, which is named.
    """
    files, classes = open_files(path), drafter_classes()
    asked = None if kind is None else drafter_class(kind).recognise_inside(files)
    if asked is not None:
        return asked
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
    """The kinds of checkpoints that are read, in words, for error messages."""
    return ", ".join(cls.reads for cls in drafter_classes() if cls.reads)


def with_draft(config: Config, draft: DraftLike | None) -> tuple[Config, DraftLike | None]:
    """Set the kind of drafter in the configuration to the one that runs the given draft.

    The draft is the argument or, if that is None, ``draft.model``. Returns the new configuration and the draft, which
    :func:`make_draft` takes. If the draft is the path of a checkpoint, it is returned opened.

    Raises:
        ConfigError: a draft was given and the drafter takes none, the checkpoint cannot be opened or is one for another
            drafter than the configuration names, or ``draft.first`` stands in front of a drafter that has no drafts of
            its own.
    """
    config, draft = _with_kind(config, draft)
    first, kind = config.draft.first, config.draft.kind
    if first is not None and kind in ("none", *LOOKUPS):
        raise ConfigError(
            f"draft.first={first} looks for drafts before another drafter makes its own, and draft.kind is {kind!r}, "
            "which makes none; choose a draft model or a head as the draft, or leave draft.first out."
        )
    return config, draft


def _with_kind(config: Config, draft: DraftLike | None) -> tuple[Config, DraftLike | None]:
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
    if given == "":
        raise ConfigError("draft is empty; give a model, or the folder or name of a checkpoint.")
    if isinstance(given, str | Path) and Path(given).exists() and not is_gguf(given):  # which holds a whole model
        given = open_checkpoint(given, kind)
    elif isinstance(given, str) and given in drafter_kinds():
        raise ConfigError(
            f"draft={given!r} is the name of a drafter, and a draft is a model, or the folder or name of a checkpoint; "
            f"choose the drafter by the configuration, compile_speculative(model, {{'draft': {given!r}}})."
        )
    found = _kind_of(given)
    if kind not in (found, DraftConfig.kind):
        raise ConfigError(
            f"draft.kind is {kind!r}, and the draft {_shown(given)} is one for {found!r}; leave draft.kind out, or "
            f"give a draft for {kind!r}."
        )
    return replace(config, draft=replace(config.draft, kind=found)), given


def _kind_of(given: DraftLike) -> str:
    """The kind of the drafter that runs a given draft."""
    if isinstance(given, Checkpoint):
        return given.kind
    return next(cls.kind for cls in drafter_classes() if cls.takes(given))


def _shown(given: DraftLike) -> str:
    """A draft as an error calls it: by its path or name, or by the class of an object."""
    if isinstance(given, Checkpoint):
        return str(given.path)
    return str(given) if isinstance(given, str | Path) else f"of the class {type(given).__name__}"


def make_draft(config: Config, target: Target, draft: DraftLike | None) -> Draft:
    """Bind the configured drafter to a traced target; ``config`` and ``draft`` are results of :func:`with_draft`."""
    options: Any = drafter_options(config.draft)
    made = drafter_class(config.draft.kind).make(options, target, draft)
    return made if options.window is None else limit_window(made, options.window)
