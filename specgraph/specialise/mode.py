"""The kind of request for which a step is specialised."""

from __future__ import annotations

from typing import NamedTuple


class Mode(NamedTuple):
    """What distinguishes the variants of a step: the options of ``specialise_step``.

    Attributes:
        logprobs: the log-probabilities it gives.
        unused: the inputs it does without.
        drafts: how many drafts it makes and verifies; None: K, for which the state has room.
        paused: whether the host changes logits in the middle of it.
        packed: whether its modules run packed rows, as steps that run prompts do.
        completed: whether the target goes on from rows that drafting has run, since all of its sequences decode.
        traced: whether it says how probable drafts are.
        ahead: whether it makes as many drafts as it can, however many it verifies.
        plain: whether it leaves the drafter out, because all of its sequences are too long for it.
    """

    logprobs: str = "none"
    unused: tuple[str, ...] = ()
    drafts: int | None = None
    paused: bool = False
    packed: bool = False
    completed: bool = False
    traced: bool = False
    ahead: bool = False
    plain: bool = False
