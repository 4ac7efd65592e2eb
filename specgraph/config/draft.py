"""The keys of ``draft``: those that every drafter has, and those that each drafter adds.

The file of a drafter holds its configuration class. The command line must know all keys before it knows to which
drafter a checkpoint belongs, and its help must not wait for torch, which those files import. So only the classes are
taken from the source of the files and run. This is why a configuration class may use only builtins, the names of this
module, and the configuration class of another drafter from which it derives.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from specgraph.errors import ConfigError

LOOKUPS = ("ngram", "suffix")
"""The drafters that ``draft.first`` can put in front of another one."""
LOOKUP_PASS = "lookup_first"
"""The pass that does so."""
MOST_MATCHED = 127
"""The longest match that a lookup may be asked for."""
NUMBERS = ("num_speculative_tokens", "num_speculative_tokens_by_load")
"""The keys that give K."""
DRAFTERS = Path(__file__).parent.parent / "drafters"
"""The folder of the drafters. Every file in it that has a configuration class is a drafter of the file's name."""


@dataclass
class DraftConfig:
    """How drafts are made. Every drafter derives its own class from this one."""

    kind: str = "ngram"
    """The drafter; `draft=NAME` sets it together with its defaults."""
    num_speculative_tokens: int = 4
    """K, drafts per step and sequence (the kind `none` ignores it). A table gives K by the number of sequences that
    decode together: with {1: 7, 8: 5, 32: 2, 64: 0} it is 7 for up to 7 of them, and 0 for 64 and more."""
    num_speculative_tokens_by_load: Any = None
    """Such a table; num_speculative_tokens is then its largest K. null: K is always the same."""
    adaptive: bool | None = None
    """Verify fewer drafts than K, or none, in steps in which that promises more tokens per second. This is for lookups
    (`ngram`, `suffix`) on a CPU. null: they do so under `strict`, unless num_speculative_tokens is given."""
    model: str | None = None
    """The folder of a checkpoint, or the name of a causal LM; `draft=` takes either, and it says which drafter it is
    for."""
    parallel: bool | None = None
    """Draft all tokens in one call with mask tokens; null does so if the draft was trained for it."""
    first: str | None = None
    """`ngram` or `suffix`: sequences in which this lookup finds drafts take them instead of the draft's own; null: all
    take the draft's own."""
    first_match: int = 8
    """How many tokens at the end of a sequence must have occurred in it before, for `first`; less for a weak draft."""

    trains: ClassVar[tuple[str, ...]] = ()
    """The values of ``train draft=`` that train a head of this drafter."""

    def check(self) -> None:
        """Raise ``ConfigError`` for a value that has the right type but that the drafter does not allow."""
        at_least_one("draft.num_speculative_tokens", self.num_speculative_tokens)


@dataclass
class ParallelDraftConfig(DraftConfig):
    """Keys of drafters that can draft all tokens in one call, with a mask token."""

    mask_token_id: int | None = None
    """The mask token of parallel drafting; null takes the one the draft's configuration names."""


def read_table(given: object) -> dict[int, int]:
    """The table of ``draft.num_speculative_tokens``: K by the number of sequences that decode together.

    Raises:
        ConfigError: it is not such a table; says what is wrong and shows one.
    """
    key, example = "draft.num_speculative_tokens", "such as {1: 7, 8: 5, 32: 2}"
    if not isinstance(given, Mapping) or not all(map(_is_int, (*given, *given.values()))):
        raise ConfigError(
            f"{key} is a number, or a table from numbers of sequences to numbers of drafts, {example}; not {given!r}."
        )
    table = {int(count): int(drafts) for count, drafts in given.items()}
    if min(table, default=0) != 1 or [*table] != sorted(table):
        raise ConfigError(
            f"{key} is a table of the numbers of sequences {[*table]}; they begin with 1 and ascend, {example}."
        )
    if min(table.values()) < 0 or max(table.values()) < 1:
        raise ConfigError(
            f"{key} is a table of the numbers of drafts {[*table.values()]}; they are 0 or more, and one of them is at "
            "least 1 (draft=none drafts nothing)."
        )
    return table


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def at_least_one(key: str, value: int | None) -> None:
    """Raise ``ConfigError`` if a number is below 1. None passes."""
    if value is not None and value < 1:
        raise ConfigError(f"{key} must be at least 1, got {value}.")


_SHARED: dict[str, type[DraftConfig]] = {cls.__name__: cls for cls in (DraftConfig, ParallelDraftConfig)}
_NAMES = {**_SHARED, "dataclass": dataclass, "field": field, "Any": Any, "ClassVar": ClassVar,
          "ConfigError": ConfigError, "at_least_one": at_least_one}  # fmt: skip


def texts_below(body: ast.ClassDef) -> dict[str, str]:
    """The string below each field of a class, by the field's name; empty for a field that has none."""
    found: dict[str, str] = {}
    for item, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not _is_class_variable(item):
            value = after.value if isinstance(after, ast.Expr) else None
            found[item.target.id] = " ".join(str(value.value).split()) if isinstance(value, ast.Constant) else ""
    return found


def _is_class_variable(item: ast.AnnAssign) -> bool:
    return ast.unparse(item.annotation).startswith("ClassVar")


@functools.cache
def drafter_configs() -> dict[str, type[DraftConfig]]:
    """The configuration class of every drafter in this package, by kind. No drafter is imported for this."""
    found = {path.stem: _class_in(path) for path in sorted(DRAFTERS.glob("*.py"))}
    return {kind: cls for kind, cls in found.items() if cls is not None}


def drafter_kinds() -> list[str]:
    """The kinds of drafters in this package."""
    return list(drafter_configs())


def trained_by() -> dict[str, str]:
    """For each value of ``train draft=``, the kind of drafter whose head it trains."""
    return {name: kind for kind, cls in drafter_configs().items() for name in cls.trains}


@functools.cache
def _class_in(path: Path) -> type[DraftConfig] | None:
    """The configuration class of a drafter's file; None if the file is no drafter."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parents = _SHARED | _imported(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) in parents for base in node.bases):
            future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
            module = ast.fix_missing_locations(ast.Module([future, node], []))
            namespace: dict[str, Any] = {**_NAMES, **parents, "__name__": __name__}
            exec(compile(module, str(path), "exec"), namespace)
            cls: type[DraftConfig] = namespace[node.name]
            cls.__doc__ = ast.get_docstring(node)
            inherited = getattr(cls, "texts", {})
            cls.texts = inherited | texts_below(node)  # type: ignore[attr-defined]
            return cls
    return None


def _imported(tree: ast.Module) -> dict[str, type[DraftConfig]]:
    """The configuration classes that a drafter's file imports from the files of others, to derive its own from one."""
    found: dict[str, type[DraftConfig]] = {}
    for node in tree.body:
        package, _, name = (node.module or "").rpartition(".") if isinstance(node, ast.ImportFrom) else ("", "", "")
        if isinstance(node, ast.ImportFrom) and package == "specgraph.drafters" and (DRAFTERS / f"{name}.py").exists():
            cls = _class_in(DRAFTERS / f"{name}.py")
            found |= {alias.name: cls for alias in node.names if cls is not None and alias.name == cls.__name__}
    return found


def _every_key() -> type[DraftConfig]:
    """One class with the keys of all drafters, which are valid as long as it is not known which drafter will run."""
    fields: dict[str, tuple[str, Any, Any]] = {}
    owners: dict[str, list[str]] = {}
    shared = {item.name for cls in _SHARED.values() for item in dataclasses.fields(cls)}
    for kind, cls in drafter_configs().items():
        for item in dataclasses.fields(cls):
            if item.name not in {own.name for own in dataclasses.fields(DraftConfig)}:
                owners.setdefault(item.name, []).append(kind)
                fields.setdefault(item.name, (item.name, item.type, _with_text(item, cls)))
    for name, (_, _, made) in fields.items():
        if name not in shared:
            made.metadata = {"text": f"{', '.join(owners[name])}: {made.metadata['text']}"}
    return dataclasses.make_dataclass("DraftKeys", list(fields.values()), bases=(DraftConfig,))


def _with_text(item: dataclasses.Field[Any], cls: type[DraftConfig]) -> Any:
    """A copy of a field that carries the string below it as metadata."""
    text = getattr(cls, "texts", {}).get(item.name) or _shared_texts().get(item.name, "")
    kept = {name: getattr(item, name) for name in ("default", "default_factory")}
    return field(**{k: v for k, v in kept.items() if v is not dataclasses.MISSING}, metadata={"text": text})


@functools.cache
def _shared_texts() -> dict[str, str]:
    """The strings below the fields of the classes of this module."""
    source = ast.parse(textwrap.dedent(Path(__file__).read_text(encoding="utf-8")))
    classes = (node for node in source.body if isinstance(node, ast.ClassDef) and node.name in _SHARED)
    return {name: text for node in classes for name, text in texts_below(node).items()}


DraftKeys = _every_key()
"""Every key of ``draft``, whichever drafter reads it."""
