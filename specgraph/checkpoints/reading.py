"""Reads from the configuration of a head's checkpoint how its tensors are used.

Configurations leave some of these options open, and public implementations disagree about them. So a user can set them,
and every value is kept together with the place from which it was taken, for ``inspect`` to show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specgraph.checkpoints.checkpoint import Checkpoint, Choice
from specgraph.errors import ConfigError

ID_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
"""The keys of the indices of hidden states. At the top level an index k means hs[k], in a nested part hs[k + 1]."""
LAYER_KEYS = ("target_layer_ids",)
"""Keys of layers whose outputs are meant, at the top level, too: the output of layer k is hs[k + 1]."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""The kinds of rotary embedding whose frequencies do not change with the length of the sequence."""
DEFAULT_THETA = 10000.0


def layer_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """The part of the configuration that describes the decoder layers."""
    nested = checkpoint.config.get("transformer_layer_config")
    return nested if isinstance(nested, dict) else checkpoint.config


@dataclass(frozen=True)
class Reader:
    """Reads keys of a checkpoint's configuration and remembers where every value came from."""

    checkpoint: Checkpoint
    sources: list[Choice] = field(default_factory=list)
    part: str = "eagle_config"
    """The part of the configuration that holds the keys of this kind of head."""
    id_keys: Sequence[str] = ID_KEYS
    """The keys of the indices of hidden states, at the top level and in :attr:`part`."""

    @property
    def nested(self) -> Mapping[str, Any]:
        found = self.checkpoint.config.get(self.part)
        return found if isinstance(found, dict) else {}

    def note(self, name: str, value: Any, source: str) -> Any:
        self.sources.append(Choice(name, value, source))
        return value

    def refuse_variants(self, usual: Mapping[str, Sequence[Any]], kind: str) -> None:
        """Refuse a head of a kind with another value of one of the keys of ``usual`` than those that it lists."""
        for values in (self.checkpoint.config, self.nested):
            for name, allowed in usual.items():
                if values.get(name) not in allowed:
                    raise ConfigError(
                        f"{self.checkpoint.path} has {name}={values[name]!r}, a variant of {kind} that specgraph does "
                        f"not run; it runs heads with {name}={allowed[-1]!r}."
                    )

    def flag(self, name: str, default: bool, override: bool | None = None, other_names: Sequence[str] = ()) -> bool:
        """A boolean option: the override, or else the value in the configuration or its :attr:`part`, or else the
        default. ``other_names`` are those that it has in files of others.
        """
        if override is not None:
            return bool(self.note(name, override, f"draft.{name}"))
        found: list[tuple[str, str, bool]] = []
        for place, values in (("config.json", self.checkpoint.config), (self.part, self.nested)):
            for key in (name, *other_names):
                if values.get(key) is None:
                    continue
                if not isinstance(values[key], bool):
                    raise ConfigError(f"{key} of {self.checkpoint.path} is {values[key]!r}; it must be true or false.")
                found.append((key, place if key == name else f"{place}.{key}", values[key]))
        if len({value for _, _, value in found}) > 1:
            said = " and ".join(f"{key}={str(value).lower()}" for key, _, value in found)
            raise ConfigError(
                f"{self.checkpoint.path} has {said}, which are names of one option; leave the wrong one out of its "
                "config.json."
            )
        source, value = (found[0][1], found[0][2]) if found else ("default", default)
        return bool(self.note(name, value, source))

    def features(
        self, given: Sequence[int] | None, layers: int | None, default: Callable[[int], Sequence[int]], source: str
    ) -> tuple[int, ...] | None:
        """The indices k of the hidden states hs[k] that the head reads, checked against ``layers`` if that is known.

        Args:
            given: those that a user gave; None takes the checkpoint's.
            layers: the number of layers of the target.
            default: gives the indices for a number of layers, if the checkpoint names none.
            source: says where these are from.
        """
        if given is not None:
            return self.checked(tuple(given), layers, "draft.feature_layers")
        found = self._declared()
        if found is not None:
            ids, key = found
            if list(ids) != sorted(ids):
                raise ConfigError(
                    f"{key} of {self.checkpoint.path} is {list(ids)}, out of order, and implementations disagree on "
                    "what that means; set draft.feature_layers to the indices k of hs[k] in the order of fc's columns."
                )
            return self.checked(ids, layers, key)
        usual = None if layers is None else tuple(default(layers))
        if layers is not None and usual is not None and list(usual) != sorted(usual):
            raise self._unreadable(usual, layers, source)
        return self.checked(usual, layers, source)

    def _declared(self) -> tuple[tuple[int, ...], str] | None:
        """The indices of hidden states that the configuration names, and the key that names them."""
        found = []
        for values, shift, place in ((self.checkpoint.config, 0, ""), (self.nested, 1, f"{self.part}.")):
            for key in self.id_keys:
                ids = values.get(key) or ()
                if not isinstance(ids, list | tuple) or not all(isinstance(k, int) for k in ids):
                    raise ConfigError(
                        f"{place}{key} of {self.checkpoint.path} is {ids!r}; it must be a list of integers."
                    )
                if ids:
                    outputs = max(shift, int(key in LAYER_KEYS))
                    found.append((tuple(k + outputs for k in ids), f"{place}{key}"))
        if len({ids for ids, _ in found}) > 1:
            told = " and ".join(f"{list(ids)} by {key}" for ids, key in found)
            raise ConfigError(f"{self.checkpoint.path} reads the hidden states {told}; set draft.feature_layers.")
        return found[0] if found else None

    def checked(self, ids: tuple[int, ...] | None, layers: int | None, source: str) -> tuple[int, ...] | None:
        """``ids``, which ``source`` names, if a target with ``layers`` layers has these hidden states."""
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
        """transformers' ``rope_parameters``, with the base from the first place that names one."""
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

    def mask_token(self, given: int | None, other: tuple[int | None, str] = (None, "")) -> int | None:
        """The mask token: ``given`` by a user, or else the configuration's, or else ``other``, which has a source."""
        named = self.checkpoint.mask_token_id, str(self.checkpoint.mask_key)
        candidates = ((given, "draft.mask_token_id"), named, other)
        value, source = next((found for found in candidates if found[0] is not None), other)
        return None if value is None else int(self.note("mask_token_id", value, source))
