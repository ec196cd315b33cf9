"""The rounds in which the sums are looked at: all early ones, then ever fewer, and the last one.

A look at the sums needs the Gram matrix of n × d numbers, which costs as much as the rule itself. But sums
forget nothing: what is too small to be seen in one look is still there in the next. So the sums are looked at
in the first `EARLY` rounds, then whenever the number of rounds has grown by the factor `pace` since the last
look, and in the last round. T rounds need

    L ≤ EARLY + log(T/EARLY)/log(pace) + 1

looks. A lie that could have been seen after t rounds is seen after at most pace · t. Messages are looked at
in every round, because the rule needs their Gram matrix anyway.

**False alarms.** The rounds with looks are fixed before the first message. A run looks at sums at most L
times and at messages at most T times. A look at m ≤ n members tests at most 2n² bounds, each of which honest
clients exceed with probability at most p (`conviction`). By the union bound, any of them is exceeded in the
whole run with probability at most

    L · 2n² · p_sums + T · 2n² · p_messages = alarm,    p_sums = alarm/(4n²L),  p_messages = alarm/(4n²T),

half of it for sums and half for messages. This needs no assumption on how looks depend on each other, and
fewer looks at sums allow tighter limits. If the round of a look is not held, the next round that is held
makes up for it, once. If somebody is expelled between looks, the sums are measured too, to set the model
right without that client, but nobody is judged by them.

**Liars who know the schedule** may push between looks as far as hides in single messages, which is more than
hides in sums. The next look sees it, expels them and undoes their part in the move, except for the noise that
they share with others. Of a push of length a beside such noise of length x, a x²/(a² + x²) ≤ x/2 ≤
√(fd) R√t/(2n) stays, no more than what liars can hide anyway (`hidden`). If a run is stopped before its last
round, what was added to the sums since the last look was tested message by message only.
"""

from __future__ import annotations

import math

PACE = 1.25
"""How many times as many rounds there are at the next look at sums, unless a rule says otherwise."""

EARLY = 8
"""Every one of the first so many rounds has a look at the sums."""


def looks(rounds: int, pace: float = PACE, wait: int = 0) -> tuple[int, ...]:
    """Return the rounds, counted from 0, in which the sums of a run are looked at.

    Round wait − 1, in which the model is moved for the first time, is one of them, to set it right.

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
