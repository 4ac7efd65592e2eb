"""The entry of the command line, ``python -m specgraph generate|dump|inspect|bench|train [KEY=VALUE ...]``.

Nothing here imports torch, because the module of a command is imported only when its configuration has been composed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from specgraph.cli.command_table import COMMANDS, draft_paths, literal, unquoted
from specgraph.cli.flags import read_flags
from specgraph.cli.generation import refuse_arguments
from specgraph.cli.help import help_text, overview
from specgraph.cli.writers import TEXT, notes
from specgraph.config import compose
from specgraph.config.compose import jobs
from specgraph.config.errors import allowed_at, did_you_mean, keys
from specgraph.config.groups import default_groups
from specgraph.config.load import read_given
from specgraph.errors import ConfigError, SpecgraphError, SpecgraphWarning

FILE = "config"
"""The key that names a file of keys, or a preset."""
TEXTS = ("prompt", "template")
"""Keys whose values are taken literally, so that commas and brackets in them need no second pair of quotes. In a sweep,
several of them are given with quotes around each: prompt="'one','two'"."""
PATHS = ("path", "dump", "old", "new", "json", "plot")
"""Keys whose values are taken literally, too, except that a sweep goes over those that commas separate."""
TRACEBACK = "HYDRA_FULL_ERROR"
"""The environment variable that shows the traceback of an error."""


def main(argv: Sequence[str]) -> int:
    """Run one command; ``doctor`` is called elsewhere.

    Returns:
        The exit code: 0, or 2 if the command or its configuration was refused (one sentence on standard error says
        why), or 130 after an interrupt.
    """
    arguments = list(argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if arguments else 2
    name, *overrides = arguments
    if name not in COMMANDS:
        known = (*COMMANDS, "doctor")
        return _fail(f"There is no command {name!r}{did_you_mean(name, known)}; commands are {', '.join(known)}.")
    try:
        flags, overrides = read_flags(_named(name, overrides), lambda: _keys(name))
        with _plain_warnings():
            return _run(name, flags, overrides)
    except ConfigError as error:
        if os.environ.get(TRACEBACK) == "1":
            raise
        return _fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(name: str, flags: Mapping[str, str], overrides: Sequence[str]) -> int:
    """Compose the configuration, and show it or run the command with it, once or for every point of a sweep."""
    sweep, folder = "multirun" in flags, flags.get("config-dir")
    given, overrides = _from_file(overrides)
    if name == "generate":
        refuse_arguments([*map(str, given), *overrides])
    overrides = draft_paths(name, [_literal(item, TEXTS if sweep else TEXTS + PATHS) for item in overrides], sweep)
    command, schema = COMMANDS[name], COMMANDS[name].schema()
    points = jobs(overrides, command.base, folder) if sweep else [overrides]
    status, results = 0, list[tuple[list[str], dict[str, str]]]()
    for point in points:
        cfg = compose(schema, given, point, command.base, folder)
        if "help" in flags:
            print(help_text(name, command, cfg))
            return 0
        if "cfg" in flags:
            print(_shown(cfg, flags))
            return 0
        out = notes(str(cfg.get("format", TEXT)))
        if sweep:
            print(f"=== {' '.join(point)}", file=out)
        measured = _job(name, cfg, first=not results)
        if measured is None:
            status = 2
        else:
            results.append((point, measured))
    if len(results) > 1:
        print("\n" + _comparison(results), file=out)
    return status


def _job(name: str, cfg: DictConfig, first: bool) -> dict[str, str] | None:
    """Run the command with a composed configuration. An error in one job, after which this is None, ends no sweep."""
    from specgraph.cli import commands

    try:
        return commands.run(name, cfg, first=first)
    except (SpecgraphError, OSError) as error:
        if os.environ.get(TRACEBACK) == "1":
            raise
        _fail(str(error))
        return None


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """A context in which a warning of this package is a sentence, without the line of our source that gave it."""
    usual = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        plain = issubclass(category, SpecgraphWarning)
        return f"warning: {message}\n" if plain else usual(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _keys(name: str) -> dict[str, bool]:
    """The keys of a command, and whether each is true or false."""
    every = compose(COMMANDS[name].schema(), base=COMMANDS[name].base)
    found = {key: (allowed_at(key, every) or "").startswith("true or false") for key in keys(every)}
    return {FILE: False, **found}


def _named(name: str, arguments: Sequence[str]) -> list[str]:
    """Add the command's positional keys to the first arguments, as long as these have none."""
    given = list(arguments)
    for place, key in enumerate(COMMANDS[name].positional[: len(given)]):
        if given[place].startswith("-") or "=" in given[place]:
            break
        given[place] = f"{key}={given[place]}"
    return given


def _from_file(overrides: Sequence[str]) -> tuple[dict[Any, Any], list[str]]:
    """The keys of the file that ``config=FILE.yaml`` names, and the other overrides.

    The choices of groups in the file become overrides, unless others take their place, because ``draft`` may be a path.
    """
    named = [unquoted(item.partition("=")[2]) for item in overrides if item.startswith(f"{FILE}=")]
    others = [item for item in overrides if not item.startswith(f"{FILE}=")]
    if len(named) > 1:
        raise ConfigError(f"{FILE}={named[0]} and {FILE}={named[-1]}: give one file of keys.")
    given = read_given(named[0]) if named else {}
    chosen = {group: given.pop(group) for group in default_groups() if isinstance(given.get(group), str)}
    taken = {item.partition("=")[0] for item in others}
    return given, [*(f"{group}={literal(value)}" for group, value in chosen.items() if group not in taken), *others]


def _literal(override: str, texts: Collection[str]) -> str:
    """Put quotes around the value of one of ``texts`` if it has none. ``null`` stays null."""
    key, equals, value = override.partition("=")
    if key not in texts or not equals or unquoted(value) != value or value == "null":
        return override
    return f"{key}={literal(value)}"


def _shown(cfg: DictConfig, flags: Mapping[str, str]) -> str:
    """The configuration that would run, or the part of it that ``--package`` names."""
    if flags["cfg"] != "job":
        raise ConfigError(f"--cfg takes job, not {flags['cfg']!r}.")
    part = OmegaConf.select(cfg, package) if (package := flags.get("package", "_global_")) != "_global_" else cfg
    if not isinstance(part, DictConfig):
        raise ConfigError(f"--package takes a group of keys, not {package!r}.")
    return OmegaConf.to_yaml(part, resolve="resolve" in flags)


def _comparison(results: Sequence[tuple[list[str], dict[str, str]]]) -> str:
    """A table of the jobs of a sweep. Each is named by those of its overrides that not all jobs share."""
    from specgraph.tables import text_table

    shared = set.intersection(*(set(overrides) for overrides, _ in results))
    named = [(" ".join(o for o in overrides if o not in shared), row) for overrides, row in results]
    columns = list(dict.fromkeys(key for _, row in results for key in row))
    return text_table([[label, *(row.get(key, "") for key in columns)] for label, row in named], ["", *columns])


def _fail(text: str) -> int:
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return 2
