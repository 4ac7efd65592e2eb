"""The modules of a program, which copies of the program share until one of them asks for a module to change it.

Every pass works on a copy of the program, and most passes change the step graph and none or one of the modules. Copies
of modules that no pass changes were half of the time of a small decoder's compilation.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from torch import fx

from specgraph.ir.graphs import copy_module


class Modules(UserDict[str, fx.GraphModule]):
    """Modules by name. Some are the program's own, and it may share the others with copies of itself.

    Whatever gives a module to the caller (``[]``, ``values()``, ``items()``, ``pop()``) gives one that may be changed:
    a shared module is copied first, once. Who only reads uses :attr:`unchanged`, which copies nothing.
    """

    def __init__(self, own: Mapping[str, fx.GraphModule]) -> None:
        """The modules ``own`` belong to no other program."""
        self._own = set[str]()
        super().__init__(own)

    @property
    def unchanged(self) -> Mapping[str, fx.GraphModule]:
        """The modules as they are. Other programs may share them, so they may not be changed."""
        return MappingProxyType(self.data)

    def copy(self) -> Modules:
        """The same modules for another program. Modules that are shared already stay shared."""
        new = Modules({})
        new.data = {name: copy_module(m) if name in self._own else m for name, m in self.data.items()}
        new._own = set(self._own)
        return new

    def share(self) -> None:
        """Let later copies share all modules. From now on, references to them that a caller holds are for reading."""
        self._own.clear()

    def where(self, wanted: Callable[[fx.Graph], bool]) -> Iterator[tuple[str, fx.GraphModule]]:
        """The modules whose graphs are ``wanted``, with their names, to change them."""
        for name in [name for name, module in self.data.items() if wanted(module.graph)]:
            yield name, self[name]

    def __getitem__(self, name: str) -> fx.GraphModule:
        if name not in self._own:
            self.data[name] = copy_module(self.data[name])
            self._own.add(name)
        return self.data[name]

    def __setitem__(self, name: str, module: fx.GraphModule) -> None:
        self.data[name] = module
        self._own.add(name)
