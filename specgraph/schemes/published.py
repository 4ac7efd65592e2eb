"""How the stacks of a model are saved: as the matrices for each expert that published files hold.

transformers reverts what its mapping of names did when a model was loaded, and does so for plain weights only. A model
with packed weights keeps the same mapping for the tensors of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, PrefixChange, WeightConverter

from specgraph.compat import get_model_conversion_mapping, revert_weight_conversion
from specgraph.errors import UnsupportedModelError
from specgraph.kernels.packed.format import Format
from specgraph.kernels.packed.formats import format_of
from specgraph.schemes.layers import PackedExperts, stacks
from specgraph.schemes.names import is_ragged, stacks_matrices


def published_layers(model: PreTrainedModel) -> dict[str, list[str]]:
    """The names that the layers of each stack of experts have in the files that a model is saved to."""
    found = {}
    for path, module in model.named_modules():
        for stack in stacks(module):
            empty = torch.empty_like(module.get_parameter(stack), device="meta")
            names = revert_weight_conversion(model, {f"{path}.{stack}": empty})
            found[f"{path}.{stack}"] = [name.removesuffix(".weight") for name in names]
    return found


def save_as_published(model: PreTrainedModel, transforms: list[Any] | None = None) -> None:
    """Let ``save_pretrained`` of a model with packed stacks write a matrix for each expert where files have that.

    transformers reverts the transformations that a model keeps. It gets those of the packed tensors, too.

    Args:
        model: the model with packed weights.
        transforms: the transformations by which it was loaded; by default those that transformers would revert.
    """
    kept: Any = model
    if transforms is None:
        transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:  # a model that was not loaded, whose names have no prefix that files lack
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        transforms = [entry for entry in mapping if not isinstance(entry, PrefixChange)]
    experts = {name: module for name, module in model.named_modules() if isinstance(module, PackedExperts)}
    forms = {module.format: format_of(module.format) for module in experts.values()}
    added = [
        _of_part(entry, form, part, experts)
        for entry in transforms if isinstance(entry, WeightConverter) and stacks_matrices(entry)
        for form in forms.values() for part in range(len(form.parts)) if form.stack_parts[part]
    ]  # fmt: skip
    # The last of them is reverted first. Names of packed tensors begin with those of plain ones, for which an older
    # transformers would take them.
    kept._weight_conversions = [*transforms, *added]


def _of_part(converter: Any, form: Format, part: int, experts: Mapping[str, Any]) -> WeightConverter:
    """The converter of a plain weight for one tensor of a packed one."""
    leaf, (target,) = form.parts[part], converter.target_patterns
    count, stack = len(converter.source_patterns), target.rpartition(".")[2]
    ragged = next((f"{name}.{stack}" for name, module in experts.items() if is_ragged(module, stack, count)), None)
    sources = [f"{source.removesuffix('weight')}{leaf}" for source in converter.source_patterns]
    made = WeightConverter(sources, [f"{target}{form.stack_parts[part]}"], [_Unstack(form, leaf, ragged)])
    made.scope_prefix, made.base_model_prefix = converter.scope_prefix, converter.base_model_prefix
    return made


class _Unstack(ConversionOps):  # type: ignore[misc]  # transformers has no types
    """What is done to a tensor of a packed stack when a model is saved.

    Attributes:
        form: the format.
        leaf: the name that the tensor has in a linear layer.
        ragged: the name of a stack that cannot be cut, since matrices that are joined in it share a scale.
    """

    def __init__(self, form: Format, leaf: str, ragged: str | None) -> None:
        self.form, self.leaf, self.ragged = form, leaf, ragged

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any
    ) -> dict[str, Any]:
        """The tensors of every matrix, which are views, by their patterns with the number of the expert."""
        if self.ragged is not None:
            raise UnsupportedModelError(
                f"{self.ragged} cannot be saved as matrices for each expert: some of them share a {self.form.shared}, "
                f"since blocks of {self.form.name} do not end where a matrix ends; name it in ignore, or choose "
                "another scheme."
            )
        ((stacked,),) = input_dict.values()
        found = {}
        for expert, joined in enumerate(stacked):
            for pattern, matrix in zip(target_patterns, joined.chunk(len(target_patterns)), strict=True):
                name = pattern.replace("*", f"{expert}")
                once = self.leaf in self.form.of_matrix
                # Stacks of mxfp4 have a dimension for the bytes of a group.
                found[name] = matrix[0] if once else matrix.flatten(1)
                if self.leaf == self.form.parts[0]:
                    found |= self._stated(name, found[name])
        return found

    def _stated(self, name: str, numbers: Any) -> dict[str, Any]:
        shape = [numbers.shape[0], numbers.shape[1] * self.form.per_element]
        return {f"{name.removesuffix(self.leaf)}{beside}": torch.tensor(shape) for beside in self.form.beside}

    @property
    def reverse_op(self) -> ConversionOps:
        """Itself: it is used only where transformers reverts."""
        return self
