"""What the server's guard sees of each client: when it last asked, how its clock is off, what was refused.

The guard keeps it in a small file of the server's folder, for who looks: `status`, `doctor`, the metrics. It
is written when something changed, at most once a second, and may be lost at any time.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trilemma.errors import UserError
from trilemma.federation.facts import Facts

AHEAD, BEHIND = 5.0, 300.0
"""Seconds by which a client's clock may be ahead of the server's, and behind it: Flower's SuperLink takes no
request that was signed later than now, or that long ago."""


def clock_agrees(ahead: float) -> bool:
    """Tell whether the server takes the requests of a client whose clock is so many seconds ahead.

    >>> clock_agrees(4.0), clock_agrees(6.0), clock_agrees(-200.0), clock_agrees(-400.0)
    (True, False, True, False)
    """
    return -BEHIND < ahead < AHEAD


@dataclass(frozen=True)
class Peer:
    """A client at the server's door. Times are the server's clock, in seconds since 1970.

    `asked` is its last request of any kind, `pulled` its last request for work; `clock` is how many seconds
    its clock is ahead, as its newest request says. `refused` counts requests by the status they were refused
    with; `received` and `sent` are bytes of bodies, seen from the server. `facts` is what the client says it
    has, and when it said so is `told`.
    """

    connections: int = 0
    requests: int = 0
    asked: float | None = None
    pulled: float | None = None
    clock: float | None = None
    received: int = 0
    sent: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    facts: Facts | None = None
    told: float | None = None

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Peer:
        """Return the peer that was written as `plain`."""
        facts = plain.get("facts")
        return cls(**{**plain, "facts": None if facts is None else Facts.read(facts)})


@dataclass(frozen=True)
class Door:
    """All that a guard sees: its clients by number, since when and until when, and strangers it turned away.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "run" / "peers"
    >>> door = Door(since=10.0, seen=12.0, strangers=3, peers={1: Peer(requests=2, asked=11.5)})
    >>> door.save(path); Door.load(path) == door
    True
    """

    since: float
    seen: float
    strangers: int = 0
    peers: Mapping[int, Peer] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write it for others; a disk that is full keeps nobody from guarding."""
        plain = {**asdict(self), "peers": {str(client): asdict(one) for client, one in self.peers.items()}}
        temporary = path.with_name(path.name + ".tmp")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(plain))
            temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Door | None:
        """Return what a guard wrote; None where there is nothing, or nothing that can be read."""
        try:
            plain = json.loads(path.read_text())
            peers = {int(client): Peer.read(one) for client, one in plain["peers"].items()}
            return cls(plain["since"], plain["seen"], plain["strangers"], peers)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, UserError):
            return None


def door_file(running: Path) -> Path:
    """Return where the guard keeps what it sees, in the server's folder of processes (`Party.running`)."""
    return running / "peers"
