"""The time of every step of a trace, beside the time that reading its bytes takes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specgraph.explore.dump_files import Dump
from specgraph.explore.trace_file import TraceFile, TraceStep
from specgraph.ir.traffic import CallReads, Traffic, traffic


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second that a device can read, and where the number is from, as the end of a sentence."""

    bytes_per_second: float
    source: str


def reads_of(dump: Dump) -> list[CallReads]:
    """The bytes that the calls of a step read, from the record of the dump; empty if the record lacks them."""
    return [CallReads.of_record(record) for record in dump.record.get("reads", [])]


def step_times(trace: TraceFile, dump: Dump, bandwidth: Bandwidth | None) -> dict[str, Any]:
    """One row for each step, and a summary of those that only decoded.

    A step that ended a prompt has no limit here, because its time depends on products as well as on bytes. The context
    of a sequence is what it had before the step.
    """
    calls, drafts = reads_of(dump), int(dump.record.get("num_speculative_tokens", 0))
    together: dict[int, list[TraceStep]] = {}
    for step in trace.steps:
        together.setdefault(step["step"], []).append(step)
    rows = [_row(number, steps, calls, drafts, bandwidth) for number, steps in together.items()]
    compared = [row for row in rows if not row["prompt"]]
    return {
        "rows": rows,
        "bandwidth": None if bandwidth is None else bandwidth.bytes_per_second,
        "source": "" if bandwidth is None else bandwidth.source,
        "median_ms": _median([row["ms"] for row in compared]),
        "median_limit_ms": _median([row["limit_ms"] for row in compared if row["limit_ms"] is not None]),
        "median_ratio": _median([row["ms"] / row["limit_ms"] for row in compared if row["limit_ms"]]),
    }


def _row(
    number: int, steps: Sequence[TraceStep], calls: Sequence[CallReads], drafts: int, bandwidth: Bandwidth | None
) -> dict[str, Any]:
    prompt = any(step["prompt"] for step in steps)
    tokens = sum(len(step["tokens"]) for step in steps)
    contexts = [float(step["position"]) for step in steps]
    found = None if prompt or not calls else traffic(calls, contexts, drafts, tokens / len(steps))
    return {
        "step": number,
        "sequences": len(steps),
        "tokens": tokens,
        "prompt": prompt,
        "ms": 1e3 * steps[0]["seconds"],
        "bytes": None if found is None else _bytes(found),
        "limit_ms": None if found is None or bandwidth is None else 1e3 * found.total / bandwidth.bytes_per_second,
    }


def _bytes(found: Traffic) -> dict[str, int]:
    return {
        "target": found.target_weights, "draft": found.draft_weights, "cache": found.cache, "state": found.state,
    }  # fmt: skip


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
