"""Checks whether two models use the same tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from specgraph.errors import UnsupportedModelError

MAX_PADDING = 1024
"""How many rows an embedding may have beyond the entries of its tokenizer, as padding to a round number."""


def check_same_tokenizer(target: PreTrainedModel, draft: PreTrainedModel) -> str:
    """Refuse a draft model in which token ids stand for other tokens than in the target.

    If both models were loaded from a folder with a tokenizer, their vocabularies are compared entry by entry. Otherwise
    their configurations are compared: the EOS ids, and the vocabulary sizes, which may differ by a padding of up to
    ``MAX_PADDING`` rows (Qwen2.5 has 151936 and 152064 with the same tokenizer).

    Returns a line for the report, which says what was compared.

    Raises:
        UnsupportedModelError: says what differs.
    """
    ours, theirs = _vocabulary(target), _vocabulary(draft)
    advice = "A draft model must share the target's tokenizer; choose one of the same family, or draft by ngram."
    if ours is not None and theirs is not None:
        differing = _first_difference(ours, theirs)
        if differing:
            raise UnsupportedModelError(f"The draft's tokenizer differs from the target's: {differing}. {advice}")
        return "the draft has the target's tokenizer, entry by entry"
    configs: list[Any] = [model.config.get_text_config() for model in (target, draft)]
    sizes = [int(config.vocab_size) for config in configs]
    if abs(sizes[0] - sizes[1]) > MAX_PADDING:
        raise UnsupportedModelError(
            f"The draft has {sizes[1]} tokens and the target {sizes[0]}, more than padding explains. {advice}"
        )
    ends = [_ids(config.eos_token_id) for config in configs]
    if ends[0] and ends[1] and not ends[0] & ends[1]:
        raise UnsupportedModelError(f"The draft's EOS is {sorted(ends[1])}, the target's {sorted(ends[0])}. {advice}")
    without = "neither model" if ours is theirs else "the target" if ours is None else "the draft"
    verb = "was" if ours is theirs else "was not"
    return (
        f"the tokenizers were not compared, because {without} {verb} loaded from a folder with one; only the sizes of "
        "the vocabularies and the EOS ids were. A draft of another tokenizer would be slow, and no token would be wrong"
    )


def _ids(value: int | list[int] | None) -> set[int]:
    return set() if value is None else {value} if isinstance(value, int) else set(value)


def _vocabulary(model: PreTrainedModel) -> dict[str, int] | None:
    """The entries of the model's tokenizer, or None if the model was not loaded from a folder that has one."""
    folder = Path(str(model.name_or_path))
    if not model.name_or_path or not (folder / "tokenizer_config.json").is_file():
        return None
    try:
        vocabulary: dict[str, int] = AutoTokenizer.from_pretrained(folder).get_vocab()
    except (OSError, ValueError):
        return None
    return vocabulary


def _first_difference(target: dict[str, int], draft: dict[str, int]) -> str | None:
    """The first id that stands for different tokens; an added token that only one of them has is no difference."""
    names = {index: token for token, index in draft.items()}
    for token, index in sorted(target.items(), key=lambda item: item[1]):
        other = names.get(index)
        if other is not None and other != token:
            return f"id {index} is {token!r} for the target and {other!r} for the draft"
    if abs(len(target) - len(draft)) > MAX_PADDING:
        return f"{len(target)} entries against {len(draft)}"
    return None
