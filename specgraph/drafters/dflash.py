"""DFlash heads, which draft a block of tokens in one call.

A head is a small decoder with two inputs. Of every verified token it reads the *context*: a projection of several
hidden states of the target, from which all of its layers compute keys and values. What it runs is a block of ``K + 1``
rows at the positions ``P``, ``P + 1``, ..., ``P + K``: the *anchor*, which is the newest verified token, and ``K`` mask
tokens. A row of the block sees the context at all positions below ``P`` and, in both directions, the other rows of the
block. Row ``j`` predicts the token at its own position ``P + j``, so that rows 1 to ``K`` give the drafts. In a head
that samples from the anchor, row ``j`` predicts the token at ``P + j + 1``, and rows 0 to ``K - 1`` are all there are.

Keys and values of the block are not kept, and rejected tokens give no context. So what a head keeps is a function of
the verified tokens alone. Because rows see later rows, drafts depend on the number of rows: every step runs all rows of
the block that the head was trained on, also if fewer give drafts and past the end of a sequence. Some heads lose most
of their acceptance with fewer rows, and ``block_rows`` is there to try it: in large batches, every row takes time.
Causal heads, whose rows see no later ones, run those that give drafts. More rows than in the training are refused.

Sources: DFlash (z-lab, 2026), with the layouts of z-lab and of speculators; JetSpec (2026, arXiv 2606.18394), whose
causal heads have the layout of z-lab. Their top drafts run as a chain here, not as a tree.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, fx
from transformers import PreTrainedModel

from specgraph.checkpoints.checkpoint import Checkpoint, architectures
from specgraph.checkpoints.files import Files
from specgraph.checkpoints.head_options import HeadOptions
from specgraph.checkpoints.loading import IGNORED, HeadLoader
from specgraph.checkpoints.reading import Reader
from specgraph.config.drafters import DFlashDraftConfig
from specgraph.drafters import dflash_loading as loading
from specgraph.drafters.base import DraftHead, Target
from specgraph.drafters.decoder_head import DecoderHeadDrafter
from specgraph.drafters.dflash_module import BlockMask, DFlash, DFlashConfig
from specgraph.drafters.dflash_saving import z_lab_config
from specgraph.drafters.parts import TARGET_FEATURES, Part, export_parts
from specgraph.drafters.plan import HeadPlan, plain_layer
from specgraph.drafters.step import DraftStep
from specgraph.errors import ConfigError
from specgraph.ir.model_info import ModelInfo
from specgraph.kernels.step.block import block_rows

FEATURES, CONTEXT, BLOCK = "draft_features", "draft_context", "draft"
"""The modules of such a drafter. The first turns the target's hidden states into rows of the context, the second keeps
keys and values of these rows, and the third runs a block and gives its logits."""
OTHERS = re.compile("Draft|DSpark|XPress")
"""Matches classes of heads of other kinds with the same layers."""
OTHERS_TENSORS = re.compile(r"markov_head\.|candidate_selector\.|layers\.\d+\.\w+_conv\.")
"""Matches tensors that these have and DFlash heads do not."""
RANDOM_LAYERS, RANDOM_RANK = 5, 256
"""The number of layers of a random head, and the rank of its Markov head if its kind has one, which are those of the
published heads."""


@dataclass(frozen=True, eq=False)
class DFlashDrafter(DecoderHeadDrafter):
    """Runs a DFlash head: keeps the context of the accepted rows, then drafts one block.

    Attributes:
        mask_token_id: the token of the rows behind the anchor.
        num_masks: the number of these rows.
    """

    mask_token_id: int = 0
    num_masks: int = 0

    Config = DFlashDraftConfig
    reads = "DFlash heads (z-lab and speculators layouts)"
    head: ClassVar[type[DFlash]] = DFlash
    shape: ClassVar[type[DFlashConfig]] = DFlashConfig
    what = "a DFlash head"
    new_layers = RANDOM_LAYERS
    returned = "block_logits"
    """The name of the node that holds what the call of a block returned."""
    samples_from_anchor = False
    """Whether the anchor's row gives the first draft, unless a checkpoint says otherwise."""
    causal_windows = True
    """Whether rows see no later rows of their block in layers with a window, unless a checkpoint says otherwise."""
    usual = loading.USUAL
    """Keys of variants with another forward pass, and the values that mean none of that."""
    saved_config = staticmethod(z_lab_config)

    def build(self, step: DraftStep) -> int:
        """Append the context of the accepted rows, one call that gives the logits of a block, and the drafts."""
        self._keep_context(step)
        block = step.call(
            block_rows, step.emitted, step.start, step.num_emitted, mask_token_id=self.mask_token_id,
            count=self.num_masks, vocab_size=self.model.input_ids, name="block",
        )  # fmt: skip
        tokens = step.call(operator.getitem, block, 0, name="block_tokens")
        positions = step.call(operator.getitem, block, 1, name="block_positions")
        state = step.program.bind(BLOCK, "draft")
        returned = step.draft(**state, tokens=tokens, positions=positions, name=self.returned)
        self.draw(step, tokens, returned)
        return 1

    def draw(self, step: DraftStep, tokens: fx.Node, returned: fx.Node) -> None:
        """Append the nodes that draw the drafts from what the call of a block with ``tokens`` ``[B, R]`` returned."""
        step.draw(returned, 0, self.model.vocab_size, self.model.dtype, name="proposals")

    def _keep_context(self, step: DraftStep) -> None:
        """Append the nodes that keep keys and values of the accepted rows. The anchor is not among them."""
        features = step.call(FEATURES, *step.features(), name="features")
        inputs = {"hidden": features, "positions": step.positions,
                  "num_rows": step.num_emitted}  # fmt: skip
        step.call(CONTEXT, **{**step.program.bind(CONTEXT, "draft"), **inputs}, name="context")

    @classmethod
    def recognise(cls, files: Files) -> Checkpoint | None:
        """Recognise a head by its configuration, or by the names of its tensors."""
        config, classes = files.config, architectures(files.config)
        declared = config.get("speculators_model_type")
        if declared is not None:
            return Checkpoint.of(files, cls.kind, "speculators", "dflash") if declared == "dflash" else None
        if classes and "DFlashDraftModel" not in classes and any(map(OTHERS.search, classes)):
            return None
        own = not any(map(OTHERS_TENSORS.match, files.tensors))
        named = own and {"fc.weight", "hidden_norm.weight"} <= files.tensors.keys()
        known = named or (own and "dflash_config" in config) or "DFlashDraftModel" in classes
        return Checkpoint.of(files, cls.kind, "z-lab", "dflash") if known else None

    @classmethod
    def read_options(cls, checkpoint: Checkpoint, overrides: Any, target_layers: int | None = None) -> HeadOptions:
        """Collect the options of the head. Variants with another forward pass are refused."""
        reader = loading.head_reader(checkpoint)
        reader.refuse_variants(cls.usual, cls.head.__name__)
        own = cls.own_settings(reader)
        return loading.common_options(
            reader, overrides, target_layers, own, from_anchor=cls.samples_from_anchor,
            causal_windows=cls.causal_windows,
        )  # fmt: skip

    @classmethod
    def own_settings(cls, reader: Reader) -> dict[str, Any]:
        """The fields of the module's configuration that heads of this kind alone have, from the checkpoint."""
        return {}

    @classmethod
    def loader(cls, checkpoint: Checkpoint, model: PreTrainedModel, info: ModelInfo) -> HeadLoader:
        """Reads the tensors, and the mask embedding if the checkpoint has one."""
        return HeadLoader(checkpoint, loading.stored_tensors(checkpoint), model, info, cls.what, IGNORED)

    @classmethod
    def make_module(cls, loader: HeadLoader, settings: Mapping[str, Any]) -> DFlash:
        """A head with an embedding of the mask token if the checkpoint has one."""
        return cls.head(cls.shape(**settings), mask_embedding=loading.MASK_EMBEDDING in loader.stored)

    @classmethod
    def bind(cls, head: DraftHead, options: Any, target: Target) -> Self:
        """The drafter that runs a loaded head on blocks of ``draft.block_rows`` rows; None chooses their number.

        Raises:
            ConfigError: the head was trained on shorter blocks, or the drafts need longer ones.
        """
        module: DFlash = head.module
        assert head.mask_token_id is not None  # every head of this kind has one
        count = options.num_speculative_tokens
        rows, info = num_rows(module.config, count, options.block_rows), module.info
        exported = cls.export(module, rows - 1, count)
        return cls(count, exported, {CONTEXT: info, BLOCK: info}, head.features, module.draft_to_target,
                   mask_token_id=head.mask_token_id, num_masks=rows - 1)  # fmt: skip

    @classmethod
    def export(cls, module: Any, num_masks: int, count: int) -> dict[str, fx.GraphModule]:
        """The graphs of a head, for blocks of an anchor and ``num_masks`` mask tokens that give ``count`` drafts."""
        return export_block(module, num_masks, count)

    @classmethod
    def feature_layers(cls, num_layers: int) -> tuple[int, ...]:
        """Those that a head of five layers reads by default, limited to those that the target has."""
        return tuple(sorted({min(max(k, 1), num_layers) for k in loading.default_features(RANDOM_LAYERS, num_layers)}))

    @classmethod
    def saved_tensors(cls, head: DraftHead) -> dict[str, Tensor]:
        """The tensors but for the embedding of the mask token, which has a file of its own."""
        found = super().saved_tensors(head)
        return {name: tensor for name, tensor in found.items() if name != loading.MASK_EMBEDDING}

    @classmethod
    def save_head(cls, head: DraftHead, folder: str | Path, **record: Any) -> Path:
        """Write the files of a head, with ``mask_embedding.pt`` if it has one."""
        saved, embedding = super().save_head(head, folder, **record), head.module.mask_embedding
        if embedding is not None:
            kept = {"embedding": embedding.detach().cpu().clone(), "mask_token_id": head.mask_token_id}
            torch.save(kept, saved / f"{loading.MASK_EMBEDDING}.pt")
        return saved

    @classmethod
    def new_head(cls, algorithm: str, plan: HeadPlan) -> DraftHead:
        """A head whose embedding and projection are the target's own frozen tensors.

        By default it learns an embedding for the mask token. That of a token of the target, which is frozen, says
        nothing about masks: no text of the target's training had one.

        Raises:
            ConfigError: the head would read the target's embeddings, which the layout of z-lab cannot express.
        """
        if 0 in plan.features:
            raise ConfigError(
                f"head.feature_layers={list(plan.features)}: heads of this kind read outputs of layers; give indices "
                "from 1 on."
            )
        module = cls.head(cls.shape(**cls.new_settings(plan)), mask_embedding=plan.mask_embedding)
        module = module.to(plan.embedding.device)
        module.start(plan)
        return DraftHead(module, plan.features, plan.mask_token_id)

    @classmethod
    def new_settings(cls, plan: HeadPlan) -> dict[str, Any]:
        """The fields of the configuration of a new head."""
        return {
            "layers": plan.layers,
            "masks": (BlockMask(causal=plan.causal),) * plan.layers.num_hidden_layers,
            "target_hidden_size": plan.embedding.shape[1],
            "num_features": len(plan.features),
            "draft_vocab_size": len(plan.projection),
            "block_size": plan.steps + 1,
        }

    @classmethod
    def plan_random(cls, model: PreTrainedModel, options: Any) -> HeadPlan:
        """A plan for a head of the usual size, as wide as the target, which has no embedding of the mask token.

        Its blocks have the rows that the drafts need, if ``block_rows`` asks for no other number.
        """
        plan, text = super().plan_random(model, options), model.config.get_text_config()
        rows = len(plan.embedding)
        steps = options.block_rows - int(not cls.samples_from_anchor) if options.block_rows else plan.steps
        return replace(plan, layers=plain_layer(text, rows, "qwen3", RANDOM_LAYERS), mask_token_id=rows - 1,
                       steps=steps, mask_embedding=False, markov_rank=RANDOM_RANK, confidence=True)  # fmt: skip


def num_rows(config: DFlashConfig, num_speculative_tokens: int, block_rows: int | None) -> int:
    """The rows of a block that a step runs for so many drafts, the anchor included; ``block_rows`` if that is given.

    Raises:
        ConfigError: the head was trained on shorter blocks, or the drafts need longer ones.
    """
    needed, size = num_speculative_tokens + config.first_row, config.block_size
    if needed > size:
        known = ", the first of which is known" if config.first_row else ""
        raise ConfigError(
            f"draft.num_speculative_tokens is {num_speculative_tokens}, but the head was trained on blocks of "
            f"{size} tokens{known}; set it to {size - config.first_row} or less."
        )
    if block_rows is not None and not needed <= block_rows <= size:
        raise ConfigError(
            f"draft.block_rows is {block_rows}; set it from {needed}, the rows that {num_speculative_tokens} drafts "
            f"need, to {size}, those of the blocks that the head was trained on."
        )
    return block_rows or (needed if all(mask.causal for mask in config.masks) else size)


def export_block(head: DFlash, num_masks: int, count: int) -> dict[str, fx.GraphModule]:
    """Export a head as the three graphs that :data:`FEATURES`, :data:`CONTEXT` and :data:`BLOCK` name.

    The first two take any number of rows. The third takes ``num_masks + 1`` rows and gives the logits of ``count``
    drafts.
    """
    parts = {
        FEATURES: Part(head.combine, (TARGET_FEATURES,) * head.config.num_features),
        CONTEXT: Part(head.keep, ("hidden", "positions")),
        BLOCK: Part(partial(head.draft, count=count), ("tokens", "positions"), num_masks + 1),
    }
    widths = {TARGET_FEATURES: head.config.target_hidden_size, "hidden": head.fc.out_features}
    return export_parts(head, head.lm_head.weight, widths, parts)
