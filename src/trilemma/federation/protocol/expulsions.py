"""Expulsions: what a server that remembers announces, and what clients hold it to.

A server with evidence (`trilemma.learning.defences.evidence`) expels clients for good, and calls the others
to an epoch without them. It names everybody it has expelled so far in every call, with the test, what it gave
and what an honest client would not have exceeded. A client cannot repeat the test, it does not see the
others' messages; but it checks what it can, and every member signs the list with the list of members:

* the run's own configuration expels clients at all;
* the list grows and never changes: nobody comes back, and no epoch has two lists;
* nobody on it is among the members;
* those who are left are as many as the client wants (`spending.least_members`): the noise is calculated for
  n − f members, so a server that expels honest clients one by one makes everybody refuse, and nobody pay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from trilemma.base.records import Test
from trilemma.federation.protocol.events import figures
from trilemma.federation.protocol.reasons import Reason, Refused

if TYPE_CHECKING:
    from trilemma.learning.defences.evidence import (
        conviction,  # and torch, which a client that waits does without
    )

Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Figure = Annotated[float, Field(allow_inf_nan=False)]


class AnnouncedExpulsion(BaseModel):
    """Who was expelled in which round (from 1, as in records), and why: see `conviction.Expulsion`.

    >>> from trilemma.learning.defences.evidence import conviction
    >>> found = conviction.Expulsion(3, "length", 9.0, 7.5)
    >>> print(AnnouncedExpulsion.of(found, round_=4))
    client 3 in round 4, length: 9 > 7.5
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    client: Count
    round: Count
    test: Test
    statistic: Figure | None = None
    threshold: Figure | None = None
    low: bool = False

    @classmethod
    def of(cls, found: conviction.Expulsion, round_: int) -> AnnouncedExpulsion:
        """Return what is announced about a conviction."""
        plain = found.plain()
        del plain["others"]  # as many as there are clients, for each: they are in the record
        return cls(**plain, round=round_)

    @property
    def holds(self) -> bool:
        """Whether the figures say what is claimed: beyond the threshold, or below it where that is a lie.

        >>> AnnouncedExpulsion(client=1, round=1, test="length", statistic=9.0, threshold=7.5, low=True).holds
        False
        """
        if self.statistic is None or self.threshold is None:
            return self.test == "not finite"
        return self.statistic < self.threshold if self.low else self.statistic > self.threshold

    @property
    def facts(self) -> dict[str, Any]:
        """What an event says about it beside whom."""
        measured = {"statistic": self.statistic, "threshold": self.threshold}
        return {"round": self.round, "test": self.test, "figures": figures(measured)}

    def __str__(self) -> str:
        from trilemma.learning.defences.evidence import conviction

        statistic, threshold = (math.nan if one is None else one for one in (self.statistic, self.threshold))
        found = conviction.Expulsion(self.client, self.test, statistic, threshold, self.low)
        return f"client {self.client} in round {self.round}, {found}"


def clients_of(expelled: Iterable[AnnouncedExpulsion]) -> frozenset[int]:
    """Return who is expelled."""
    return frozenset(one.client for one in expelled)


def check_announced(
    announced: Sequence[AnnouncedExpulsion], before: Sequence[AnnouncedExpulsion], clients: int, expels: bool
) -> None:
    """Refuse a list of expulsions that cannot be, or that does not go on from the one before.

    `clients` is how many places the roster has, `expels` whether the run's configuration expels anybody.
    """
    if announced and not expels:
        raise Refused(Reason.EXPULSIONS, "nobody is expelled in a run of this configuration")
    if list(announced[: len(before)]) != list(before):
        raise Refused(Reason.EXPULSIONS, f"other expulsions than before: {_said(announced)}, {_said(before)}")
    places = [one.client for one in announced]
    if len(set(places)) < len(places) or any(place >= clients for place in places):
        raise Refused(Reason.EXPULSIONS, f"clients {places} of {clients}")
    if wrong := [one for one in announced if not one.holds]:
        raise Refused(Reason.EXPULSIONS, f"figures that prove nothing: {_said(wrong)}")


def _said(expelled: Sequence[AnnouncedExpulsion]) -> str:
    return "; ".join(map(str, expelled)) or "none"
