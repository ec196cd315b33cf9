"""A client's memory of what it let out: the last answer, and its state before and after it.

The answer is on disk before it leaves. A server that asks again (it crashed, or the round is repeated) gets
the very same bytes, so asking twice reveals nothing new and costs nothing; a server that asks the same round
with different numbers is refused. A client that was not heard in a round takes back its state, not its
ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trilemma import files
from trilemma.errors import UserError
from trilemma.federation import wire
from trilemma.federation.commits import part_of


class Refused(UserError):
    """A request this client does not answer; the reason travels back to the server."""


class _EntryHeader(wire.Header):
    kind = "journal"
    run: str
    epoch: int
    round: int
    asked: str


@dataclass(frozen=True)
class Entry:
    """The last answer: the question it belongs to (by digest), the vector, and the state around it."""

    run: str
    epoch: int
    round: int
    asked: str
    vector: Tensor
    before: wire.Tensors
    after: wire.Tensors


@dataclass(frozen=True)
class Fresh:
    """Take a new step from `state`; None: from the beginning."""

    state: wire.Tensors | None


@dataclass(frozen=True)
class Again:
    """Send the vector that was sent before."""

    vector: Tensor


def what_to_do(entry: Entry | None, client: int, ask: wire.Ask, asked: str) -> Fresh | Again:
    """Decide how to answer a question, given the last answer.

    >>> import torch
    >>> entry = Entry("run", 0, 4, "digest", torch.ones(1), {"m": torch.zeros(1)}, {"m": torch.ones(1)})
    >>> following = wire.Ask(run="run", epoch=0, round=5, heard={"2": 4}, unused=[])
    >>> what_to_do(entry, 2, following, "other").state
    {'m': tensor([1.])}
    >>> what_to_do(entry, 2, following.model_copy(update={"heard": {"2": 3}}), "other").state
    {'m': tensor([0.])}
    >>> what_to_do(entry, 2, following.model_copy(update={"round": 4}), "digest").vector
    tensor([1.])
    >>> what_to_do(entry, 2, following.model_copy(update={"round": 4}), "other")
    Traceback (most recent call last):
    trilemma.federation.journal.Refused: round 4 was asked before, with other numbers
    """
    if entry is None:
        return Fresh(None)
    if ask.epoch < entry.epoch:
        raise Refused(f"epoch {ask.epoch} is over, this client has answered in epoch {entry.epoch}")
    if ask.round < entry.round:
        raise Refused(f"round {ask.round} is over, this client has answered round {entry.round}")
    if ask.round > entry.round:
        unheard = ask.heard.get(str(client), -1) < entry.round
        return Fresh(entry.before if unheard else entry.after)
    if ask.epoch > entry.epoch:
        return Fresh(entry.before)  # the round was given up; what was sent under the old keys is spent
    if asked != entry.asked:
        raise Refused(f"round {ask.round} was asked before, with other numbers")
    return Again(entry.vector)


class Journal:
    """The journal of one run, one file in the run's folder."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "journal"
        self._last: Entry | None = None

    def last(self) -> Entry | None:
        """Return the last entry."""
        if self._last is not None or not self._file.is_file():
            return self._last
        header, tensors = wire.loads(self._file.read_bytes(), _EntryHeader)
        self._last = Entry(
            header.run,
            header.epoch,
            header.round,
            header.asked,
            tensors["vector"],
            part_of("before", tensors),
            part_of("after", tensors),
        )
        return self._last

    def write(self, entry: Entry) -> None:
        """Replace the last entry; on disk when this returns."""
        header = _EntryHeader(run=entry.run, epoch=entry.epoch, round=entry.round, asked=entry.asked)
        tensors = {"vector": entry.vector}
        tensors |= {f"before/{name}": tensor for name, tensor in entry.before.items()}
        tensors |= {f"after/{name}": tensor for name, tensor in entry.after.items()}
        files.write_atomically(self._file, wire.dumps(header, tensors), secret=True)
        self._last = entry
