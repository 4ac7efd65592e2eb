"""Drafts from the target's own first layers, which its final norm and vocabulary projection turn into logits.

The first layers are traced as a model of their own, which shares all weights with the target, and also its KV cache:
when a step begins to draft, the target has just written the rows of all accepted tokens. So nothing is brought up to
date. The first call runs the newest token, and each further one the draft before it. What they write in the target's
cache are the rows of the next window, which the target's own call writes again, all layers of them, before it reads
them; so no bit of the target's depends on drafts. Rows behind that window are written before anything sees them.

It needs no training, but a target that was not trained to be left early (Elhoushi et al. 2024, LayerSkip,
arXiv 2404.16710) guesses little right.

Source: self-speculative decoding of Zhang et al. 2023 (arXiv 2309.08168), and of LayerSkip, section 4.3.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from specgraph.config.drafters import EarlyExitDraftConfig
from specgraph.drafters.base import Draft, Target
from specgraph.drafters.chain import BODY, HEAD, ChainDrafter
from specgraph.drafters.step import DraftStep
from specgraph.errors import ConfigError
from specgraph.frontend.first_layers import with_first_layers
from specgraph.frontend.tracing import trace
from specgraph.kernels import step as functions
from specgraph.kernels.state import RECURRENT

CACHES = "caches"
TARGET_CACHES = "target_caches"
"""The input of a step that holds the target's KV cache, layer after layer."""


class EarlyExitDrafter(ChainDrafter):
    """Runs the target's first layers, token by token, over the target's KV cache."""

    Config = EarlyExitDraftConfig
    keeps_rows = False

    @classmethod
    def make(cls, options: EarlyExitDraftConfig, target: Target, given: Any) -> Draft:
        """Trace the first layers of the target."""
        count, layers = options.exit_layer, target.info.num_layers
        first = None if count is None or count >= layers else with_first_layers(target.model, count)
        if first is None:
            raise ConfigError(
                f"draft.exit_layer is {count}, and drafts come from the first 1 to {layers - 1} of the target's "
                f"{layers} layers, which have to stand in one list; give a number of them."
            )
        traced = trace(first, target.max_length)
        if any(node.target in RECURRENT for node in traced.body.graph.nodes):
            raise ConfigError(
                "draft=early_exit takes no target with recurrent layers, whose state knows no drafts that may be taken "
                "back; draft by ngram, or by a head."
            )
        modules = {BODY: traced.body, HEAD: traced.head}
        drafter = cls(options.num_speculative_tokens, modules, {BODY: traced.info})
        return Draft(drafter, first, traced, (f"drafts come from {count} of the target's {layers} layers",))

    def bind_state(self, step: DraftStep) -> dict[str, fx.Node]:
        """The target's KV cache in the place of one of its own."""
        every = step.program.inputs[TARGET_CACHES]
        for node in step.program.modules["draft"].graph.find_nodes(op="placeholder"):
            if node.name == CACHES:
                own = node.meta["state"]
                if own != every[: len(own)]:  # type: ignore[index]
                    raise ConfigError(
                        "draft=early_exit reads the target's KV cache, and the two differ, as they do where several "
                        "devices share the target; draft by something else there, or use one device."
                    )
                node.meta["state"] = every
        return step.program.bind("draft", "target")

    def first_inputs(self, step: DraftStep) -> dict[str, fx.Node]:
        """The newest token alone, which no call has run yet."""
        known = (step.window, step.emitted, step.num_emitted)
        tokens = step.call(functions.last_accepted, *known, name="last_accepted")
        positions = step.position(0, "position_0")
        return {"tokens": tokens, "positions": positions, "num_rows": step.num_emitted, "row": step.num_emitted}
