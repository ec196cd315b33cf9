"""The server's memory: after each round everything needed to continue is written, whole, with a checksum.

A server that is killed at any moment finds the last committed round when it starts again, asks the same
question as before (clients then give the same answer as before), and cannot apply a round twice: a commit of
any round but the next one is refused, and a lock that dies with its process keeps a second server out. The
last few commits are kept: where a disk broke the newest, the one before it is the last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.base.files import ends
from trilemma.federation.party.agreed import Agreed
from trilemma.federation.party.layout import Party
from trilemma.federation.protocol import events, kinds, wire
from trilemma.federation.protocol.disk_backed import FileReference, Memory
from trilemma.federation.protocol.epochs import Epoch
from trilemma.federation.protocol.expulsions import AnnouncedExpulsion
from trilemma.federation.protocol.records import RECORDS, read_record, written_records

KEPT = 5
"""How many commits a run keeps: a disk that breaks the newest does not end the run."""


class _CommitHeader(kinds.Header):
    kind = "commit"
    run: str
    terms: str
    rounds: int
    epoch: int
    members: list[int]
    rows: list[int]
    heard: dict[str, int]
    unused: list[int]
    record: dict[str, Any]
    epoch_terms: str
    plan: str
    expelled: list[AnnouncedExpulsion] = Field(default_factory=list)
    files: dict[str, FileReference] = Field(default_factory=dict)


@dataclass(frozen=True)
class Commit:
    """Where a run stands after `rounds` rounds. `terms` are what it is about, whoever takes part.

    `plan` is that and the code of the server's own task.
    `chosen` is the model the run returns if it ends here, where that is not the latest. `heard` has the round
    in which each client's answer was last used; `unused` are the clients whose answer was not used when they
    were last asked; `record` is what is said about the last round. `remembered` is what the server needs of
    each client's last message to understand its next one; what of it, and of the `server`'s state, lies in
    the server's `Memory` is not in the commit, which only refers to it. `expelled` are all who were expelled
    so far.
    """

    run: str
    terms: str
    rounds: int
    epoch: Epoch | None
    broadcast: wire.Tensors
    server: wire.Tensors
    chosen: wire.Tensors = field(default_factory=dict)
    heard: Mapping[int, int] = field(default_factory=dict)
    unused: tuple[int, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)
    remembered: Mapping[int, wire.Tensors] = field(default_factory=dict)
    expelled: tuple[AnnouncedExpulsion, ...] = ()
    plan: str = ""

    def parts(self, memory: Memory) -> list[bytes | memoryview]:
        """Return the commit as a block, in parts."""
        remembered = {
            f"{client}/{name}": tensor
            for client, kept in sorted(self.remembered.items())
            for name, tensor in kept.items()
        }
        parts = {"broadcast": self.broadcast, "server": self.server, "chosen": self.chosen}
        parts["remembered"] = remembered
        tensors = {k: v for name, part in parts.items() for k, v in _under(name, part).items()}
        found = {name: memory.reference(tensor) for name, tensor in tensors.items()}
        files = {name: one for name, one in found.items() if one is not None}
        epoch = self.epoch or Epoch(-1, (), ())
        header = _CommitHeader(
            run=self.run,
            terms=self.terms,
            rounds=self.rounds,
            epoch=epoch.number,
            members=list(epoch.members),
            rows=list(epoch.rows),
            heard={str(client): round_ for client, round_ in sorted(self.heard.items())},
            unused=list(self.unused),
            record=dict(self.record),
            epoch_terms=epoch.terms,
            plan=self.plan,
            expelled=list(self.expelled),
            files=files,
        )
        return wire.parts_of(header, {name: one for name, one in tensors.items() if name not in files})

    @classmethod
    def from_block(cls, block: wire.Block, memory: Memory, thorough: bool = False) -> Commit:
        """Read a commit; `thorough`ly, check that what it refers to is as it was written."""
        try:
            return cls._read(block, memory, thorough)
        except ValueError as error:
            raise wire.WireError(f"not a commit: {error}") from None

    @classmethod
    def _read(cls, block: wire.Block, memory: Memory, thorough: bool) -> Commit:
        header, tensors = wire.loads(block, _CommitHeader)
        tensors |= {name: memory.tensor(one) for name, one in header.files.items()}
        if thorough:
            memory.check(header.files.values())
        epoch = Epoch(header.epoch, tuple(header.members), tuple(header.rows), header.epoch_terms)
        return cls(
            header.run,
            header.terms,
            header.rounds,
            epoch if header.epoch >= 0 else None,
            part_of("broadcast", tensors),
            part_of("server", tensors),
            part_of("chosen", tensors),
            {int(client): round_ for client, round_ in header.heard.items()},
            tuple(header.unused),
            header.record,
            _remembered(part_of("remembered", tensors)),
            tuple(header.expelled),
            header.plan,
        )


def _remembered(tensors: wire.Tensors) -> dict[int, wire.Tensors]:
    clients = sorted({int(name.split("/")[0]) for name in tensors})
    return {client: part_of(str(client), tensors) for client in clients}


def _under(prefix: str, state: wire.Tensors) -> dict[str, Any]:
    return {f"{prefix}/{name}": tensor for name, tensor in state.items()}


def part_of(prefix: str, tensors: wire.Tensors) -> dict[str, Any]:
    """Return the tensors whose names begin with `prefix/`, without it.

    >>> import torch
    >>> part_of("a", {"a/x": torch.ones(1), "b/x": torch.zeros(1)})
    {'x': tensor([1.])}
    """
    start = f"{prefix}/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def result_of(path: Path, run: str) -> wire.Tensors:
    """Return what a run handed out; refuse the file of another one, whose model may have the same shape."""
    header, tensors = wire.read_file(path, kinds.Finished)
    if header.run != run:
        raise UserError(f"{path} is the result of run {header.run[:64]!r}, and not of {run!r}")
    return tensors


def check_began(agreed: Agreed, server: Path, run: str, terms: str, plan: str) -> None:
    """Refuse to take a run for one of what is in the server's folder now, where it began with something else.

    "": nothing says with what. A model of the same shape would be taken for another one.
    """
    folder = repr(str(server))
    if terms not in ("", agreed.agreement):
        raise UserError(
            f"config.toml, `examples` or `slow_times` in federation.toml of {folder} are not those with "
            f"which run {run!r} began: put them back as they were, or choose a new name"
        )
    if plan not in ("", agreed.plan):
        raise UserError(
            f"task.py in {folder} is not the one with which run {run!r} began: put it back as it was, or "
            "choose a new name"
        )


def _references(path: Path) -> list[FileReference]:
    """Return what a commit refers to; of one that cannot be read, nothing."""
    if not ends(path):
        return []
    try:
        with path.open("rb") as file:
            header = wire.header_of(wire.unchecked(file.read(wire.LARGEST_HEADER + 256)), _CommitHeader)
            return [*header.files.values()]
    except wire.WireError:
        return []
    except OSError as error:
        if files.disk_broke(error):
            return []
        raise


_NAME = re.compile(r"\d+-\d+")


@dataclass(frozen=True, order=True)
class _Place:
    """Which round and epoch a commit is about, as the name of its file says."""

    rounds: int
    epoch: int

    @classmethod
    def of_commit(cls, commit: Commit) -> _Place:
        return cls(commit.rounds, -1 if commit.epoch is None else commit.epoch.number)

    @classmethod
    def of(cls, path: Path) -> _Place:
        rounds, epoch = path.stem.split("-")
        return cls(int(rounds), int(epoch) - 1)

    @property
    def name(self) -> str:
        # Before the first epoch the epoch is -1: what stands in the name is one more.
        return f"{self.rounds:08d}-{self.epoch + 1:08d}.commit"


class CommitLog:
    """The commits of one run, in its folder: the last few whole, and a line of record for each.

    A commit's name says its round and its epoch, so that a broken one still tells how far things had come.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._commits = folder / "commits"
        self._records = folder / RECORDS
        self.result = folder / "result"
        self._terms = folder / "terms"
        self.memory = Memory(folder / "memory")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other process out; the lock is gone when the process is."""
        self.folder.mkdir(parents=True, exist_ok=True)
        refusal = UserError(f"another server works on the run in {self.folder}")
        with files.locked(self.folder / "lock", refusal):
            yield

    def last(self) -> Commit | None:
        """Return the last commit that is whole, or None before the first.

        It only reads: anybody may, at any time. Of the files it refers to only the lengths are looked at.
        """
        return self._newest_whole()[0]

    def _began(self) -> tuple[str, str]:
        """Return terms and plan of the run, "" where neither a commit nor a file says so any more.

        The model of a finished run is a file of its own, and stays readable when its commits are lost.
        """
        try:
            last = self.last()
        except UserError:
            last = None
        if last is not None:
            return last.terms, last.plan
        said = self._terms.read_text(errors="replace") if self._terms.is_file() else ""
        terms, _, plan = said.partition(" ")
        return terms, plan

    def check_began_with(self, server: Party) -> None:
        """Refuse a server's folder with another configuration or task now, or with another run's result."""
        check_began(server.agreed, server.folder, self.folder.name, *self._began())
        if self.result.is_file():
            result_of(self.result, self.folder.name)

    def check(self) -> None:
        """Refuse a log of which no commit is whole, with everything it refers to."""
        self._newest_whole(thorough=True)

    def recover(self, say: events.Say = events.silent) -> Commit | None:
        """Return the last commit after mending what a crash or a disk left; only for who holds the lock.

        A broken commit is stepped over, and put aside. Where clients may have been called to a later epoch
        since, or agreed on its keys, the one returned continues with another.
        """
        commit, broken = self._newest_whole(thorough=True)
        if commit is None:
            self._check_unused()
            return None
        for path in broken:
            say(events.COMMIT_BROKEN(file=path.name, round=commit.rounds))
            path.replace(self.folder / f"broken-{path.name}")
        begun = max((place.epoch for place in map(_Place.of, broken)), default=-1)
        if begun > (-1 if commit.epoch is None else commit.epoch.number):
            commit = replace(commit, epoch=Epoch(begun))
            self._write(commit)
        self._repair(commit)
        return commit

    def _check_unused(self) -> None:
        """Refuse a folder in which a run has been of which no commit is left: another would overwrite it."""
        if self.result.exists() or self._records.exists():
            raise UserError(
                f"there was a run in {self.folder}, and no commit of it is left: bring a copy back, or "
                "choose a new name"
            )

    def append(self, commit: Commit) -> None:
        """Commit the next round."""
        expected = self._rounds() + 1
        if commit.rounds != expected:
            raise UserError(f"round {commit.rounds} cannot be committed: the next one is {expected}")
        if commit.rounds == 0:
            files.write_atomically(self._terms, f"{commit.terms} {commit.plan}".strip().encode())
        self._write(commit)
        self._write_record(commit)

    def update_epoch(self, commit: Commit) -> None:
        """Replace the last commit by one of the same round that differs in its epoch."""
        if self._rounds() != commit.rounds:
            raise UserError("an epoch can only change between two rounds")
        self._write(commit)

    def _write(self, commit: Commit) -> None:
        """Write a commit, and forget those before the last few with what only they refer to."""
        content = wire.sealed_parts(commit.parts(self.memory))
        files.write_atomically(self._commits / _Place.of_commit(commit).name, *content)
        for path in self._kept()[KEPT:]:
            path.unlink()
        self.memory.forget_all_but([one for path in self._kept() for one in _references(path)])

    def _kept(self) -> list[Path]:
        """Return the files of the commits there are, the newest first."""
        found = [path for path in self._commits.glob("*.commit") if _NAME.fullmatch(path.stem)]
        return sorted(found, key=_Place.of, reverse=True)

    def _rounds(self) -> int:
        """Return how many rounds the newest commit is about; -1 before the first."""
        kept = self._kept()
        return _Place.of(kept[0]).rounds if kept else -1

    def _newest_whole(self, thorough: bool = False) -> tuple[Commit | None, list[Path]]:
        """Return the newest commit that can be read, and the files of newer ones that cannot."""
        broken: list[Path] = []
        for path in self._kept():
            try:
                if not ends(path):
                    raise wire.WireError("not as it was written: it is no file")
                return Commit.from_block(wire.unsealed(path.read_bytes()), self.memory, thorough), broken
            except (OSError, wire.WireError) as error:
                if not path.exists():  # it was forgotten just now: newer ones have come
                    continue
                if isinstance(error, OSError) and not files.disk_broke(error) and not path.is_dir():
                    raise
                broken.append(path)
        if broken:
            raise UserError(
                f"no commit in {self._commits} is as it was written: the run cannot be continued from here; "
                "bring a copy back, or choose a new name"
            )
        return None, broken

    def records(self) -> list[dict[str, Any]]:
        """Return what was written about every committed round."""
        return written_records(self._records.parent)

    def _write_record(self, commit: Commit) -> None:
        if commit.record:
            files.append_durably(self._records, (json.dumps(dict(commit.record)) + "\n").encode())

    def _repair(self, commit: Commit) -> None:
        """Bring the records in line with the commit.

        The process may have died between the two writes, or a disk broke a record, or the last one's commit.
        """
        lines = self._records.read_bytes().split(b"\n") if self._records.is_file() else [b""]
        whole = [read_record(line) for line in lines[:-1]]
        kept = [place for place, one in enumerate(whole) if one is not None and one["round"] <= commit.rounds]
        if lines[-1] or len(kept) < len(whole):
            files.write_atomically(self._records, b"".join(lines[place] + b"\n" for place in kept))
        if commit.record and commit.record not in [whole[place] for place in kept[-1:]]:
            self._write_record(commit)
