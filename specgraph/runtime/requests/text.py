"""Texts in, texts out: for those who do not want to see token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from specgraph.errors import InputError, warn_caller
from specgraph.runtime.requests.values import name_of


class Tokenizers:
    """The tokenizer of a model, loaded from where the model came from when it is first asked for."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._source = str(getattr(model, "name_or_path", "") or "")
        self._own: Any = None

    def get(self, given: Any) -> Any:
        """``given``, else the model's.

        Raises:
            InputError: there is none, or ``given`` is none.
        """
        if given is not None:
            check_tokenizer(given)
            return given
        if self._own is None:
            try:
                self._own = AutoTokenizer.from_pretrained(self._source)
            except (OSError, ValueError, KeyError) as error:
                where = repr(self._source) if self._source else "the model, which was not loaded from a folder"
                raise InputError(f"There is no tokenizer beside {where}; pass one as tokenizer=.") from error
        return self._own


def check_tokenizer(given: Any) -> None:
    """Refuse what is no tokenizer of transformers, such as its name."""
    if not callable(given) or not all(hasattr(given, name) for name in ("decode", "get_vocab")):
        shown = repr(given) if isinstance(given, str) else name_of(given)
        raise InputError(
            f"tokenizer is a tokenizer of transformers, not {shown}; AutoTokenizer.from_pretrained loads one."
        )


_MADE, _ALONE = "the tokenizer makes it", "the result is the text alone"
_NO_OPTIONS = {
    **dict.fromkeys(("input_ids", "inputs", "attention_mask", "token_type_ids"), _MADE),
    **dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits", "return_logprobs"), _ALONE),
}
"""Arguments of ``generate`` that have no use where texts go in and come out, and why."""


def check_text_options(options: Mapping[str, Any]) -> None:
    """Refuse arguments of ``generate`` that would have no effect, except where they ask for nothing.

    Raises:
        InputError: names the argument.
    """
    for name, why in _NO_OPTIONS.items():
        if options.get(name) is not None and options[name] is not False:
            raise InputError(f"text() and chat() do not take {name} ({why}); leave it out, or call generate().")


def encode_texts(tokenizer: Any, texts: Sequence[Any]) -> list[list[int]]:
    """The token ids of each text, with the special tokens that the tokenizer adds.

    Raises:
        InputError: something is no text, or a text is empty of tokens.
    """
    if not isinstance(texts, list | tuple):
        raise InputError(f"Prompts are a text or a list of texts here, not {type(texts).__name__}.")
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"A prompt is a text here, not {type(text).__name__}; generate() takes token ids.")
    rows = [list(tokenizer(text)["input_ids"]) for text in texts]
    if [] in rows:
        raise InputError(f"The tokenizer makes no token of the text {texts[rows.index([])]!r}; give it some text.")
    doubled = [place for place, row in enumerate(rows) if _begins_twice(tokenizer, texts[place], row)]
    if doubled:
        which = "The text begins" if len(rows) == 1 else f"{len(doubled)} of {len(rows)} texts begin"
        warn_caller(
            f"{which} with {tokenizer.bos_token}, so no second one is put in front, as the tokenizer would. A chat "
            "template has usually written it; chat() takes the messages themselves. Else leave it out of the text."
        )
    return [row[1:] if place in doubled else row for place, row in enumerate(rows)]


def _begins_twice(tokenizer: Any, text: str, row: Sequence[int]) -> bool:
    """Whether the tokenizer has put a BOS in front of one that the text has."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None or list(row[:2]) != [bos, bos]:
        return False
    plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return plain[:1] == [bos] and plain != list(row)
