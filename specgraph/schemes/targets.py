"""Which layers of a model are quantised, by patterns as compressed-tensors has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from specgraph.errors import UnsupportedModelError


def matches(name: str, kind: type[nn.Module], patterns: Iterable[str]) -> bool:
    """Whether one of the patterns is the name of a module, the name of a class that its class ``kind`` is or is derived
    from, or ``re:`` and an expression that the beginning of its name matches.
    """
    kinds = {base.__name__ for base in kind.__mro__}
    return any(
        re.match(pattern.removeprefix("re:"), name) is not None if pattern.startswith("re:")
        else pattern == name or pattern in kinds
        for pattern in patterns
    )  # fmt: skip


def named(name: str, given: Iterable[str]) -> bool:
    """Whether an entry is the name of a module or of one that holds it, an expression for such a name, or the end of
    one, as transformers reads ``modules_to_not_convert``.
    """
    return any(re.match(rf"(?:{each})(?:(?<=\.)|(?=\.|$))", name) or name.endswith(each) for each in given)


def targeted(
    model: nn.Module, targets: Iterable[str], ignore: Iterable[str], layers: Mapping[str, Sequence[str]]
) -> dict[str, nn.Linear]:
    """The linear layers that ``targets`` match and ``ignore`` does not, by their names.

    A pattern matches the name of a layer in the model or the one that files give it: those that ``layers`` has for its
    weight.

    Raises:
        UnsupportedModelError: a layer is of a class derived from ``nn.Linear``, whose forward may be another, or its
            weight is that of another module, too.
    """
    targets, ignore, found = tuple(targets), tuple(ignore), {}
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        names, kind = {name, *layers.get(f"{name}.weight", ())}, type(module)
        if not any(matches(x, kind, targets) for x in names) or any(matches(x, kind, ignore) for x in names):
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
