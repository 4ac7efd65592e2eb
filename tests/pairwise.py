"""A pairwise cover of a product: few cases in which every two values of different axes still meet.

Most mistakes need no more than two particular values to show, and the cover grows with the product of the two longest
axes and not with that of all of them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Case = tuple[Any, ...]
"""One value of every axis, in the order of the axes."""
Pair = tuple[int, Any, int, Any]
"""Two axes and a value of each."""


def product(axes: Mapping[str, Sequence[Any]], possible: Callable[..., bool] = lambda **_: True) -> list[Case]:
    """All combinations that exist, in the order of the axes. ``possible`` takes a value of every axis by its name."""
    cases = itertools.product(*axes.values())
    return [case for case in cases if possible(**dict(zip(axes, case, strict=True)))]


def pairs(cases: Iterable[Case]) -> set[Pair]:
    """Every two values of different axes that meet in one of the cases."""
    return {(i, case[i], j, case[j]) for case in cases for i, j in itertools.combinations(range(len(case)), 2)}


def cover(cases: Sequence[Case], first: tuple[int, int]) -> list[Case]:
    """Some of the cases, in which all pairs of all cases occur.

    For every pair of values of the two axes ``first``, which should be the longest, the cover takes the case with the
    most pairs that it does not have yet. Of equal ones it takes that whose values have been rarest so far, then the
    earliest. It goes on among all cases while a pair is missing. So the same axes always give the same cover.
    """
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault(tuple(case[axis] for axis in first), []).append(case)
    missing, used, taken, remaining = pairs(cases), Counter[Any](), [], [*groups.values()]
    while missing or remaining:
        group = remaining.pop(0) if remaining else cases
        best = max(group, key=lambda case: (len(pairs([case]) & missing), -sum(used[v] for v in enumerate(case))))
        missing -= pairs([best])
        used.update(enumerate(best))
        taken.append(best)
    return taken
