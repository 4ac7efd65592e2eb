"""The pages of a KV cache: who has them, and which of them hold the beginning of a sequence that comes later.

A page that is full of verified tokens holds keys and values that depend on these tokens and on all before them, and on
nothing else: every bit of a row is the same whatever ran beside it, and however a prompt was cut. So sequences that
begin with the same full pages share them. A page is known by its tokens and by the page before it, which is known in
the same way; tokens are compared, not hashes of them, so no two beginnings are ever mistaken for each other. A known
page stays when its last sequence ends, until it is needed for something else; the one that was not used for the longest
time goes first.

Rows of a drafter's cache depend on a few tokens that follow, too (``Drafter.lookahead``), so these belong to what a
page is known by. A page that was filled without a drafter, as scoring does, has another name, which only those look for
who run no drafter either. Shared pages are never written: a sequence runs its own rows only, from the first that is not
shared.

A target with recurrent layers can go on behind a page only if a snapshot of its state was kept there
(:mod:`specgraph.runtime.memory.snapshots`). So a sequence shares pages up to the last snapshot among them. It leaves
two of its own: one where its prompt stops following what is known, because others may have that beginning, too, and one
at the last boundary of its prompt, for those that go on from there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specgraph.runtime.memory.snapshots import SnapshotPool

Key = tuple[int, bytes]
"""What a page is known by: the serial number of the page before it (0 for none), and its tokens with those behind it
that its rows depend on."""


_TARGET_ONLY = b"target only"
"""Stands behind the tokens in the name of a page that holds no rows of the drafter's."""


def num_pages(length: int, block_size: int) -> int:
    """The pages that ``length`` tokens take."""
    return -(-length // block_size)


@dataclass
class Reservation:
    """The pages of one sequence, in order.

    Attributes:
        num_shared: how many of them, from the first on, hold what they should already.
        epoch: when they were reserved; see :meth:`PagePool.forget`.
        snapshot: what the sequence begins with, if it shares pages of a target with recurrent layers.
        boundaries: how many tokens are in front of the snapshots that it should leave.
        taken: those that it has left and nobody can find yet, by the pages in front of them.
    """

    pages: list[int] = field(default_factory=list)
    num_shared: int = 0
    epoch: int = 0
    snapshot: int | None = None
    boundaries: tuple[int, ...] = ()
    taken: dict[int, int] = field(default_factory=dict)


class PagePool:
    """Hands out pages, which lie anywhere: a sequence reaches its own through its block table.

    A sequence gets the pages for its whole length when it is admitted, so it never waits for one later.

    Attributes:
        count: how many there are, free or not.
        block_size: the tokens of a page.
        lookahead: how many tokens behind a page have to be known, so that it can be shared.
        num_touched: how many of them a sequence has had so far. Those that none has had are handed out last, in order.
        snapshots: those of the target's recurrent state; None if it has none.
    """

    def __init__(
        self, count: int, block_size: int, lookahead: int = 1, *, reuse: bool = True, weights: Iterable[Tensor] = (),
        snapshots: SnapshotPool | None = None,
    ) -> None:  # fmt: skip
        """``count`` pages of ``block_size`` tokens, numbered from 0, all free.

        ``lookahead``: how many tokens behind it a row may depend on. ``reuse``: whether pages are shared at all.
        ``weights``: what else decides about the rows of a page.
        """
        self.count, self.block_size, self.lookahead, self.reuses = count, block_size, max(1, lookahead), reuse
        self.snapshots = snapshots
        self._weights = [tensor for tensor in weights if not tensor.is_inference()]
        """Tensors made in inference mode do not count how often they are written."""
        self._free = list(range(count - 1, -1, -1))
        self._users = [0] * count
        self.num_touched = 0
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Known pages that nobody has, the longest unused first."""
        self._known: dict[Key, int] = {}
        self._names: dict[int, tuple[int, Key]] = {}
        """The serial number and the key of every known page."""
        self._serial = 0
        self._epoch = 0
        self._versions = self._weight_versions()

    @property
    def num_free(self) -> int:
        """How many pages nobody has."""
        return len(self._free) + len(self._idle)

    def reserve(self, prompt: Tensor, length: int, *, target_only: bool = False) -> Reservation | None:
        """The pages of a sequence that begins with ``prompt`` (1-D int64) and grows to ``length`` tokens.

        None if there are not enough now. ``target_only``: whether pages without a drafter's rows will do.
        """
        known, needed = self._find(prompt, target_only), num_pages(length, self.block_size)
        shared = known[: self._num_resumable(known)]
        if needed - len(shared) > self.num_free - sum(self._users[page] == 0 for page in shared):
            return None
        for page in shared:
            self._idle.pop(page, None)
        pages = [*shared, *(self._take() for _ in range(needed - len(shared)))]
        for page in pages:
            self._users[page] += 1
        snapshot = self.snapshots.use(shared[-1]) if self.snapshots and shared else None
        return Reservation(pages, len(shared), self._epoch, snapshot, self._boundaries(prompt, len(known), len(shared)))

    def offer(self, reservation: Reservation, tokens: Tensor, *, target_only: bool = False) -> None:
        """Let others share those pages that the verified ``tokens`` (1-D int64) of a sequence have filled.

        ``target_only``: whether they hold no rows of the drafter's.
        """
        if reservation.epoch != self._epoch:
            return
        before = 0
        for depth, (page, own) in enumerate(zip(reservation.pages, self.filled(tokens), strict=False), 1):
            key = self._key(before, own, target_only)
            if key not in self._known:
                self._unname(page)  # the page before it was forgotten, so nobody finds it under its old name
                self._serial += 1
                self._known[key], self._names[page] = page, (self._serial, key)
            before = self._names[self._known[key]][0]
            if self.snapshots is not None and depth in reservation.taken:
                self.snapshots.name(self._known[key], reservation.taken.pop(depth))

    def take_snapshot(
        self, reservation: Reservation, prompt: Tensor, boundary: int, *, target_only: bool = False
    ) -> int | None:
        """Where the state of a sequence behind the first ``boundary`` tokens of its prompt is to be copied.

        None if it is there already, or there is no room. It is found as soon as the pages in front of it are known.
        """
        if self.snapshots is None or reservation.epoch != self._epoch:
            return None
        pages = self._find(prompt[: boundary + self.lookahead], target_only)
        depth = boundary // self.block_size
        named = len(pages) == depth
        if named and pages[-1] in self.snapshots:
            return None
        snapshot = self.snapshots.take()
        if snapshot is None:
            return None
        if named:
            self.snapshots.name(pages[-1], snapshot)
        else:
            reservation.taken[depth] = snapshot
        return snapshot

    def give_back(self, reservation: Reservation) -> None:
        """A sequence has ended."""
        for page in reversed(reservation.pages):  # a page is of no use without those before it, so it goes sooner
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._names:
                self._idle[page] = None
            else:
                self._free.append(page)
        if self.snapshots is not None:
            for snapshot in reservation.taken.values():
                self.snapshots.give_back(snapshot)
        reservation.pages, reservation.taken = [], {}

    def check_weights(self) -> None:
        """Forget everything if a weight was written in place since the last call.

        What is written through ``.data``, or to a tensor made in inference mode, leaves no mark.
        """
        versions = self._weight_versions()
        if self._versions != versions:
            self.forget()
        self._versions = versions

    def forget(self) -> None:
        """What pages hold is of no use any more; those of sequences that are running now will not be either."""
        self._free += self._idle
        self._idle.clear()
        self._known.clear()
        self._names.clear()
        if self.snapshots is not None:
            self.snapshots.forget()
        self._epoch += 1

    def _key(self, before: int, own: bytes, target_only: bool) -> Key:
        """What a page is known by, or would be. One with a drafter's rows serves those without a drafter, too."""
        whole = (before, own)
        return whole if whole in self._known or not target_only else (before, own + _TARGET_ONLY)

    @property
    def within(self) -> int:
        """See :class:`~specgraph.runtime.memory.snapshots.Boundaries`; 1 if there are none."""
        return 1 if self.snapshots is None else self.snapshots.boundaries.within

    def num_shareable(self, prompt: Tensor) -> int:
        """How many pages that begin with ``prompt`` another sequence could share at most."""
        length = len(self.filled(prompt)) * self.block_size
        return (length if self.snapshots is None else self.snapshots.boundaries.last(length)) // self.block_size

    def _num_resumable(self, pages: list[int]) -> int:
        """How many of these ``pages``, which are known, a sequence can go on behind."""
        if self.snapshots is None:
            return len(pages)
        return next((count for count in range(len(pages), 0, -1) if pages[count - 1] in self.snapshots), 0)

    def _boundaries(self, prompt: Tensor, num_known: int, num_shared: int) -> tuple[int, ...]:
        """Where a sequence should leave snapshots: where its ``prompt`` stops following known pages, and at its end.

        The last window of a prompt leaves the one at its end. Where pages are so long that this would take a window of
        its own, there is none: most prompts come once, and would wait for it.
        """
        if self.snapshots is None or not self.snapshots.count or not self.reuses:
            return ()
        size, places, length = self.block_size, self.snapshots.boundaries, prompt.numel()
        ends = {places.last(size * num_known)}
        if length - places.last(length) < places.within:
            ends.add(places.last(length))
        return tuple(sorted(end for end in ends if end > size * num_shared))

    def _find(self, prompt: Tensor, target_only: bool) -> list[int]:
        """The known pages that ``prompt`` begins with."""
        pages: list[int] = []
        before = 0
        for own in self.filled(prompt):
            page = self._known.get(self._key(before, own, target_only))
            if page is None:
                break
            pages.append(page)
            before = self._names[page][0]
        return pages

    def filled(self, tokens: Tensor) -> list[bytes]:
        """The tokens of every page whose rows follow from ``tokens``, with those behind it; none if none are shared.

        There is one at least, since the last token of a prompt must be run.
        """
        behind = self.lookahead
        if not self.reuses or tokens.numel() < self.block_size + behind:
            return []
        # Bytes are cut, and not tensors, because that is done three times for every sequence.
        every, width = tokens.numpy().tobytes(), tokens.element_size()
        begins = range(0, tokens.numel() - self.block_size - behind + 1, self.block_size)
        return [every[begin * width : (begin + self.block_size + behind) * width] for begin in begins]

    def _weight_versions(self) -> list[int]:
        return [tensor._version for tensor in self._weights]

    def _take(self) -> int:
        """A page that nobody has, and that nobody will look for any more."""
        if self._free:
            page = self._free.pop()
            self.num_touched = max(self.num_touched, page + 1)
            return page
        page, _ = self._idle.popitem(last=False)
        self._unname(page)
        return page

    def _unname(self, page: int) -> None:
        if page in self._names:
            del self._known[self._names.pop(page)[1]]
            if self.snapshots is not None:
                self.snapshots.drop(page)


def known_tokens(prompt: Tensor, new: Sequence[int]) -> Tensor:
    """A prompt and what follows it, 1-D int64."""
    return torch.cat([prompt, torch.tensor(new, dtype=torch.int64, device="cpu")])
