"""Makes the tables that ``generate`` prints at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specgraph.cli.decode_prompts import Outcome, PeerOutcome

_SAME_TOKENS = "strict"
"""The rule whose output does not depend on the drafts."""


def summary_rows(outcome: Outcome) -> dict[str, str]:
    """The tokens, acceptance and speed of one run, as texts by name."""
    stats = outcome.stats
    rows = {
        "tokens": str(sum(map(len, outcome.tokens))),
        "tokens per step": _number(stats.acceptance_length, stats.acceptance_length_stderr),
    }
    if stats.num_speculative_tokens:
        rows["accepted per position"] = _shares(stats.acceptance_per_position)
    if stats.confidence_per_position:
        rows["as the draft expected"] = _shares(stats.confidence_per_position)
    with_ = f", with {outcome.besides}" if outcome.besides else ""
    return {**rows, f"tokens/s{with_}": f"{_speed(outcome):.1f}"}


def compare_rows(outcome: Outcome, plain: Outcome, peers: Sequence[PeerOutcome] = ()) -> dict[str, str]:
    """The comparison of one run with transformers and with plain decoding of the same prompts, as texts by name."""
    speeds = {f"transformers {peer.name}": _rate(peer.tokens, peer.seconds) for peer in peers}
    speeds |= {"draft=none": _speed(plain)}
    equal = sum(a == b for a, b in zip(outcome.tokens, plain.tokens, strict=True))
    answer = "yes" if equal == len(outcome.tokens) else f"{equal} of {len(outcome.tokens)} prompts"
    if equal < len(outcome.tokens) and outcome.config.verify.rule != _SAME_TOKENS:
        answer += f" ({outcome.config.verify.rule} does not promise the same tokens)"
    return {
        **{f"tokens/s, {name}": f"{speed:.1f}" for name, speed in speeds.items()},
        **{f"times as fast as {name}": f"{_speed(outcome) / speed:.2f}" for name, speed in speeds.items() if speed},
        "tokens equal": answer,
    }


def _speed(outcome: Outcome) -> float:
    return _rate(outcome.tokens, outcome.seconds)


def _rate(tokens: Sequence[Sequence[int]], seconds: float) -> float:
    return sum(map(len, tokens)) / seconds if seconds else math.nan


def _shares(values: Sequence[float]) -> str:
    return " ".join(map(_number, values))


def _number(value: float, error: float = math.nan) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.2f}" if math.isnan(error) else f"{value:.2f} ± {error:.2f}"
