"""Makes a Markdown table of the JSON lines of ``real_models``:  python -m benchmarks.markdown FILE.jsonl"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HEADER = ("prompts", "temperature", "batch", "decoder", "K", "tokens/step", "tokens/s", "x plain", "differ", "in a bit")


def table(lines: Sequence[dict[str, Any]]) -> str:
    """One row per line, grouped by prompts, temperature and number of sequences, under a title for each machine."""
    parts = []
    for title in dict.fromkeys(map(_title, lines)):
        own = [line for line in lines if _title(line) == title]
        plain = {_group(line): line["tokens_per_second"] for line in own if line["cell"]["decoder"] == "none"}
        rows = [_row(line, plain) for line in sorted(own, key=lambda line: (*_group(line), *_order(line["cell"])))]
        ruled = [HEADER, ["---"] * 4 + ["---:"] * 6, *rows]
        parts.append("\n".join([f"{title}:", "", *(f"| {' | '.join(row)} |" for row in ruled)]))
    return "\n\n".join(parts)


def _title(line: dict[str, Any]) -> str:
    return f"{line['model']}, {line['dtype']}, {line['device']}"


def _group(line: dict[str, Any]) -> tuple[str, float, int]:
    cell = line["cell"]
    return cell["prompts"], cell["temperature"], cell["batch"]


def _order(cell: dict[str, Any]) -> tuple[int, str, int]:
    """Plain decoding first, then our drafters, then transformers."""
    rank = 0 if cell["decoder"] == "none" else 2 if cell["decoder"].startswith("transformers") else 1
    return rank, cell["decoder"], cell["k"]


def _row(line: dict[str, Any], plain: dict[tuple[str, float, int], float]) -> list[str]:
    cell, speed, per_step = line["cell"], line["tokens_per_second"], line["tokens_per_step"]
    *words, last = cell["decoder"].split(" ")
    base = plain.get(_group(line))
    return [
        cell["prompts"], f"{cell['temperature']:g}", str(cell["batch"]), " ".join([*words, Path(last).name]),
        str(cell["k"] or ""), "" if per_step is None else f"{per_step:.2f}", f"{speed:.1f}",
        "" if base is None else f"{speed / base:.2f}", _of(line["differ"], line), _of(line["differ_in_bits"], line),
    ]  # fmt: skip


def _of(count: int | None, line: dict[str, Any]) -> str:
    return "" if count is None else f"{count} of {line['sequences']}"


if __name__ == "__main__":
    print(table([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]))
