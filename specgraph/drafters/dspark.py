"""DSpark heads: a block of drafts from one call, corrected one after the other.

The layers are those of a DFlash head, which :mod:`specgraph.drafters.dflash` describes. A *Markov head* adds to the
logits of every row what the token before it makes more or less likely. For the first row, this token is the anchor, and
for each other row it is the draft that was drawn before. So drafts are drawn one after the other, with the drafter's
noise, and what each is drawn from is the exact distribution given the drafts before it, which the rules
``probabilistic`` and ``block`` compare with the target's. One draft takes an embedding, a small product and a draw,
because the layers have run for all of them.

A *confidence head* estimates for each draft the probability that it is accepted if those before it are. It changes no
draft. ``stats.confidence_per_position`` has its estimates beside what was accepted.

Sources: DSpark (DeepSeek, 2026), with the layout of DeepSpec; the ``dspark`` of speculators.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from specgraph.checkpoints.checkpoint import Checkpoint, architectures
from specgraph.checkpoints.files import Files
from specgraph.checkpoints.loading import HeadLoader
from specgraph.checkpoints.reading import Reader
from specgraph.config.drafters import DSparkDraftConfig
from specgraph.drafters import dspark_loading as loading
from specgraph.drafters.dflash import DFlashDrafter, export_block
from specgraph.drafters.dflash_module import DFlash
from specgraph.drafters.dspark_module import DSpark, DSparkConfig
from specgraph.drafters.parts import Part, export_parts
from specgraph.drafters.plan import HeadPlan
from specgraph.drafters.step import DraftStep

MARKOV, CONFIDENCE = "draft_markov", "draft_confidence"
"""The modules that DSpark adds to those of DFlash. The first corrects the logits of one row, and the second estimates
which drafts of a block will be accepted."""


class DSparkDrafter(DFlashDrafter):
    """Runs a DSpark head: keeps the context, runs one block, and draws its drafts one after the other."""

    Config = DSparkDraftConfig
    reads = "DSpark heads (DeepSpec and speculators layouts)"
    head = DSpark
    shape = DSparkConfig
    what = "a DSpark head"
    returned = "block_outputs"
    samples_from_anchor = True
    usual = loading.UNUSUAL
    saved_config = staticmethod(loading.deepspec_config)

    def draw(self, step: DraftStep, tokens: fx.Node, returned: fx.Node) -> None:
        """Append a call of :data:`MARKOV` and a draw for each draft, and a call of :data:`CONFIDENCE` for all."""
        logits = step.call(operator.getitem, returned, 0, name="base_logits")
        hidden = step.call(operator.getitem, returned, 1, name="block_hidden")
        before = [step.cut(tokens, 0, 1, "anchor")]
        if MARKOV in step.program.modules:
            before += self._draw_in_order(step, before[0], logits, hidden, returned)
        else:
            step.draw(logits, 0, self.model.vocab_size, self.model.dtype, name="proposals")
        if CONFIDENCE in step.program.modules:
            self._keep_confidence(step, before[:-1], hidden)

    def _draw_in_order(
        self, step: DraftStep, token: fx.Node, logits: fx.Node, hidden: fx.Node, returned: fx.Node
    ) -> list[fx.Node]:
        """Append the corrections and draws, and return the drafts ``[B, 1]``."""
        inputs = step.program.inputs_of(MARKOV)
        state = step.call(operator.getitem, returned, 2, name="markov_state") if "state" in inputs else None
        drafts = []
        for row in range(self.num_speculative_tokens):
            given: dict[str, Any] = {"tokens": token, "logits": step.cut(logits, row, 1, f"base_logits_{row}")}
            if "hidden" in inputs:
                given["hidden"] = step.cut(hidden, row, 1, f"block_hidden_{row}")
            corrected = step.call(MARKOV, **given, **({} if state is None else {"state": state}), name=f"markov_{row}")
            if state is not None:
                state = step.call(operator.getitem, corrected, 1, name=f"markov_state_{row}")
                corrected = step.call(operator.getitem, corrected, 0, name=f"draft_logits_{row}")
            token = step.draw(corrected, row, self.model.vocab_size, self.model.dtype)
            drafts.append(token)
        return drafts

    def _keep_confidence(self, step: DraftStep, before: list[fx.Node], hidden: fx.Node) -> None:
        """Append the estimates for all drafts, from the token before each of them."""
        inputs = {"hidden": hidden}
        if "tokens" in step.program.inputs_of(CONFIDENCE):
            inputs["tokens"] = step.call(torch.cat, before, dim=1, name="tokens_before")
        step.keep_confidence(step.call(CONFIDENCE, **inputs, name="estimates"))

    @classmethod
    def recognise(cls, files: Files) -> Checkpoint | None:
        """Recognise a head by its configuration, or by the names of its tensors. Gemma 4's layers are not run."""
        declared, classes = files.config.get("speculators_model_type"), architectures(files.config)
        if declared is not None:
            return Checkpoint.of(files, cls.kind, "speculators", cls.kind) if declared == cls.kind else None
        if any("Gemma4" in name for name in classes):
            return None
        known = any("DSpark" in name for name in classes) or "markov_head.markov_w1.weight" in files.tensors
        return Checkpoint.of(files, cls.kind, "deepspec", cls.kind) if known else None

    @classmethod
    def own_settings(cls, reader: Reader) -> dict[str, Any]:
        """The options of the Markov head and of the confidence head."""
        markov = loading.markov_settings(reader)
        return markov | loading.confidence_settings(reader, markov["markov_rank"] > 0)

    @classmethod
    def make_module(cls, loader: HeadLoader, settings: Mapping[str, Any]) -> DFlash:
        """A head whose Markov head embeds every token of the target."""
        rows, size = settings["markov_rows"], loader.info.vocab_size
        if loading.W1 in loader.stored and settings["markov_rank"] and rows < size:
            raise loader.unfit(f"{loading.W1} has {rows} rows", f"has a vocabulary of {size}")
        return super().make_module(loader, settings)

    @classmethod
    def export(cls, module: Any, num_masks: int, count: int) -> dict[str, fx.GraphModule]:
        """The graphs of a head: those of DFlash, and those that the head has of :data:`MARKOV`, :data:`CONFIDENCE`."""
        return export_block(module, num_masks, count) | export_refinements(module, count)

    @classmethod
    def new_settings(cls, plan: HeadPlan) -> dict[str, Any]:
        """The fields of the configuration of a new head. Every one of its rows gives a draft, the anchor's too."""
        rank = plan.markov_rank
        return super().new_settings(plan) | {
            "sample_from_anchor": True,
            "block_size": plan.steps,
            "markov_rank": rank,
            "markov_kind": plan.markov_kind,
            "markov_rows": plan.layers.vocab_size if rank else 0,
            "confidence": plan.confidence,
            "confidence_with_markov": plan.confidence and rank > 0,
        }


MARKOV_INPUTS = {
    "vanilla": ("tokens", "logits"),
    "gated": ("tokens", "logits", "hidden"),
    "rnn": ("tokens", "logits", "hidden", "state"),
}
"""The inputs of a Markov head, by its kind."""


def export_refinements(head: DSpark, count: int) -> dict[str, fx.GraphModule]:
    """Export what a head adds to DFlash: :data:`MARKOV` for one row, and :data:`CONFIDENCE` for ``count`` rows."""
    config, weight = head.config, head.lm_head.weight
    widths = {"logits": config.draft_vocab_size, "hidden": weight.shape[1], "state": config.markov_rank}
    parts = {}
    if head.markov_head is not None:
        parts[MARKOV] = Part(head.correct, MARKOV_INPUTS[config.markov_kind], 1)
    if head.confidence_head is not None:
        parts[CONFIDENCE] = Part(head.estimate, ("hidden", "tokens")[: 1 + config.confidence_with_markov], count)
    return export_parts(head, weight, widths, parts)
