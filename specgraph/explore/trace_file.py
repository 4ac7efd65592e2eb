"""Reads a trace: what happened to every draft of a call, and why a draft was not accepted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgraph.config.paths import did_you_mean_path
from specgraph.errors import ConfigError
from specgraph.explore.dump_files import Dump, checked
from specgraph.runtime.outputs.trace import FORMAT
from specgraph.runtime.schedule.num_drafts import Reasons

AGAIN = "write it again with python -m specgraph generate trace=FILE"
ACCEPTED, REJECTED, BEHIND, ENDED, CUT = "accepted", "rejected", "behind", "ended", "cut"
WHY = {
    ACCEPTED: {
        "strict": "It equals the token that the target itself chose at this place, {own}.",
        "*": "The rule {rule} accepted it.",
    },
    REJECTED: {
        "strict": "Under the rule strict, a draft is accepted if it equals the token that the target itself chooses at "
        "this place. The target chose {own}. The probabilities below do not decide.",
        "probabilistic": "Under the rule probabilistic, a draft is accepted with probability min(1, p/q), where p is "
        "its probability under the target, {p}, and q the one it was drawn with, {q} (1 if it was looked up). That was "
        "{ratio}, and the draw was against it. The target then drew {own} from what its distribution has beyond the "
        "drafter's.",
        "block": "The rule block decides about the drafts of a step together and keeps the longest prefix that one of "
        "its draws accepts. That prefix ends before this draft. The target then drew {own}.",
        "typical": "The rule typical accepts a draft whose probability under the target is high enough for the entropy "
        "of the target's distribution at this place. This one's was not. The target went on with {own}.",
        "synthetic": "The rule synthetic accepts every draft with one given probability, whatever the models say. The "
        "draw was against it. The target went on with {own}.",
        "*": "The rule {rule} did not accept it. The target went on with {own}.",
    },
    BEHIND: {
        "*": "It was not considered, because a draft before it in the same step was rejected. It continues a text that "
        "was not emitted.",
    },
    ENDED: {"*": "It was not considered, because the sequence ended with the accepted draft before it."},
    CUT: {
        "*": "The step emitted this very token, but the sequence had reached its limit of tokens, so that drafts from "
        "here on were not needed.",
    },
}
"""The fate of a draft in words, by the rule of verification; ``*`` is every other rule. ``{own}`` is the token that the
target chose in its place, and ``{ratio}`` is p/q."""


DRAFT: Mapping[str, Any] = {"token": int, "accepted": bool, "target": float | int | None, "draft": float | int | None}
STEP: Mapping[str, Any] = {
    "tokens": list, "step": int, "sequence": int, "position": int, "seconds": float | int, "prompt": bool,
    "drafts": list,
}  # fmt: skip
"""The values of every line of a trace, and of each of its drafts, with their types."""
NEWER = {"texts": None, "own": None, "own_rank": None, "why": None}
"""Values that a line may lack: in traces without texts, and in those of earlier versions."""
TraceStep = Mapping[str, Any]
"""A step for one sequence: a line of the file, as :class:`~specgraph.runtime.outputs.trace.TracedStep` describes
it. Each of its drafts also has a ``verdict``, which is a key of :data:`WHY`, and ``why`` is in words."""


@dataclass(frozen=True)
class TraceFile:
    """A trace: what it is about, the prompts (as texts, or else as ids), and the steps in order."""

    about: dict[str, Any]
    prompts: list[str]
    steps: list[TraceStep]

    @property
    def rule(self) -> str:
        """The rule of verification."""
        return str(self.about.get("rule", ""))

    @property
    def decoding(self) -> list[TraceStep]:
        """The steps that verified drafts."""
        return [step for step in self.steps if not step["prompt"]]


def read_trace(path: str | Path) -> TraceFile:
    """Read the file that ``Trace.save`` has written.

    Raises:
        ConfigError: there is none, it is empty, damaged or of another version, or it is no trace.
    """
    path = Path(path).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        near = did_you_mean_path(path)
        raise ConfigError(f"trace={path} cannot be read ({error.strerror}){near}; {AGAIN}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"trace={path} is no text; {AGAIN}.") from None
    records = [_record(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not records or "trace" not in records[0]:
        raise ConfigError(f"trace={path} is no trace of specgraph; {AGAIN}.")
    about = records[0]
    if about["trace"] != FORMAT:
        raise ConfigError(f"trace={path} has format {about['trace']}, this version reads {FORMAT}; {AGAIN}.")
    try:
        prompts = [str(text) for text in about.get("texts") or [_ids(ids) for ids in about["prompts"]]]
        steps = [_step(record) for record in records[1:]]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"trace={path} is damaged ({error!r}); {AGAIN}.") from None
    if any(not 0 <= step["sequence"] < len(prompts) for step in steps):
        raise ConfigError(f"trace={path} is damaged (a step is of a sequence without a prompt); {AGAIN}.")
    return TraceFile({key: value for key, value in about.items() if key not in ("prompts", "texts")}, prompts, steps)


def check_same(trace: TraceFile, dump: Dump, path: str | Path) -> None:
    """Refuse a trace of another decoder than the dump's.

    Raises:
        ConfigError: names what differs.
    """
    for key in ("target", "drafter", "rule", "num_speculative_tokens"):
        theirs, ours = trace.about.get(key), dump.record.get(key)
        if theirs is not None and ours is not None and theirs != ours:
            raise ConfigError(
                f"trace={path} is of another decoder than the dump: its {key} is {theirs}, the dump's {ours}; "
                "give both commands the same model and options."
            )
    size = dump.record.get("vocab_size")
    most = max((token for step in trace.steps for token in step["tokens"]), default=0)
    if size is not None and most >= size:
        raise ConfigError(f"trace={path} is of another decoder than the dump: token {most} of a vocabulary of {size}.")


def acceptance(trace: TraceFile) -> list[dict[str, int]]:
    """For every place among the drafts: how many were verified there, how many had all before them accepted, and how
    many were accepted."""
    rows: list[dict[str, int]] = []
    for step in trace.decoding:
        for place, draft in enumerate(step["drafts"]):
            if place == len(rows):
                rows.append({"verified": 0, "reached": 0, "accepted": 0})
            rows[place]["verified"] += 1
            rows[place]["reached"] += draft["verdict"] in (ACCEPTED, REJECTED)
            rows[place]["accepted"] += draft["verdict"] == ACCEPTED
    return rows


ABOUT = {
    "strict": "strict accepts a draft if it equals the token that the target itself chooses at this place: the most "
    "probable one or, at a temperature, the one that it draws.",
    "probabilistic": "probabilistic accepts a draft with probability min(1, p/q), where p is its probability under the "
    "target and q the one it was drawn with.",
    "block": "block decides about the drafts of a step together, so that the accepted ones are as many as possible.",
    "typical": "typical accepts a draft that is probable enough under the target, so the distribution of the text is "
    "another than the target's.",
    "synthetic": "synthetic accepts every draft with one given probability, to measure speed. Its text means nothing.",
}
"""The verification rules in words, for the head of the page."""


def why(rule: str) -> dict[str, str]:
    """The explanations of drafts under a rule, by verdict; ``about`` explains the rule itself."""
    said = {verdict: by_rule.get(rule, by_rule["*"]) for verdict, by_rule in WHY.items()}
    about = ABOUT.get(rule, "")
    ends = "A step ends with one token that the target chooses by itself, behind the accepted drafts."
    return said | {"about": f"The rule {about or f'is {rule}.'} {ends}"}


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"trace={path}: line {number} is no JSON object, so the file is no trace, or cut; {AGAIN}.")
    return found


def _step(record: dict[str, Any]) -> TraceStep:
    """A line of the file, with the verdicts about its drafts.

    The step emitted the accepted drafts and one more token, unless the last accepted draft ended the sequence. If that
    token is the next draft itself, no rule has rejected it: the sequence was at its limit.
    """
    tokens = [int(token) for token in checked(record, STEP)["tokens"]]
    drafts = [checked(draft, DRAFT) for draft in record["drafts"]]
    first = sum(draft["accepted"] for draft in drafts)
    if len(tokens) == first:
        verdicts = [ENDED] * len(drafts)
    elif first < len(drafts) and drafts[first]["token"] == tokens[first]:
        verdicts = [CUT] * len(drafts)
    else:
        verdicts = [REJECTED, *[BEHIND] * len(drafts)]
    judged = zip(drafts, [*[ACCEPTED] * first, *verdicts], strict=False)
    known = [{"text": None, "rank": None, **draft, "verdict": verdict} for draft, verdict in judged]
    why = None if record.get("why") is None else str(Reasons.of_record(record["why"]))
    return {**NEWER, **record, "tokens": tokens, "drafts": known, "why": why}


def _ids(ids: Sequence[int]) -> str:
    return " ".join(str(int(token)) for token in ids)
