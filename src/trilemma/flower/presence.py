"""What a guard counts while it works, per client: `trilemma.federation.peers` is what others read of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from trilemma.federation.facts import Facts
from trilemma.federation.peers import Door, Peer
from trilemma.flower.limits import PULLS

EVERY = 1.0
"""Seconds between two writings, at least."""


class Presence:
    """Counts for the clients whose certificates have these names, `client-i`.

    >>> presence = Presence(["client-1"], now=lambda: 1000.0)
    >>> presence.asked("client-1", "/v1/fleet/pull-messages", "1970-01-01T00:16:44+00:00", 100)
    >>> presence.refused("client-1", 413)
    >>> peer = presence.door.peers[1]
    >>> peer.pulled, peer.clock, peer.received, peer.refused
    (1000.0, 4.0, 100, {'413': 1})
    """

    def __init__(self, names: Iterable[str], now: Callable[[], float] = time.time) -> None:
        self._now, self._since = now, now()
        self._peers: dict[str, Peer] = {}
        self._refused: dict[str, Counter[str]] = {}
        self.know(names)
        self._strangers = 0
        self._changed, self._written = True, 0.0

    def know(self, names: Iterable[str]) -> None:
        """Count for these from now on; what was counted for others stays."""
        for name in names:
            self._peers.setdefault(name, Peer())
            self._refused.setdefault(name, Counter())

    @property
    def door(self) -> Door:
        """All that was seen."""
        peers = {
            int(name.rpartition("-")[2]): replace(peer, refused=dict(self._refused[name]))
            for name, peer in self._peers.items()
        }
        return Door(self._since, self._now(), self._strangers, peers)

    def connected(self, name: str, connections: int) -> None:
        """Note how many connections a client has now."""
        self._note(name, replace(self._peers[name], connections=connections))

    def asked(self, name: str, path: str, clock: str, length: int) -> None:
        """Note a request: what for, what the client's clock said, how long its body is."""
        peer, now = self._peers[name], self._now()
        peer = replace(peer, requests=peer.requests + 1, asked=now, received=peer.received + length)
        if path == PULLS:
            peer = replace(peer, pulled=now)
        ahead = seconds_ahead(clock, now)
        self._note(name, peer if ahead is None else replace(peer, clock=ahead))

    def answered(self, name: str, length: int) -> None:
        """Note bytes of an answer."""
        peer = self._peers[name]
        self._note(name, replace(peer, sent=peer.sent + length))

    def refused(self, name: str, status: int) -> None:
        """Note a request that was refused."""
        self._refused[name][str(status)] += 1
        self._changed = True

    def told(self, name: str, facts: Facts) -> None:
        """Note what a client says it has."""
        self._note(name, replace(self._peers[name], facts=facts, told=self._now()))

    def stranger(self) -> None:
        """Note somebody who was not let in."""
        self._strangers += 1
        self._changed = True

    def write(self, path: Path | None) -> None:
        """Write it down where something changed and the last time was a while ago."""
        if path is not None and self._changed and abs(self._now() - self._written) >= EVERY:
            self.door.save(path)
            self._changed, self._written = False, self._now()

    def _note(self, name: str, peer: Peer) -> None:
        self._peers[name] = peer
        self._changed = True


def seconds_ahead(clock: str, now: float) -> float | None:
    """Return how far a clock that says `clock` is ahead; None where it says nothing.

    >>> seconds_ahead("1970-01-01T00:16:30+00:00", 1000.0), seconds_ahead("noon", 1000.0)
    (-10.0, None)
    """
    try:
        return round(datetime.fromisoformat(clock).timestamp() - now, 3)
    except (ValueError, OverflowError):
        return None
