"""The table of commands, with their arguments, and the overrides that name files."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from specgraph.bench.config import BenchConfig
from specgraph.cli.keys import DiffConfig, DumpConfig, ExploreConfig, GenerateConfig, InspectConfig
from specgraph.config import Config, DraftConfig, group_choices
from specgraph.config.drafters import trained_by
from specgraph.config.paths import did_you_mean_path
from specgraph.errors import ConfigError


def _train_config() -> type:
    from specgraph.training.config import HeadTrainConfig

    return HeadTrainConfig


@dataclass(frozen=True)
class Command:
    """One command of the command line.

    Attributes:
        about: one line that says what the command does.
        schema: returns the dataclass of its configuration, which is imported only when it is needed.
        usage: its arguments, for the help.
        examples: the arguments of some calls, for the help.
        positional: the keys of the first arguments, which may be given without them.
        base: the file of ``conf`` that names its groups; None if it has no groups.
    """

    about: str
    schema: Callable[[], type]
    usage: str
    examples: tuple[str, ...]
    positional: tuple[str, ...] = ()
    base: str | None = None


COMMANDS = {
    "generate": Command(
        "continue prompts with a speculative decoder and count what was accepted",
        lambda: GenerateConfig,
        "model=PATH prompt=TEXT|prompts=FILE [draft=NAME|PATH] [KEY=VALUE ...]",
        (
            'model=path/of/a/model prompt="Once upon a time, there was"',
            'model=path/of/a/model prompts=questions.jsonl template="Question: {question}\\nAnswer:"',
            "model=path/of/a/model draft=path/of/a/draft prompts=questions.jsonl compare=true",
            'model=path/of/a/model prompt="Once upon a time, there was" -m draft.num_speculative_tokens=1,4',
        ),
        base="config",
    ),
    "dump": Command(
        "compile a model and write the graphs of every pass to a folder",
        lambda: DumpConfig,
        "model=PATH out=graphs [draft=NAME|PATH] [KEY=VALUE ...]",
        ("model=path/of/a/model draft=path/of/a/draft out=graphs",),
        base="config",
    ),
    "explore": Command(
        "write a dump, and a trace if there is one, as a page for a browser",
        lambda: ExploreConfig,
        "DUMP [trace=FILE] [out=FILE.html] [KEY=VALUE ...]",
        ("graphs trace=trace.jsonl out=page.html",),
        ("dump",),
    ),
    "diff": Command(
        "show in what nodes two stages or two dumps differ, and the first whose value differs",
        lambda: DiffConfig,
        "OLD NEW [graph=NAME] [numerics=true]",
        ("graphs/07_insert_verify graphs/08_insert_processors", "graphs other/graphs numerics=true"),
        ("old", "new"),
    ),
    "inspect": Command(
        "say what a draft checkpoint is, how it would be used, and whether it fits a target",
        lambda: InspectConfig,
        "PATH [target=MODEL] [KEY=VALUE ...]",
        ("path/of/a/draft target=path/of/a/model",),
        ("path",),
    ),
    "bench": Command(
        "time steps, first tokens, sessions and more, or find the best draft for some prompts",
        lambda: BenchConfig,
        "[first_token|sessions|cpu|tune] target=SHAPE|MODEL [draft=NAME|PATH] [KEY=VALUE ...]",
        (
            "target=tiny-shape draft=eagle3 batch_sizes=[1,8]",
            "tune target=path/of/a/model drafts=[ngram,path/of/a/draft] prompts=questions.jsonl batch_sizes=[1,8]",
        ),
        ("what",),
        base="bench",
    ),
    "train": Command(
        "train a draft head for a frozen target on the target's own answers",
        _train_config,
        f"draft={'|'.join(trained_by())} model=PATH data=FILE.jsonl output=FOLDER [KEY=VALUE ...]",
        ("draft=eagle3 model=path/of/a/model data=questions.jsonl output=head",),
    ),
}


def options_of(name: str, cfg: DictConfig) -> Any:
    """The configuration of a command as an object of its dataclass.

    Raises:
        ConfigError: a key that has no default is not set.
    """
    for key in [str(key) for key in cfg if OmegaConf.is_missing(cfg, key)]:
        raise ConfigError(f"{key} is not set: python -m specgraph {name} {COMMANDS[name].usage}")
    return OmegaConf.to_object(cfg)


def draft_paths(name: str, overrides: Sequence[str], sweep: bool) -> list[str]:
    """The overrides with ``draft=PATH`` replaced by ``draft.model=PATH``, since the checkpoint determines the drafter.

    A value is a path if it is not the name of a drafter, and if the file exists or the value contains a separator. In a
    sweep, there can be several values.

    Raises:
        ConfigError: there is no such file, or another override names the draft as well.
    """
    given = [override for override in overrides if override.startswith("draft=")]
    if not given or not issubclass(COMMANDS[name].schema(), Config):
        return list(overrides)
    names, value = group_choices("draft"), unquoted(given[-1].partition("=")[2])
    values = value.split(",") if sweep and not _exists(value) else [value]
    paths = [value for value in values if value not in names and (_exists(value) or "/" in value)]
    if not paths:
        return list(overrides)
    for path in paths:
        if not _exists(path):
            raise ConfigError(
                f"draft={path}: there is no such file or folder{did_you_mean_path(path)}; draft is one of "
                f"{', '.join(names)}, or the path of a checkpoint (draft.model also takes the name of a model that is "
                "downloaded)."
            )
    others = [override for override in overrides if override not in given]
    second = [item for item in others if item.lstrip("+").startswith(("draft.model=", "draft.kind="))]
    for other in (*given[:-1], *second):
        raise ConfigError(f"{given[-1]} names the draft, and so does {other}; leave one of them out.")
    if len(paths) < len(values):
        raise ConfigError(f"{given[-1]}: a sweep goes over names or over paths; run it once for each of the two.")
    model = ",".join(literal(str(Path(path).expanduser())) for path in paths)
    # `bench` has another default, a random head of EAGLE-3, which must not stand beside a checkpoint.
    kind = [f"draft={DraftConfig.kind}"] if name == "bench" else []
    return [*kind, f"draft.model={model}", *others]


def _exists(path: str) -> bool:
    return bool(path) and Path(path).expanduser().exists()


def literal(value: str) -> str:
    """The value in quotes, so that Hydra takes it literally, with ``${`` escaped, which OmegaConf would look up."""
    return QuotedString(re.sub(r"(\\*)\$\{", r"\1\1\\${", value), Quote.single).with_quotes()


def unquoted(value: str) -> str:
    """The value without the quotes that a user put around it."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
