"""The graphs of a causal LM of another vocabulary, as if it read the target's ids and drafted shared tokens alone."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, fx

from specgraph.frontend.tracing import TracedModel
from specgraph.ir.graphs import copy_module, set_attribute

aten = torch.ops.aten


def with_shared_ids(traced: TracedModel, reads: Tensor, drafts: Tensor) -> TracedModel:
    """The model with ``reads[token]`` in the place of each token, and with the logits of the ids ``drafts`` alone.

    Both are int64, ``[V]`` and ``[S]``, on the model's device.
    """
    body, head = copy_module(traced.body), copy_module(traced.head)
    tokens = next(node for node in body.graph.find_nodes(op="placeholder") if node.name == "tokens")
    with body.graph.inserting_after(tokens):
        table = _constant(body, "draft_id", reads)
    with body.graph.inserting_after(table):
        own = body.graph.call_function(aten.take.default, (table, tokens))
    own.meta["val"] = tokens.meta["val"]
    tokens.replace_all_uses_with(own, delete_user_cb=lambda user: user is not own)
    output = head.graph.output_node()
    (logits,) = output.all_input_nodes
    with head.graph.inserting_before(output):
        table = _constant(head, "shared_ids", drafts)
        shared = head.graph.call_function(aten.index_select.default, (logits, -1, table))
    whole = logits.meta["val"]
    shared.meta["val"] = whole.new_empty(*whole.shape[:-1], len(drafts))
    output.replace_input_with(logits, shared)
    info = dataclasses.replace(traced.info, vocab_size=len(drafts), num_embeddings=len(reads))
    return TracedModel(info, body, head)


def _constant(module: fx.GraphModule, name: str, tensor: Tensor) -> fx.Node:
    """A node with a tensor that becomes the module's."""
    set_attribute(module, name, tensor)
    return module.graph.get_attr(name)
