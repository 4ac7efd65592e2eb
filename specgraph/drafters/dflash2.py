"""DFlash2 heads: a block from one call, in which drafts are chosen among candidates one after the other.

The layers are those of a DFlash head, which :mod:`specgraph.drafters.dflash` describes, with two additions. Each is
there if a checkpoint has it.

Around every attention and every MLP there are *convolutions*: each row of the block is mixed with the row before it, by
weights that depend on the row (:mod:`specgraph.kernels.linear.block_conv`). Rows of the context are not.

The *candidates* of a draft are the tokens with the largest logits of its row. A *selector* corrects these logits by the
token before, which makes some candidates more likely and others less. That token is the anchor or, for each further
row, the draft that was drawn before. A draft is drawn from the candidates alone: every other token has the probability
0. This is the exact distribution given the drafts before it, which the rules ``probabilistic`` and ``block`` compare
with the target's.

Sources: DFlash 2 (z-lab and Inco AI, 2026), with the layout of z-lab; the ``dflash2`` of speculators.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from specgraph.checkpoints.checkpoint import Checkpoint, architectures
from specgraph.checkpoints.files import Files
from specgraph.checkpoints.loading import HeadLoader
from specgraph.checkpoints.reading import Reader
from specgraph.config.drafters import DFlash2DraftConfig
from specgraph.drafters import dflash2_loading as loading
from specgraph.drafters.dflash import DFlashDrafter, export_block
from specgraph.drafters.dflash2_module import DFlash2, DFlash2Config
from specgraph.drafters.dflash_module import DFlash
from specgraph.drafters.parts import Part, export_parts
from specgraph.drafters.plan import HeadPlan
from specgraph.drafters.step import DraftStep
from specgraph.errors import ConfigError

SELECTOR = "draft_selector"
"""The module that DFlash2 adds to those of DFlash. It gives the logits of one row from its candidates."""
CANDIDATES = ("candidates", "unary", "gates")
"""What the call of a block returns for each draft, if there is a selector."""
RANDOM_TAPS = 2
"""The taps of the convolutions of a new head, which are those of the published heads."""


class DFlash2Drafter(DFlashDrafter):
    """Runs a DFlash2 head: keeps the context, runs one block, and draws its drafts one after the other."""

    Config = DFlash2DraftConfig
    reads = "DFlash2 heads (z-lab and speculators layouts)"
    head = DFlash2
    shape = DFlash2Config
    what = "a DFlash2 head"
    causal_windows = False
    usual = loading.UNUSUAL
    saved_config = staticmethod(loading.dflash2_config)

    def draw(self, step: DraftStep, tokens: fx.Node, returned: fx.Node) -> None:
        """Append a call of :data:`SELECTOR` and a draw for each draft."""
        if SELECTOR not in step.program.modules:
            super().draw(step, tokens, returned)
            return
        found = {name: step.call(operator.getitem, returned, at, name=name) for at, name in enumerate(CANDIDATES)}
        token = step.cut(tokens, 0, 1, "anchor")
        for row in range(self.num_speculative_tokens):
            given = {name: step.cut(node, row, 1, f"{name}_{row}") for name, node in found.items()}
            scores = step.call(SELECTOR, tokens=token, **given, name=f"scores_{row}")
            token = step.draw(scores, row, self.model.vocab_size, self.model.dtype)

    @classmethod
    def recognise(cls, files: Files) -> Checkpoint | None:
        """Recognise a head by its configuration, or by the names of its tensors."""
        declared, classes = files.config.get("speculators_model_type"), architectures(files.config)
        if declared is not None:
            return Checkpoint.of(files, cls.kind, "speculators", cls.kind) if declared == cls.kind else None
        known = "DFlash2DraftModel" in classes or (
            not classes and {loading.CODEBOOK, loading.KERNEL} & {*files.tensors}
        )
        return Checkpoint.of(files, cls.kind, "z-lab", cls.kind) if known else None

    @classmethod
    def own_settings(cls, reader: Reader) -> dict[str, Any]:
        """The options of the convolutions and of the selector."""
        return loading.conv_settings(reader) | loading.selector_settings(reader)

    @classmethod
    def make_module(cls, loader: HeadLoader, settings: Mapping[str, Any]) -> DFlash:
        """A head that drafts the whole vocabulary, every token of which its selector embeds."""
        found, size = cls.shape(**settings), loader.info.vocab_size
        if found.draft_vocab_size < size:
            raise loader.unfit(
                f"it drafts {found.draft_vocab_size} tokens", f"has {size}, all of which {cls.what} drafts"
            )
        if loading.CODEBOOK in loader.stored and 0 < found.selector_rows < size:
            raise loader.unfit(f"{loading.CODEBOOK} has {found.selector_rows} rows", f"has a vocabulary of {size}")
        if found.selector_top_k > size:
            raise loader.unfit(f"selector_top_k is {found.selector_top_k}", f"has a vocabulary of {size}")
        if found.layers.hidden_size % found.conv_group:
            raise loader.unfit(f"conv_group_size is {found.conv_group}", f"has {found.layers.hidden_size} channels")
        return super().make_module(loader, settings)

    @classmethod
    def export(cls, module: Any, num_masks: int, count: int) -> dict[str, fx.GraphModule]:
        """The graphs of a head: those of DFlash and, if the head has a selector, :data:`SELECTOR`."""
        return export_block(module, num_masks, count) | export_selector(module)

    @classmethod
    def new_settings(cls, plan: HeadPlan) -> dict[str, Any]:
        """The fields of the configuration of a new head.

        Raises:
            ConfigError: it would draft a part of the vocabulary.
        """
        if plan.vocabulary is not None:
            raise ConfigError("DFlash2 heads draft the whole vocabulary; leave head.draft_vocab_size out.")
        return super().new_settings(plan) | {
            "conv_taps": RANDOM_TAPS,
            "conv_group": math.gcd(loading.CONV_GROUP, plan.layers.hidden_size),
            "selector_rank": plan.markov_rank,
            "selector_rows": plan.layers.vocab_size,
            "selector_top_k": min(loading.SELECTOR_TOP_K, len(plan.projection)),
        }


def export_selector(head: DFlash2) -> dict[str, fx.GraphModule]:
    """Export what a head adds to DFlash: :data:`SELECTOR` for one row."""
    config = head.config
    if head.candidate_selector is None:
        return {}
    widths = {"candidates": config.selector_top_k, "unary": config.selector_top_k, "gates": config.selector_rank}
    part = Part(head.score, ("tokens", *CANDIDATES), 1, ids=("candidates",))
    return export_parts(head, head.lm_head.weight, widths, {SELECTOR: part})
