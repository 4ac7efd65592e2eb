"""The times of options on the CPU: what it asks for, that options take turns, and what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import options as bench
from benchmarks.options import HOST, NOTHING, THESE, every_option, main, measure, option_lines, option_row
from specgraph.bench.config import BenchConfig
from specgraph.ir.traffic import STAGE
from specgraph.runtime.decoder import SpeculativeDecoder

WAITING = ("regex", "output_logits", HOST)
NAMES = [NOTHING, "repetition_penalty", "frequency_penalty", "no_repeat_ngram_size", "suppress_tokens, 20 of them",
         THESE, "trace", *WAITING]  # fmt: skip
QUICK = [
    "target=tiny-shape",
    "device=cpu",
    "lowering=eager",
    "prompt_length=4",
    "new_tokens=6",
]


def decoder(vocab_size: int = 512) -> SpeculativeDecoder:
    """What is asked of a decoder for its vocabulary alone."""
    program = SimpleNamespace(target=SimpleNamespace(vocab_size=vocab_size))
    return cast(SpeculativeDecoder, SimpleNamespace(stages={STAGE: program}))


def test_options_take_turns_and_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    times = {"output_logits": [9.0, 5.0, 1.0], "nothing": [2.0, 4.0, 6.0]}

    def request(given: object, prompts: list[Any], options: object, call: dict[str, Any]) -> Any:
        asked.append([*call])
        name = "nothing" if not call else "output_logits"
        seen = asked.count([*call]) - 3  # two requests come before those that count
        return bench._Round(times[name][max(seen, 0)], 0.25 if call else None, 7)

    monkeypatch.setattr(bench, "_request", request)
    monkeypatch.setattr(bench, "every_option", lambda vocab: {NOTHING: {}, "output_logits": {"output_logits": True}})
    rows = measure(decoder(), BenchConfig(target="x", rounds=3), 8, 3)
    assert asked == [[], ["output_logits"]] * 5
    assert rows == [
        option_row(8, 3, NOTHING, 4.0, None, None, 7),
        option_row(8, 3, "output_logits", 5.0, pytest.approx(25.0), 0.25, 7),
    ]  # fmt: skip


def test_what_is_asked_for() -> None:
    asked = every_option(512)
    assert [*asked] == NAMES
    assert asked[THESE] == {name: value for option in NAMES[1:5] for name, value in asked[option].items()}
    assert len(asked[THESE]["suppress_tokens"]) == 20


def test_without_the_library_there_is_no_regex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    assert "regex" not in every_option(512) and len(every_option(512)) == len(NAMES) - 1


def test_the_regex_takes_every_token_and_never_ends() -> None:
    pytest.importorskip("llguidance")
    from specgraph.runtime.requests.grammar import Grammars, read_structures

    asked = bench.endless_regex(70)
    (matching,) = Grammars(70).read(read_structures(asked, 1), lambda: asked["tokenizer"], [(69,)], [0])
    assert matching is not None
    for seen in ([], [3, 60], [3, 60, 27, 5]):
        (mask,) = matching.masks(seen, [])
        bits = [int(mask[token // 32]) >> token % 32 & 1 for token in range(70)]
        assert bits == [1] * 69 + [0]


def test_table_json_and_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "a.json"
    given = ["draft=eagle3", "num_speculative_tokens=[2]", "batch_sizes=[1,2]", "rounds=2", f"json={written}"]
    rows = main([*QUICK, *given])
    shown = capsys.readouterr().out.splitlines()
    assert any("% over nothing" in line for line in shown)
    found = json.loads(written.read_text())
    assert (found["what"], found["draft"], found["verify"]) == ("options", "eagle3 (random)", "synthetic")
    assert [option_row(**row) for row in found["rows"]] == rows
    names = [name for name in NAMES if name in {row["option"] for row in rows}]  # a library may not be there
    assert [(row["batch"], row["option"]) for row in rows] == [(batch, name) for batch in (1, 2) for name in names]
    for row in rows:
        assert row["steps"] > 0 and row["k"] == 2 and (row["host_ms"] is not None) == (row["option"] in WAITING)
    assert shown[-len(names) - 2 :] == option_lines(rows)


def test_lines_are_those_of_the_documentation() -> None:
    suppressed = NAMES[4]
    rows = [
        option_row(1, 0, NOTHING, 3.8181, None, None, 9),
        option_row(1, 0, suppressed, 3.84, 0.57, None, 9),
        option_row(1, 0, HOST, 4.3, 12.6, 3.94, 9),
        option_row(8, 0, NOTHING, 3.9, None, None, 9),
        option_row(8, 0, suppressed, 3.95, 1.28, None, 9),
        option_row(8, 0, HOST, 5.0, 28.2, 5.41, 9),
    ]
    assert option_lines(rows) == [
        "| | plain, batch 1 | plain, batch 8 | host, ms |",
        "|---|---|---|---|",
        "| nothing | 3.818 | 3.900 | |",
        "| `suppress_tokens`, 20 of them | 3.840 (+0.6%) | 3.950 (+1.3%) | |",
        "| a Python processor that does nothing | 4.300 (+12.6%) | 5.000 (+28.2%) | 3.9 to 5.4 |",
    ]
