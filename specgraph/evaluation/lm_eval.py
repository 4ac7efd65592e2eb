"""The model ``specgraph`` of the Language Model Evaluation Harness (https://github.com/EleutherAI/lm-evaluation-harness).

It is the harness's own model ``hf`` in all that concerns the tokenizer, prompts, truncation and stop strings. Requests
for text run through ``decoder.generate``, and requests for log-likelihoods through ``decoder.score``. So answers are
those of ``hf``, up to the rounding of other kernels.

The harness finds models in a table of its own and reads no entry points, so this file has to be imported first.
``python -m specgraph.evaluation`` does that and then is the harness's command line.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import lm_eval.models  # noqa: F401  (fills the table, which the harness does only while it is empty)
import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from specgraph.checkpoints.causal_lm import DAMAGED, load_whole, not_loaded
from specgraph.compiler.compile import compile_speculative
from specgraph.config import Config, group_choices
from specgraph.errors import ConfigError, SpecgraphError

NONE = "none"
"""The drafter that drafts nothing. The harness reads this word in ``model_args`` as Python's None."""
KEYS = {key.name for key in fields(Config)} - inspect.signature(HFLM.__init__).parameters.keys()
"""The keys of specgraph's configuration at its top that are no argument of ``hf``."""
TOGETHER = 1024
"""Requests in one call of the decoder, which runs ``max_batch_size`` of them at a time and gives the row of a sequence
that has ended to the next one."""

Scored = tuple[Any, list[int], list[int]]
"""A request for a log-likelihood: a key for the cache of the harness or None, a context, and its continuation."""


class WholeCausalLM:
    """Takes the place of ``AutoModelForCausalLM``, and refuses files that lack a tensor."""

    @staticmethod
    def from_pretrained(name: str, **options: Any) -> Any:
        """The model; ``options`` are those of transformers."""
        return load_whole(name, f"pretrained={name}", **options)


@register_model("specgraph")
class SpecgraphLM(HFLM):  # type: ignore[misc]  # without types
    """A causal LM of transformers in a compiled decoder.

    ``model_args`` are those of ``hf``, and ``draft``: a draft model or head, its path, or the name of a drafter that
    needs none, such as ``suffix`` or ``none``. Keys of specgraph's configuration are there, too, such as
    ``lowering=eager``, ``draft.num_speculative_tokens=4`` and ``cache.pool_tokens=65536``.
    ``max_batch_size`` is how many sequences run together; the harness's ``--batch_size`` changes nothing.
    """

    AUTO_MODEL_CLASS = WholeCausalLM

    def __init__(self, pretrained: Any, draft: Any = "ngram", max_batch_size: int = 64, **options: Any) -> None:
        """Load the model as ``hf`` does, and compile it.

        Raises:
            ConfigError: the model cannot be loaded with these arguments, a key of the configuration does not exist, or
                a value is out of range.
            UnsupportedModelError: the model cannot be decoded correctly.
        """
        config = {name: value for name, value in options.items() if "." in name or name in KEYS}
        if "draft.kind" in config and config["draft.kind"] is None:
            config["draft.kind"] = NONE
        name = NONE if draft is None else draft
        if isinstance(name, str) and name in group_choices("draft"):
            draft = None
            config = config if "draft.kind" in config else {"draft": name, **config}
        rest = {name: value for name, value in options.items() if name not in config}
        try:
            super().__init__(pretrained, max_batch_size=max_batch_size, **rest)
        except SpecgraphError:
            raise
        except DAMAGED as error:
            raise not_loaded(f"pretrained={pretrained}", str(pretrained), error) from error
        if self.backend != "causal":
            raise ConfigError(f"backend={self.backend} is for models with an encoder; specgraph runs causal LMs.")
        self.decoder = compile_speculative(self.model, {**config, "max_batch_size": max_batch_size}, draft=draft)

    @property
    def batch_size(self) -> int:
        """How many requests the harness collects for a call."""
        return TOGETHER

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence that is run."""
        return min(int(super().max_length), self.decoder.max_length)

    def _model_generate(self, context: Tensor, max_length: int, stop: Sequence[str], **options: Any) -> Tensor:
        """Continue prompts ``[B, S]``, padded on the left, to ``max_length`` tokens or a stop string."""
        ends = StopStrings(self.tokenizer, stop, context.shape[1])
        pad_id = self.tokenizer.pad_token_id
        return self.decoder.generate(
            context, max_length=max_length, stopping_criteria=[ends], pad_token_id=pad_id, **options
        ).sequences

    def _loglikelihood_tokens(
        self, requests: Iterable[Scored], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """The log-probability of what follows each context, and whether greedy decoding would give it."""
        answers: list[tuple[float, bool]] = []
        every = list(requests)
        with tqdm(total=len(every), disable=disable_tqdm, desc="Running loglikelihood requests") as progress:
            for begin in range(0, len(every), TOGETHER):
                some = every[begin : begin + TOGETHER]
                for (key, _, _), answer in zip(some, self._score(some), strict=True):
                    answers.append(answer)
                    if key is not None:
                        self.cache_hook.add_partial("loglikelihood", key, answer)
                progress.update(len(some))
        return answers

    def _score(self, requests: Sequence[Scored]) -> list[tuple[float, bool]]:
        most = self.max_length + 1  # the last token is not run
        sequences = [(context + continuation)[-most:] for _, context, continuation in requests]
        starts = [len(ids) - len(given) for ids, (_, _, given) in zip(sequences, requests, strict=True)]
        scored = self.decoder.score([torch.tensor(ids) for ids in sequences], start=starts)
        return [
            (total, bool(is_greedy.all()))
            for total, is_greedy in zip(scored.sums.tolist(), scored.is_greedy, strict=True)
        ]


class StopStrings:
    """Ends a sequence as soon as one of some strings is in its new text.

    As in the harness, the last tokens are looked at, two more than the string itself has, because a text may be cut
    into tokens in several ways.
    """

    def __init__(self, tokenizer: Any, strings: Iterable[str], prompt_length: int) -> None:
        """``prompt_length`` is the number of tokens of a prompt with its padding, which are not looked at."""
        self._tokenizer, self._strings, self._begin = tokenizer, [text for text in strings if text], prompt_length
        lengths = [len(tokenizer.encode(text, add_special_tokens=False)) for text in self._strings]
        self._tail = max(lengths, default=0) + 2

    def __call__(self, ids: Tensor, scores: object) -> bool:
        """Whether a sequence ``[1, S]`` ends with the last of its tokens."""
        text = self._tokenizer.decode(ids[0, self._begin :][-self._tail :])
        return any(string in text for string in self._strings)
