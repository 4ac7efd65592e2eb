"""The help, which is made from the commands, their keys and the strings below these."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
import textwrap

from omegaconf import DictConfig, OmegaConf

from specgraph.cli import doctor
from specgraph.cli.command_table import COMMANDS, Command
from specgraph.config import DraftConfig, group_choices
from specgraph.config.drafters import DraftKeys, readers
from specgraph.config.groups import default_groups

_FOOTER = """\
--KEY VALUE is KEY=VALUE. Also: config=FILE.yaml (keys from a file; those of the command line count more), --cfg job
(show the configuration), -m KEY=A,B (sweep), --config-dir DIR (choose among files of your own, such as
DIR/draft/mine.yaml by draft=mine)"""


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


def help_text(name: str, command: Command, cfg: DictConfig) -> str:
    """The text of ``python -m specgraph COMMAND --help``, with the configuration that would run."""
    called = f"python -m specgraph {name}"
    lines = [f"{called}: {command.about}", "", f"usage: {called} {command.usage}", "", "== Examples =="]
    lines += [f"{called} {example}" for example in command.examples]
    described = describe(OmegaConf.get_type(cfg) or command.schema())
    lines += ["", "== Keys =="]
    width = max(map(len, described)) + 2
    for key, text in described.items():
        lines += textwrap.wrap(text, 118, initial_indent=f"{key:<{width}}", subsequent_indent=" " * width)
    if command.base is not None:
        lines += ["", "== Configuration groups ==", "Choose with GROUP=NAME", ""]
        lines += [f"{group}: {', '.join(group_choices(group))}" for group in sorted(default_groups())]
    return "\n".join([*lines, "", "== Configuration ==", OmegaConf.to_yaml(cfg), _FOOTER])


def describe(schema: type) -> dict[str, str]:
    """Every dotted key of a dataclass with the string below its field. Keys of subclasses come first."""
    own: dict[str, str] = {}
    for cls in schema.__mro__:
        own = own | {name: text for name, text in _texts(cls).items() if not own.get(name)}
    found: dict[str, str] = {}
    for name, text in own.items():
        if schema is DraftKeys and not hasattr(DraftConfig, name):
            text = f"{', '.join(readers(name))}: {text}"
        inner = _group(schema, name)
        found |= {name: text} if inner is None else {f"{name}.{key}": value for key, value in describe(inner).items()}
    return found


def _group(schema: type, name: str) -> type | None:
    """The dataclass of a field that is a group of keys; None for any other field."""
    factory = next(item.default_factory for item in dataclasses.fields(schema) if item.name == name)
    made = None if factory is dataclasses.MISSING else factory()
    return type(made) if dataclasses.is_dataclass(made) else None


def _texts(cls: type) -> dict[str, str]:
    """The string below each field that a class adds, or the text that the field carries; empty if it has neither."""
    own = inspect.get_annotations(cls)
    fields = [item for item in dataclasses.fields(cls) if item.name in own] if dataclasses.is_dataclass(cls) else []
    if not fields or fields[0].metadata:
        return {item.name: item.metadata["text"] for item in fields}
    below = _texts_below(cls.__module__)[cls.__name__]
    return {item.name: below.get(item.name, "") for item in fields}


@functools.cache
def _texts_below(module: str) -> dict[str, dict[str, str]]:
    """For each class of a module, the strings below its fields."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        body.name: {
            item.target.id: " ".join(str(after.value.value).split())
            for item, after in itertools.pairwise(body.body)
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        }
        for body in ast.walk(tree) if isinstance(body, ast.ClassDef)
    }  # fmt: skip
