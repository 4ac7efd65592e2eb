"""What ``draft=`` and the configuration name, made into a drafter for a traced target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from specgraph import drafters
from specgraph.checkpoints import Checkpoint, load_head, open_checkpoint, shared_notes
from specgraph.checkpoints.tokenizers import check_same_tokenizer
from specgraph.config import Config
from specgraph.drafters import Drafter, DraftHead
from specgraph.errors import ConfigError, UnsupportedModelError
from specgraph.frontend.tracing import TracedModel, check_is_causal_lm, trace

DraftLike: TypeAlias = "PreTrainedModel | DraftHead | Checkpoint | str | Path"


@dataclass(frozen=True)
class Draft:
    """A drafter, and the model behind it if it is a causal LM of its own: that is checked as the target is."""

    drafter: Drafter
    model: PreTrainedModel | None = None
    traced: TracedModel | None = None
    notes: tuple[str, ...] = ()


def with_draft(config: Config, draft: DraftLike | None) -> tuple[Config, DraftLike | None]:
    """The configuration with the kind of drafter that a draft, given as an argument or by ``draft.model``, is.

    Beside it the draft itself, for :func:`make_draft`: opened, if it is the path of a checkpoint.

    Raises:
        ConfigError: a draft was given and the drafter takes none, or the checkpoint cannot be opened.
    """
    given, kind = draft if draft is not None else config.draft.model, config.draft.kind
    if kind == "none":
        if draft is not None:
            raise ConfigError("draft= was given, but draft.kind is 'none'; leave one of them out.")
        return config, None
    if given is None:
        if kind in ("draft_model", "eagle3"):
            what = {"draft_model": "model", "eagle3": "head"}[kind]
            raise ConfigError(f"The {kind} drafter needs a {what}: pass draft=... or set draft.model to its folder.")
        return config, None
    if isinstance(given, str | Path) and Path(given).exists():
        given = open_checkpoint(given)
    return replace(config, draft=replace(config.draft, kind=_kind(given))), given


def _kind(given: DraftLike) -> str:
    if isinstance(given, Checkpoint):
        return given.kind
    return "eagle3" if isinstance(given, DraftHead) else "draft_model"


def make_draft(config: Config, model: PreTrainedModel, target: TracedModel, draft: DraftLike | None) -> Draft:
    """The drafter for a target ``model`` that was traced as ``target``; takes what :func:`with_draft` returned."""
    options = config.draft
    makers: dict[str, Callable[[], Draft]] = {
        "none": lambda: Draft(drafters.none()),
        "ngram": lambda: Draft(
            drafters.ngram(options.num_speculative_tokens, options.max_ngram, options.min_ngram, target.info.device)
        ),
        "draft_model": lambda: _draft_model(config, model, target, draft),
        "eagle3": lambda: _head(config, model, target, draft),
    }
    return makers[options.kind]()


def _head(config: Config, model: PreTrainedModel, target: TracedModel, given: Any) -> Draft:
    """An EAGLE-3 head, loaded or as a checkpoint."""
    notes: tuple[str, ...] = ()
    if isinstance(given, Checkpoint):
        checkpoint, given = given, load_head(given, config.draft, model, target.info)
        notes = (checkpoint.about, *shared_notes(checkpoint, given, model))
    found, info = given.module.lm_head.weight, target.info
    if (found.device, found.dtype) != (info.device, info.dtype):
        raise ConfigError(
            f"The head is {found.dtype} on {found.device}, the target {info.dtype} on {info.device}; move one of them."
        )
    return Draft(drafters.eagle3(given, config.draft.num_speculative_tokens), notes=notes)


def _draft_model(config: Config, model: PreTrainedModel, target: TracedModel, given: Any) -> Draft:
    """A causal LM with the target's tokenizer, on its device. One by path or name is loaded in the target's dtype."""
    mask, parallel = config.draft.mask_token_id, False
    notes: tuple[str, ...] = ()
    if isinstance(given, Checkpoint):
        mask, parallel = given.mask_token_id if mask is None else mask, given.parallel
        given, notes = given.path, (given.about,)
    if isinstance(given, str | Path):
        given = _read_causal_lm(given, target)
    try:
        check_is_causal_lm(given)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"draft: {error}") from None
    check_same_tokenizer(model, given)
    device = next(given.parameters()).device
    if device != target.info.device:
        raise ConfigError(f"The draft is on {device}, the target on {target.info.device}; move one of them.")
    traced = trace(given)
    if mask is not None and not 0 <= mask < traced.info.input_ids:
        raise ConfigError(f"draft.mask_token_id is {mask}; the draft takes ids 0 to {traced.info.input_ids - 1}.")
    drafter = drafters.draft_model(traced, config.draft.num_speculative_tokens, mask, parallel)
    return Draft(drafter, given, traced, notes)


def _read_causal_lm(path: str | Path, target: TracedModel) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=target.info.dtype)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"The draft {str(path)!r} cannot be loaded as a causal LM: {reason}") from None
    moved: PreTrainedModel = loaded.to(target.info.device).eval()
    return moved
