"""Who takes how much: seats, limited for each name and in all; tokens; and from where who came lately."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager

DEBT = 10.0
"""Seconds after which any name has a token again, however many it took."""


class Full(Exception):
    """All seats of this name, or all there are, are taken."""


class Seats:
    """At most `each` at a time under one name, and `all` together.

    >>> seats = Seats(each=1, all=2)
    >>> with seats.taken("alice"), seats.taken("bob"):
    ...     seats.count("alice"), seats.free("carol")
    (1, False)
    >>> seats.count("alice"), seats.free("carol")
    (0, True)
    """

    def __init__(self, each: int, all: int) -> None:
        self._each, self._all = each, all
        self._taken: Counter[str] = Counter()

    def allow(self, each: int, all: int) -> None:
        """Have more or fewer seats from now on; who sits stays."""
        self._each, self._all = each, all

    def count(self, name: str) -> int:
        """Return how many are taken under a name."""
        return self._taken[name]

    def free(self, name: str) -> bool:
        """Tell whether there is a seat for `name`."""
        return not self.used_up(name) and self._taken.total() < self._all

    def used_up(self, name: str) -> bool:
        """Tell whether `name` has taken all seats that one may have."""
        return self._taken[name] >= self._each

    @contextmanager
    def taken(self, name: str) -> Iterator[None]:
        """Take a seat for a while, or raise `Full`."""
        if not self.free(name):
            raise Full(name)
        self._taken[name] += 1
        try:
            yield
        finally:
            self._taken[name] -= 1
            if not self._taken[name]:
                del self._taken[name]  # names come from outside: none is remembered for ever


class Acquaintances:
    """Addresses from which each name came lately, the last `each` of them.

    >>> known = Acquaintances(each=2)
    >>> for address in ("10.0.0.1", "10.0.0.2", "10.0.0.3"):
    ...     known.met("alice", address)
    >>> known.knows("10.0.0.1"), known.knows("10.0.0.3")
    (False, True)
    >>> known.forget_all_but(["bob"]); known.knows("10.0.0.3")
    False
    """

    def __init__(self, each: int) -> None:
        self._each = each
        self._of: dict[str, deque[str]] = {}
        self._all: set[str] = set()

    def met(self, name: str, address: str) -> None:
        """Remember that `name` came from an address."""
        lately = self._of.setdefault(name, deque(maxlen=self._each))
        if address not in lately:
            lately.append(address)
            self._all = set().union(*self._of.values())

    def knows(self, address: str) -> bool:
        """Tell whether anybody came from there lately."""
        return address in self._all

    def forget_all_but(self, names: Container[str]) -> None:
        """Forget where all others came from."""
        self._of = {name: lately for name, lately in self._of.items() if name in names}
        self._all = set().union(*self._of.values())


class Tokens:
    """A bucket of `burst` tokens that is refilled by `rate` a second; each name has its own.

    Only names that are known beforehand may be asked for: each is remembered.

    >>> moment = [0.0]
    >>> tokens = Tokens(rate=2.0, burst=1, now=lambda: moment[0])
    >>> tokens.wait("alice"), tokens.wait("alice"), tokens.wait("bob")
    (0.0, 0.5, 0.0)
    >>> moment[0] = 10.0; tokens.wait("alice")
    0.0
    """

    def __init__(self, rate: float, burst: int, now: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._now = rate, burst, now
        self._left: dict[str, tuple[float, float]] = {}

    def wait(self, name: str) -> float:
        """Take a token; return after how many seconds it may be used."""
        moment = self._now()
        left, since = self._left.get(name, (float(self._burst), moment))
        left = min(self._burst, left + (moment - since) * self._rate) - 1
        # Who asks without end is in debt for some seconds, not for ever.
        self._left[name] = (max(left, -DEBT * self._rate), moment)
        return max(0.0, -left / self._rate)
