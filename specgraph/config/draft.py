"""The keys of ``draft`` that every drafter has, and what they allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
EXAMPLE = "such as {1: 7, 8: 5, 32: 2}"
ALLOWED = {
    "draft.num_speculative_tokens": "an integer, auto, or a table from numbers of sequences to numbers of drafts, "
    + EXAMPLE
}
"""What a key takes that takes more than values of its type, in words."""


@dataclass
class DraftConfig:
    """How drafts are made. Every drafter derives its own class from this one."""

    kind: str = "ngram"
    """The drafter; `draft=NAME` sets it together with its defaults."""
    num_speculative_tokens: int = 4
    """K, drafts per step and sequence (the kind `none` ignores it). A table gives K by the number of sequences that
    decode together: with {1: 7, 8: 5, 32: 2, 64: 0} it is 7 for up to 7 of them, and 0 for 64 and more. auto is
    adaptive=true: at most the drafter's own number, and as many as are worth it."""
    num_speculative_tokens_by_load: Any = None
    """The same as a table for num_speculative_tokens, which is then its largest K. null: K does not depend on the
    number of sequences."""
    adaptive: bool | None = None
    """Verify fewer drafts than K, or none, in steps where that is expected to give more tokens per second. null: true
    for lookups (`ngram`, `suffix`) and draft models on a CPU under `strict`, unless num_speculative_tokens is given; a
    draft model then makes up to 16 drafts."""
    model: str | None = None
    """The folder of a checkpoint, which determines the drafter, or the name of a causal LM. `draft=` takes either,
    too."""
    parallel: bool | None = None
    """Draft all tokens in one call with mask tokens; null does so if the draft was trained for it."""
    first: str | None = None
    """A lookup that is tried before the drafter, `ngram` or `suffix`: a sequence in which it finds drafts takes these,
    and any other sequence takes the drafter's. null: no lookup."""
    first_match: int = 8
    """For `first`: how many tokens at the end of a sequence must have occurred in it before. A smaller number suits a
    weak drafter."""

    window: int | None = None
    """How many tokens the attention of the drafter sees at most, also in a draft that was trained without a window; one
    that has a smaller window keeps it. null: as the draft says."""
    max_context: int | None = None
    """For a sequence of more tokens than this, its prompt among them, the drafter makes no drafts, and those of `first`
    are left. null: none is too long."""

    trains: ClassVar[tuple[str, ...]] = ()
    """The values of ``train draft=`` that train a head of this drafter."""

    def check(self) -> None:
        """Raise ``ConfigError`` for a value that has the right type but that the drafter does not allow."""
        at_least_one("draft.num_speculative_tokens", self.num_speculative_tokens)
        at_least_one("draft.window", self.window)
        at_least_one("draft.max_context", self.max_context)


@dataclass
class ParallelDraftConfig(DraftConfig):
    """Keys of drafters that can draft all tokens in one call, with a mask token."""

    mask_token_id: int | None = None
    """the mask token of parallel drafting; null takes the one the draft's configuration names."""


def read_table(given: object) -> dict[int, int]:
    """The table of ``draft.num_speculative_tokens``: K by the number of sequences that decode together.

    Raises:
        ConfigError: it is not such a table; says what is wrong and shows one.
    """
    key = f"draft.{NUMBERS[0]}"
    if not isinstance(given, Mapping) or not all(map(_is_int, (*given, *given.values()))):
        raise ConfigError(f"{key} is {ALLOWED[key]}, not {given!r}.")
    table = {int(count): int(drafts) for count, drafts in given.items()}
    if min(table, default=0) != 1 or [*table] != sorted(table):
        raise ConfigError(
            f"{key} is a table of the numbers of sequences {[*table]}; they begin with 1 and ascend, {EXAMPLE}."
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
