"""Questions to clients and their answers, over a transport that is slow, loses and delivers late.

A question is a block for a node. It stays open until it is answered, until the transport says that it cannot
be delivered, or until it expires; while it is open

* it is not sent a second time, because a slow node that is asked four times is four times as slow; only when
  most of its time has passed it may have been lost, and one copy is sent;
* its answer is welcome in any later call that asks the same, however many calls that takes;
* a node in doubt gets no other question: it first catches up, and is then asked what the others are.

When nobody waits for an answer any more the question has expired: a node that comes back then does not work,
and spend privacy, on what nobody will read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from trilemma.federation.protocol.transport import Reply, Transport
from trilemma.federation.protocol.waiting import Took

RESEND = 0.75
"""Share of a question's time after which a copy is sent."""


@dataclass(frozen=True)
class Clock:
    """Time, and the passing of it; a test has its own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class Patience:
    """How long to wait for replies: `limit` seconds for everybody.

    For the nodes in `doubtful`, once all others have answered, only so many seconds more: a client that is
    gone costs the limit once and not in every round, a slow one can still come back.

    An answer is welcome for `welcome` seconds, where the same will be asked in later calls too (default: the
    limit).
    """

    limit: float
    doubtful: Mapping[int, float] = field(default_factory=dict)
    welcome: float | None = None

    @property
    def patient(self) -> frozenset[int]:
        """The doubtful nodes that are waited for as the others are."""
        return frozenset(node for node, seconds in self.doubtful.items() if seconds >= self.limit)

    @property
    def lifetime(self) -> float:
        """Seconds after which nobody waits for the answer any more."""
        return self.limit if self.welcome is None else self.welcome


@dataclass(frozen=True)
class _Open:
    """A question that may still be answered."""

    node: int
    block: bytes
    sent: float
    expires: float
    timed: bool

    def may_be_lost(self, now: float) -> bool:
        """Tell whether so much of its time has passed that the node may never have got it."""
        return now - self.sent >= RESEND * (self.expires - self.sent)


@dataclass(frozen=True)
class _Owed:
    """A timed question that a node has not answered, and whether `times` has told of it already."""

    block: bytes
    since: float
    told: bool = False


@dataclass(frozen=True)
class _Taken:
    """How long a node took for a question; `before`: `times` has told of it while it was owed."""

    node: int
    took: Took
    before: bool


@dataclass
class Correspondence:
    """How the server asks its clients, over a transport."""

    transport: Transport
    poll: float
    clock: Clock = field(default_factory=Clock)
    _open: dict[str, _Open] = field(default_factory=dict)
    _owed: dict[int, _Owed] = field(default_factory=dict)
    _took: list[_Taken] = field(default_factory=list)

    def nodes(self) -> Mapping[int, int]:
        """Return the connected nodes and the clients they are."""
        return self.transport.nodes()

    def ask(self, blocks: Mapping[int, bytes], patience: Patience, timed: bool = False) -> list[Reply]:
        """Ask what is not open already, and collect replies until all are there or time is up.

        How long answers take is noted where the question is `timed`.
        """
        self._forget_expired()
        self._send(self._new(blocks, patience), patience.lifetime, timed)
        waiting = {node for node, block in blocks.items() if self._copies(node, block)}
        behind = (patience.doubtful.keys() & blocks.keys()) - waiting
        expires, deadline = self.clock.now() + patience.lifetime, self.clock.now() + patience.limit
        replies: list[Reply] = []
        others_done: float | None = None
        while True:
            self._repeat({node: blocks[node] for node in waiting})
            for reply in self._fetch():
                asked = self._open.pop(reply.question, None)
                if asked is None:
                    continue  # the carrier brings it twice
                self._note_time(asked, answered=reply.block is not None)
                if asked.block != blocks.get(reply.node):
                    continue  # nobody wants to know any more
                replies.append(reply)
                # A node that could not be reached may yet answer another copy.
                if not (reply.unreached and self._copies(reply.node, blocks[reply.node])):
                    waiting.discard(reply.node)
            rest = waiting | (behind & patience.patient)
            if rest and (caught_up := self._new({node: blocks[node] for node in behind}, patience)):
                self._send(caught_up, expires - self.clock.now(), timed)
                behind -= caught_up.keys()
                rest |= caught_up.keys()
                waiting |= caught_up.keys()
            until = deadline
            if rest <= patience.doubtful.keys():
                others_done = self.clock.now() if others_done is None else others_done
                longest = max((patience.doubtful[node] for node in rest), default=0.0)
                until = min(deadline, others_done + longest)
            left = until - self.clock.now()
            if not rest or left <= 0:
                return replies
            self.clock.sleep(min(self.poll, left))

    def times(self) -> dict[int, Took]:
        """Return how long nodes took for all that was timed since this was last asked.

        Of those that owe an answer, how long they have owed it, where that is longer.
        """
        for node in self._owed:
            self._take(node, answered=False, before=True)
            self._owed[node] = replace(self._owed[node], told=True)
        took: dict[int, Took] = {}
        for one in sorted(self._took, key=lambda one: one.before):
            sofar, new = took.get(one.node, Took(0.0)), one.took
            total = Took(sofar.seconds + new.seconds, sofar.answered and new.answered)
            took[one.node] = max(sofar, new, key=lambda each: each.seconds) if one.before else total
        self._took = []
        return took

    def _take(self, node: int, answered: bool, before: bool) -> None:
        seconds = self.clock.now() - self._owed[node].since
        self._took.append(_Taken(node, Took(seconds, answered), before))

    def _note_time(self, asked: _Open, answered: bool) -> None:
        """Note that a node owes nothing more; copies of a question count from the first."""
        owed = self._owed.get(asked.node)
        if asked.timed and owed is not None and owed.block == asked.block:
            self._take(asked.node, answered, owed.told)
            del self._owed[asked.node]

    def _copies(self, node: int, block: bytes) -> list[_Open]:
        """Return the open questions of a node that are this one."""
        return [one for one in self._open.values() if one.node == node and one.block == block]

    def _new(self, blocks: Mapping[int, bytes], patience: Patience) -> dict[int, bytes]:
        """Return the questions that are not open, of doubtful nodes only where nothing else is."""
        busy = patience.doubtful.keys() & {one.node for one in self._open.values()}
        return {
            node: block
            for node, block in blocks.items()
            if node not in busy and not self._copies(node, block)
        }

    def _repeat(self, blocks: Mapping[int, bytes]) -> None:
        """Send what may have been lost a second time; the copy expires with the original."""
        now = self.clock.now()
        for node, block in blocks.items():
            copies = self._copies(node, block)
            if len(copies) == 1 and copies[0].may_be_lost(now):
                self._send({node: block}, copies[0].expires - now, copies[0].timed)

    def _send(self, blocks: Mapping[int, bytes], lifetime: float, timed: bool) -> None:
        now = self.clock.now()
        for question, node in self.transport.send(blocks, lifetime).items() if blocks else ():
            self._open[question] = _Open(node, blocks[node], now, now + lifetime, timed)
            owed = self._owed.get(node)
            if not timed or (owed is not None and owed.block == blocks[node]):
                continue
            if owed is not None and not owed.told:  # it was waited for in vain, and is asked something else
                self._take(node, answered=False, before=False)
            self._owed[node] = _Owed(blocks[node], now)

    def _fetch(self) -> list[Reply]:
        """Look for answers to everything that is open, also to what is not asked now: it ends the matter."""
        self._forget_expired()
        return self.transport.fetch(list(self._open)) if self._open else []

    def _forget_expired(self) -> None:
        now = self.clock.now()
        self._open = {question: one for question, one in self._open.items() if one.expires > now}
