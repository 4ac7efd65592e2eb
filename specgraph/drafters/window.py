"""``draft.window``: the attention of a drafter sees the last tokens alone, also if it was trained to see all of them.

Far behind the lengths that it was trained on, a head that sees everything drafts badly, and what it reads grows with
the context. So every attention op of the drafter's traced modules gets a sliding window of ``N`` tokens, or keeps its
own if that is smaller. A query then sees its own token and the ``N - 1`` before it. The rows of a block, which attend
to each other whatever a window says, see the ``N`` tokens in front of the block. Kernels do not read what lies outside.

Recurrent layers have no window, and a target's features say of all tokens what the target saw.

Source: the drafters' windows of vLLM and SGLang (``--speculative-dflash-draft-window-size``), and speculators#684.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from specgraph.drafters.base import Draft
from specgraph.errors import ConfigError
from specgraph.ir.graphs import copy_module
from specgraph.kernels.ops import find
from specgraph.kernels.state import RECURRENT


def limit_window(draft: Draft, window: int) -> Draft:
    """The same draft, whose attention sees ``window`` tokens at most.

    Raises:
        ConfigError: the drafter has no attention.
    """
    drafter = draft.drafter
    modules = {name: copy_module(module) for name, module in drafter.modules.items()}
    limited = [_limit(*found, window) for module in modules.values() for found in _attention(module.graph)]
    recurrent = sum(node.target in RECURRENT for module in modules.values() for node in module.graph.nodes)
    if not limited:
        has = "recurrent layers alone" if recurrent else "none of its own"
        raise ConfigError(
            f"draft.window={window} is for the attention of a drafter, and {drafter.name} has {has}; leave it out."
        )
    note = f"draft.window: {sum(limited)} of the drafter's {len(limited)} attention layers see {window} tokens at most"
    note += "" if all(limited) else ", and the others keep their own window, which is no larger"
    note += f"; {recurrent} recurrent ops have no window" if recurrent else ""
    return replace(draft, drafter=replace(drafter, modules=modules), notes=(*draft.notes, note))


def _attention(graph: fx.Graph) -> Iterator[tuple[fx.Node, set[str]]]:
    """The nodes that see keys through a window, or could, with the names of the arguments that they may have."""
    for node in graph.nodes:
        op = find(node.target)
        names = set() if op is None else {entry.name for entry in op.fields}
        if "window" in names:
            yield node, names


def _limit(node: fx.Node, names: set[str], window: int) -> bool:
    """Give a node a window; False if it has one that is no larger. ``names`` are those of its arguments."""
    own = node.kwargs.get("window")
    if own is not None and own <= window:  # type: ignore[operator]
        return False
    anchored = own is None and "anchored" in names
    node.kwargs = {**node.kwargs, "window": window, **({"anchored": True} if anchored else {})}
    return True
