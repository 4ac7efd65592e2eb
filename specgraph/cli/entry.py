"""The entry of the command line, ``python -m specgraph generate|dump|inspect|bench|train [KEY=VALUE ...]``.

Hydra composes the configuration. Nothing here imports torch, because the module of a command is imported only when the
command runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from specgraph.cli.config import (
    COMMANDS,
    CONFIGURATIONS,
    TRAIN_HEAD,
    choose,
    draft_paths,
    literal,
    overview,
    own_drafter_keys,
    register,
    shared_store,
    unquoted,
)
from specgraph.cli.errors import CONFIGURATION_ERRORS, every_key, sentence
from specgraph.cli.flags import flags_as_keys
from specgraph.cli.generation import refuse_arguments
from specgraph.cli.own_file import KEY, own_file
from specgraph.cli.writers import TEXT, notes
from specgraph.config import Config
from specgraph.config.draft import NUMBERS
from specgraph.config.errors import OPEN, allowed_at, check_keys, did_you_mean, keys
from specgraph.errors import ConfigError, SpecgraphError, SpecgraphWarning

TEXTS = ("prompt", "template")
"""Keys whose values are taken literally, so that commas and brackets in them need no second pair of quotes. In a sweep,
several of them are given with quotes around each: prompt="'one','two'"."""
PATHS = ("path", "dump", "old", "new", "json", "plot")
"""Keys whose values are taken literally, too, except that a sweep goes over those that commas separate."""
SWEEP = {"-m", "--multirun"}
_OVERRIDE = re.compile(r"~|[^=]+=")
_TABLE = re.compile(r"\+*draft\.num_speculative_tokens=\s*{")
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
        overrides = own_file(_with_keys(name, _named(name, overrides)))
        if name == "generate":
            refuse_arguments(overrides)
        overrides = _obeyed(name, overrides)
        overrides = draft_paths(name, overrides, sweep=bool(SWEEP & set(overrides)))
        own, overrides = own_drafter_keys(name, overrides)
        name, overrides = choose(name, overrides)
        return _Run(name, register(name, own)).start(overrides)
    except ConfigError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


@dataclass
class _Run:
    """One call of the command line, which has several jobs if it is a sweep.

    Attributes:
        status: the exit code so far.
        results: the overrides and the measurements of every job that succeeded.
        notes: where headings and the comparison of jobs go.
    """

    name: str
    schema: type
    status: int = 0
    results: list[tuple[list[str], dict[str, str]]] = field(default_factory=list)
    notes: TextIO = field(default_factory=lambda: sys.stdout)
    traceback: bool = field(default_factory=lambda: os.environ.get(TRACEBACK) == "1")

    def start(self, overrides: Sequence[str]) -> int:
        """Let Hydra compose the configuration and call :meth:`job`, once or for every point of a sweep."""
        compose = hydra.main(version_base="1.3", config_path="pkg://specgraph.conf", config_name=self.name)
        try:
            with (
                tempfile.TemporaryDirectory() as scratch,
                _command_line(self.name, overrides, scratch),
                shared_store(),
                _plain_warnings(),
            ):
                compose(_task(self))()
        except SystemExit as exit_:
            return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        except (HydraException, *CONFIGURATION_ERRORS) as error:
            if self.traceback:
                raise
            return _fail(sentence(error, self.schema))
        if len(self.results) > 1:
            print("\n" + _comparison(self.results), file=self.notes)
        return self.status

    def job(self, cfg: DictConfig) -> None:
        """Run the command with a composed configuration. An error in one job does not end a sweep."""
        from specgraph.cli import commands

        swept = HydraConfig.get().mode == RunMode.MULTIRUN
        overrides = list(HydraConfig.get().overrides.task)
        self.notes = notes(str(cfg.get("format", TEXT)))
        if swept:
            print(f"=== {' '.join(overrides)}", file=self.notes)
        try:
            given = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False))
            check_keys(given, every_key(self.schema), self.schema)  # because Hydra accepts any +key=value
            self.results.append((overrides, commands.run(self.name, cfg, first=not self.results)))
        except (SpecgraphError, OSError, *CONFIGURATION_ERRORS) as error:
            if self.traceback:
                raise
            text = sentence(error, self.schema) if isinstance(error, CONFIGURATION_ERRORS) else str(error)
            self.status = _fail(text)


def _task(run: _Run) -> Callable[[DictConfig], None]:
    """The job as a plain function, which Hydra requires."""

    def task(cfg: DictConfig) -> None:
        run.job(cfg)

    return task


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


@contextlib.contextmanager
def _command_line(name: str, overrides: Sequence[str], scratch: str) -> Iterator[None]:
    """A context with what Hydra reads from the process: its arguments, and the setting that it raises errors.

    A sweep writes a record to its folder, which is ``scratch``.
    """
    flags, given = _sorted(overrides)
    sweep = bool(SWEEP & set(flags))
    given = [_literal(override, TEXTS if sweep else TEXTS + PATHS) for override in given]
    if sweep and not any(override.startswith("hydra.sweep.dir=") for override in given):
        given.append(f"hydra.sweep.dir={scratch}")
    argv, variable = sys.argv, os.environ.get(TRACEBACK)
    sys.argv, os.environ[TRACEBACK] = [f"python -m specgraph {name}", *flags, *given], "1"
    try:
        yield
    finally:
        sys.argv = argv
        if variable is None:
            del os.environ[TRACEBACK]
        else:
            os.environ[TRACEBACK] = variable


def _sorted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags with their values, and the overrides. argparse does not accept the two in mixed order."""
    given = [argument for argument in arguments if not argument.startswith("-") and _OVERRIDE.match(argument)]
    return [argument for argument in arguments if argument not in given], [_open(override) for override in given]


def _with_keys(name: str, arguments: Sequence[str]) -> list[str]:
    """The arguments with flags that name keys as overrides; see :func:`flags_as_keys`."""
    if not any(argument.startswith(("-", "=")) for argument in arguments):
        return list(arguments)
    schemas = [CONFIGURATIONS[key].schema() for key in ((name, TRAIN_HEAD) if name == "train" else (name,))]
    kinds = {key: allowed_at(key, schema) or "" for schema in schemas for key in keys(every_key(schema))}
    switches = {key for key, kind in kinds.items() if kind.startswith("true or false")}
    return flags_as_keys(arguments, {*kinds, KEY}, switches)


def _obeyed(name: str, overrides: Sequence[str]) -> list[str]:
    """The overrides, and that a K among them holds for every step, unless ``draft.adaptive`` is given beside it.

    The configuration that Hydra composes does not tell a K that was given from the default.
    """
    given = {override.partition("=")[0].lstrip("+") for override in overrides}
    numbers = {f"draft.{key}" for key in NUMBERS}
    obey = numbers & given and "draft.adaptive" not in given and issubclass(COMMANDS[name].schema(), Config)
    return [*overrides, "draft.adaptive=false"] if obey else [*overrides]


def _named(name: str, arguments: Sequence[str]) -> list[str]:
    """Add the command's positional keys to the first arguments, as long as these have none."""
    given = list(arguments)
    for place, key in enumerate(COMMANDS[name].positional[: len(given)]):
        if given[place].startswith("-") or "=" in given[place]:
            break
        given[place] = f"{key}={given[place]}"
    return given


def _open(override: str) -> str:
    """Let Hydra add any key to the groups whose keys are checked by those who read them, such as options of a pass.

    A table takes the place of a number under a key of its own, because Hydra gives every key one type.
    """
    if _TABLE.match(override):
        return override.replace("=", "_by_load=", 1)
    return f"++{override}" if override.startswith(tuple(f"{group}." for group in OPEN)) else override


def _literal(override: str, texts: Collection[str]) -> str:
    """Put quotes around the value of one of ``texts`` if it has none. ``null`` stays null."""
    key, equals, value = override.partition("=")
    if key not in texts or not equals or unquoted(value) != value or value == "null":
        return override
    return f"{key}={literal(value)}"


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
