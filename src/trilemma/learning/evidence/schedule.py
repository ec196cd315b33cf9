"""When the sums are looked at: in every early round, then ever more rarely, and in the last one.

A look at the sums is a Gram matrix of n × d numbers, as dear as the rule itself. But sums forget nothing:
what one look is too early for, the next one sees in full. So they are looked at in the first `EARLY` rounds,
then whenever there are `pace` times as many rounds as at the last look, and in the last: T rounds pay for

    L ≤ EARLY + log(T/EARLY)/log(pace) + 1

looks, and a lie is seen at most a share pace − 1 of the past later than it could be. Messages are looked at
in every round, for their Gram matrix is the rule's anyway.

**False alarms.** Which rounds are looked at is fixed before the first message. A run looks at sums at most L
times and at messages at most T times; in a look at m ≤ n members there are at most 2n² bounds, each exceeded
by honest clients with probability p at most (`conviction`). In the whole run any of them is with at most

    L · 2n² · p_sums + T · 2n² · p_messages = alarm,    p_sums = alarm/(4n²L),  p_messages = alarm/(4n²T):

half for either. Nothing is assumed about how looks depend on each other. Fewer looks at sums need less slack
than one in every round. The look of a round that was not held is made up for in the next one that is, never
twice. Where somebody is expelled between looks the sums are measured too, to set the model right without it,
but nobody is judged by them.

**Liars who know it** may push between looks as far as single messages hide, beyond what hides in their sums.
The next look sees it, expels them and takes their past back as far as it is not noise that they share with
the others: of a push a beside such noise of length x, a x²/(a² + x²) ≤ x/2 ≤ √(fd) R√t/(2n) stays, no more
than what liars can hide for good (`hidden`). A run that is stopped before its last round has had its last
look: what was added to sums since then was looked at message by message only.
"""

from __future__ import annotations

import math

from trilemma.aggregation.evidence import PACE

EARLY = 8
"""Rounds that are all looked at: in runs as short as that nothing is left out."""


def looks(rounds: int, pace: float = PACE, wait: int = 0) -> tuple[int, ...]:
    """Return the rounds, counted from 0, in which the sums of a run are looked at.

    The round in which a model that waits is first moved is one of them: it is set right then.

    >>> [round_ + 1 for round_ in looks(30)]
    [1, 2, 3, 4, 5, 6, 7, 8, 10, 13, 17, 22, 28, 30]
    >>> looks(12, pace=math.inf)
    (0, 1, 2, 3, 4, 5, 6, 7, 11)
    >>> len(looks(400)), looks(5) == looks(5, pace=1.0) == tuple(range(5))
    (25, True)
    """
    found, count = {rounds - 1}, 1
    while count < rounds:
        found.add(count - 1)
        count = count + 1 if count < EARLY else max(count + 1, math.ceil(min(count * pace, rounds)))
    return tuple(sorted(found | ({wait - 1} if 0 < wait < rounds else set())))
