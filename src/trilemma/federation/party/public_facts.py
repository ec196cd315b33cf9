"""The public facts of a federation: its name, where its server is, how long anybody is waited for."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import lru_cache
from typing import Any

import tomli_w

from trilemma.base.errors import UserError
from trilemma.federation.party.addresses import address_of, check_host

PUBLIC = "federation.toml"
"""The file they are in, in every party's folder."""

LONGEST_NAME = 54
"""Bytes of a federation's name: the authority's certificate has room for 64, " authority" among them."""


@dataclass(frozen=True)
class Timing:
    """How long the server waits, in seconds; `repeats` is how often a failed round is asked again.

    A client that takes more than `slow_times` as long as usual in `slow_rounds` rounds is not waited for
    (`waiting`): all parties agree on that, and `slow_times = inf` switches it off.
    """

    round_limit: float = 120.0
    join_limit: float = 60.0
    poll: float = 0.2
    repeats: int = 1
    slow_times: float = 5.0
    slow_rounds: int = 3

    def __post_init__(self) -> None:
        for name in ("round_limit", "join_limit", "poll"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} = {getattr(self, name)}: allowed are seconds, more than 0")
        if self.repeats < 0:
            raise UserError(f"repeats = {self.repeats}: allowed is 0 or more")
        if not self.slow_times >= 2:  # nor is nan
            raise UserError(f"slow_times = {self.slow_times}: allowed is 2 or more; inf waits for everybody")
        if self.slow_rounds < 1:
            raise UserError(f"slow_rounds = {self.slow_rounds}: allowed is 1 or more")

    @property
    def agreed(self) -> bytes:
        """What all parties must have in common of it: who is not waited for may be not heard."""
        return f"slow_times {float(self.slow_times)!r} slow_rounds {self.slow_rounds}".encode()


@dataclass(frozen=True)
class Federation:
    """The public facts of a federation, the same in every party's folder.

    `clients` is with how many it began; how many there are is on the roster. Clients connect to `host`; the
    server binds to `listen` where that is another address (0.0.0.0).
    `examples` is how many training examples the poorest client holds, where clients bring their own data;
    `records` is what one record may be there (`data.Declaration`, as plain values).
    `transcript` makes the server keep every vector it admitted.

    >>> Federation("pilot", clients=3).toml().splitlines()[0]
    'name = "pilot"'
    >>> Federation.parse(Federation("pilot", clients=3).toml()).clients
    3
    """

    name: str
    clients: int
    host: str = "127.0.0.1"
    port: int = 9190
    listen: str | None = None
    examples: int | None = None
    records: Mapping[str, Any] | None = None
    transcript: bool = False
    timing: Timing = Timing()

    def __post_init__(self) -> None:
        if not self.name.isprintable() or not 1 <= len(self.name.encode()) <= LONGEST_NAME:
            raise UserError(
                f"name = {self.name!r}: allowed is one line of text, at most {LONGEST_NAME} bytes"
            )
        check_host("host", self.host)
        if self.listen is not None:
            check_host("listen", self.listen)
        if self.clients < 1:
            raise UserError(f"a federation needs at least one client, not {self.clients}")
        if self.examples is not None and self.examples < 1:
            raise UserError(f"examples = {self.examples}: the poorest client holds at least 1")
        if not 1 <= self.port <= 65535:
            raise UserError(f"port = {self.port}: allowed is 1 to 65535")

    @property
    def address(self) -> str:
        """Where the server listens, and clients connect."""
        return address_of(self.host, self.port)

    @property
    def on_one_machine(self) -> bool:
        """Whether nobody outside this machine can be part of it: a pilot."""
        here = ("127.0.0.1", "localhost", "::1")
        return self.host in here and self.listen in (None, *here)

    def toml(self) -> str:
        """Return the facts as TOML."""
        facts = {name: fact for name, fact in asdict(self).items() if fact is not None}
        return tomli_w.dumps(facts)

    @classmethod
    def parse(cls, text: str) -> Federation:
        """Read the facts from TOML."""
        return _parsed(text)


@lru_cache(maxsize=4)
def _parsed(text: str) -> Federation:
    """Read the facts; the same ones are asked for with every question, and stay what they are."""
    try:
        facts = tomllib.loads(text)
        for kind, said in ((Federation, facts), (Timing, facts.get("timing", {}))):
            _check_names(kind, said)
        return Federation(**{**facts, "timing": Timing(**facts.get("timing", {}))})
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{PUBLIC} cannot be read: {error}") from None


def _check_names(kind: type[Federation] | type[Timing], said: Mapping[str, object]) -> None:
    """Refuse names that no fact has, and facts that are missing: a file that was damaged, or cut off."""
    known = {one.name: one.default is MISSING for one in fields(kind)}
    if unknown := sorted(set(said) - set(known)):
        raise ValueError(f"unknown {', '.join(unknown)}; allowed: {', '.join(known)}")
    if missing := [name for name, needed in known.items() if needed and name not in said]:
        raise ValueError(f"{', '.join(missing)} missing; the same file is in every other party's folder")
