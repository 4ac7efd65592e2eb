"""Which layers of a model are quantised, by patterns as compressed-tensors has them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from specgraph.errors import UnsupportedModelError


def matches(name: str, module: nn.Module, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns is the name of the module, the name of a class of it, or ``re:`` and an expression
    that the beginning of its name matches.
    """
    kinds = {kind.__name__ for kind in type(module).__mro__}
    return any(
        re.match(pattern.removeprefix("re:"), name) is not None if pattern.startswith("re:")
        else pattern == name or pattern in kinds
        for pattern in patterns
    )  # fmt: skip


def targeted(model: nn.Module, targets: Iterable[str], ignore: Iterable[str]) -> dict[str, nn.Linear]:
    """The linear layers that ``targets`` match and ``ignore`` does not, by their names.

    Raises:
        UnsupportedModelError: a layer is of a class derived from ``nn.Linear``, whose forward may be another, or its
            weight is that of another module, too.
    """
    targets, ignore, found = tuple(targets), tuple(ignore), {}
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not matches(name, module, targets) or matches(name, module, ignore):
            continue
        if type(module) is not nn.Linear:
            raise UnsupportedModelError(
                f"{name} is a {type(module).__name__}, and only layers of the class Linear itself are quantised; "
                "add its name to ignore."
            )
        if len(shared := owners[id(module.weight)]) > 1:
            raise UnsupportedModelError(
                f"{name} has its weight in common with {next(other for other in shared if other != f'{name}.weight')}, "
                "so it cannot be quantised alone; add its name to ignore."
            )
        found[name] = module
    return found
