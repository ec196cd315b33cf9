"""The server's memory: after each round everything needed to continue is replaced by one atomic write.

A server that is killed at any moment finds the last committed round when it starts again, asks the same
question as before (clients then give the same answer as before), and cannot apply a round twice: a commit of
any round but the next one is refused, and a lock that dies with its process keeps a second server out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trilemma import files
from trilemma.errors import UserError
from trilemma.federation import wire
from trilemma.federation.epochs import Epoch


class _CommitHeader(wire.Header):
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


@dataclass(frozen=True)
class Commit:
    """Where a run stands after `rounds` rounds.

    `chosen` is the model the run returns if it ends here, where that is not the latest. `heard` has the round
    in which each client's answer was last used; `unused` are the clients whose answer was not used when they
    were last asked; `record` is what is said about the last round. `remembered` is what the server needs of
    each client's last message to understand its next one.
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

    def block(self) -> bytes:
        """Return the commit as bytes."""
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
        )
        parts = {"broadcast": self.broadcast, "server": self.server, "chosen": self.chosen}
        parts |= {f"remembered/{client}": kept for client, kept in sorted(self.remembered.items())}
        return wire.dumps(
            header, {k: v for name, part in parts.items() for k, v in _under(name, part).items()}
        )

    @classmethod
    def from_block(cls, block: bytes) -> Commit:
        """Read a commit."""
        header, tensors = wire.loads(block, _CommitHeader)
        epoch = Epoch(header.epoch, tuple(header.members), tuple(header.rows)) if header.epoch >= 0 else None
        return cls(
            header.run,
            header.terms,
            header.rounds,
            epoch,
            part_of("broadcast", tensors),
            part_of("server", tensors),
            part_of("chosen", tensors),
            {int(client): round_ for client, round_ in header.heard.items()},
            tuple(header.unused),
            header.record,
            _remembered(part_of("remembered", tensors)),
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


class CommitLog:
    """The commits of one run, in its folder: the last one whole, and a line of record for each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "commit"
        self._records = folder / "rounds.jsonl"
        self.result = folder / "result"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other process out; the lock is gone when the process is."""
        self.folder.mkdir(parents=True, exist_ok=True)
        refusal = UserError(f"another server works on the run in {self.folder}")
        with files.locked(self.folder / "lock", refusal):
            yield

    def last(self) -> Commit | None:
        """Return the last commit, or None before the first. It only reads: anybody may, at any time."""
        return Commit.from_block(self._file.read_bytes()) if self._file.is_file() else None

    def recover(self) -> Commit | None:
        """Return the last commit after mending what a crash left; only for who holds the lock."""
        commit = self.last()
        if commit is not None:
            self._repair(commit)
        return commit

    def append(self, commit: Commit) -> None:
        """Commit the next round."""
        before = self.last()
        expected = 0 if before is None else before.rounds + 1
        if commit.rounds != expected:
            raise UserError(f"round {commit.rounds} cannot be committed: the next one is {expected}")
        files.write_atomically(self._file, commit.block())
        self._write_record(commit)

    def update_epoch(self, commit: Commit) -> None:
        """Replace the last commit by one of the same round that differs in its epoch."""
        before = self.last()
        if before is None or before.rounds != commit.rounds:
            raise UserError("an epoch can only change between two rounds")
        files.write_atomically(self._file, commit.block())

    def records(self) -> list[dict[str, Any]]:
        """Return what was written about every committed round; a line still being written is left out."""
        if not self._records.is_file():
            return []
        return [json.loads(line) for line in self._records.read_text().split("\n")[:-1]]

    def _write_record(self, commit: Commit) -> None:
        if commit.record:
            files.append_durably(self._records, (json.dumps(dict(commit.record)) + "\n").encode())

    def _repair(self, commit: Commit) -> None:
        """Bring the records in line with the commit: the process may have died between the two writes."""
        lines = self._records.read_bytes().split(b"\n") if self._records.is_file() else [b""]
        whole = [json.loads(line) for line in lines[:-1]]
        if lines[-1]:
            files.write_atomically(self._records, b"".join(line + b"\n" for line in lines[:-1]))
        if commit.record and commit.record not in whole[-1:]:
            self._write_record(commit)
