"""Why a client refuses: what travels is a code and a fixed sentence, the details stay at home.

An exception's text may contain what nobody else should read: a loss, a path, a number of examples. So the
server is told one entry of a fixed catalogue, whatever went wrong; the rest is a line in the client's own
`run/node.log`.

The server does not rely on that. What reaches it as a reason may be anything, of any length: `heard` takes
the catalogue's sentence where there is a code of it, and at most 200 characters of anything else.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import traceback
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from trilemma.base.errors import UserError

LARGEST_LOG = 1 << 20
"""Bytes after which a log is put aside and a new one begun: a server may ask for refusals without end."""


LONGEST = 200
"""Characters of a reason that is not the catalogue's: what others say goes into records and onto consoles."""


NO_ROOM = frozenset(
    getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS") if hasattr(errno, name)
)
"""What a system says where nothing more can be written."""


class Reason(Enum):
    """The catalogue. A reason says nothing that depends on a client's data.

    >>> Reason.BUDGET.told
    "budget: the client's own budget does not allow it"
    """

    TERMS = "config.toml, roster.json, `examples` or `slow_times` differ: all parties must hold the same"
    ROSTER = "the roster is older than the client's, or the authority has not signed it"
    EPOCH = "the client is not in this epoch"
    KEYS = "the epoch's keys were not accepted"
    MEMBERS = "the epoch has fewer members than the client accepts"
    UNCONFIRMED = "not every member of the epoch signed the same list of members and keys"
    EXPULSIONS = "the expulsions announced are not those announced before, or none this run can have"
    EXPELLED = "the client was expelled from this run, for good"
    ROLLBACK = "a ledger is older than one that was seen before"
    ROUND = "the round is over, or not one of this run"
    REPEATED = "the round was asked before, with other numbers"
    LOST = "the round was paid for and its answer is gone: the client needs a new epoch"
    BROADCAST = "the broadcast is not one of this configuration"
    BUDGET = "the client's own budget does not allow it"
    REACH = (
        "the client's budget is too small for the whole run, and its owner has not allowed a part "
        "(`allow --partly`)"
    )
    LEDGER = "the client's ledger cannot be trusted or opened"
    ALLOWED = "the client's owner has not allowed this run (yet)"
    RUN = "the client has not joined such a run"
    BLOCK = "the client does not read such a block"
    DISK = "the client cannot write to its disk, which may be full"
    UNSAFE = "the client's folder is not fit for a real run"
    FAILED = "the client failed; its own log says why"

    @property
    def code(self) -> str:
        """One word."""
        return self.name.lower()

    @property
    def told(self) -> str:
        """What travels: the code and its sentence."""
        return f"{self.code}: {self.value}"


class Refused(UserError):
    """A request this client does not answer. Its text is the catalogue's; `detail` never travels.

    >>> str(Refused(Reason.BUDGET, "ε would be 3.71")), Refused(Reason.BUDGET, "ε would be 3.71").detail
    ("budget: the client's own budget does not allow it", 'ε would be 3.71')
    """

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason.told)
        self.reason, self.detail = reason, detail


def what_travels(error: BaseException) -> str:
    """Return what a carrier may tell the server about any failure of a client.

    >>> what_travels(ValueError("patient 4711 has no label"))
    'failed: the client failed; its own log says why'
    """
    return reason_for(error).told


def reason_for(error: BaseException) -> Reason:
    """Return the entry of the catalogue for any failure of a client.

    >>> reason_for(OSError(errno.ENOSPC, "No space left on device")), reason_for(KeyError("patient 4711"))
    (<Reason.DISK: 'the client cannot write to its disk, which may be full'>, <Reason.FAILED: 'the client...
    """
    if isinstance(error, Refused):
        return error.reason
    return Reason.DISK if isinstance(error, OSError) and error.errno in NO_ROOM else Reason.FAILED


def shortened(text: str) -> str:
    """Return at most 200 characters of what somebody else wrote, and only such as can be shown.

    >>> shortened("a" * 300) == "a" * 199 + "…", shortened("two" + chr(10) + "lines")
    (True, 'two?lines')
    """
    shown = "".join(one if one.isprintable() else "?" for one in text[: LONGEST + 1])
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


def heard(text: str) -> str:
    """Return what a server believes to have been told: the catalogue's sentence, or a little of the rest.

    >>> heard("budget: we have 3.71 left, and patient 4711 says hello")
    "budget: the client's own budget does not allow it"
    >>> heard("Traceback of somebody's code")
    "unknown: Traceback of somebody's code"
    """
    code = text[:20].partition(":")[0]
    known = {reason.code: reason.told for reason in Reason}
    return known[code] if code in known else shortened(f"unknown: {text[:LONGEST]}")


def write_down(log: Path, kind: str, error: BaseException) -> None:
    """Add a failure, with all that is known about it, to a client's own log."""
    detail = error.detail if isinstance(error, Refused) else "".join(traceback.format_exception(error))
    note_down(log, f"{kind[:40]!r} refused, {what_travels(error)}. {detail}")


def note_down(log: Path, said: str) -> None:
    """Add a line to a client's own log; where that cannot be written, to the error stream."""
    line = f"{datetime.now(UTC).isoformat(timespec='seconds')} {said}"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > LARGEST_LOG:
            log.replace(log.with_name(log.name + ".1"))
        with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{line}\n")
    except OSError as unwritten:
        said = f"{log.name} cannot be written ({unwritten.strerror}): {line}"
        with contextlib.suppress(OSError):  # it may be a file on the same disk
            print(said.encode(errors="backslashreplace").decode(), file=sys.stderr, flush=True)
