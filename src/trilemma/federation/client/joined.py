"""Which epochs a client has joined, for good: of each run the last one, since none before it is joined again.

A server calls to as many epochs as it likes, and may think of names of runs without end. So what is kept goes
by runs, not by epochs: those that have a folder here, in which something may have been answered, and the
newest of the others. Nothing was answered in a run that is forgotten; should it be joined anew its keys are
fresh, and rounds of it that were paid for are in the ledger.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from trilemma.base import files
from trilemma.base.errors import PrivacyError

KEPT = 1000
"""Runs without a folder that are remembered."""


@dataclass(frozen=True)
class JoinedEpochs:
    """The epochs in the file `path`; `runs` is where runs have their folders.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> joined = JoinedEpochs(folder / "joined", folder / "runs")
    >>> joined.claim("monday", 0); joined.claim("monday", 3); joined.claim("tuesday", 0)
    >>> joined.claim("monday", 2)
    Traceback (most recent call last):
    trilemma.base.errors.PrivacyError: epoch 2 of run 'monday': epoch 3 was joined before
    >>> len(joined.path.read_bytes().splitlines())
    2
    """

    path: Path
    runs: Path

    def claim(self, run: str, epoch: int) -> None:
        """Join an epoch; refuse one that was joined before, or came before one that was. On disk then."""
        lines = [line for line in self.path.read_bytes().split(b"\n") if line] if self.path.exists() else []
        said = {line: _said(line) for line in lines}
        last = max((one[1] for one in said.values() if one is not None and one[0] == run), default=-1)
        if epoch <= last:
            raise PrivacyError(f"epoch {epoch} of run {run!r}: epoch {last} was joined before")
        others = {line: one for line, one in said.items() if one is None or one[0] != run}
        here = [line for line, one in others.items() if one is not None and (self.runs / one[0]).is_dir()]
        rest = [line for line in others if line not in here][-KEPT:]
        files.write_atomically(self.path, b"\n".join([*rest, *here, _line(run, epoch), b""]))


def _line(run: str, epoch: int) -> bytes:
    """Return what is written about a run, behind a checksum: a disk must not make another epoch of it."""
    said = f"{epoch} {run}".encode()
    return hashlib.sha256(said).hexdigest().encode() + b" " + said


def _said(line: bytes) -> tuple[str, int] | None:
    """Return run and epoch of a line; None where a disk changed it."""
    checksum, _, said = line.partition(b" ")
    if not said or hashlib.sha256(said).hexdigest().encode() != checksum:
        return None
    epoch, _, run = said.decode().partition(" ")
    return run, int(epoch)
