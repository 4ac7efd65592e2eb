"""Traces a causal LM of transformers as two FX graphs: the body (tokens to hidden states) and the head (to logits).

The model is exported without a cache. Meanwhile, hooks in transformers' own registries replace its attention by
``specgraph::attention`` and its experts by ``specgraph::expert_linear``. Nothing here depends on an architecture. A
model that passes an argument which the hooks do not support is refused, with the name of the argument.
"""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

import specgraph.kernels.attention.attention  # noqa: F401  (registers the op)
from specgraph.compat import output_capturing
from specgraph.errors import UnsupportedModelError
from specgraph.frontend.experts import HOOK, hook_experts
from specgraph.frontend.first_layers import find_layers
from specgraph.frontend.masks import AttentionCall, attention_calls, check_masks, mask_hook, note_attention
from specgraph.frontend.mixing import check_mixing
from specgraph.frontend.quantised import hook_quantised
from specgraph.frontend.recurrent import hooked_recurrence, recurrent_functions, take_groups
from specgraph.frontend.rotary import fix_rotary, read_one_row, rope_of
from specgraph.frontend.unknown import HARMLESS, refuse_unknown
from specgraph.ir.devices import move_foreign_nodes
from specgraph.ir.exporting import export_module, exporting, own_copy, replaced
from specgraph.ir.functional import functional
from specgraph.ir.graphs import calls, new_module, splice, unlift
from specgraph.ir.kept import kept
from specgraph.ir.model_info import ModelInfo, Rope
from specgraph.kernels.state import RECURRENT

_Module = TypeVar("_Module", bound=nn.Module)
ATTENTION = torch.ops.specgraph.attention.default
_HARMLESS = HARMLESS | {"is_causal", "dropout", "layer_type"}


_RECURRENT_LAYERS = {
    "linear_attention": {
        "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan", "mamba_selective_scan",
    },
    "conv": {"causal_conv1d_fn"},
    "mamba": {"mamba2_chunk_scan", "mamba_selective_scan"},
}  # fmt: skip
"""The ``layer_types`` of transformers that keep a state other than keys and values, and the functions of each."""


@dataclass(frozen=True)
class TracedModel:
    """A causal LM as two graphs.

    ``body(tokens, positions) -> hidden`` takes int64 ``[B, T]`` twice and returns the input ``[B, T, H]`` of the head.
    In its graph, the node whose ``meta["hidden_state"]`` is ``k`` holds ``hs[k]``, the residual stream that enters
    layer ``k``. ``hs[0]`` are the embeddings. With ``L`` layers, ``hs[L]`` is taken after the final norm, and what
    enters this norm is ``hs[L + 1]``, if the base model has it under the name ``norm``; else that is what leaves the
    last layer, if the layers are one list. The other graph, ``head(hidden) -> logits``, turns ``[B, R, H]`` into
    ``[B, R, V]``. Both hold the model's own parameters and no copies.
    """

    info: ModelInfo
    body: fx.GraphModule
    head: fx.GraphModule


def attention_hook(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called by a model's attention layers while they are traced, with transformers' signature."""
    refuse_unknown(type(module).__name__, "attention", kwargs, _HARMLESS)
    if not note_attention(attention_mask, sliding_window) and attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} builds its own attention mask; only causal masks work.")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(f"{type(module).__name__} is not causal; only causal attention works.")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    options = {"scale": scale, "window": sliding_window, "softcap": softcap}
    return torch.ops.specgraph.attention(query, key, value, s_aux, **options), None


AttentionInterface.register(HOOK, attention_hook)
AttentionMaskInterface.register(HOOK, mask_hook)


def hooked(model: _Module, length: int | None = None) -> _Module:
    """A copy of a model in evaluation mode, whose attention, masks and experts go to the hooks above.

    The copy has modules and configurations of its own, and the model's own tensors. Rotary frequencies that change with
    the length are those of ``length``, and rows of positions are read once (:mod:`specgraph.frontend.rotary`).
    """
    model = own_copy(model).eval()
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            config._attn_implementation = HOOK
            config._experts_implementation = HOOK
    fix_rotary(model, length)
    read_one_row(model)
    hook_experts(model)
    hook_quantised(model)
    return model


def max_positions(model: PreTrainedModel, rope: Rope | None) -> int | None:
    """The length of the longest sequence for which the traced model is correct; None if its configuration names none.

    It ends with the table of positions, or where other frequencies than those of ``rope`` would count.
    """
    if rope is not None:
        return rope.original if rope.length is None else rope.most
    config: Any = model.config.get_text_config()
    known = getattr(config, "max_position_embeddings", None)
    return int(known) if known else None


class _Forward(nn.Module):
    """The model as a function of tokens and positions only, which returns the logits and every hidden state."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.norm: Any = getattr(model.base_model, "norm", None)
        self.found = None if self.norm is not None else find_layers(model)

    def forward(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        place = {"position_ids": positions} if self.takes_positions else {}
        entered: list[Tensor] = []
        with contextlib.ExitStack() as stack:
            if self.norm is not None:
                stack.enter_context(self.norm.register_forward_pre_hook(lambda _, args: entered.extend(args[:1])))
            elif self.found is not None:
                last = self.found[2][-1]
                keep = lambda *call: entered.append(call[-1] if isinstance(call[-1], Tensor) else call[-1][0])  # noqa: E731
                stack.enter_context(last.register_forward_hook(keep))
            out = self.model(input_ids=tokens, use_cache=False, output_hidden_states=True, return_dict=True, **place)
        return (out.logits, *out.hidden_states, *entered[-1:])


def _collecting() -> contextlib.AbstractContextManager[None]:
    """A context in which a thread that exports collects the hidden states of its own forward pass alone.

    transformers collects them in a variable of the context, and while something is compiled in one of the process,
    since ``torch.compile`` could not trace the former. An export runs the model's code, and has no such need.
    """
    return replaced(output_capturing, "is_torchdynamo_compiling", lambda: False)


def is_multimodal(model: object) -> bool:
    """Whether a model decodes text, and takes something else beside it."""
    return (
        isinstance(model, PreTrainedModel)
        and type(model).__name__.endswith("ForConditionalGeneration")
        and not model.config.is_encoder_decoder
    )


def check_is_causal_lm(model: object) -> None:
    """Refuse everything that is not a decoder-only language model of transformers."""
    advice = "Pass a model from AutoModelForCausalLM.from_pretrained(...)."
    if (wrapper := _wrapped(model)) is not None:
        raise UnsupportedModelError(
            f"This model is the {type(model).__name__} of a {type(getattr(model, wrapper)).__name__} (as torch.compile "
            f"and torch's parallel modules do), and specgraph compiles the model itself; pass model.{wrapper}."
        )
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"Expected a transformers causal LM, got {type(model).__name__}. {advice}")
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; specgraph compiles decoder-only models. {advice}")
    if is_multimodal(model):
        raise UnsupportedModelError(f"{name} is multimodal, and specgraph compiles text models; {_text_class(model)}.")
    if model.get_output_embeddings() is None or ("CausalLM" not in name and "LMHead" not in name):
        raise UnsupportedModelError(f"{name} is not a causal LM (it has no language-model head). {advice}")


def check_no_hooks(model: PreTrainedModel) -> None:
    """Refuse a model into whose forward pass accelerate has put hooks."""
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise UnsupportedModelError(
            f"{type(model).__name__} has hooks of accelerate, which move weights and inputs during its forward pass "
            "(of dispatch_model, or of a device_map over devices), and a compiled step runs without them; load it "
            "onto one device, or take them off with accelerate.hooks.remove_hook_from_module(model, recurse=True)."
        )


def _wrapped(model: object) -> str | None:
    """The attribute that holds the model where this is a wrapper around one, as torch.compile makes."""
    names = ("_orig_mod", "module") if isinstance(model, nn.Module) else ()
    return next((name for name in names if isinstance(getattr(model, name, None), PreTrainedModel)), None)


def _text_class(model: PreTrainedModel) -> str:
    """The advice for a multimodal model: how to get its text model."""
    text = type(model.config.get_text_config())
    if text not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "transformers has no ForCausalLM class for its text model, so write one with its lm_head"
    return f"load its text model by {MODEL_FOR_CAUSAL_LM_MAPPING[text].__name__}"


def trace(model: PreTrainedModel, length: int | None = None) -> TracedModel:
    """Export ``model`` and split it into body and head.

    ``length`` is that of the longest sequence which it is to run. Only models whose rotary frequencies change with the
    length need it; None gives them those of short sequences.

    Raises:
        UnsupportedModelError: the model is not a causal LM, cannot be exported, mixes tokens outside of the attention
            interface, or uses a mask that is no causal window. The message names the model and what is missing.
    """
    check_is_causal_lm(model)
    config: Any = model.config.get_text_config()
    layers = int(config.num_hidden_layers)
    functions = {name for _, name in recurrent_functions(model)}
    _check_layer_types(config, type(model).__name__, functions)
    rope = rope_of(model, length)
    graph = _exported(model, rope)
    body, head = _split(graph, layers, type(model).__name__)
    parameter, caches = next(model.parameters()), sum(1 for _ in calls(body.graph, ATTENTION))
    (logits,) = head.graph.output_node().all_input_nodes
    info = ModelInfo(type(model).__name__, int(logits.meta["val"].shape[-1]), layers, int(config.hidden_size),
                     parameter.dtype, parameter.device, max_positions(model, rope), num_caches=caches,
                     rope=rope)  # fmt: skip
    return TracedModel(info, body, head)


@kept
def _exported(model: PreTrainedModel, rope: Rope | None) -> fx.GraphModule:
    """The graph from tokens and positions to the logits and every hidden state, after all checks of the model."""
    name, layers = type(model).__name__, int(model.config.get_text_config().num_hidden_layers)
    with exporting(), _collecting(), torch.no_grad():
        own = hooked(model, rope.length if rope else None)
        wrapper = _Forward(own)
        made = attention_calls(own, model)
        recurrent = bool(recurrent_functions(model))
        _check_attention(len(made), name, layers, wrapper.takes_positions, recurrent=recurrent)
        check_masks(made, name, max_positions(model, rope))
        with hooked_recurrence(own):
            exported = functional(_export(wrapper, name))
    graph = unlift(exported, "model.")
    move_foreign_nodes(graph, next(model.parameters()).device)
    take_groups(graph.graph)
    _check_calls(graph.graph, made, name)
    check_mixing(_split(graph, layers, name)[0], {ATTENTION, *RECURRENT}, name)
    return graph


def export_hooked(
    module: nn.Module, args: tuple[Any, ...], dims: dict[str, Any], name: str, prefix: str, rope: Rope | None = None
) -> fx.GraphModule:
    """Export a drafter's module whose attention layers are those of transformers, which then go through the hook.

    ``prefix`` is removed from the names of its tensors. ``rope`` is the target's, if the module has its embeddings.
    """
    with torch.no_grad():
        graph = export_module(hooked(module, rope.length if rope else None), args, dims, name, prefix)
    move_foreign_nodes(graph, args[0].device)
    return graph


def _export(wrapper: _Forward, name: str) -> torch.export.ExportedProgram:
    """Export with named dynamic dimensions for batch and length, or with inferred ones if the model's code needs it."""
    device = next(wrapper.parameters()).device
    # A size of one would become a constant, and two equal sizes would become one dimension.
    tokens = torch.zeros(3, 5, dtype=torch.int64, device=device)
    positions = torch.arange(5, device=device).expand(3, 5).contiguous()
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("length", min=1)
    named, auto = {0: batch, 1: length}, {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    first: Exception | None = None
    for dims in (named, auto):
        try:
            shapes = {"tokens": dims, "positions": dims}
            exported = torch.export.export(wrapper, (tokens, positions), dynamic_shapes=shapes, strict=False)
            _check_range(exported)
            return exported
        except UnsupportedModelError:
            raise
        except Exception as error:
            first = first or error
    reason = str(first).strip().splitlines()[0]
    raise UnsupportedModelError(f"{name} cannot be exported by torch.export: {reason}") from first


def _check_range(exported: torch.export.ExportedProgram) -> None:
    """Refuse a graph whose inferred dimensions admit only some sizes."""
    for name, bounds in exported.range_constraints.items():
        # "Infinity" is a class of torch's own; whatever is not a plain number has no bound.
        if int(bounds.lower) > 2 or (bounds.upper.is_finite and bounds.upper < 1 << 31):
            raise ValueError(f"its graph holds only for {bounds.lower} <= {name} <= {bounds.upper}")


def _check_layer_types(config: Any, name: str, functions: set[str]) -> None:
    """Refuse layers that the configuration names: recurrent ones without their ``functions``, and a selection of keys.

    This comes before the export, which would unroll a recurrence and take minutes for every layer.
    """
    kinds = getattr(config, "layer_types", None) or []
    if "indexed_attention" in kinds:
        raise UnsupportedModelError(
            f"{name} has layers of the kind indexed_attention, where an indexer selects the keys that a query attends "
            "to; specgraph attends to all keys of a causal window, so the model is refused."
        )
    unknown = [kind for kind in kinds if kind in _RECURRENT_LAYERS and functions.isdisjoint(_RECURRENT_LAYERS[kind])]
    if unknown:
        raise _other_layers(name, len(kinds), len(kinds) - len(unknown))


def _other_layers(name: str, layers: int, count: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} has {layers} layers but {count} attention calls: some layers mix tokens in another way "
        "(convolution, linear attention, state space), which needs a recurrent state that specgraph does not keep."
    )


def _check_attention(count: int, name: str, layers: int, takes_positions: bool, *, recurrent: bool) -> None:
    if count == 0 and not recurrent:
        raise UnsupportedModelError(
            f"{name} does not call its attention through transformers' AttentionInterface, so specgraph cannot give "
            "it a KV cache. Use a model whose attention goes through the interface."
        )
    if count > layers:
        raise UnsupportedModelError(
            f"{name} has {layers} layers but {count} attention calls; one per layer is expected."
        )
    if count < layers and not recurrent:
        raise _other_layers(name, layers, count)
    if count and not takes_positions:
        raise UnsupportedModelError(f"{name}.forward takes no position_ids, so its positions cannot be set.")


def _check_calls(graph: fx.Graph, calls: list[AttentionCall], name: str) -> None:
    """Check that the graph has the same attention calls as the forward pass in which masks were checked."""
    found = [node.kwargs.get("window") for node in graph.nodes if node.target is ATTENTION]
    if found != [call.window for call in calls]:
        raise UnsupportedModelError(
            f"{name} makes other attention calls while it is exported than in a forward pass: {len(found)} calls "
            f"with the windows {found} instead of {[call.window for call in calls]}."
        )


def _split(module: fx.GraphModule, layers: int, name: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut the graph behind the final norm. The part before it is the body, and the part after it is the head."""
    outputs: Any = module.graph.output_node().args[0]
    logits, *hidden_states = outputs
    for index, node in enumerate(hidden_states):
        node.meta.setdefault("hidden_state", index)
    last = hidden_states[layers]
    body = _subgraph(module, last, [n for n in module.graph.nodes if n.op == "placeholder"], "body")
    head = _subgraph(module, logits, [last], "head")
    if any(node.op == "placeholder" and node.name not in {"hidden"} for node in head.graph.nodes):
        raise UnsupportedModelError(f"{name}'s logits depend on more than its last hidden state.")
    return body, head


def cut_at_layer(traced: TracedModel, layer: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The body in two parts: ``first(tokens, positions) -> hidden``, which is ``hs[layer]``, and ``rest(positions,
    hidden) -> hidden``, which takes ``tokens`` as well if its layers read them."""
    body = traced.body
    inputs = [*body.graph.find_nodes(op="placeholder")]
    between, last = hidden_states(traced)[layer], body.graph.output_node().all_input_nodes[0]
    positions = [node for node in inputs if node.name == "positions"]
    return _subgraph(body, between, inputs, "first_layers"), _subgraph(body, last, [*positions, between], "target")


def exit_head(traced: TracedModel) -> fx.GraphModule:
    """``exit_head(hidden) -> logits``, from ``hs[L + 1]``: the final norm, and the head behind it.

    It takes ``tokens`` and ``positions`` as well if the model reads their sizes there.
    """
    states, layers = hidden_states(traced), traced.info.num_layers
    norm = _subgraph(traced.body, states[layers], [states[layers + 1]], "norm")
    graph, root = fx.Graph(), nn.Module()
    mapping = {node: graph.node_copy(node) for node in norm.graph.find_nodes(op="placeholder")}  # with their shapes
    (normed,) = traced.head.graph.find_nodes(op="placeholder")
    graph.output(splice(graph, root, traced.head, {normed: splice(graph, root, norm, mapping)}))
    return new_module(root, graph, "exit_head")


def hidden_states(traced: TracedModel) -> dict[int, fx.Node]:
    """The nodes of the body that hold ``hs[k]``, by ``k``."""
    return {n.meta["hidden_state"]: n for n in traced.body.graph.nodes if "hidden_state" in n.meta}


def _subgraph(module: fx.GraphModule, result: fx.Node, inputs: list[fx.Node], name: str) -> fx.GraphModule:
    """The nodes between ``inputs`` and ``result`` as a module of their own, sharing the parameters."""
    needed = {result}
    for node in reversed(module.graph.nodes):
        if node in needed and node not in inputs:
            needed.update(node.all_input_nodes)
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        mapping[node] = graph.placeholder(node.name if node.op == "placeholder" else "hidden")
        mapping[node].meta = {"val": node.meta["val"]}
    for node in module.graph.nodes:
        if node in needed and node not in mapping:
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
    graph.output(mapping[result])
    return new_module(module, graph, name)
