"""Flower carries a federation through what it documents, and says who sits where no better than our hello."""

from __future__ import annotations

import ast
import contextlib
import inspect
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from federation_harness import PRIVATE, check_against_simulation, make, share_seeds, small_config
from trilemma.base.errors import UserError
from trilemma.federation.client.account import CAVEAT, own_statement
from trilemma.federation.client.node import Node
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.transport import FIRST_NODE
from trilemma.federation.server.commits import CommitLog
from trilemma.privacy.secrets import Identity, Roster
from trilemma.report.federations import standing

pytest.importorskip("flwr.serverapp", reason="Flower is not installed: pip install 'trilemma[flower]'")

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from trilemma import flower

CLIENTS, RUN_ID = 4, 77
NODES = {9001 + 17 * client: client for client in range(CLIENTS)}
"""Flower's names of nodes, and which client's folder each was given."""


class LocalGrid(Grid):
    """Flower's public grid, in one process: each node's ClientApp is called when a message is pushed."""

    def __init__(self, parties, nodes=NODES):
        self.parties, self.at, self.count, self.there = parties, dict(nodes), 0, {}
        self.app = flower.client_app

    set_run = run = create_message = send_and_receive = None  # not needed

    def get_node_ids(self):
        return list(self.at)

    def context(self, node, run_id=RUN_ID):
        folder = self.parties[1 + self.at[node]].folder
        return Context(run_id, node, {flower.FOLDER: str(folder)}, RecordDict(), {})

    def answer(self, node, message):
        return self.app(message, self.context(node))

    def push_messages(self, messages):
        names = []
        for message in messages:
            self.count += 1
            names.append(f"message {self.count}")
            node = message.metadata.dst_node_id
            reply = self.answer(node, message) if node in self.at else None
            if reply is not None:
                self.there[names[-1]] = reply
        return names

    def pull_messages(self, message_ids, /):
        return [Pulled(name, self.there.pop(name)) for name in list(message_ids) if name in self.there]


class Pulled:
    """A reply as a grid brings it: what it answers is in its metadata."""

    def __init__(self, name, reply):
        node = reply.metadata.src_node_id
        self.metadata, self._reply = SimpleNamespace(reply_to_message_id=name, src_node_id=node), reply

    def __getattr__(self, name):
        return getattr(self._reply, name)


@pytest.fixture(autouse=True)
def in_a_run_of_flower(monkeypatch):
    """What Flower's own process sets before it calls an app, and a message asks for."""
    with contextlib.suppress(ImportError):  # other minors ask for nothing
        from flwr.supercore.task_identity import TaskIdentity

        for name, number in (("_run_id", RUN_ID), ("_node_id", 1), ("_task_id", 1)):
            monkeypatch.setattr(TaskIdentity, name, number)


@pytest.fixture
def parties(tmp_path, monkeypatch):
    """Clients whose own processes are this one."""
    config = small_config(CLIENTS, *PRIVATE, "data.holders=all")
    made = make(tmp_path / "federation", CLIENTS, config, budget=1e9, transcript=True)
    share_seeds(made, config)
    nodes = {party.folder: Node(party) for party in made[1:]}
    monkeypatch.setattr(flower, "passed", lambda party, block: flower.answered(nodes[party.folder], block))
    return made


def carrier(grid, parties):
    return flower.OverGrid(grid, RUN_ID, lambda: parties[0].keys)


def present(over):
    """Who is there once hellos were said, answered and heard."""
    over.nodes()
    return dict(over.nodes())


def test_a_run_over_flowers_grid_is_the_simulations(parties):
    server = Context(RUN_ID, 1, {}, RecordDict(), {flower.FOLDER: str(parties[0].folder), flower.RUN: "run"})
    flower.main(LocalGrid(parties), server)
    config = parties[0].config.read_text()
    check_against_simulation(parties, config, "run")
    assert not any(record["absent"] for record in CommitLog(parties[0].run_folder("run")).records())


def test_the_verdict_says_that_flowers_server_is_trusted(parties):
    """Once for a run, in every client's own ledger, and in what its owner looks at."""
    server = Context(RUN_ID, 1, {}, RecordDict(), {flower.FOLDER: str(parties[0].folder)})
    flower.main(LocalGrid(parties), server)
    for party in parties[1:]:
        said = [(one.run, one.text) for one in own_statement(party).remarks if CAVEAT in one.text]
        assert said == [("default", f"no guarantee against a malicious server: {flower.DELIVERED}")]
    found = standing(parties[1].folder)[0]
    assert found.account.caveats == (said[0][1],)


def test_nodes_are_those_who_proved_whose_they_are(parties):
    over = carrier(LocalGrid(parties), parties)
    assert present(over) == {FIRST_NODE + client: client for client in range(CLIENTS)}


@pytest.mark.parametrize(
    "how", ["another's name", "another's node", "another run", "an old nonce", "nonsense"]
)
def test_nobody_sits_at_a_node_by_saying_so(parties, how):
    """Client 3's node says it is client 0: with its own key, or with what client 0 signed elsewhere."""
    grid, liar, victim = (
        LocalGrid(parties),
        *[node for node, client in NODES.items() if client in (0, 3)][::-1],
    )
    keys = {client: Identity.load(parties[1 + client].identity) for client in (0, 3)}

    def lies(node, message):
        nonce = message.content.config_records[flower.RECORD].get("nonce")
        if node != liar or nonce is None:
            return LocalGrid.answer(grid, node, message)
        said = {
            "another's name": lambda: keys[3].sign(flower.statement(liar, RUN_ID, nonce)),
            "another's node": lambda: keys[0].sign(flower.statement(victim, RUN_ID, nonce)),
            "another run": lambda: keys[0].sign(flower.statement(liar, RUN_ID + 1, nonce)),
            "an old nonce": lambda: keys[0].sign(flower.statement(liar, RUN_ID, bytes(32))),
            "nonsense": lambda: "no signature",
        }[how]()
        record = ConfigRecord({"client": 0, "signature": said})
        return Message(RecordDict({flower.RECORD: record}), reply_to=message)

    grid.answer = lies
    over = carrier(grid, parties)
    assert present(over) == {FIRST_NODE + client: client for client in (0, 1, 2)}
    over.send({FIRST_NODE: b"for client 0"}, 5.0)
    assert over._at[FIRST_NODE] == victim


def test_a_node_that_started_again_takes_the_place_of_the_former(parties):
    grid = LocalGrid(parties)
    over = carrier(grid, parties)
    present(over)
    grid.at[4711] = 2
    assert present(over)[FIRST_NODE + 2] == 2
    assert over._at[FIRST_NODE + 2] == 4711


def test_who_is_not_on_the_roster_any_more_is_not_there(parties):
    roster = [parties[0].keys]
    over = flower.OverGrid(LocalGrid(parties), RUN_ID, lambda: roster[0])
    present(over)
    roster[0] = Roster(roster[0].keys, removed=frozenset({1}))
    assert set(present(over).values()) == {0, 2, 3}
    roster[0] = Roster((Identity.generate().public, *roster[0].keys[1:]), removed=frozenset({1}))
    assert set(present(over).values()) == {2, 3}, "client 0 exchanged its key, and has not proven the new one"


def test_refusals_failures_and_silence_are_told_apart(parties):
    grid = LocalGrid(parties)
    over = carrier(grid, parties)
    present(over)
    broken, silent = (node for node, client in NODES.items() if client in (2, 3))

    def answer(node, message):
        if node == broken:
            return Message(Error(2, "the app crashed"), reply_to=message)
        return None if node == silent else LocalGrid.answer(grid, node, message)

    grid.answer = answer
    asked = over.send(dict.fromkeys([FIRST_NODE + client for client in range(CLIENTS)], b"no block"), 5.0)
    replies = {reply.node - FIRST_NODE: reply for reply in over.fetch(list(asked))}
    assert set(replies) == {0, 1, 2}
    assert replies[0].refused
    assert replies[0].why.startswith("block: ")
    assert replies[2].unreached
    assert "the app crashed" in replies[2].why
    assert over.fetch(list(asked)) == []


def test_another_node_answers_nobody_elses_question(parties):
    grid = LocalGrid(parties)
    over = carrier(grid, parties)
    present(over)
    (question,) = over.send({FIRST_NODE: b"no block"}, 5.0)
    liar = list(NODES)[3]
    (theirs,) = over.send({FIRST_NODE + 3: b"no block"}, 5.0)
    honest, grid.there[question] = grid.there[question], grid.there.pop(theirs)
    assert grid.there[question].metadata.src_node_id == liar
    assert over.fetch([question, theirs]) == []
    grid.there[question] = honest
    assert [reply.node for reply in over.fetch([question])] == [FIRST_NODE]


def test_a_clients_own_process_stays_and_answers_one_message_after_the_other(parties, monkeypatch):
    """Flower starts an app for every message: what a client keeps in memory is in a process of its own."""
    monkeypatch.undo()
    client = parties[1]
    for path in (client.folder / "secrets").glob("reproducible-*"):
        path.unlink()
    with pytest.raises(UserError, match="its own process does not answer"):
        flower.passed(client, b"no block")
    own = subprocess.Popen([sys.executable, "-m", "trilemma.flower", str(client.folder)])
    try:
        said, deadline = b"", time.monotonic() + 60
        while not said and time.monotonic() < deadline:
            with contextlib.suppress(UserError):
                said = flower.passed(client, b"no block")
            time.sleep(0.1)
        assert said[:1] == flower.REFUSED
        assert said[1:].startswith(b"block: ")
        hello = kinds.Hello(run="run", epoch=0, terms=parties[0].agreed.terms)
        assert flower.passed(client, wire.dumps(hello))[:1] == flower.ANSWERED
        assert (client.running / "flower").stat().st_mode & 0o777 == 0o700
        with pytest.raises(UserError, match="another process works in"):
            flower.serve(client.folder)
    finally:
        own.kill()
        own.wait()


DOCUMENTED = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}


def test_nothing_is_used_that_flower_does_not_document():
    """No private module, no private name, no patched class: the next minor keeps what is documented."""
    text = Path(inspect.getfile(flower)).read_text()
    tree = ast.parse(text)
    imported = {node.module: node.names for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    flowers = {module: names for module, names in imported.items() if (module or "").startswith("flwr")}
    assert set(flowers) == DOCUMENTED
    assert not any(
        alias.name.startswith("flwr")
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    )
    names = {alias.name for found in flowers.values() for alias in found}
    assert not any(name.startswith("_") for name in names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            assert own or not node.attr.startswith("_"), f"line {node.lineno}: {node.attr} is private"
            assert own or isinstance(node.ctx, ast.Load), f"line {node.lineno}: {node.attr} is patched"
        assert not (isinstance(node, ast.Name) and node.id in ("setattr", "__import__", "getattr"))
    assert len(text.splitlines()) <= 350
