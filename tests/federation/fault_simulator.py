"""A whole federation in one process, to which a list of faults happens; what must hold whatever they are.

Server, nodes, sessions, journals, ledgers and commits are the real ones. Simulated are what faults happen to:

* **the carrier**: loses requests or replies, delivers them twice, late, and in another order;
* **the disks**: a party dies at any of its writes, before it, after it or in the middle; files are set back
  to what they held before;
* **the clock**: it moves when somebody waits, or jumps;
* **the arithmetic**: there is nothing to learn. Client i's message of round t is a mark at place (i, t): how
  many of its messages have been used so far, this one included. So the finished model is the list of what was
  counted: a round that was counted twice, or not at all, or a step that was not taken back, is a wrong number
  in it. The last place is a number that no two messages share, as fresh noise would be. And the server
  remembers the sum of each client's messages, a copy of the same list: where f = 1 and nobody lies
  in files, as for long messages. A liar's mark is negative: the server expels it, and takes back whatever
  it counted of it.

What is promised is checked while things happen (`Releases`) and at the end (`check_end`). Rounds cost a token
price: which accountant says what is tested elsewhere, here it matters that entries are made.
"""

from __future__ import annotations

import atexit
import errno
import itertools
import json
import os
import shutil
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import torch

from federation_harness import PRIVATE, make, small_config
from trilemma.base import files
from trilemma.base.records import Record
from trilemma.federation.client import node, sessions
from trilemma.federation.client.node import Node
from trilemma.federation.client.sessions import Session, epoch_name
from trilemma.federation.identity.rosters import SignedRoster
from trilemma.federation.party.agreed import Agreed
from trilemma.federation.party.layout import Party
from trilemma.federation.party.permission import Permission
from trilemma.federation.party.public_facts import Timing
from trilemma.federation.party.task import PartyTask, load_task
from trilemma.federation.protocol import confirmation, disk_backed, kinds, wire
from trilemma.federation.protocol.epochs import Epoch, EpochsStopped
from trilemma.federation.protocol.reasons import Refused
from trilemma.federation.protocol.transport import Reply
from trilemma.federation.server import commits, coordinator
from trilemma.federation.server.coordinator import open_run
from trilemma.federation.server.exchange import Clock
from trilemma.learning.defences.evidence import Expulsion
from trilemma.learning.messages import Length, MessageLayout, MessageLengths, Messages, Part
from trilemma.learning.protocol import Algorithm, ClientStep, ServerStep, Start
from trilemma.privacy.ledger import ledger as ledgers
from trilemma.privacy.ledger.ledger import Ledger
from trilemma.privacy.ledger.lines import read_entries
from trilemma.privacy.secrets import agreement, check_signature

RUN = "run"
HONEST_FINISH = files.NamedByContent.finish
TIMING = Timing(round_limit=1.0, join_limit=1.0, poll=0.25)


@dataclass(frozen=True)
class Shape:
    """How many clients there are, rounds, how many may fail, and who lies from the second round on."""

    clients: int
    rounds: int
    tolerate: int
    liar: int | None = None


LYING = "lying"
SHAPES = {0: Shape(2, 2, 0), 1: Shape(3, 3, 1), LYING: Shape(4, 3, 1, liar=3)}
"""The smallest federations of which f may fail: with f = 0 whoever is missed costs an epoch, with f = 1 it is
missed for a round, or for two; and one whose server expels a liar and goes on with the others."""


# --- what may happen -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Carried:
    """What the carrier does to the `nth` block for `client`; it is late by so many `looks` of the server."""

    client: int
    nth: int
    how: Literal["lose request", "lose reply", "repeat", "late request", "late reply"]
    looks: int = 1


@dataclass(frozen=True)
class Crash:
    """`party` (-1: the server) dies at its `nth` write; a client is back after so many `looks`."""

    party: int
    nth: int
    how: Literal["before", "torn", "after"]
    looks: int = 0


@dataclass(frozen=True)
class Full:
    """The disk of `party` (-1: the server) is full at its `nth` write and so many more; its process lives on.

    Half of what was to be written, or nothing, is on it.
    """

    party: int
    nth: int
    more: int = 0
    how: Literal["before", "torn"] = "torn"


@dataclass(frozen=True)
class Killed:
    """The server dies when it has sent for the `nth` time, or just before."""

    nth: int
    how: Literal["before", "after"]


@dataclass(frozen=True)
class SetBack:
    """Before its `nth` block reaches `client`, `what` is set back by so many `versions`."""

    client: int
    nth: int
    what: Literal["session", "journal", "ledger", "joined", "state"]
    versions: int


@dataclass(frozen=True)
class ServerSetBack:
    """When it has sent for the `nth` time, the server dies, and its newest commits are lost."""

    nth: int
    versions: int


@dataclass(frozen=True)
class NewKeys:
    """When it has sent for the `nth` time, the server is stopped, and continues with an epoch of new keys."""

    nth: int


@dataclass(frozen=True)
class Jump:
    """When the server sends for the `nth` time, the clock jumps."""

    nth: int
    seconds: float


@dataclass(frozen=True)
class MemoryBroken:
    """When it has sent for the `nth` time, the server dies, and its disk breaks a file of its memory."""

    nth: int
    how: Literal["changed", "cut", "gone"]


Fault = Carried | Crash | Full | Killed | SetBack | ServerSetBack | NewKeys | Jump | MemoryBroken


AT_SENDS = Killed | ServerSetBack | NewKeys | Jump | MemoryBroken


class Dies(BaseException):
    """A process is gone."""


# --- what is learned: nothing, but everything is counted --------------------------------------------------


@dataclass(frozen=True)
class SummingCodec:
    """The mark travels; its receiver also remembers the sum of all there were."""

    dim: int

    @property
    def longest(self) -> Length:
        return Length(self.dim, 4 * self.dim)

    def lengths(self, parts) -> MessageLengths:
        return MessageLengths.of(len(parts["mark"]), self.longest)

    def encode(self, parts) -> bytes:
        return parts["mark"].numpy().tobytes()

    def decode(self, data, before, asked=None):
        mark = torch.frombuffer(bytearray(data), dtype=torch.float32)
        return {"mark": mark, "sum": before["sum"] + mark}


def marking(shape: Shape) -> Algorithm:
    """Return the algorithm whose model is the list of what was counted."""
    dim = shape.clients * shape.rounds + 1
    fresh = itertools.count(1)

    def init(model, ids, key):
        nothing, known = {"params": torch.zeros(dim)}, {}
        if shape.liar is not None:
            known = {
                "sums": torch.zeros(shape.clients, dim),
                "in": torch.ones(shape.clients, dtype=torch.bool),
            }
        return Start(nothing, {"used": torch.zeros(len(ids))}, {**nothing, **known})

    def client(broadcast, state, me, round_, key):
        ((identity,), (used,)) = me.ids, state["used"]
        mark = torch.zeros(1, dim)
        lies = identity == shape.liar and round_ > 0
        mark[0, identity * shape.rounds + round_] = -1 if lies else used + 1
        mark[0, -1] = next(fresh) % 4096
        return ClientStep(Messages(mark), {"used": state["used"] + 1})

    def server(messages, state, round_, key):
        heard = torch.isfinite(messages.vectors).all(1)
        params = {"params": state["params"] + messages.vectors[heard].sum(0)}
        return ServerStep(params, params, {"weights": heard.float()})

    def remembering(messages, state, round_, key):
        senders, rows = list(messages.senders), messages.vectors
        lying = (rows[:, :-1] < 0).any(1)
        found = [client for client, lies in zip(senders, lying.tolist(), strict=True) if lies]
        sums, members = state["sums"].clone(), state["in"].clone()
        sums[senders] += torch.where(lying[:, None], 0.0, rows)
        params = state["params"] + rows[~lying].sum(0) - sums[found].sum(0)
        sums[found], members[found] = 0.0, False
        after = {"params": params, "sums": sums, "in": members}
        expelled = tuple(Expulsion(client, "length", 2.0, 1.0) for client in found)
        return ServerStep({"params": params}, after, {"weights": (~lying).float(), "expelled": expelled})

    parts = Part("mark", (dim,)), Part("sum", (dim,))
    layout = MessageLayout(parts, ("mark",), SummingCodec(dim), remembered=("sum",))
    plain = Algorithm("marking", init, client, server, lambda model: layout)
    if shape.liar is None:
        return plain
    return replace(
        plain, server=remembering, members=lambda state: tuple(torch.nonzero(state["in"])[:, 0].tolist())
    )


@cache
def folders(name: int | str) -> tuple[Path, list[Party], PartyTask]:
    """Make a federation's folders once; what happens in them is removed before the next list of faults."""
    shared_memory = Path("/dev/shm")  # thousands of lists write millions of files
    where = shared_memory if shared_memory.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="trilemma-faults-", dir=where)) / "federation"
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    shape = SHAPES[name]
    config = small_config(shape.clients, *PRIVATE, tolerate=shape.tolerate, rounds=shape.rounds)
    parties = make(folder, shape.clients, config, timing=TIMING, budget=1e6)
    for party in parties[1:]:
        party.budget.write_text(party.budget.read_text() + "least_members = 2\n")
        Permission().with_plan("the plan").save(party.allowed)
    task = load_task(parties[0])
    learned = replace(task, resolved=replace(task.resolved, algorithm=marking(shape)))
    learned.__dict__["score"] = lambda params: {}
    return folder.parent, parties, learned


# --- disks -------------------------------------------------------------------------------------


@dataclass
class Disk:
    """What parties wrote, version by version, and when writing kills them."""

    parties: list[Party]
    crashes: dict[tuple[int, int], Crash]
    full: dict[tuple[int, int], Full] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    versions: dict[Path, list[tuple[int, bytes | None]]] = field(default_factory=dict)
    tick: int = 0
    died: Crash | None = None

    def owner(self, path: Path) -> int:
        home = str(self.parties[0].folder.parent)
        name = str(path)[len(home) + 1 :].partition("/")[0]
        return -1 if name == "server" else int(name.removeprefix("client-"))

    @contextmanager
    def writing(self, path: Path, torn: Callable[[], None]) -> Iterator[None]:
        """Surround a write: its party may die before it, in its middle (`torn` leaves half) or after."""
        owner = self.owner(path)
        self.writes[owner] += 1
        if (full := self.full.pop((owner, self.writes[owner]), None)) is not None:
            if full.how == "torn":
                torn()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        crash = self.crashes.pop((owner, self.writes[owner]), None)
        if crash is not None and crash.how != "after":
            if crash.how == "torn":
                torn()
            self.died = crash
            raise Dies
        before = path.read_bytes() if path.is_file() else None
        history = self.versions.setdefault(path, [(self.tick, before)])
        yield
        self.tick += 1
        history.append((self.tick, path.read_bytes()))
        if crash is not None:
            self.died = crash
            raise Dies

    def write_atomically(self, path: Path, *parts: bytes, secret: bool = False) -> None:
        content = b"".join(parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        with self.writing(path, lambda: temporary.write_bytes(content[: len(content) // 2])):
            path.write_bytes(content)

    def finish(self, file: files.NamedByContent) -> Path:
        path = file._temporary.with_name(file._checksum.hexdigest())
        with self.writing(path, lambda: path.with_name(".incomplete").write_bytes(b"half")):
            return HONEST_FINISH(file)

    def append_durably(self, path: Path, content: bytes) -> None:
        with self.writing(path, lambda: self._append(path, content[: len(content) // 2])):
            self._append(path, content)

    def _append(self, path: Path, content: bytes) -> None:
        with path.open("ab") as file:
            file.write(content)

    def set_back(self, path: Path, versions: int) -> None:
        """Put back what a file held so many writes ago."""
        history = self.versions.get(path)
        if history is not None:
            self._put(path, history[max(0, len(history) - 1 - versions)][1])

    def set_back_all(self, folder: Path, versions: int) -> None:
        """Put back what everything in a folder held so many of its writes ago."""
        inside = {path: history for path, history in self.versions.items() if folder in path.parents}
        ticks = sorted({tick for history in inside.values() for tick, _ in history[1:]})
        moment = ticks[-1 - versions] if versions < len(ticks) else -1
        for path, history in inside.items():
            self._put(path, next((old for tick, old in reversed(history) if tick <= moment), history[0][1]))

    def _put(self, path: Path, content: bytes | None) -> None:
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(content)


# --- what must never happen -------------------------------------------------------------------------------


@dataclass
class Releases:
    """Everything that left a client, and the promises about it that are checked as it leaves."""

    parties: list[Party]
    messages: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    vectors: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    noise: dict[tuple[int, bytes, int], bytes] = field(default_factory=dict)
    asked: dict[tuple[object, ...], str] = field(default_factory=dict)

    def leave(self, client: int, block: bytes) -> None:
        """A node answered; whether that ever arrives does not matter."""
        if wire.kind_of(block) != "answer":
            return
        header, tensors = wire.loads(block, kinds.Answer)
        place = (client, header.epoch, header.round)
        if place in self.messages:
            assert self.messages[place] == block, f"two different answers: {place}"
            return  # said again, and nothing new with it
        self.messages[place] = block
        self.vectors[place] = tensors["encoded"].view(torch.float32)
        party = self.parties[1 + client]
        secrets = Session(party, RUN).secrets
        assert secrets is not None
        for key in secrets.pairs.values():
            known = self.noise.setdefault((client, key, header.round), block)
            assert known == block, f"noise used for two messages: {place}"
        entries = [(entry.run, entry.round) for entry in read_entries(party.ledger)]
        for one, epoch, round_ in self.messages:
            paid = (epoch_name(RUN, epoch), round_) in entries
            assert one != client or paid, f"released and not in the ledger: {(client, epoch, round_)}"

    def ask(self, block: bytes) -> None:
        """The server asks: whatever it asks again is what it asked before, to the last byte."""
        kind = wire.kind_of(block)
        about = json.loads(block[len(wire.MAGIC) + 8 :].split(b'"tensors"')[0].rstrip(b", ") + b"}")["fields"]
        place = (kind, about.get("epoch"), about.get("round"))
        assert self.asked.setdefault(place, wire.digest(block)) == wire.digest(block), f"changed: {place}"


# --- the carrier -------------------------------------------------------------------------------------


@dataclass
class Carrier:
    """Carries blocks between the server and nodes in this process, as well as the faults allow."""

    world: World
    time: float = 0.0
    looks: int = 0
    sent: int = 0
    received: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    questions: Iterator[int] = field(default_factory=itertools.count)
    requests: list[tuple[int, str, int, bytes]] = field(default_factory=list)
    replies: list[tuple[int, Reply]] = field(default_factory=list)

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.time, self._pass)

    def _pass(self, seconds: float) -> None:
        assert seconds > 0, "who waits for nothing waits for ever"
        self.time += seconds

    def nodes(self) -> Mapping[int, int]:
        """A node's number is no client's, as elsewhere."""
        self.world.revive(self.looks)
        return {100 + client: client for client in self.world.nodes}

    def send(self, blocks: Mapping[int, bytes], lifetime: float) -> Mapping[str, int]:
        self.sent += 1
        self.world.before_sending(self.sent)
        questions = {f"question {next(self.questions)}": target for target in blocks}
        for question, target in questions.items():
            self._carry(question, target - 100, blocks[target])
        self.world.after_sending(self.sent)
        return questions

    def _carry(self, question: str, client: int, block: bytes) -> None:
        if not self.world.server_was_set_back:
            self.world.releases.ask(block)
        self.received[client] += 1
        fault = self.world.carried.pop((client, self.received[client]), None)
        how = fault.how if fault is not None else ""
        looks = fault.looks if fault is not None else 0
        if how == "lose request":
            return
        if how == "late request":
            self.requests.append((self.looks + looks, question, client, block))
            return
        reply = self._deliver(question, client, block)
        if how == "repeat":
            again = self._deliver(question, client, block)
            self._arrive(self.looks, again)
        if how != "lose reply":
            self._arrive(self.looks + (looks if how == "late reply" else 0), reply)

    def _deliver(self, question: str, client: int, block: bytes) -> Reply | None:
        """Let a node answer, if it is there and survives that."""
        self.world.revive(self.looks)
        if client not in self.world.nodes:
            return None
        self.world.before_delivery(client, self.received[client])
        try:
            answer = self.world.nodes[client].answer(block)
        except Refused as refusal:
            return Reply(100 + client, error=str(refusal), refused=True, question=question)
        except Dies:
            self.world.bury(client, self.looks)
            return None
        self.world.releases.leave(client, answer)
        return Reply(100 + client, answer, question=question)

    def _arrive(self, when: int, reply: Reply | None) -> None:
        if reply is not None:
            self.replies.append((when, reply))

    def fetch(self, questions: Collection[str]) -> list[Reply]:
        self.looks += 1
        due = [one for one in self.requests if one[0] <= self.looks]
        self.requests = [one for one in self.requests if one[0] > self.looks]
        for _, question, client, block in due:
            self._arrive(self.looks, self._deliver(question, client, block))
        there = [reply for when, reply in self.replies if when <= self.looks and reply.question in questions]
        self.replies = [(when, reply) for when, reply in self.replies if when > self.looks]
        return there


# --- the world -------------------------------------------------------------------------------------


class World:
    """A federation, and the faults that are still to happen to it."""

    def __init__(self, faults: Collection[Fault], name: int | str) -> None:
        _, self.parties, self.task = folders(name)
        self.shape = SHAPES[name]
        self.faults, self.rounds, self.tolerate = tuple(faults), self.shape.rounds, self.shape.tolerate
        self.carried = {(one.client, one.nth): one for one in faults if isinstance(one, Carried)}
        self.set_back = {(one.client, one.nth): one for one in faults if isinstance(one, SetBack)}
        self.at_sends = [one for one in faults if isinstance(one, AT_SENDS)]
        crashes = {(one.party, one.nth): one for one in faults if isinstance(one, Crash)}
        full = [one for one in faults if isinstance(one, Full)]
        self.disk = Disk(
            self.parties,
            crashes,
            {(one.party, one.nth + k): one for one in full for k in range(one.more + 1)},
        )
        self.releases = Releases(self.parties)
        self.carrier = Carrier(self)
        self.nodes: dict[int, Node] = {}
        self.dead: dict[int, int] = {}
        self.server_was_set_back = False
        self.said: list[str] = []

    @contextmanager
    def entered(self) -> Iterator[World]:
        """Begin with empty disks, and let everybody write through the simulated ones."""
        for party in self.parties:
            for name in ("state", "memory", "run", "proposals"):
                shutil.rmtree(party.folder / name, ignore_errors=True)
        disk, task = self.disk, self.task
        honest_append = Ledger._append

        def append(ledger, record):
            def torn() -> None:
                disk._append(ledger.path, b"0" * 40)

            with disk.writing(ledger.path, torn):
                honest_append(ledger, record)

        def price(past, delta, accountants=()):
            return {"exact": 1e-3 * sum(past.values())}

        with ExitStack() as patches:
            for target, name, stand_in in (
                (files, "write_atomically", disk.write_atomically),
                (files, "append_durably", disk.append_durably),
                (files.NamedByContent, "finish", lambda file: disk.finish(file)),
                (disk_backed, "IN_MEMORY", disk_backed.IN_MEMORY if self.shape is SHAPES[0] else 0),
                (files, "sync_folder", lambda folder: None),
                (Ledger, "_append", append),
                (ledgers, "cost", price),
                (node, "load_task", lambda party, **_: task),
                (coordinator, "load_task", lambda party, **_: task),
                # For speed: one process needs no locks, and what nobody changes is read once.
                (files, "locked", lambda path, refusal=None: nullcontext()),
                (tomllib, "loads", _read_once(tomllib.loads)),
                (Agreed, "terms", "the terms"),
                (Agreed, "plan", "the plan"),
                (SignedRoster, "read", _read_roster_once),
                *((room, "check_signature", _checked_once) for room in (sessions, confirmation, agreement)),
            ):
                patches.enter_context(patch.object(target, name, stand_in))
            self.nodes = {client: self._new_node(client) for client in range(len(self.parties) - 1)}
            yield self

    def _new_node(self, client: int) -> Node:
        return Node(self.parties[1 + client])

    def bury(self, client: int, looks: int) -> None:
        """A client's process is gone for a while."""
        del self.nodes[client]
        assert self.disk.died is not None
        self.dead[client] = looks + self.disk.died.looks

    def revive(self, looks: int) -> None:
        """Start those again whose time has come."""
        for client in [client for client, when in self.dead.items() if when <= looks]:
            del self.dead[client]
            self.nodes[client] = self._new_node(client)

    def before_delivery(self, client: int, nth: int) -> None:
        fault = self.set_back.pop((client, nth), None)
        if fault is None:
            return
        party = self.parties[1 + client]
        places = {
            "session": party.run_folder(RUN) / "session",
            "journal": party.run_folder(RUN) / "journal",
            "ledger": party.ledger,
            "joined": party.state / "joined",
        }
        if fault.what == "state":
            self.disk.set_back_all(party.state, fault.versions)
        else:
            self.disk.set_back(places[fault.what], fault.versions)
        self.nodes[client] = self._new_node(client)

    def before_sending(self, nth: int) -> None:
        for fault in [one for one in self.at_sends if one.nth == nth]:
            if isinstance(fault, Jump):
                self.carrier.time += fault.seconds
                self.at_sends.remove(fault)
            elif isinstance(fault, Killed) and fault.how == "before":
                self.at_sends.remove(fault)
                raise Dies

    def after_sending(self, nth: int) -> None:
        for fault in [one for one in self.at_sends if one.nth == nth]:
            self.at_sends.remove(fault)
            if isinstance(fault, NewKeys):
                self._renew_keys()
            if isinstance(fault, ServerSetBack):
                self._set_server_back(fault.versions)
            if isinstance(fault, MemoryBroken):
                self._break_memory(fault.how)
            raise Dies

    @property
    def log(self) -> commits.CommitLog:
        return commits.CommitLog(self.parties[0].run_folder(RUN))

    def _renew_keys(self) -> None:
        last = self.log.last()
        if last is not None and last.epoch is not None:
            self.log.update_epoch(replace(last, epoch=Epoch(last.epoch.number)))

    def _set_server_back(self, versions: int) -> None:
        kept = self.log._kept()
        for path in kept[: min(versions, len(kept) - 1)]:
            path.unlink()
            self.server_was_set_back = True

    def _break_memory(self, how: str) -> None:
        """Break a file that the newest commit needs, and the oldest does not."""
        needed = [{one.file for one in commits._references(path)} for path in self.log._kept()]
        for name in sorted(needed[0] - needed[-1])[:1]:
            path = self.log.memory.folder / name
            content = path.read_bytes()
            if how == "gone":
                path.unlink()
            else:
                path.write_bytes(content[:-1] if how == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
            self.server_was_set_back = True

    def run(self) -> bool:
        """Run, and start again whoever died, until the run is over; tell whether it came to an end."""
        for _ in range(len(self.faults) + len(self.disk.full) + 3):
            runner = open_run(
                self.parties[0],
                RUN,
                self.carrier,
                lambda event: self.said.append(event.text),
                self.carrier.clock,
            )
            with suppress(Dies, EpochsStopped, OSError):
                runner.go()
                return True
            self.carrier.time += 60.0  # a supervisor, or an operator, needs a while
            self.revive(10**9)
        return False

    # --- what must hold in the end ---

    def check_end(self, finished: bool) -> None:
        lost_memory = {one.client for one in self.faults if isinstance(one, SetBack)}
        if not finished:
            held_up = self.server_was_set_back or len(lost_memory) > self.tolerate
            assert held_up, f"the run does not end: {self.said[-12:]}"
            return
        records = self.log.records()
        assert [record["round"] for record in records] == list(range(1, self.rounds + 1))
        heard = [
            (int(client), record["epoch"], record["round"] - 1)
            for record in records
            for client, weight in record["weights"].items()
            if weight
        ]
        gone = self._check_expulsion(records)
        heard = [one for one in heard if one[0] not in gone]
        params = wire.read_file(self.log.result, kinds.Finished)[1]["params"]
        replayed = sum((self.releases.vectors[one] for one in heard), start=torch.zeros_like(params))
        assert torch.equal(params, replayed), f"the model is not what was released: {params - replayed}"
        commit = self.log.recover()
        remembered = commit.remembered
        for client, kept in enumerate(commit.server.get("sums", ())):
            told = [self.releases.vectors[one] for one in heard if one[0] == client]
            assert torch.equal(kept, sum(told, start=torch.zeros_like(params))), (
                f"the sum of client {client} is not what was heard"
            )
        for client, kept in remembered.items():
            told = [self.releases.vectors[one] for one in heard if one[0] == client]
            assert torch.equal(kept["sum"], sum(told, start=torch.zeros_like(params))), (
                f"what is remembered of client {client} is not what was heard"
            )
        assert set(remembered) == {client for client, _, _ in heard}
        counted = params[:-1].reshape(-1, self.rounds)
        for client, row in enumerate(counted.tolist()):
            assert client not in gone or not any(row), f"what client {client} did was not taken back: {row}"
            used = [round_ for one, _, round_ in sorted(heard, key=lambda one: one[2]) if one == client]
            assert [round_ for round_, mark in enumerate(row) if mark] == used, f"client {client}: {row}"
            # A server that has forgotten a round cannot tell who was heard in it: that step may stay.
            if client not in lost_memory and not self.server_was_set_back:
                marks = [row[round_] for round_ in used]
                assert marks == list(range(1, len(used) + 1)), (
                    f"client {client} did not take steps back: {row}"
                )

    def _check_expulsion(self, records: list[dict]) -> set[int]:
        """Return who was expelled: a liar in the first round it was heard lying in, once, and nobody else."""
        expelled = [(one["client"], record) for record in records for one in record["expelled"]]
        liar = self.shape.liar
        lied = [
            record
            for record in records[1:]
            if str(liar) in record["weights"] and liar not in Record.read(record).unheard
        ]
        assert [client for client, _ in expelled] == [liar] * bool(lied), f"expelled: {expelled}"
        if not lied:
            return set()
        assert lied == [expelled[0][1]], "who is expelled is heard no more"
        later = [record for record in records if record["round"] > lied[0]["round"]]
        assert all(record["epoch"] > lied[0]["epoch"] for record in later), "secrets are shared anew"
        last = self.log.last()
        assert last is not None
        assert [one.client for one in last.expelled] == [liar]
        for party in self.parties[1:]:
            known = Session(party, RUN).secrets
            others = known is not None and any(known.epoch == record["epoch"] for record in later)
            assert not others or liar not in known.members, f"{party.name} shares secrets with the liar"
        return {liar}


def _read_once(loads: Callable[[str], dict]) -> Callable[[str], dict]:
    once = cache(loads)
    return lambda text: dict(once(text))


_checked_once = cache(check_signature)
_read_roster_once = cache(SignedRoster.read)


def happens(faults: Collection[Fault], name: int | str) -> World:
    """Let a list of faults happen to a federation, and check everything that is promised."""
    with World(faults, name).entered() as world:
        world.check_end(world.run())
        return world
