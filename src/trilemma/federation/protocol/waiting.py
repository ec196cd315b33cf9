"""Who is waited for: a public rule, a pure function of the times that stand in the records.

A client is **slow** in a round in which it took more than k times as long as the others usually do, and
more than a second, for all that it was asked and whatever it said to it. Slow in m rounds, it is not waited
for any more: it is asked as before, and its answer counts if it is there when all others have answered. At
most f clients are not waited for, the slowest, and only while 2f + 1 others are. The rule over messages is
told about those who were waited for or heard, and no others, so it tolerates as many liars as before.

**Usually** is the time at place f + ⌈(n − f)/2⌉ of n, in rising order, or at place n − f where that is
less. Liars who answer at once cannot lower it below the median of honest clients (with n ≥ 3f; at least n −
2f honest clients take as long, with fewer). Liars who answer late cannot raise it above the slowest honest
one.

**A slow site is not lost.** It is waited for in one round, again and again, as soon as the others' usual
times since the last such round add up to k times its own longest: each of f makes a run longer by 1/k of its
time at most. Once it has been prompt in 2m rounds in a row it is waited for as before; when it is slow once
more, in 4m, in 8m. So in T rounds a liar is waited for in vain in about m + log₂(T/m) rounds, and 1/k of the
time.

Under central privacy everybody is waited for: there a client counts on the noise of the others who are
heard.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from trilemma.base.records import Record

AT_LEAST = 1.0
"""Seconds within which nobody is slow, however quick the others are."""

USUAL = "usual_seconds"
"""The fact of a record that says how long clients usually took."""


@dataclass(frozen=True)
class Took:
    """How long a client took for its newest answer; not `answered`: for how long it has been asked."""

    seconds: float
    answered: bool = True


def usual(took: Mapping[int, Took], tolerated: int) -> float:
    """Return how long clients take, whatever f = `tolerated` of them do; ∞ where too few answered.

    Who refuses has not answered: that is quick.

    >>> honest = {0: Took(2.0), 1: Took(3.0), 2: Took(4.0)}
    >>> usual({**honest, 3: Took(0.0)}, 1), usual({**honest, 3: Took(99.0)}, 1)
    (3.0, 4.0)
    >>> usual({0: Took(1.0), 1: Took(9.0, answered=False)}, 0)
    1.0
    """
    place = min(tolerated + math.ceil((len(took) - tolerated) / 2), len(took) - tolerated)
    if place < 1:
        return math.inf
    return sorted(one.seconds if one.answered else math.inf for one in took.values())[place - 1]


def slow_ones(took: Mapping[int, Took], tolerated: int, times: float) -> tuple[int, ...]:
    """Return who was slow in a round: more than `times` as long as usual.

    >>> slow_ones({0: Took(2.0), 1: Took(3.0), 2: Took(2.0), 3: Took(40.0, answered=False)}, 1, times=5.0)
    (3,)
    """
    most = longest_prompt(took, tolerated, times)
    return tuple(sorted(client for client, one in took.items() if one.seconds > most))


def longest_prompt(took: Mapping[int, Took], tolerated: int, times: float) -> float:
    """Return the seconds after which a client is slow."""
    return max(times * usual(took, tolerated), AT_LEAST)


@dataclass(frozen=True)
class Standing:
    """What is kept of a client: in how many rounds it was `slow` since it was last waited for as others are.

    `left` is how often it came to be not waited for, `out` whether it is so now; then `prompt` is in how many
    rounds in a row it was not slow, and `spent` how long the others took since it was waited for. `longest`
    is the longest it took, since it last was waited for as others are.
    """

    slow: int = 0
    left: int = 0
    out: bool = False
    prompt: int = 0
    spent: float = 0.0
    longest: float = 0.0


@dataclass(frozen=True)
class Waiting:
    """The rule (`times` is k, `rounds` is m, `tolerated` is f) and where clients stand by it.

    >>> waiting = Waiting(times=5.0, rounds=1, tolerated=1)
    >>> seconds = {0: 2.0, 1: 2.0, 2: 2.0, 3: 30.0}
    >>> waiting = waiting.after(Record(1, times=seconds, slow=(3,)))
    >>> waiting.not_awaited(range(4)), waiting.not_awaited([0, 1, 3])
    ((3,), ())
    """

    times: float = math.inf
    rounds: int = 1
    tolerated: int = 0
    standings: Mapping[int, Standing] = field(default_factory=dict)

    @property
    def out(self) -> tuple[int, ...]:
        """Who is not waited for as the others are."""
        return tuple(sorted(client for client, one in self.standings.items() if one.out))

    def not_awaited(self, asked: Collection[int], missing: int = 0) -> tuple[int, ...]:
        """Return whom of those who are `asked` in the next round the server does not wait for.

        Of f who may be unheard so many are `missing` already.
        """
        places = min(self.tolerated - missing, len(asked) - (2 * self.tolerated + 1))
        candidates = sorted(set(asked) & set(self.out), key=lambda one: (-self.standings[one].longest, one))
        return tuple(sorted(one for one in candidates[: max(0, places)] if not self.is_due(one)))

    def is_due(self, client: int) -> bool:
        """Tell whether it is the turn of a client that is out to be waited for."""
        one = self.standings.get(client, Standing())
        return one.out and one.spent >= self.times * one.longest

    def after(self, record: Record) -> Waiting:
        """Return the rule after a round, as its record has it."""
        known = dict(self.standings)
        for client in {*known, *record.times}:
            before, seconds = known.get(client, Standing()), record.times.get(client)
            if self.is_due(client) and client in record.weights:
                before = replace(before, spent=0.0)
            elif before.out:
                before = replace(before, spent=before.spent + record.facts.get(USUAL, 0.0))
            if seconds is not None:
                before = replace(before, longest=max(before.longest, seconds))
            slow, prompt = client in record.slow, seconds is not None and client not in record.slow
            known[client] = self._judged(before, slow, prompt)
        return replace(self, standings=known)

    def _judged(self, one: Standing, slow: bool, prompt: bool) -> Standing:
        if not one.out:
            one = replace(one, slow=one.slow + slow)
            if one.slow < (1 if one.left else self.rounds):
                return one
            return replace(one, slow=0, out=True, left=one.left + 1, prompt=0, spent=0.0)
        in_a_row = 0 if slow else one.prompt + prompt
        if in_a_row < self.rounds * 2**one.left:
            return replace(one, prompt=in_a_row)
        return Standing(left=one.left)

    @classmethod
    def of(cls, times: float, rounds: int, records: Iterable[Record]) -> Waiting:
        """Return where clients stand after these rounds."""
        waiting = cls(times, rounds)
        for record in records:
            waiting = waiting.after(record)
        return waiting
