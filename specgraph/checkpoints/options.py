"""What the configuration of an EAGLE-3 checkpoint says, or leaves open, about how its tensors are used.

Public implementations disagree about several of these, so each can be set and none is guessed silently:

===================== ========================================================== =====================================
option                read from                                                  if nothing says it
===================== ========================================================== =====================================
feature_layers        ``eagle_aux_hidden_state_layer_ids`` or                    hs[2], hs[L // 2], hs[L - 3]
                      ``aux_hidden_state_layer_ids``: id k is hs[k]; nested in
                      ``eagle_config`` id k is hs[k + 1]
norm_before_residual  ``norm_before_residual``                                   false
norm_output           ``norm_output``                                            false: fed on before the last norm
rope_theta            ``rope_theta``, then ``rope_parameters.rope_theta``        10000
mask_token_id         ``ptd_token_id``, ``pard_token``, ``mask_token_id``        refused if the head has mask_hidden
===================== ========================================================== =====================================
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specgraph.checkpoints.checkpoint import Checkpoint
from specgraph.errors import ConfigError

ID_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies do not change with the length."""
DEFAULT_THETA = 10000.0


class Overrides(Protocol):
    """The keys of ``draft`` that overrule a checkpoint; None leaves it as it is."""

    parallel: bool | None
    mask_token_id: int | None
    feature_layers: list[int] | None
    norm_before_residual: bool | None
    norm_output: bool | None
    rope_theta: float | None


@dataclass(frozen=True)
class Choice:
    """One option: its value and what it was taken from."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True)
class HeadOptions:
    """How the tensors of a head are used.

    Attributes:
        layer_type: ``llama``, or ``qwen3`` if queries and keys are normed.
        num_layers: decoder layers, counted.
        features: the k of the hidden states hs[k] it reads; None if that depends on a target that is not known.
        rope: transformers' ``rope_parameters``.
        sources: everything above and below, and where it is from.
    """

    layer_type: str
    num_layers: int
    features: tuple[int, ...] | None
    rope: dict[str, Any]
    fc: bool
    input_norm: bool
    last_norm: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    mask_token_id: int | None
    sources: tuple[Choice, ...]


def default_features(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's: one hidden state near the bottom, the middle one, one near the top; no such for a few layers."""
    return 2, num_layers // 2, num_layers - 3


def nearest_features(num_layers: int) -> tuple[int, ...]:
    """:func:`default_features`, moved into the range that a target of few layers has, ascending and distinct."""
    return tuple(sorted({min(max(k, 0), num_layers) for k in default_features(num_layers)}))


def layer_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """The part of the configuration that describes the decoder layers."""
    nested = checkpoint.config.get("transformer_layer_config")
    return nested if isinstance(nested, dict) else checkpoint.config


def layer_name(name: str) -> str:
    """A tensor's name in the speculators layout."""
    return re.sub(r"^midlayer\.", "layers.0.", name)


def read_options(checkpoint: Checkpoint, overrides: Overrides, target_layers: int | None = None) -> HeadOptions:
    """Collect the options of an EAGLE-3 checkpoint; ``target_layers`` is L, if the target is known.

    Raises:
        ConfigError: the head needs something that is not supported, or an option that nothing says.
    """
    names = {layer_name(name) for name in checkpoint.tensors}
    reader = _Reader(checkpoint, [])
    reader.refuse_variants()
    indices = [int(found[1]) for name in names if (found := re.match(r"layers\.(\d+)\.", name))]
    for name in ("embed_tokens", "lm_head"):
        reader.note(name, "its own" if f"{name}.weight" in names else "the target's", "tensors")
    fc = reader.flag("use_aux_hidden_state", True)
    return HeadOptions(
        layer_type=reader.note(
            "layer_type", "qwen3" if "layers.0.self_attn.q_norm.weight" in names else "llama", "tensors"
        ),
        num_layers=reader.note("num_layers", max(indices, default=0) + 1, "tensors"),
        features=reader.features(overrides.feature_layers, target_layers, fc),
        rope=reader.rope(overrides.rope_theta),
        fc=fc,
        input_norm=reader.flag("use_input_layernorm_in_first_layer", True),
        last_norm=reader.flag("use_last_layernorm", True),
        norm_before_residual=reader.flag("norm_before_residual", False, overrides.norm_before_residual),
        norm_before_fc=reader.flag("norm_before_fc", "input_norm.weight" in names),
        fc_norm=reader.flag("fc_norm", any(name.startswith("fc_norm.") for name in names)),
        norm_output=reader.flag("norm_output", False, overrides.norm_output),
        mask_token_id=reader.mask(overrides, "mask_hidden" in names),
        sources=tuple(reader.sources),
    )


@dataclass(frozen=True)
class _Reader:
    """Reads keys and remembers where every value came from."""

    checkpoint: Checkpoint
    sources: list[Choice]

    @property
    def nested(self) -> Mapping[str, Any]:
        found = self.checkpoint.config.get("eagle_config")
        return found if isinstance(found, dict) else {}

    def note(self, name: str, value: Any, source: str) -> Any:
        self.sources.append(Choice(name, value, source))
        return value

    def flag(self, name: str, default: bool, override: bool | None = None) -> bool:
        """An override, the configuration or its ``eagle_config``, or the default."""
        if override is not None:
            return bool(self.note(name, override, f"draft.{name}"))
        for place, values in (("config.json", self.checkpoint.config), ("eagle_config", self.nested)):
            if values.get(name) is not None:
                if not isinstance(values[name], bool):
                    raise ConfigError(f"{name} of {self.checkpoint.path} is {values[name]!r}; it is true or false.")
                return bool(self.note(name, values[name], place))
        return bool(self.note(name, default, "default"))

    def refuse_variants(self) -> None:
        """Variants of ModelOpt whose forward pass is another one."""
        for name, usual in (("next_layer_regular", True), ("use_mtp_layernorm", False)):
            if self.nested.get(name, usual) is not usual:
                raise ConfigError(
                    f"{self.checkpoint.path} has {name}={str(self.nested[name]).lower()}, a variant that specgraph "
                    f"does not run; it runs heads with {name}={str(usual).lower()}."
                )
        if (self.nested.get("parallel_draft_step") or 1) != 1:
            raise ConfigError(
                f"{self.checkpoint.path} has parallel_draft_step={self.nested['parallel_draft_step']}, extra heads "
                "that specgraph does not run; it drafts in parallel by heads with a mask_hidden (P-EAGLE)."
            )

    def features(self, given: Sequence[int] | None, layers: int | None, fc: bool) -> tuple[int, ...] | None:
        """The indices k of hs[k], checked as far as ``layers`` is known."""
        if given is not None:
            return self._checked(tuple(given), layers, "draft.feature_layers")
        if not fc:
            source = "use_aux_hidden_state=false: the last hidden state"
            return self._checked(None if layers is None else (layers,), layers, source)
        found = self._declared()
        if found is not None:
            ids, source = found
            if list(ids) != sorted(ids):
                raise ConfigError(
                    f"{source} of {self.checkpoint.path} is {list(ids)}, out of order, and implementations disagree on "
                    "what that means; set draft.feature_layers to the indices k of hs[k] in the order of fc's columns."
                )
            return self._checked(ids, layers, source)
        default, source = None if layers is None else default_features(layers), "default: 2, L // 2, L - 3"
        if default is not None and list(default) != sorted(default):
            raise self._unreadable(default, layers, source)
        return self._checked(default, layers, source)

    def _declared(self) -> tuple[tuple[int, ...], str] | None:
        """The ids of the configuration as indices of hs, and their key."""
        found = []
        for values, shift, place in ((self.checkpoint.config, 0, ""), (self.nested, 1, "eagle_config.")):
            for key in ID_KEYS:
                ids = values.get(key) or ()
                if not isinstance(ids, list | tuple) or not all(isinstance(k, int) for k in ids):
                    raise ConfigError(f"{place}{key} of {self.checkpoint.path} is {ids!r}; it is a list of integers.")
                if ids:
                    found.append((tuple(k + shift for k in ids), f"{place}{key}"))
        if len({ids for ids, _ in found}) > 1:
            told = " and ".join(f"{list(ids)} by {key}" for ids, key in found)
            raise ConfigError(f"{self.checkpoint.path} reads the hidden states {told}; set draft.feature_layers.")
        return found[0] if found else None

    def _checked(self, ids: tuple[int, ...] | None, layers: int | None, source: str) -> tuple[int, ...] | None:
        known = ids is None or layers is None or all(0 <= k <= layers for k in ids)
        if ids is not None and (not known or not ids or len(set(ids)) != len(ids) or min(ids) < 0):
            raise self._unreadable(ids, layers, source)
        shown = "unknown without a target" if ids is None else ", ".join(f"hs[{k}]" for k in ids)
        self.note("feature_layers", shown, source)
        return ids

    def _unreadable(self, ids: Sequence[int], layers: int | None, source: str) -> ConfigError:
        return ConfigError(
            f"{self.checkpoint.path} would read the hidden states {list(ids)} ({source}) of a target with "
            f"{layers or 'some'} layers; set draft.feature_layers to distinct indices from 0 to that number."
        )

    def rope(self, given: float | None) -> dict[str, Any]:
        """transformers' rope parameters, with the base from the first place that names one."""
        settings = layer_settings(self.checkpoint)
        scaling = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
        if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
            raise ConfigError(
                f"rope_parameters of {self.checkpoint.path} differ by layer, which specgraph does not read; "
                "write one set of them."
            )
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise ConfigError(
                f"{self.checkpoint.path} has the rope_type {kind!r}, which specgraph does not run in a head; it runs "
                f"{', '.join(ROPE_TYPES)}."
            )
        place = "transformer_layer_config." if settings is not self.checkpoint.config else ""
        candidates = [
            (given, "draft.rope_theta"),
            (settings.get("rope_theta"), f"{place}rope_theta"),
            (scaling.get("rope_theta"), f"{place}rope_parameters.rope_theta"),
            (self.checkpoint.config.get("rope_theta"), "rope_theta"),
            (DEFAULT_THETA, "default"),
        ]
        theta, source = next((value, source) for value, source in candidates if value is not None)
        if not isinstance(theta, int | float) or theta <= 0:
            raise ConfigError(
                f"{source} of {self.checkpoint.path} is {theta!r}; set draft.rope_theta to a base above 0."
            )
        self.note("rope_theta", float(theta), source)
        return {**scaling, "rope_type": kind, "rope_theta": float(theta)}

    def mask(self, overrides: Overrides, has_hidden: bool) -> int | None:
        """The mask token of a head that can draft in parallel."""
        if not has_hidden:
            for name in ("mask_token_id", "parallel"):
                if getattr(overrides, name):
                    raise ConfigError(
                        f"draft.{name} is set, but {self.checkpoint.path} has no mask_hidden, so it cannot draft in "
                        f"parallel; leave draft.{name} out or give a P-EAGLE head."
                    )
            return None
        key = self.checkpoint.mask_key
        value = overrides.mask_token_id if overrides.mask_token_id is not None else self.checkpoint.mask_token_id
        if value is None:
            raise ConfigError(
                f"{self.checkpoint.path} names no mask token for its mask_hidden; set draft.mask_token_id."
            )
        source = "draft.mask_token_id" if overrides.mask_token_id is not None else str(key)
        return int(self.note("mask_token_id", value, source))
