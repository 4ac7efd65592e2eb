"""The commands that read dumps, and compile nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from omegaconf import DictConfig

from specgraph.cli.command_table import options_of
from specgraph.cli.keys import DiffConfig, ExploreConfig
from specgraph.errors import ConfigError

if TYPE_CHECKING:
    from specgraph.explore import Bandwidth


def explore(cfg: DictConfig) -> dict[str, str]:
    """Write the page of a dump, and of a trace if one is given."""
    from specgraph.explore import explore as write_page

    options: ExploreConfig = options_of("explore", cfg)
    if options.bandwidth is not None and not 0 < options.bandwidth < math.inf:
        raise ConfigError(f"bandwidth={options.bandwidth} is in GB/s, so it is a number above 0.")
    page = write_page(options.dump, options.out, trace=options.trace, bandwidth=_bandwidth(options.bandwidth))
    print(f"{page}: {page.stat().st_size / 1e6:.1f} MB, to be opened in a browser")
    return {"page": str(page)}


def _bandwidth(given: float | None) -> Callable[[str], Bandwidth | None]:
    """A function from a device to the bandwidth of its memory: the number given in GB/s, or else a measurement."""

    def of(device: str) -> Bandwidth | None:
        from specgraph.bench.timing import measure_bandwidth
        from specgraph.explore import Bandwidth

        place = torch.device(device)
        if given is not None:
            return Bandwidth(1e9 * given, "as given")
        if place.type != "cpu" and (place.index or 0) >= torch.cuda.device_count():
            return None
        return Bandwidth(measure_bandwidth(place), "measured when this page was made")

    return of


def diff(cfg: DictConfig) -> dict[str, str]:
    """Print the nodes in which two stages or two dumps differ."""
    from specgraph.explore.diff import diff as differences

    options: DiffConfig = options_of("diff", cfg)
    text = differences(options.old, options.new, graph=options.graph, numerics=options.numerics)
    print(text)
    return {"difference": text.splitlines()[0] if text else "equal"}
