"""A second, smaller causal LM as the draft.

Source: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318). With a mask token it can draft
in parallel: PARD, An et al. 2025 (arXiv 2504.18583). With another tokenizer than the target's, it drafts the tokens
that both have (:mod:`specgraph.checkpoints.shared_tokens`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specgraph.checkpoints.checkpoint import Checkpoint, architectures
from specgraph.checkpoints.files import Files
from specgraph.checkpoints.gguf import is_gguf
from specgraph.checkpoints.shared_tokens import SharedTokens
from specgraph.checkpoints.tokenizers import compare_tokenizers
from specgraph.config.drafters import DraftModelConfig
from specgraph.drafters.base import Draft, DraftHead, Target, chooses_drafts
from specgraph.drafters.chain import BODY, HEAD, ChainDrafter
from specgraph.drafters.shared_ids import with_shared_ids
from specgraph.errors import ConfigError, UnsupportedModelError
from specgraph.frontend.shapes_only import without_weights
from specgraph.frontend.tracing import TracedModel, check_is_causal_lm, check_no_hooks, trace
from specgraph.ir.drafter import Mask
from specgraph.ir.model_info import ModelInfo
from specgraph.kernels.verify import LOSSLESS_RULES
from specgraph.schemes.layers import arrange_weights
from specgraph.schemes.load import load_causal_lm

MOST = 16
"""K where the chain of drafts may end early, unless a number is given."""


class DraftModelDrafter(ChainDrafter):
    """Runs a traced causal LM, which drafts token by token, or all tokens in one call with mask tokens."""

    Config = DraftModelConfig
    reads = "PARD and plain causal LMs"
    needs = "model"
    fallback = True

    @classmethod
    def recognise(cls, files: Files) -> Checkpoint | None:
        """PARD models, and every other checkpoint that transformers loads as a causal LM.

        This drafter is asked last, so no checkpoint of a head reaches it.
        """
        config = files.config
        if config.get("pard_token") is not None or config.get("spd_type") == "pard":
            return Checkpoint.of(files, cls.kind, "pard", "pard", parallel=True)
        return Checkpoint.of(files, cls.kind, "transformers", "draft_model") if _is_causal_lm(config) else None

    @classmethod
    def takes(cls, given: object) -> bool:
        """Whether the draft is a loaded model or the name of one, that is, anything but a loaded head."""
        return not isinstance(given, DraftHead)

    @classmethod
    def check_fit(cls, checkpoint: Checkpoint, options: Any, model: PreTrainedModel, info: ModelInfo) -> None:
        """Compare the tokenizers of both models, without loading weights."""
        folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        compare_tokenizers(model, without_weights(str(folder), "draft"))

    @classmethod
    def make(cls, options: DraftModelConfig, target: Target, given: Any) -> Draft:
        """Trace the draft model. A model that is given by path or name is loaded in the target's dtype first."""
        mask, parallel = options.mask_token_id, False
        notes: tuple[str, ...] = ()
        if isinstance(given, Checkpoint):
            mask, parallel = given.mask_token_id if mask is None else mask, given.parallel
            given, notes = given.path, (given.about,)
        if isinstance(given, str | Path):
            if is_gguf(given):
                notes = (*notes, f"the weights of {given} are dequantised to {str(target.info.dtype).split('.')[1]}")
            loaded: Any = load_causal_lm(given, target.info.dtype, f"The draft {str(given)!r}")
            given = loaded.to(target.info.device)
        compared, shared = _check_model(target, given)
        arrange_weights(given)
        traced = trace(given, target.max_length)
        if mask is not None and not 0 <= mask < traced.info.input_ids:
            raise ConfigError(f"draft.mask_token_id is {mask}; the draft takes ids 0 to {traced.info.input_ids - 1}.")
        chain = not (parallel if options.parallel is None else options.parallel)
        able = target.info.device.type == "cpu" and target.rule in LOSSLESS_RULES
        ends = chain and able and chooses_drafts(options, target.rule, target.info.device)
        count = options.num_speculative_tokens
        if ends and options.adaptive is None:  # no K was given
            count = MOST if target.max_length is None else min(MOST, target.max_length - 1)
        least = least_survival(given, target.model) if ends else 0.0
        made = draft_model(traced, count, mask, parallel, least, shared)
        return Draft(made, given, traced, (*notes, compared))


def draft_model(
    traced: TracedModel, num_speculative_tokens: int, mask_token_id: int | None = None, parallel: bool = False,
    least_survival: float = 0.0, shared: SharedTokens | None = None,
) -> DraftModelDrafter:  # fmt: skip
    """The drafter that runs a traced causal LM. ``shared`` are its tokens and the target's if tokenizers differ."""
    to_target = None
    if shared is not None:
        ids = shared.reads
        if mask_token_id is not None:  # an id of the draft's own, which takes one behind the target's
            ids, mask_token_id = torch.cat([ids, ids.new_tensor([mask_token_id])]), len(ids)
        reads, drafts, to_target = (each.to(traced.info.device) for each in (ids, shared.draft_ids, shared.target_ids))
        traced = with_shared_ids(traced, reads, drafts)
    mask = None if mask_token_id is None else Mask(mask_token_id)
    modules = {BODY: traced.body, HEAD: traced.head}
    return DraftModelDrafter(
        num_speculative_tokens, modules, {BODY: traced.info}, draft_to_target=to_target, mask=mask, parallel=parallel,
        least_survival=least_survival,
    )  # fmt: skip


def least_survival(draft: nn.Module, target: nn.Module) -> float:
    """The probability of being accepted below which a chain of drafts ends.

    A further draft pays where the tokens per second that it promises, its probability over the seconds of its call, are
    more than those of the whole step: down to the seconds of its call over the seconds that a token takes in all. The
    latter lie between a call of the draft and one of the target, and their geometric mean comes near. On a CPU a call
    of few rows reads all weights once, so their bytes stand for both times. Of experts it reads a part, so
    a target that has them costs less than its bytes say, and chains are longer than they should be.

    For Qwen2.5 1.5B and 0.5B, and recorded probabilities of 15 prompts of HumanEval, this was within 5% of the best
    threshold wherever a call of the draft costs a twentieth to two thirds of one of the target. A constant 0.5 was
    within 10%.
    """
    weights = [itertools.chain(model.parameters(), model.buffers()) for model in (draft, target)]
    drafting, verifying = (sum(weight.nbytes for weight in own) for own in weights)
    return min(1.0, math.sqrt(drafting / verifying))


def _is_causal_lm(config: Mapping[str, Any]) -> bool:
    listed = architectures(config)
    return "model_type" in config and (not listed or any("CausalLM" in name or "LMHead" in name for name in listed))


def _check_model(target: Target, draft: Any) -> tuple[str, SharedTokens | None]:
    """Refuse a draft that is not a causal LM on the target's device whose tokens are known.

    Returns a line for the report, and the shared tokens of a draft that has another tokenizer than the target.
    """
    try:
        check_is_causal_lm(draft)
        check_no_hooks(draft)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"draft: {error}") from None
    compared = compare_tokenizers(target.model, draft, target.rule)
    device = next(draft.parameters()).device
    if device != target.info.device:
        raise ConfigError(f"The draft is on {device}, the target on {target.info.device}; move one of them.")
    return compared
