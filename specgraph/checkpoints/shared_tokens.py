"""Token-level intersection: which tokens of two vocabularies stand for the same string.

Drafts come from the shared tokens alone, with their probabilities renormalised, so every rule of verification holds as
it does for a head with a reduced vocabulary. Strings are compared as bytes: ``Ġthe`` of a byte-level tokenizer and
``▁the`` of a sentencepiece one are both `` the``. Special tokens are compared by their names, and those for the
beginning and the end of a text by what they are.

Source: Timor et al. 2025 (arXiv 2502.05202), algorithm TLI.
"""

from __future__ import annotations

import re
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specgraph.errors import UnsupportedModelError

LEAST_SHARE = 0.5
"""The least share of the tokens of a text that can be drafted. Any other token ends what is accepted of its step,
so with a share ``s`` even a perfect draft has ``s / (1 - s)`` of them accepted on average: one at 0.5."""
TEXT = "".join(topics.values())[:50_000]
"""A text that every Python has: the help on its language, English with code."""
_BLANK = "▁"
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(byte): byte for byte in _SHOWN} | {
    chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in _SHOWN)
}
"""The byte that each character of a byte-level token stands for, as in GPT-2."""


class SharedTokens(NamedTuple):
    """The tokens that two vocabularies share.

    Attributes:
        draft_ids: int64 ``[S]``, their ids for the draft.
        target_ids: int64 ``[S]``, their ids for the target, ascending.
        reads: int64 ``[V]``, what the draft reads for every id of the target: the token of the same string, else the
            longest end of the string that is a token, else a special token (unknown, end or beginning).
        words: how much is shared, for the report.
    """

    draft_ids: Tensor
    target_ids: Tensor
    reads: Tensor
    words: str


def share_tokens(target: Any, draft: Any, target_size: int, draft_size: int) -> SharedTokens:
    """Compare two tokenizers of transformers, of models that have ``target_size`` and ``draft_size`` tokens.

    Raises:
        UnsupportedModelError: what the tokens of one stand for is not known, or too few are shared.
    """
    ours, theirs = _strings(target, target_size, "target"), _strings(draft, draft_size, "draft")
    known: dict[bytes | str, int] = {}
    for index, string in theirs.items():
        known.setdefault(string, index)
    special = (getattr(draft, f"{role}_token_id", None) for role in ("unk", "eos", "bos"))
    reads = [next((index for index in special if index is not None), 0)] * target_size
    pairs: dict[int, int] = {}
    for index, string in ours.items():
        if string in known:
            pairs.setdefault(known[string], index)
        ends = (string[place:] for place in range(len(string) if isinstance(string, bytes) else 1))
        reads[index] = next((known[end] for end in ends if end in known), reads[index])
    drafted = {*pairs.values()}
    counted = [index in drafted for index in target.backend_tokenizer.encode(TEXT, add_special_tokens=False).ids]
    share = sum(counted) / max(1, len(counted))
    words = f"{len(pairs)} of the target's {len(ours)} tokens ({share:.1%} of those in an English text with code)"
    if share < LEAST_SHARE:
        raise UnsupportedModelError(
            f"The draft has another tokenizer than the target, which shares {words}; with less than {LEAST_SHARE:.0%} "
            "of a text even perfect drafts are not worth their time, so choose a draft of a nearer family, or draft by "
            "ngram."
        )
    order = sorted(pairs, key=pairs.__getitem__)
    draft_ids, target_ids, read = map(torch.tensor, (order, [pairs[index] for index in order], reads))
    return SharedTokens(draft_ids, target_ids, read, words)


def _strings(tokenizer: Any, size: int, whose: str) -> dict[int, bytes | str]:
    """What each token below ``size`` stands for: the bytes of an ordinary one, the name or the role of a special one.

    Where two tokens have the same bytes, and one of them is the fallback for a byte, the one that texts have is first.
    """
    decoder: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    byte_level, blanks = (decoder is not None and decoder.decode(["a", f"{mark}b"]) == "a b" for mark in ("Ġ", _BLANK))
    if not byte_level and not blanks:
        raise UnsupportedModelError(
            f"The draft's tokenizer differs from the target's, and the {whose}'s is neither byte-level nor of "
            "sentencepiece, so its tokens cannot be matched; choose a draft of the target's family, or draft by ngram."
        )
    fallback = blanks and decoder.decode(["a", "<0x62>"]) == "ab"
    found: dict[int, bytes | str] = {}
    bytes_alone: dict[int, bytes | str] = {}
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        byte = _BYTE.fullmatch(token) if fallback else None
        if byte is not None:
            bytes_alone[index] = bytes.fromhex(byte[1])
        elif byte_level and all(letter in _BYTES for letter in token):
            found[index] = bytes(_BYTES[letter] for letter in token)
        else:
            found[index] = token.replace(_BLANK, " ").encode()
    found |= bytes_alone
    for index, token in tokenizer.added_tokens_decoder.items():
        found[index] = token.content if token.special else token.content.encode()
    for role in ("bos", "eos"):
        if (index := getattr(tokenizer, f"{role}_token_id", None)) is not None:
            found[index] = role
    return {index: string for index, string in found.items() if index < size and string}
