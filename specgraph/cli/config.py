"""The commands: their arguments, and the help that is made from their keys."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Quote, QuotedString

from specgraph.cli import doctor
from specgraph.cli.keys import DiffConfig, DumpConfig, ExploreConfig, GenerateConfig, InspectConfig
from specgraph.config import Config, DraftConfig, group_choices
from specgraph.config.draft import texts_below, trained_by
from specgraph.config.errors import did_you_mean
from specgraph.config.load import own_drafter
from specgraph.config.paths import did_you_mean_path
from specgraph.errors import ConfigError


def _bench_config() -> type:
    from specgraph.bench.config import BenchConfig

    return BenchConfig


def _train_config() -> type:
    from specgraph.training.config import TrainConfig

    return TrainConfig


def _head_config() -> type:
    from specgraph.training.heads.config import HeadTrainConfig

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
    """

    about: str
    schema: Callable[[], type]
    usage: str
    examples: tuple[str, ...]
    positional: tuple[str, ...] = ()


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
    ),
    "dump": Command(
        "compile a model and write the graphs of every pass to a folder",
        lambda: DumpConfig,
        "model=PATH out=graphs [draft=NAME|PATH] [KEY=VALUE ...]",
        ("model=path/of/a/model draft=path/of/a/draft out=graphs",),
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
        ("graphs/07_insert_verify graphs/08_fuse_verify", "graphs other/graphs numerics=true"),
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
        _bench_config,
        "[first_token|sessions|cpu|tune] target=SHAPE|MODEL [draft=NAME|PATH] [KEY=VALUE ...]",
        (
            "target=tiny-shape draft=eagle3 batch_sizes=[1,8]",
            "tune target=path/of/a/model drafts=[ngram,path/of/a/draft] prompts=questions.jsonl batch_sizes=[1,8]",
        ),
        ("what",),
    ),
    "train": Command(
        "train a small target and its draft from questions and answers",
        _train_config,
        "data=FILE.jsonl output=FOLDER [KEY=VALUE ...], or draft=HEAD model=PATH ... (train draft=HEAD --help)",
        ("data=questions.jsonl output=models",),
    ),
}

TRAIN_HEAD = "train_head"
"""The name of the configuration with which ``train draft=HEAD`` runs."""
CONFIGURATIONS = COMMANDS | {
    TRAIN_HEAD: Command(
        "train a draft head for a frozen target on the target's own answers",
        _head_config,
        f"draft={'|'.join(trained_by())} model=PATH data=FILE.jsonl output=FOLDER [KEY=VALUE ...]",
        ("draft=eagle3 model=path/of/a/model data=questions.jsonl output=head",),
    )
}


def choose(name: str, overrides: Sequence[str]) -> tuple[str, list[str]]:
    """The name of the configuration with which a command runs, and its overrides.

    For ``train``, the configuration depends on ``draft=``.

    Raises:
        ConfigError: ``draft=`` names nothing that can be trained.
    """
    chosen = [override.partition("=")[2] for override in overrides if override.startswith("draft=")]
    if name != "train" or not chosen:
        return name, list(overrides)
    values, others = chosen[-1].split(","), [override for override in overrides if not override.startswith("draft=")]
    heads = list(trained_by())
    valid = ("draft_model", *heads)
    for value in values:
        if value not in valid:
            raise ConfigError(
                f"There is no draft={value} to train{did_you_mean(value, valid)}; draft is draft_model (a small model "
                f"with its target, the default), {', '.join(heads[:-1])} or {heads[-1]} (a head for the target in "
                "model=PATH)."
            )
    if "draft_model" not in values:
        return TRAIN_HEAD, [f"algorithm={chosen[-1]}", *others]
    if len(values) > 1:
        raise ConfigError(f"draft={chosen[-1]}: a draft_model and a head have other keys; train them one by one.")
    return name, others


def draft_paths(name: str, overrides: Sequence[str], sweep: bool) -> list[str]:
    """The overrides with ``draft=PATH`` replaced by ``draft.model=PATH``, since the checkpoint determines the drafter.

    A value is a path if it is not the name of a drafter, and if the file exists or the value contains a separator. In a
    sweep, there can be several values.

    Raises:
        ConfigError: there is no such file, or another override names the draft as well.
    """
    given = [override for override in overrides if override.startswith("draft=")]
    if not given or name == "train" or not issubclass(COMMANDS[name].schema(), Config):
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


def own_drafter_keys(name: str, overrides: Sequence[str]) -> tuple[type | None, list[str]]:
    """The configuration class of a user's drafter that ``draft._target_=`` names, and the overrides that choose it.

    None if there is no such override. ``draft=none`` keeps out the defaults of the drafter that runs otherwise.

    Raises:
        ConfigError: there is no such class, or another override names a drafter as well.
    """
    given = [override for override in overrides if override.lstrip("+").startswith("draft._target_=")]
    if not given or not issubclass(COMMANDS[name].schema(), Config):
        return None, list(overrides)
    target, others = unquoted(given[-1].partition("=")[2]), [item for item in overrides if item not in given]
    named = [item for item in others if item.startswith(("draft=", "draft.kind="))]
    if named or len(given) > 1:
        raise ConfigError(f"{given[-1]} names the drafter, and so does {[*named, *given][0]}; leave one of them out.")
    return own_drafter(target).Config, ["draft=none", f"draft.kind={target}", *others]


def _exists(path: str) -> bool:
    return bool(path) and Path(path).expanduser().exists()


def quoted(value: str) -> str:
    """The value in quotes, so that Hydra takes it literally."""
    return QuotedString(value, Quote.single).with_quotes()


def literal(value: str) -> str:
    """The value in quotes, with ``${`` escaped, which OmegaConf would look up."""
    return quoted(re.sub(r"(\\*)\$\{", r"\1\1\\${", value))


def unquoted(value: str) -> str:
    """The value without the quotes that a user put around it."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def overview() -> str:
    """The text of ``python -m specgraph --help``."""
    lines = ["Lossless speculative decoding of Hugging Face causal language models.", ""]
    lines += ["usage: python -m specgraph COMMAND [KEY=VALUE ...]", "", "commands:"]
    lines += [f"  {name:<10}{command.about}" for name, command in COMMANDS.items()]
    lines += [f"  {'doctor':<10}{doctor.ABOUT}"]
    lines += ["", "python -m specgraph COMMAND --help    the keys of a command and their defaults"]
    lines += ["python -m specgraph COMMAND config=FILE.yaml  keys from a file; --KEY VALUE is KEY=VALUE"]
    lines += ["python -m specgraph COMMAND --cfg job  the configuration that would run"]
    lines += ["python -m specgraph COMMAND -m draft.num_speculative_tokens=1,4  one run for each value"]
    return "\n".join(lines)


def register(name: str, draft: type | None = None) -> type:
    """Make a command's schema and help known to Hydra, and return the schema.

    The keys of ``draft`` are those of the class ``draft``, or of all drafters of this package if that is None.
    """
    command, store = CONFIGURATIONS[name], ConfigStore.instance()
    schema = command.schema() if draft is None else _with_draft(command.schema(), draft)
    store.store(name=f"{name}_schema", node=schema)
    store.store(group="hydra/help", name=name, node={
        "app_name": f"python -m specgraph {name.partition('_')[0]}",
        "header": _header(name, command, schema),
        "template": _TEMPLATE if issubclass(schema, Config) else _TEMPLATE_WITHOUT_GROUPS,
        "footer": _FOOTER,
    })  # fmt: skip
    return schema


@contextlib.contextmanager
def shared_store() -> Iterator[None]:
    """For as long as the context lasts, Hydra's store of schemas stands for its own copies.

    Hydra copies it, with all that it holds, for every group that a help text lists, in two thirds of the time that
    one takes. What is loaded from it is copied in any case.
    """
    store = ConfigStore.instance()
    store.__deepcopy__ = lambda memo: store  # type: ignore[attr-defined]
    try:
        yield
    finally:
        vars(store).pop("__deepcopy__", None)


def _with_draft(schema: type, draft: type) -> type:
    """A command's schema with other keys of ``draft``."""
    keys = field(default_factory=draft, metadata={"text": ""})
    return dataclasses.make_dataclass(schema.__name__, [("draft", DraftConfig, keys)], bases=(schema,))


_FOOTER = """\
--KEY VALUE is KEY=VALUE. Also: config=FILE.yaml (keys from a file; those of the command line count more), --cfg job
(show the configuration), -m KEY=A,B (sweep), --config-dir DIR (choose among files of your own, such as
DIR/draft/mine.yaml by draft=mine), --hydra-help (Hydra's own flags)"""
_TEMPLATE_WITHOUT_GROUPS = """${hydra.help.header}

== Configuration ==
$CONFIG
${hydra.help.footer}
"""
_TEMPLATE = _TEMPLATE_WITHOUT_GROUPS.replace(
    "== Configuration", "== Configuration groups ==\nChoose with GROUP=NAME\n\n$APP_CONFIG_GROUPS\n== Configuration"
)


def _header(name: str, command: Command, schema: type) -> str:
    called = f"python -m specgraph {name.partition('_')[0]}"
    lines = [f"{called}: {command.about}", "", f"usage: {called} {command.usage}", "", "== Examples =="]
    lines += [f"{called} {example}" for example in command.examples]
    described = describe(schema)
    lines += ["", "== Keys =="]
    width = max(map(len, described)) + 2
    for key, text in described.items():
        lines += textwrap.wrap(text, 118, initial_indent=f"{key:<{width}}", subsequent_indent=" " * width)
    return "\n".join(lines).replace("$", "")


def describe(schema: type) -> dict[str, str]:
    """Every dotted key of a dataclass with the string below its field. Keys of subclasses come first."""
    texts = [_texts(cls) for cls in schema.__mro__ if dataclasses.is_dataclass(cls)]
    own: dict[str, str] = {}
    for of_class in texts:
        own = own | {name: text for name, text in of_class.items() if name not in own}
    found: dict[str, str] = {}
    for name, text in own.items():
        inner = _group(schema, name)
        found |= {name: text} if inner is None else {f"{name}.{key}": value for key, value in describe(inner).items()}
    return found


def _group(schema: type, name: str) -> type | None:
    """The dataclass of a field that is a group of keys; None for any other field."""
    factory = next(item.default_factory for item in dataclasses.fields(schema) if item.name == name)
    made = None if factory is dataclasses.MISSING else factory()
    return type(made) if dataclasses.is_dataclass(made) else None


def _texts(schema: type) -> dict[str, str]:
    """The string below each field of one class; empty for a field that has none."""
    own = inspect.get_annotations(schema)
    fields = [item for item in dataclasses.fields(schema) if item.name in own]
    carried = {item.name: item.metadata["text"] for item in fields if "text" in item.metadata}
    return carried or texts_below(cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(schema))).body[0]))
