"""What may reach the SuperLink from outside: which requests, how long, with how many records in them.

A client needs ten of the SuperLink's requests. Nine of them are small; the tenth uploads an object, and the
largest object of a reply is its one block of bytes, whose length the run's configuration declares. So the
guard knows what every request may weigh before it has read more than its head. Everything here is decided
from numbers alone; `guard` does the talking.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trilemma import files
from trilemma.federation.facts import FACTS

FLEET = "/v1/fleet/"
ANNOUNCES = FLEET + "push-messages"
UPLOADS = FLEET + "push-object"
PULLS = FLEET + "pull-messages"
ASKS_AGAIN = {PULLS} | {FLEET + name for name in ("activate-node", "send-node-heartbeat")}
"""Requests that a client's SuperNode simply makes again when it is told that nobody is there just now."""

PATHS = frozenset(
    {ANNOUNCES, UPLOADS}
    | ASKS_AGAIN
    | {
        FLEET + name
        for name in ("deactivate-node", "get-run", "get-fab", "pull-object", "confirm-message-received")
    }
)
"""What clients need. Registering, control and the server's own worker are not for outside."""

SMALL = 8192
"""Bytes that any request but an upload may have: it names a node, a run, an object, perhaps a reason."""

WRAPPING = 1024
"""Bytes that Flower puts around a block: a record, its name, the ids of node, run and object."""

MARGIN = 1.1
"""A message may be a tenth longer than declared, and is then refused by who knows what it should be."""


@dataclass(frozen=True)
class Limits:
    """What one peer, and all strangers together, may ask of the guard.

    `message` is how many bytes the block of a reply may have. A reply consists of three records; `records`
    is how many are let through. A peer has `connections` and `rate` requests a second (`burst` at once).
    Strangers, who have not shown a certificate yet, have `strangers` connections for each address they come
    from and eight times as many in all. A request's head has `head_seconds`, its body may be no slower than
    `slowest` bytes a second, a silent connection is closed after `idle_seconds`, and the SuperLink has
    `answer_seconds`.
    """

    message: int
    records: int = 8
    connections: int = 16
    rate: float = 100.0
    burst: int = 200
    strangers: int = 32
    head_seconds: float = 10.0
    idle_seconds: float = 75.0
    answer_seconds: float = 120.0
    slowest: int = 16384

    def for_one_address(self, peers: int) -> Limits:
        """Return the limits where all clients come from one address, and perhaps at the same moment.

        >>> Limits(message=0).for_one_address(3).strangers, Limits(message=0).for_one_address(50).strangers
        (32, 200)
        """
        return replace(self, strangers=max(self.strangers, 4 * peers))

    def largest(self, path: str) -> int | None:
        """Return how many bytes a request may have; None where there is no such request.

        >>> limits = Limits(message=100_000)
        >>> limits.largest("/v1/fleet/push-object"), limits.largest("/v1/fleet/pull-messages")
        (111126, 8192)
        >>> limits.largest("/v1/control/start-run")
        """
        if path not in PATHS and path != FACTS:
            return None
        return max(SMALL, int(MARGIN * (self.message + WRAPPING))) if path == UPLOADS else SMALL

    @staticmethod
    def keeps_waiting(peers: int) -> float:
        """Return for how many seconds a client that finds nothing to do is kept waiting.

        Up to eighty clients then ask the SuperLink four times a second, all together; a SuperNode gives a
        request up after 30 s.

        >>> Limits.keeps_waiting(5), Limits.keeps_waiting(20), Limits.keeps_waiting(1000)
        (2.0, 5.0, 20.0)
        """
        return min(max(2.0, peers / 4), 20.0)

    def body_seconds(self, length: int) -> float:
        """Return how long a body may take.

        >>> Limits(message=0).body_seconds(163840)
        20.0
        """
        return self.head_seconds + length / self.slowest


@dataclass(frozen=True)
class Settings:
    """All that a guard is told: where it listens and where the SuperLink is, its certificate, whom it knows.

    `peers` maps the names of clients' certificates to the node keys that go with them, as Flower's requests
    show them; `folder` is the server's, whose facts a guard tells (`trilemma.federation.facts`).
    """

    listen: str
    port: int
    upstream: int
    authority: str
    certificate: str
    key: str
    peers: Mapping[str, str]
    limits: Limits
    folder: str = ""

    def save(self, path: Path) -> None:
        """Write the settings to a file."""
        files.write_atomically(path, json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Read what `save` wrote."""
        facts: dict[str, Any] = json.loads(path.read_text())
        return cls(**{**facts, "limits": Limits(**facts["limits"])})


def version_of(file: Path | None) -> tuple[int, ...]:
    """Return what tells one version of a file from another: each is a new file."""
    try:
        facts = None if file is None else file.stat()
    except OSError:
        facts = None
    return () if facts is None else (facts.st_ino, facts.st_mtime_ns, facts.st_size)
