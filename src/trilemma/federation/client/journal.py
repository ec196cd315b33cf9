"""A client's memory of what it let out: the last answer, and its state before and after it.

The answer is on disk before it leaves. A server that asks again (it crashed, or the round is repeated) gets
the very same bytes, so asking twice reveals nothing new and costs nothing; a server that asks the same round
with different numbers is refused. A client that was not heard in a round takes back its state, not its
ledger.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from trilemma.federation.party import sealed_files
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.reasons import Reason, Refused
from trilemma.federation.server.commits import part_of


class _Written(kinds.Header):
    run: str
    epoch: int
    round: int
    asked: str

    @classmethod
    def of(cls, entry: JournalEntry | ToldScore) -> Self:
        return cls(**{name: getattr(entry, name) for name in cls.model_fields})


class _EntryHeader(_Written):
    kind = "journal"
    inquired: str = ""


@dataclass(frozen=True)
class JournalEntry:
    """The last answer: the question it belongs to (by digest), what was sent, and the state around it.

    `inquired` is the digest of what was asked after it in the same round, where something was.
    """

    run: str
    epoch: int
    round: int
    asked: str
    sent: wire.Tensors
    before: wire.Tensors
    after: wire.Tensors
    inquired: str = ""


@dataclass(frozen=True)
class Fresh:
    """Take a new step from `state`; None: from the beginning."""

    state: wire.Tensors | None


@dataclass(frozen=True)
class Again:
    """Send what was sent before."""

    sent: wire.Tensors


def what_to_do(entry: JournalEntry | None, client: int, ask: kinds.Ask, asked: str) -> Fresh | Again:
    """Decide how to answer a question, given the last answer.

    >>> import torch
    >>> sent, before, after = {"vector": torch.ones(1)}, {"m": torch.zeros(1)}, {"m": torch.ones(1)}
    >>> entry = JournalEntry("run", 0, 4, "digest", sent, before, after)
    >>> following = kinds.Ask(run="run", epoch=0, round=5, heard={"2": 4}, unused=[])
    >>> what_to_do(entry, 2, following, "other").state
    {'m': tensor([1.])}
    >>> what_to_do(entry, 2, following.model_copy(update={"heard": {"2": 3}}), "other").state
    {'m': tensor([0.])}
    >>> what_to_do(entry, 2, following.model_copy(update={"round": 4}), "digest").sent
    {'vector': tensor([1.])}
    >>> what_to_do(entry, 2, following.model_copy(update={"round": 4}), "other")
    Traceback (most recent call last):
    trilemma.federation.protocol.reasons.Refused: repeated: the round was asked before, with other numbers
    """
    if entry is None:
        return Fresh(None)
    if ask.epoch < entry.epoch:
        raise Refused(
            Reason.EPOCH, f"epoch {ask.epoch} is over, this client has answered in epoch {entry.epoch}"
        )
    if ask.round < entry.round:
        raise Refused(
            Reason.ROUND, f"round {ask.round} is over, this client has answered round {entry.round}"
        )
    if ask.round > entry.round:
        unheard = ask.heard.get(str(client), -1) < entry.round
        return Fresh(entry.before if unheard else entry.after)
    if ask.epoch > entry.epoch:
        return Fresh(entry.before)  # the round was given up; what was sent under the old keys is spent
    if asked != entry.asked:
        raise Refused(Reason.REPEATED, f"round {ask.round}")
    return Again(entry.sent)


def what_to_tell(entry: JournalEntry | None, inquire: kinds.Inquire, asked: str) -> JournalEntry:
    """Return the entry that a second question of a round is answered from, with that question in it.

    Only the last answer's round can be asked about, and only one thing.
    """
    if entry is None or (inquire.epoch, inquire.round) != (entry.epoch, entry.round):
        raise Refused(
            Reason.ROUND, f"round {inquire.round} was not answered last, nothing can be added to it"
        )
    if entry.inquired not in ("", asked):
        raise Refused(Reason.REPEATED, f"round {inquire.round} was asked about before")
    return replace(entry, inquired=asked)


class _ScoreHeader(_Written):
    kind = "score"


@dataclass(frozen=True)
class ToldScore:
    """The last evaluation that was answered: the question, by digest, and what was told."""

    run: str
    epoch: int
    round: int
    asked: str
    told: wire.Tensors


def told_before(score: ToldScore | None, evaluate: kinds.Evaluate, asked: str) -> wire.Tensors | None:
    """Return what was told to this very question; None where it is a new one. An old one is refused.

    >>> import torch
    >>> told = {"share": torch.ones(1)}
    >>> before = ToldScore("run", 0, 4, "digest", told)
    >>> again = kinds.Evaluate(run="run", epoch=0, round=4)
    >>> told_before(before, again, "digest") == told
    True
    >>> told_before(before, again.model_copy(update={"round": 9}), "other")
    >>> told_before(before, again, "other")
    Traceback (most recent call last):
    trilemma.federation.protocol.reasons.Refused: repeated: the round was asked before, with other numbers
    """
    if score is None:
        return None
    place, last = (evaluate.epoch, evaluate.round), (score.epoch, score.round)
    if place == last and asked == score.asked:
        return score.told
    if place == last:
        raise Refused(Reason.REPEATED, f"the evaluation after round {evaluate.round}")
    if evaluate.epoch < score.epoch or evaluate.round < score.round:
        raise Refused(Reason.ROUND, f"the evaluation after round {evaluate.round} is over")
    return None


class Scores:
    """The last evaluation of one run, one file in the run's folder."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "score"

    def last(self) -> ToldScore | None:
        """Return the last one; a broken file is as good as lost, and the ledger says what is over."""
        found = sealed_files.read(self._file, _ScoreHeader) if self._file.is_file() else None
        if found is None:
            return None
        return ToldScore(**found[0].model_dump(), told=found[1])

    def write(self, score: ToldScore) -> None:
        """Replace the last one; on disk when this returns."""
        sealed_files.write(self._file, _ScoreHeader.of(score), score.told)


def _entry(header: _EntryHeader, tensors: wire.Tensors) -> JournalEntry:
    """Return the entry that a file holds."""
    about: dict[str, Any] = {**header.model_dump()}
    about |= {name: part_of(name, tensors) for name in ("sent", "before", "after")}
    return JournalEntry(**about)


class Journal:
    """The journal of one run, one file in the run's folder.

    The file is what counts, another process may have written it: memory only saves reading it twice.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "journal"
        self._last: JournalEntry | None = None
        self._version: tuple[int, ...] = ()

    def last(self) -> JournalEntry | None:
        """Return the last entry."""
        if not self._file.is_file():
            return None
        if self._version == self._on_disk():
            return self._last
        version = self._on_disk()
        found = sealed_files.read(self._file, _EntryHeader)
        if found is None or found[0].run != self._file.parent.name:
            return None  # as good as lost: it repeats no answer, and the ledger says which rounds are over
        self._last, self._version = _entry(*found), version
        return self._last

    def write(self, entry: JournalEntry) -> JournalEntry:
        """Replace the last entry, on disk when this returns; return it as it lies there, where it is long."""
        # What was sent may be bytes of any number; behind it numbers could not be read where they lie.
        parts = {"before": entry.before, "after": entry.after, "sent": entry.sent}
        tensors = {
            f"{part}/{name}": tensor for part, found in parts.items() for name, tensor in found.items()
        }
        sealed_files.write(self._file, _EntryHeader.of(entry), tensors)
        if sealed_files.is_long(self._file):  # the file's pages will do
            entry = _entry(*sealed_files.written(self._file, _EntryHeader))
        self._last, self._version = entry, self._on_disk()
        return entry

    def _on_disk(self) -> tuple[int, ...]:
        """Return what tells one version of the file from another: each is a new file."""
        facts = self._file.stat()
        return (facts.st_ino, facts.st_mtime_ns, facts.st_size)
