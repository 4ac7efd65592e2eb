"""Compares the tokenizers of a target and of its draft."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import try_to_load_from_cache
from transformers import AutoTokenizer, PreTrainedModel

from specgraph.checkpoints.shared_tokens import SharedTokens, share_tokens
from specgraph.errors import UnsupportedModelError, warn_caller
from specgraph.kernels.verify import LOSSLESS_RULES

MAX_PADDING = 1024
"""How many rows an embedding may have beyond the entries of its tokenizer, as padding to a round number."""


def compare_tokenizers(
    target: PreTrainedModel, draft: PreTrainedModel, rule: str = LOSSLESS_RULES[0]
) -> tuple[str, SharedTokens | None]:
    """Compare the tokenizers of a target and a draft model.

    If both models were loaded from a folder with a tokenizer, their vocabularies are compared entry by entry. Where an
    id stands for other tokens, the draft drafts those that both have, and its ids are translated. Special tokens may
    differ without that where ``rule`` is lossless: such a token is then drafted where the target does not want it, and
    is refused like any other wrong draft. Under ``typical`` and ``synthetic``, it could come out.

    Otherwise their configurations are compared: the EOS ids, and the vocabulary sizes, which may differ by a padding of
    up to ``MAX_PADDING`` rows (Qwen2.5 has 151936 and 152064 with the same tokenizer).

    Returns a line for the report, which says what was compared, and the shared tokens if ids have to be translated.

    Raises:
        UnsupportedModelError: says what differs.
    """
    ours, theirs = _vocabulary(target), _vocabulary(draft)
    configs: list[Any] = [model.config.get_text_config() for model in (target, draft)]
    sizes = [int(config.vocab_size) for config in configs]
    if ours is not None and theirs is not None:
        found = _first_difference(ours, theirs)
        if found is None:
            return "the draft has the target's tokenizer, entry by entry", None
        differing, special = found
        if not special or rule not in LOSSLESS_RULES:
            shared = share_tokens(ours.tokenizer, theirs.tokenizer, *sizes)
            return f"the draft has another tokenizer ({differing}), and drafts what it shares: {shared.words}", shared
        warn_caller(
            f"The draft's special tokens differ from the target's: {differing}. No token is wrong by that under the "
            f"rule {rule}, but drafts of such a token are refused; a draft with the target's tokenizer may be faster."
        )
        return f"the draft has the target's tokenizer but for special tokens: {differing}", None
    without = "neither model" if ours is theirs else "the target" if ours is None else "the draft"
    verb = "was" if ours is theirs else "was not"
    advice = (
        f"Tokens of different tokenizers are matched by their strings, but {without} {verb} loaded from a folder with "
        "one; load both from one, choose a draft of the target's family, or draft by ngram."
    )
    if abs(sizes[0] - sizes[1]) > MAX_PADDING:
        raise UnsupportedModelError(
            f"The draft has {sizes[1]} tokens and the target {sizes[0]}, more than padding explains. {advice}"
        )
    ends = [_ids(config.eos_token_id) for config in configs]
    if ends[0] and ends[1] and not ends[0] & ends[1]:
        raise UnsupportedModelError(f"The draft's EOS is {sorted(ends[1])}, the target's {sorted(ends[0])}. {advice}")
    return (
        f"the tokenizers were not compared, because {without} {verb} loaded from a folder with one; only the sizes of "
        "the vocabularies and the EOS ids were. A draft of another tokenizer would be slow, and no token would be wrong"
    ), None


def _ids(value: int | list[int] | None) -> set[int]:
    return set() if value is None else {value} if isinstance(value, int) else set(value)


class _Vocabulary(NamedTuple):
    """A tokenizer, its entries, and which of their ids are special."""

    tokenizer: Any
    entries: dict[str, int]
    special: Set[int]


def _vocabulary(model: PreTrainedModel) -> _Vocabulary | None:
    """The model's tokenizer, or None if the model was not loaded from a folder or a repository that has one."""
    name = str(model.name_or_path)
    try:
        local = name and (Path(name) / "tokenizer_config.json").is_file()
        if not name or not (local or isinstance(try_to_load_from_cache(name, "config.json"), str)):
            return None
        tokenizer: Any = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return None
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return _Vocabulary(tokenizer, tokenizer.get_vocab(), {index for index, token in added.items() if token.special})


def _first_difference(target: _Vocabulary, draft: _Vocabulary) -> tuple[str, bool] | None:
    """The first id that stands for different tokens, in words, and whether both are special.

    An ordinary token is preferred to a special one. An added token that only one of the tokenizers has is no
    difference.
    """
    names = {index: token for token, index in draft.entries.items()}
    found: tuple[str, bool] | None = None
    for token, index in sorted(target.entries.items(), key=lambda item: item[1]):
        other = names.get(index)
        if other is None or other == token:
            continue
        words = f"id {index} is {token!r} for the target and {other!r} for the draft"
        if not (index in target.special and index in draft.special):
            return words, False
        found = found or (words, True)
    sizes = len(target.entries), len(draft.entries)
    if abs(sizes[0] - sizes[1]) > MAX_PADDING:
        return f"{sizes[0]} entries against {sizes[1]}", False
    return found
