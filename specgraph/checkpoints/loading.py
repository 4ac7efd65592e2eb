"""Fills a head's module with the tensors of a checkpoint. All shapes are checked before any tensor is read.

The module is first made on the device ``meta``, from the configuration. Some of its parameters may be borrowed from the
target, such as the embedding. If the checkpoint lacks such a tensor, or has one that equals the target's, the head uses
the target's own tensor and not a copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specgraph.checkpoints.checkpoint import EMBEDDING, PROJECTION, Checkpoint
from specgraph.checkpoints.files import StoredTensor
from specgraph.errors import ConfigError
from specgraph.ir.model_info import ModelInfo
from specgraph.ir.tensors import equal_tensors

BORROWED = (EMBEDDING, PROJECTION)
"""The parameters that are taken from the target if the checkpoint does not have them."""
COMPUTED = re.compile(r"(.*\.)?rotary_emb\.inv_freq$")
"""Tensors that are computed and not read."""
IGNORED = re.compile(rf"t2d$|d2t$|{COMPUTED.pattern}|verifier_(lm_head|norm)\.weight$")
"""Tensors of files that are no parameters: others read them, they are computed, or only training needs them."""


@dataclass(frozen=True, eq=False)
class HeadLoader:
    """Loads one checkpoint into a module.

    Attributes:
        checkpoint: the checkpoint.
        stored: its tensors, by the names of the module's parameters.
        model: the target, from which the head borrows tensors. Its weights need not be loaded.
        info: facts about it; the head gets its device and dtype.
        what: what the head is, in words, such as ``an EAGLE-3 head``.
        ignored: matches the names of tensors that are not parameters of the module: something else reads them, they are
            computed, or only training needs them.
        shown: gives the name that the file has for a parameter.
    """

    checkpoint: Checkpoint
    stored: Mapping[str, StoredTensor]
    model: PreTrainedModel
    info: ModelInfo
    what: str
    ignored: re.Pattern[str] = COMPUTED
    shown: Callable[[str], str] = str

    @property
    def own(self) -> dict[str, nn.Parameter]:
        """The tensors of the target that heads borrow, by the names of the heads' parameters."""
        modules: list[Any] = [self.model.get_input_embeddings(), self.model.get_output_embeddings()]
        return {name: module.weight for name, module in zip(BORROWED, modules, strict=True)}

    def add_biases(self, module: nn.Module) -> None:
        """Give linear layers the biases that the file has, whatever its configuration says.

        The vocabulary projection, which may be the target's, gets none.
        """
        owners = {name: owner for name, owner in module.named_modules() if f"{name}.weight" != PROJECTION}
        for name in self.stored:
            owner = owners.get(name.removesuffix(".bias"))
            if name.endswith(".bias") and isinstance(owner, nn.Linear):
                owner.bias = nn.Parameter(torch.empty(owner.out_features, device="meta"), requires_grad=False)

    def check(self, module: nn.Module) -> None:
        """Compare names and shapes.

        Raises:
            ConfigError: the checkpoint does not fit the target or itself; names the tensor, the expected and the found
                shape.
        """
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        # The tensors that stand for a mask come last: if all shapes are wrong, that of a layer says more.
        self.check_shapes(dict(sorted(shapes.items(), key=lambda item: "." not in item[0])))

    def check_shapes(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Compare names and shapes with those that are ``expected``, as :meth:`check` does."""
        missing = [name for name in expected if name not in self.stored and name not in BORROWED]
        if missing:
            raise ConfigError(
                f"{self.checkpoint.path} lacks {self._listed(missing)}; download it again or correct its config.json."
            )
        for name, shape in expected.items():
            if name in self.stored:
                self._check_tensor(name, self.stored[name], shape)
            else:
                self._check_borrowed(name, shape)
        unused = [name for name in self.stored if name not in expected and not self.ignored.match(name)]
        if unused:
            raise ConfigError(
                f"{self.checkpoint.path} holds {self._listed(unused)}, which {self.what} with its configuration "
                "does not use; correct the configuration or remove them."
            )

    def fill(self, module: nn.Module, apart: str | None = None) -> None:
        """Read every parameter, convert it to the target's dtype and move it to the target's device.

        Parameters whose names begin with ``apart`` are left as they are.
        """
        # A target with tied weights has its embedding and its projection as one parameter, and a head may have two.
        for name, expected in list(module.named_parameters(remove_duplicate=False)):
            if apart is not None and name.startswith(apart):
                continue
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, self._parameter(name, expected))

    def unfit(self, found: str, needed: str) -> ConfigError:
        """The error that says that the head was made for another target."""
        return unfit(self.checkpoint, self.info, found, needed)

    def _check_tensor(self, name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise ConfigError(
                f"{self.shown(name)} of {self.checkpoint.path} is {tensor.dtype}; convert it to bfloat16 or float32."
            )
        if tensor.shape != shape:
            raise self.unfit(
                f"{self.shown(name)} has the shape {list(tensor.shape)}", f"and config.json need {list(shape)}"
            )

    def _check_borrowed(self, name: str, shape: tuple[int, ...]) -> None:
        own = self.own[name]
        if tuple(own.shape) != shape:
            raise self.unfit(f"it has no {name}, needs {list(shape)}", f"has {list(own.shape)}")

    def _parameter(self, name: str, expected: Tensor) -> nn.Parameter:
        if name not in self.stored:
            return self.own[name]
        read = self.stored[name].read().reshape(expected.shape).to(self.info.dtype)
        if name in BORROWED and equal_tensors(read, self.own[name]):
            return self.own[name]
        # A CPU may round a matrix product differently when operands are not aligned, and a mapped file aligns none.
        # So the tensor is copied.
        return nn.Parameter(read.to(self.info.device, copy=True).contiguous(), requires_grad=False)

    def _listed(self, names: Sequence[str]) -> str:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(self.shown(name) for name in names[:3]) + more


def check_size(checkpoint: Checkpoint, info: ModelInfo) -> None:
    """Refuse a head that was made for a target of another hidden size.

    This comes before its options are read: that a target lacks the layers of another one says less about it. A head
    whose configuration has no ``target_hidden_size`` is judged by its ``fc``, which reads hidden states side by side.

    Raises:
        ConfigError: names both sizes.
    """
    declared, fc = checkpoint.config.get("target_hidden_size"), checkpoint.tensors.get("fc.weight")
    if declared is not None and declared != info.hidden_size:
        raise unfit(
            checkpoint, info, f"it was made for a target with hidden size {declared}", f"has {info.hidden_size}"
        )
    if declared is None and fc is not None and len(fc.shape) == 2:
        count, rest = divmod(fc.shape[1], info.hidden_size)
        if rest or count > info.num_layers + 1:
            states = f"has {info.num_layers + 1} hidden states of {info.hidden_size}"
            raise unfit(checkpoint, info, f"its fc.weight reads {fc.shape[1]} columns", states)


def unfit(checkpoint: Checkpoint, info: ModelInfo, found: str, needed: str) -> ConfigError:
    """The error that says that a head was made for another target."""
    return ConfigError(f"{checkpoint.path} does not fit: {found}, but the target {info.name} {needed}.")


def shared_notes(
    stored: Container[str], module: nn.Module, model: PreTrainedModel, called: str = "draft"
) -> tuple[str, ...]:
    """For the report, one line for every tensor of a loaded head that is the target's own tensor.

    ``stored`` are the names of those parameters that the checkpoint has, and ``called`` is what the head is called.
    """
    owned = {id(parameter): name for name, parameter in model.named_parameters()}
    notes = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in owned:
            why = "" if name in stored else " (the checkpoint has none)"
            size = f"{parameter.nbytes:,} bytes{why}"
            notes.append(f"shared while loading: {called}.{name} is target.{owned[id(parameter)]}, {size}")
    return tuple(notes)
