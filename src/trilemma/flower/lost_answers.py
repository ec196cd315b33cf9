"""Answers to clients that ask for work: given once more to one that lost its answer.

The SuperLink hands a message out once. Where the line breaks while the answer is on its way, the message is
gone, and a copy comes when most of the question's time has passed. But a SuperNode that has an answer fetches
what it names before it asks for anything else; one that asks for work again has not got it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from trilemma.flower.limits import FLEET, PULLS

LARGEST = 1 << 16
"""Bytes of an answer that is kept: it names a message and the objects it consists of."""
LONGEST = 90.0
"""Seconds for which it is kept; a SuperNode gives a request up after 30, and asks again soon after."""
BESIDE = FLEET + "send-node-heartbeat"
"""The request that a SuperNode makes whatever else it is doing."""

Heads = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Answer:
    """An answer to a client that asked for work, and when it was given."""

    heads: Heads
    body: bytes
    at: float


class LostAnswers:
    """The last answer to each client, until it goes on with it.

    >>> lost = LostAnswers()
    >>> lost.asked("client-0", PULLS); lost.answered("client-0", [], b"a message")
    >>> lost.asked("client-0", BESIDE); lost.asked("client-0", PULLS).body
    b'a message'
    >>> lost.answered("client-0", [], b"a message"); lost.asked("client-0", "/v1/fleet/pull-object")
    >>> lost.asked("client-0", PULLS)
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._kept: dict[str, Answer] = {}

    def answered(self, name: str, heads: Heads, body: bytes) -> None:
        """Keep an answer that is about to be given to a client; one that names nothing is no loss."""
        if 0 < len(body) <= LARGEST:
            self._kept[name] = Answer(heads, body, self._now())

    def asked(self, name: str, path: str) -> Answer | None:
        """Note what a client asks; return the answer that it must have lost, where it does."""
        if path == BESIDE:
            return None
        kept = self._kept.pop(name, None)
        recent = kept is not None and self._now() - kept.at <= LONGEST
        return kept if path == PULLS and recent else None
