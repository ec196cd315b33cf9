"""How often a client announces replies: a few times for each question, and a reply only ever as it was.

Flower's SuperLink writes a line into its database for every announcement, refused ones too, and keeps it
until the run ends. What is announced a second time under the same id it takes for a repetition, and stores
what is new in it. So a client could fill the server's disk, or its memory, while it is asked one question.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from trilemma.flower.announcements import Announcement

TRIES = 4
"""Announcements that each question to a client allows: lines break, and a SuperNode tries again."""
MOST = 64
"""Announcements that a client may have left, and has at first: it may have been asked by another guard."""
REFILL = 10.0
"""Seconds after which there is one more in any case, so that nobody is kept out for good."""
REMEMBERED = 2 * MOST
"""Replies that are remembered of each client: twice as many as it can announce at once."""


class Replies:
    """What each client may still announce, and what it has announced.

    Only names that are known beforehand may be asked for: each is remembered.

    >>> moment, first = [0.0], Announcement(b"reply", b"its records", 3)
    >>> replies = Replies(now=lambda: moment[0])
    >>> replies.may("alice"), replies.same("alice", first)
    (True, True)
    >>> replies.same("alice", Announcement(b"reply", b"other records", 3))
    False
    >>> [replies.may("alice") for _ in range(MOST)][-1]
    False
    >>> replies.asked("alice"); [replies.may("alice") for _ in range(TRIES + 1)][-2:]
    [True, False]
    >>> moment[0] = REFILL; replies.may("alice")
    True
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._left: dict[str, tuple[float, float]] = {}
        self._trees: dict[str, OrderedDict[bytes, bytes]] = {}

    def asked(self, name: str) -> None:
        """Note that a client was asked a question."""
        self._left[name] = (min(MOST, self._now_left(name) + TRIES), self._now())

    def may(self, name: str) -> bool:
        """Tell whether a client may announce something now, and count it."""
        left = self._now_left(name)
        allowed = left >= 1
        self._left[name] = (left - allowed, self._now())
        return allowed

    def same(self, name: str, announcement: Announcement) -> bool:
        """Tell whether a reply is new, or announced with the records it had before; remember it."""
        trees = self._trees.setdefault(name, OrderedDict())
        known = trees.setdefault(announcement.reply, announcement.tree)
        if len(trees) > REMEMBERED:
            trees.popitem(last=False)
        return known == announcement.tree

    def _now_left(self, name: str) -> float:
        left, since = self._left.get(name, (float(MOST), self._now()))
        return min(MOST, left + (self._now() - since) / REFILL)
