"""Why a draft was not accepted, and which traces are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specgraph.errors import ConfigError
from specgraph.explore.dump_files import Dump
from specgraph.explore.trace_file import acceptance, check_same, read_trace, why
from tests.explore.conftest import Made

ABOUT = {"trace": 1, "target": "A", "drafter": "b", "rule": "strict", "num_speculative_tokens": 3, "prompts": [[1, 2]]}


def written(folder: Path, drafts: list[tuple[int, bool]], tokens: list[int], **about: Any) -> Path:
    """A trace of one step."""
    step = {
        "step": 0, "sequence": 0, "position": 2, "seconds": 0.5, "prompt": False, "tokens": tokens,
        "drafts": [{"token": t, "accepted": accepted, "target": 0.5, "draft": None} for t, accepted in drafts],
    }  # fmt: skip
    path = folder / "trace.jsonl"
    path.write_text(f"{json.dumps(ABOUT | about)}\n{json.dumps(step)}\n")
    return path


@pytest.mark.parametrize(
    ("drafts", "tokens", "verdicts"),
    [
        ([(5, True), (6, True), (7, True)], [5, 6, 7, 8], ["accepted"] * 3),
        ([(5, True), (6, False), (7, False)], [5, 9], ["accepted", "rejected", "behind"]),
        ([(5, False), (6, False), (7, False)], [9], ["rejected", "behind", "behind"]),
        # The second draft is an EOS, behind which nothing is emitted.
        ([(5, True), (2, True), (7, False)], [5, 2], ["accepted", "accepted", "ended"]),
        # The limit of tokens ends the sequence with what was the second draft, too.
        ([(5, True), (6, False), (7, False)], [5, 6], ["accepted", "cut", "cut"]),
    ],
)
def test_what_became_of_drafts(
    drafts: list[tuple[int, bool]], tokens: list[int], verdicts: list[str], tmp_path: Path
) -> None:
    trace = read_trace(written(tmp_path, drafts, tokens))
    assert [draft["verdict"] for draft in trace.steps[0]["drafts"]] == verdicts
    rows = acceptance(trace)
    assert [row["accepted"] for row in rows] == [int(verdict == "accepted") for verdict in verdicts]
    assert [row["reached"] for row in rows] == [int(verdict in ("accepted", "rejected")) for verdict in verdicts]


@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block", "typical", "synthetic", "own"])
def test_every_verdict_is_explained_under_every_rule(rule: str) -> None:
    said = why(rule)
    assert said.keys() == {"accepted", "rejected", "behind", "ended", "cut", "about"} and all(said.values())
    assert said["about"].startswith(f"The rule {'is ' if rule == 'own' else ''}{rule}")
    assert rule in said["rejected"] or "{rule}" in said["rejected"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no trace of specgraph"),
        (b"{}\n", "is no trace of specgraph"),
        (b"hello\n", "line 1 is no JSON object, so the file is no trace, or cut"),
        (b"\xff\n", "is no text"),
        (b'{"trace": 9, "prompts": []}\n', "has format 9, this version reads 1"),
        (b'{"trace": 1}\n', "is damaged (KeyError('prompts'))"),
        (b'{"trace": 1, "prompts": [[1]]}\n{"step": 0}\n', "is damaged (KeyError('tokens'))"),
        (b'{"trace": 1, "prompts": [[1]]}\n{"step": 0, "tok', "line 2 is no JSON object"),
    ],
)
def test_what_is_no_trace_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_trace(path)
    assert f"trace={path}" in str(error.value) and message in str(error.value)
    assert str(error.value).endswith("write it again with python -m specgraph generate trace=FILE.")


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("key", "value"), [("target", "B"), ("drafter", "c"), ("rule", "block"), ("num_speculative_tokens", 4)]
)
def test_a_trace_of_another_decoder_is_refused_by_what_differs(key: str, value: Any, tmp_path: Path) -> None:
    record = {**ABOUT, "vocab_size": 10}
    path = written(tmp_path, [(5, True)], [5, 9])
    check_same(read_trace(path), Dump(record, []), path)
    with pytest.raises(ConfigError, match=f"is of another decoder than the dump: its {key} is"):
        check_same(read_trace(written(tmp_path, [(5, True)], [5, 9], **{key: value})), Dump(record, []), path)
    with pytest.raises(ConfigError, match="token 11 of a vocabulary of 10"):
        check_same(read_trace(written(tmp_path, [(5, True)], [5, 11])), Dump(record, []), path)


def test_a_trace_of_an_earlier_version_says_nothing_of_the_targets_own_token(made: Made, tmp_path: Path) -> None:
    path = written(tmp_path, [(5, False)], [9])
    step = read_trace(path).steps[0]
    assert step["own"] is None and step["own_rank"] is None and step["drafts"][0]["rank"] is None
    about, line = path.read_text().splitlines()
    path.write_text(f"{about}\n{json.dumps(json.loads(line) | {'own': 0.25})}\n")
    assert read_trace(path).steps[0]["own"] == 0.25


def test_a_trace_without_texts_has_ids(made: Made, tmp_path: Path) -> None:
    assert made.out.trace is not None
    trace = read_trace(made.out.trace.save(tmp_path / "trace.jsonl"))
    assert trace.prompts[0] == " ".join(str(token) for token in made.out.trace.prompts[0])
    assert all(step["texts"] is None and all(d["text"] is None for d in step["drafts"]) for step in trace.steps)
