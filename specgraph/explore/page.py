"""Puts everything into one HTML file."""

from __future__ import annotations

import html
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from specgraph.errors import ConfigError
from specgraph.explore.changes import changes_of
from specgraph.explore.dump_files import Dump, read_dump
from specgraph.explore.graphs import node_table
from specgraph.explore.sizes import decode_sizes
from specgraph.explore.times import Bandwidth, reads_of, step_times
from specgraph.explore.trace_file import TraceFile, acceptance, check_same, read_trace, why
from specgraph.explore.weights import sharing

LIBRARIES = {"cytoscape.min.js": "cytoscape", "cytoscape-dagre.min.js": "cytoscape-dagre", "uPlot.iife.min.js": "uPlot"}
"""The libraries that draw the graphs and the plot, with the names of their licences. ``vendor/README.md`` names their
sources."""
SCRIPTS = ("dom.js", "data.js", "stages.js", "graph.js", "node.js", "weights.js", "drafts.js", "times.js", "main.js")
STYLES = ("vendor/uPlot.min.css", "page/page.css")
UNKNOWN_LENGTH = 1024
"""The length of sequences for which bytes are given if there is no trace."""


def explore(
    dump: str | Path, out: str | Path, *, trace: str | Path | None = None,
    bandwidth: Callable[[str], Bandwidth | None] | None = None,
) -> Path:  # fmt: skip
    """Write the page of a dump, and of a trace if one is given.

    Args:
        dump: the folder that ``decoder.dump`` wrote.
        out: the file to write, in a folder that exists. It is written over, once the page is complete.
        trace: the file that ``Trace.save`` or ``generate trace=FILE`` wrote.
        bandwidth: says how fast the memory of a device is, which is given by its name, for the limit of a step's time.
            It is called if there is a trace. None shows no limit.

    Returns:
        ``out``.

    Raises:
        ConfigError: a file is missing, damaged or of another version, the trace is of another decoder than the dump, or
            ``out`` cannot be written.
    """
    out = Path(out).expanduser()
    check_out(out)
    found = read_dump(dump)
    if trace is None:
        _write(out, render(page_data(found, None, None)))
        return out
    traced = read_trace(trace)
    check_same(traced, found, trace)
    speed = None if bandwidth is None else bandwidth(str(found.record.get("device", "cpu")))
    _write(out, render(page_data(found, traced, speed)))
    return out


def check_out(out: Path) -> None:
    """Refuse a file that cannot be written, before anything is read.

    Raises:
        ConfigError: says why.
    """
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"out={out} is no file that can be written; give a file in a folder that exists.")


def page_data(dump: Dump, trace: TraceFile | None, bandwidth: Bandwidth | None) -> dict[str, Any]:
    """All that the page shows, as plain values."""
    sizes = _sizes(dump, trace)
    nodes, graphs = node_table(dump, sizes)
    places = {stage.name: index for index, stage in enumerate(dump.stages)}
    named = {stage.name: stage for stage in dump.stages}
    stages = [
        {
            "name": stage.name, **stage.made, "before": places.get(stage.before or ""), "graphs": graphs[stage.name],
            "changes": changes_of(stage, named.get(stage.before or "")),
        }
        for stage in dump.stages
    ]  # fmt: skip
    calls = [call.to_record() for call in reads_of(dump)]
    about = {key: value for key, value in dump.record.items() if key != "reads"}
    return {
        "about": about, "sizes": sizes, "nodes": nodes, "stages": stages, "calls": calls, "weights": sharing(dump),
        "trace": None if trace is None else _trace(trace, step_times(trace, dump, bandwidth)),
    }  # fmt: skip


def render(data: Mapping[str, Any]) -> str:
    """The HTML of the page."""
    about = data["about"]
    title = f"{about.get('target', 'A program')}, drafted by {about.get('drafter', 'nothing')}"
    parts = {
        "title": html.escape(title),
        "style": "\n".join(map(_file, STYLES)),
        "data": _embedded(data),
        "libraries": "\n".join(_library(*library) for library in LIBRARIES.items()),
        "scripts": "\n".join(_script(f"page/{name}") for name in SCRIPTS),
    }
    # One pass, so that nothing that was put in is looked at again.
    return re.sub(r"<!--(\w+)-->", lambda match: parts[match[1]], _file("page/page.html"))


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON inside of a script element: only ASCII, and no character that HTML could take for the element's end."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _script(name: str) -> str:
    return f"<script>\n{_file(name)}\n</script>"


def _library(name: str, licence: str) -> str:
    """A library with its licence, which every copy of it must contain."""
    return f"<script>\n/*\n{_file(f'vendor/LICENSE-{licence}.txt')}*/\n{_file(f'vendor/{name}')}\n</script>"


def _file(name: str) -> str:
    return resources.files("specgraph.explore").joinpath(name).read_text(encoding="utf-8")


def _sizes(dump: Dump, trace: TraceFile | None) -> dict[str, int]:
    """The sizes for which bytes are given: of the largest step of the trace, or of one sequence."""
    steps = [] if trace is None else trace.decoding
    counts = Counter(step["step"] for step in steps)
    longest = max((step["position"] + len(step["tokens"]) for step in steps), default=UNKNOWN_LENGTH)
    return decode_sizes(int(dump.record.get("num_speculative_tokens", 0)), max(counts.values(), default=1), longest)


def _trace(trace: TraceFile, times: dict[str, Any]) -> dict[str, Any]:
    return {
        "about": trace.about,
        "prompts": trace.prompts,
        "steps": trace.steps,
        "acceptance": acceptance(trace),
        "why": why(trace.rule),
        "times": times,
    }


def _write(out: Path, text: str) -> None:
    """Write a file beside ``out`` and put it in its place, so that a failure leaves nothing behind."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.writing")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(out)
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written ({error.strerror}); choose another file.") from None
    finally:
        temporary.unlink(missing_ok=True)
