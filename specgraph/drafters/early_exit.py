"""Drafts from the target's own first layers, which its final norm and vocabulary projection turn into logits.

The target is cut at the exit layer. Its first layers are a module of their own, which the step calls for the window,
and this drafter calls for each draft, over the same KV cache: when a step begins to draft, the target has just written
the rows of all accepted tokens, so nothing is brought up to date. The first call runs the newest token, and each
further one the draft before it. What they compute are the rows of the next window, of which only the last one is
missing. Their hidden states are kept, and the step that verifies the drafts goes on from there
(:mod:`specgraph.specialise.complete_rows`). Rows of rejected drafts are written again before anything sees them.

It needs no training, but a target that was not trained to be left early (Elhoushi et al. 2024, LayerSkip,
arXiv 2404.16710) guesses little right.

Source: self-speculative decoding of Zhang et al. 2023 (arXiv 2309.08168), and of LayerSkip, section 4.3, whose "KVQ
cache" holds the kept states.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from specgraph.config.drafters import EarlyExitDraftConfig
from specgraph.drafters.base import Draft, Drafter, Target
from specgraph.drafters.step import DraftStep
from specgraph.errors import ConfigError
from specgraph.frontend.tracing import ATTENTION, exit_head, hidden_states
from specgraph.ir.program import FIRST_LAYERS
from specgraph.kernels import step as functions
from specgraph.kernels.state import FIRST_HIDDEN, RECURRENT, Buffer

EXIT_HEAD = "exit_head"
"""The module that turns a hidden state that leaves the first layers into logits."""


class EarlyExitDrafter(Drafter):
    """Runs the target's first layers, token by token, over the target's KV cache."""

    Config = EarlyExitDraftConfig
    chained = True

    @classmethod
    def make(cls, options: EarlyExitDraftConfig, target: Target, given: Any) -> Draft:
        """Take the final norm and the projection of the target for drafts."""
        count, info, states = options.exit_layer, target.info, hidden_states(target.traced)
        layers = info.num_layers
        if count is None or count >= layers:
            raise ConfigError(
                f"draft.exit_layer is {count}, and drafts come from the first 1 to {layers - 1} of the target's "
                f"{layers} layers; give a number of them."
            )
        first = [*itertools.takewhile(lambda node: node is not states[count], target.traced.body.graph.nodes)]
        if any(node.target in RECURRENT for node in first):
            raise ConfigError(
                "draft=early_exit takes no target with recurrent layers, whose state knows no drafts that may be taken "
                "back; draft by ngram, or by a head."
            )
        entering, left = states.get(layers + 1), states[count].meta["val"]
        same = entering is not None and entering.meta["val"].shape == left.shape and left.dtype == info.dtype
        if not same:
            raise ConfigError(
                f"draft=early_exit takes what leaves a layer of the target to its final norm, and {info.name} has no "
                "list of layers, or does something else in between; draft by ngram, or by a head."
            )
        caches = sum(node.target is ATTENTION for node in first)
        models = {FIRST_LAYERS: replace(info, num_layers=count, num_caches=caches)}
        head = {EXIT_HEAD: exit_head(target.traced)}
        drafter = cls(options.num_speculative_tokens, head, models, exit_layer=count)
        return Draft(drafter, notes=(f"drafts come from {count} of the target's {layers} layers",))

    def build(self, step: DraftStep) -> int:
        """Append K calls of the first layers, each with what turns its hidden state into logits."""
        count = self.num_speculative_tokens
        own = step.program.bind(FIRST_LAYERS, FIRST_LAYERS)
        kept = step.state(FIRST_HIDDEN, Buffer(("B", count, self.model.hidden_size), self.model.dtype, indexed=True))
        names = step.program.inputs_of(EXIT_HEAD)
        known = (step.window, step.emitted, step.num_emitted)
        token = step.call(functions.last_accepted, *known, name="last_accepted")
        for row in range(count):
            position = step.position(row, f"position_{row}")
            given = {**own, "tokens": token, "positions": position, "num_rows": step.num_emitted}
            hidden = step.program.call(FIRST_LAYERS, **given, name=f"draft_{row}", role="draft")
            step.mark_scratch(hidden)
            step.call(functions.keep_hidden_, kept, hidden, step.rows, step.num_emitted, row=row, name=f"keep_{row}")
            read = {"hidden": hidden, "tokens": token, "positions": position}
            logits = step.call(EXIT_HEAD, **{name: read[name] for name in names}, name=f"draft_logits_{row}")
            token = step.draw(logits, row, self.model.vocab_size, self.model.dtype)
        return count
