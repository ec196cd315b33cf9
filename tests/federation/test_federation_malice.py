"""A malicious server against real nodes, block by block: what it may try and what it gets.

Nobody coordinates here. `Server` says to each node whatever it likes, as an attacker with the server's
network position would.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from malicious_server import DIM, Server, entries, opened, refusal

from federation_harness import PRIVATE, Direct, asks, coordinator, make, small_config
from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.federation.client import sessions, spending
from trilemma.federation.client.node import Node
from trilemma.federation.client.rounds import RunAnswers
from trilemma.federation.client.sessions import Session
from trilemma.federation.party.layout import REPRODUCIBLE
from trilemma.federation.party.permission import Permission
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.confirmation import Confirmation, MemberList, Position, Witness
from trilemma.federation.protocol.epochs import EpochsStopped
from trilemma.federation.protocol.reasons import Reason, Refused
from trilemma.federation.protocol.transport import FIRST_NODE, Reply
from trilemma.privacy.ledger.ledger import Ledger
from trilemma.privacy.secrets import Identity, Roster
from trilemma.privacy.threats.covariance import SecretGraph, covariance

CLIENTS = 5


@pytest.fixture
def parties(tmp_path):
    return make(tmp_path / "federation", CLIENTS, small_config(CLIENTS, *PRIVATE), budget=1e6)


# --- batches (defect 1) -----------------------------------------------------------------------------------


def test_every_release_has_a_batch_of_its_own(tmp_path):
    """Without noise a message shows its batch: the same round in other epochs and runs shows another one."""
    parties = make(tmp_path / "federation", 2, small_config(2, "algorithm.batch_size=10", tolerate=0))
    sent = []
    for run in ("monday", "tuesday"):
        server = Server(parties, run)
        for epoch in range(3):
            server.open(epoch, (0, 1))
            sent.append(server.ask(0, epoch, 0))
    assert all(not torch.equal(a, b) for place, a in enumerate(sent) for b in sent[:place])


def test_a_release_is_replayed_and_never_drawn_again(tmp_path):
    parties = make(tmp_path / "federation", 2, small_config(2, "algorithm.batch_size=10", tolerate=0))
    server = opened(parties)
    first = server.ask(0, 0, 0)
    assert torch.equal(server.ask(0, 0, 0), first)
    server.nodes[0] = Node(parties[1])
    assert torch.equal(server.ask(0, 0, 0), first), "after a restart too"


def test_all_of_a_clients_randomness_is_its_own(tmp_path):
    """Dropout and coins are drawn from the key an algorithm is given: nobody else can know it."""
    parties = make(tmp_path / "federation", 2, small_config(2, tolerate=0))
    server = Server(parties)
    node, keys = server.nodes[0], []
    algorithm = node.task.resolved.algorithm

    def spy(broadcast, state, clients, round_, key):
        keys.append(key.integer())
        return algorithm.client(broadcast, state, clients, round_, key)

    resolved = replace(node.task.resolved, algorithm=replace(algorithm, client=spy))
    public = node.task.key.fold("round", 0).integer()
    node.hold(replace(node.task, resolved=resolved))
    for epoch in range(2):
        server.open(epoch, (0, 1))
        server.ask(0, epoch, 0)
    assert len({public, *keys}) == 3


def test_a_client_whose_noise_is_no_secret_refuses_real_runs(parties, monkeypatch, capsys):
    (parties[1].folder / "secrets" / "reproducible-noise").write_text("07" * 32)
    (parties[1].folder / "secrets" / "reproducible-noise").chmod(0o600)
    server = Server(parties)
    server.hello(0, (0,))
    assert "NOT SECRET" in capsys.readouterr().err
    monkeypatch.delenv(REPRODUCIBLE)
    refusal(Reason.UNSAFE, server.hello, 1, (0,))
    with pytest.raises(UserError, match="no real run may have them"):
        parties[1].check()


# --- who is in an epoch (defect 4) ------------------------------------------------------------------------


def test_the_ledger_is_right_about_three_honest_clients(tmp_path):
    """Nobody lies, and shared noise cancels between the three: what is left of it is σ_ind = 1e-3.

    The oracle is the covariance of the three messages: a client's noise given both others.
    """
    quiet = ("privacy.clip=1e-3", "privacy.sigma_cor=0.5", "privacy.sigma_ind=1e-3", "algorithm.momentum=0.0")
    parties = make(tmp_path / "federation", CLIENTS, small_config(CLIENTS, *PRIVATE[:4], *quiet), budget=1e13)
    server, members = Server(parties), (0, 2, 4)
    server.open(0, members)
    sent = torch.stack([server.ask(client, 0, 0) for client in members])
    release = server.nodes[0].task.resolved.release
    noise = covariance(SecretGraph.complete(3), release.law, senders=range(3))
    true = 1 / (release.sensitivity * math.sqrt(np.linalg.inv(noise)[0, 0]))
    assert sent.std() > 0.3, "each message alone looks noisy"
    for client in members:
        (entry,) = entries(parties[1 + client])
        assert entry.mechanism.z <= true * (1 + 1e-6)


def test_two_lists_of_members_are_refused(parties):
    """Half is told of an epoch of four, half of one of five. Keys are genuine; the lists differ."""
    server = Server(parties)
    offers = server.hello(0, range(CLIENTS))
    four = {client: offers[client] for client in range(4)}
    signed = {client: server.keys(client, 0, four if client < 2 else offers) for client in range(CLIENTS)}
    for client in range(CLIENTS):
        told = range(4) if client < 2 else range(CLIENTS)
        refusal(Reason.UNCONFIRMED, server.confirm, client, 0, {member: signed[member] for member in told})
        refusal(Reason.UNCONFIRMED, server.ask, client, 0, 0)
        assert not parties[1 + client].ledger.exists()


def test_nothing_is_released_before_the_epoch_is_confirmed(parties):
    server = Server(parties)
    offers = server.hello(0, range(CLIENTS))
    refusal(Reason.UNCONFIRMED, server.ask, 0, 0, 0)
    server.keys(0, 0, offers)
    refusal(Reason.UNCONFIRMED, server.ask, 0, 0, 0)


@pytest.mark.parametrize("how", ["missing", "another's", "of another epoch", "gibberish", "another ledger"])
def test_a_confirmation_is_everybodys_own(parties, how):
    server = opened(parties)
    old = json.loads(server.keys(3, 0, server.hello(0, range(CLIENTS))))
    offers = server.hello(1, range(CLIENTS))
    signed = {client: server.keys(client, 1, offers) for client in range(CLIENTS)}
    length, digest, signature = json.loads(signed[3])
    forged = {
        "missing": None,
        "another's": signed[2],
        "of another epoch": json.dumps(old),
        "gibberish": "[",
        "another ledger": json.dumps([length + 7, digest, signature]),
    }[how]
    told = {**signed, 3: forged} if forged else {c: text for c, text in signed.items() if c != 3}
    refusal(Reason.UNCONFIRMED, server.confirm, 0, 1, told)
    refusal(Reason.UNCONFIRMED, server.ask, 0, 1, 0)
    server.confirm(0, 1, signed)
    server.ask(0, 1, 0)


def test_an_epoch_is_confirmed_across_restarts(parties):
    server = Server(parties)
    offers = server.hello(0, range(CLIENTS))
    signed = {client: server.keys(client, 0, offers) for client in range(CLIENTS)}
    server.nodes = {party.client: Node(party) for party in parties[1:]}
    assert signed == {client: server.keys(client, 0, offers) for client in range(CLIENTS)}
    for client in range(CLIENTS):
        server.confirm(client, 0, signed)
    server.nodes = {party.client: Node(party) for party in parties[1:]}
    server.confirm(0, 0, signed)
    server.ask(0, 0, 0)


def test_a_client_has_its_own_minimum(parties):
    """f = 1 demands three members; one client wants all five."""
    with parties[1].budget.open("a") as file:
        file.write("least_members = 5\n")
    server = Server(parties)
    offers = server.hello(0, range(4))
    refusal(Reason.MEMBERS, server.keys, 0, 0, offers)
    server.keys(1, 0, offers)
    pair = server.hello(1, range(2))
    refusal(Reason.MEMBERS, server.keys, 1, 1, pair)
    server.open(2, range(CLIENTS))
    server.ask(0, 2, 0)


def test_one_that_joins_and_does_not_sign_costs_an_epoch_and_not_the_run(parties):
    transport = Direct(
        parties, tamper=lambda client, asked, answer: None if (client, kind(asked)) == (3, "keys") else answer
    )
    runner, said = coordinator(parties, transport)
    assert runner.go().rounds == 3
    assert [(record["epoch"], record["absent"]) for record in runner.log.records()] == [(1, [3])] * 3
    assert "epoch 1: without clients 3, who did not sign" in said


def kind(block):
    return wire.kind_of(block)


# --- what no ledger would show ----------------------------------------------------------------------------


def test_who_has_a_budget_says_nothing_without_noise(parties):
    """A budget holds over all runs: a later configuration without noise would leave nothing in its ledger."""
    server = opened(parties, rounds=1)
    for party in parties:
        party.config.write_text(small_config(CLIENTS))
        Permission().with_plan(party.agreed.plan).save(party.allowed)
    server.open(1, range(CLIENTS))
    refusal(Reason.BUDGET, server.ask, 0, 1, 1)


def test_a_round_over_budget_leaves_no_remark_either(tmp_path):
    """Otherwise a server could fill a client's disk, and its ledger with its own words, for nothing."""
    config = small_config(CLIENTS, *PRIVATE)
    parties = make(tmp_path / "federation", CLIENTS, config, budget=1e-3, partly=True)
    server = opened(parties)
    ask = kinds.Ask(run="run", epoch=0, round=0, heard={}, unused=list(range(CLIENTS)))
    block = wire.dumps(ask, {"params": torch.zeros(DIM)})
    refusal(Reason.BUDGET, server.nodes[0].answer, block)
    size = parties[1].ledger.stat().st_size
    refusal(Reason.BUDGET, server.nodes[0].answer, block)
    assert parties[1].ledger.stat().st_size == size


def test_a_ledger_takes_no_more_of_a_servers_words_than_there_are_clients(parties):
    """It is never shortened: what is written there for a round is read again in every round to come."""
    server = opened(parties)
    ask = kinds.Ask(run="run", epoch=0, round=0, heard={}, unused=[3, *[10**50] * 80, 3, 1, -1])
    server.nodes[0].answer(wire.dumps(ask, {"params": torch.zeros(DIM)}))
    with Ledger(parties[1].ledger, spending.read_budget(parties[1])) as ledger:
        assert [remark.text.partition(";")[0] for remark in ledger.remarks] == [
            "not heard last time: clients 1, 3"
        ]
    assert (parties[1].run_folder("run") / "notes.jsonl").stat().st_size < 500


# --- two workers, lost and old memories, texts (defect 9) -------------------------------------------------


def test_two_workers_on_one_folder_give_one_answer(parties):
    """Both know of round 0; one answers round 1, and the other is asked it with other numbers."""
    server = opened(parties, rounds=1)
    second = Server(parties)
    second.ask(0, 0, 0)
    server.ask(0, 0, 1, number=0.0)
    refusal(Reason.REPEATED, second.ask, 0, 0, 1, 1.0)
    assert len(entries(parties[1])) == 2


def test_two_workers_at_the_same_moment_give_one_answer(parties, monkeypatch):
    server, second = Server(parties), Server(parties)
    server.open(0, range(CLIENTS))
    together, outcomes = threading.Barrier(2), []
    honest = RunAnswers._step

    def step(self, *arguments):
        together.wait(timeout=0.5) if not together.broken else None
        return honest(self, *arguments)

    def slow(self, *arguments):
        try:
            return step(self, *arguments)
        except threading.BrokenBarrierError:  # the other one does not compute at the same time
            return honest(self, *arguments)

    monkeypatch.setattr(RunAnswers, "_step", slow)

    def ask(who, number):
        try:
            outcomes.append(who.ask(0, 0, 0, number))
        except Refused as error:
            outcomes.append(error.reason)

    threads = [threading.Thread(target=ask, args=pair) for pair in ((server, 0.0), (second, 1.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(outcome, torch.Tensor) for outcome in outcomes) == 1
    assert Reason.REPEATED in outcomes


def test_a_deleted_state_is_not_a_fresh_budget(parties):
    server = opened(parties, rounds=1)
    shutil.rmtree(parties[1].state)
    server.nodes[0] = Node(parties[1])
    refusal(Reason.ROLLBACK, server.hello, 1, (0,))
    refusal(Reason.ROLLBACK, Server(parties, "new").hello, 0, (0,))
    assert "deleted or set back" in parties[1].log.read_text()


def test_a_restored_state_is_refused(parties, tmp_path):
    """The copy is whole and was genuine once: its ledger's chain is in order, only too short."""
    server = opened(parties, rounds=1)
    shutil.copytree(parties[1].state, tmp_path / "copy")
    server.ask(0, 0, 1)
    shutil.rmtree(parties[1].state)
    shutil.copytree(tmp_path / "copy", parties[1].state)
    server.nodes[0] = Node(parties[1])
    refusal(Reason.ROLLBACK, server.ask, 0, 0, 1, 1.0)
    refusal(Reason.ROLLBACK, server.hello, 1, (0,))


def test_a_ledger_may_be_ahead_of_what_is_remembered_of_it(parties):
    """The process died between the two writes."""
    server = opened(parties, rounds=1)
    behind = parties[1].ledger_head.read_bytes()
    server.ask(0, 0, 1)
    parties[1].ledger_head.write_bytes(behind)
    server.ask(0, 0, 2)
    assert len(entries(parties[1])) == 3


def test_a_client_set_back_as_a_whole_is_refused_by_the_others(parties, tmp_path):
    """A machine restored from an image remembers nothing of what it forgot; those it spoke to do."""
    server = opened(parties, rounds=1)
    shutil.copytree(parties[1].folder, tmp_path / "image")
    server.ask(0, 0, 1)
    server.open(1, range(CLIENTS))
    shutil.rmtree(parties[1].folder)
    shutil.copytree(tmp_path / "image", parties[1].folder)
    server.nodes[0] = Node(parties[1])
    offers = server.hello(2, range(CLIENTS))
    signed = {client: server.keys(client, 2, offers) for client in range(CLIENTS)}
    for client in range(1, CLIENTS):
        assert server.confirm(client, 2, signed) == {"0"}
        refusal(Reason.UNCONFIRMED, server.ask, client, 2, 2)
    assert "the ledger of client 0 has" in parties[2].log.read_text()


@pytest.mark.slow
def test_an_honest_server_goes_on_without_a_client_that_was_set_back(parties, tmp_path):
    """It has seen the ledgers too: it leaves out whose went back, and the others run."""
    coordinator(parties, Direct(parties), "before")[0].go()
    shutil.copytree(parties[1].folder, tmp_path / "image")
    coordinator(parties, Direct(parties), "after")[0].go()
    coordinator(parties, Direct(parties), "later")[0].go()
    shutil.rmtree(parties[1].folder)
    shutil.copytree(tmp_path / "image", parties[1].folder)
    runner, said = coordinator(parties, Direct(parties), "last")
    assert runner.go().rounds == 3
    assert [record["absent"] for record in runner.log.records()] == [[0]] * 3
    assert any("the ledger of client 0 has" in line for line in said)


def test_nobody_was_set_back_where_a_run_costs_nothing(parties):
    """All owners agree on a run without noise after private ones: their ledgers are where they were."""
    for run in ("first", "second"):
        coordinator(parties, Direct(parties), run)[0].go()
    lengths = {client: one.length for client, one in Witness(parties[0].ledgers_seen).seen().items()}
    assert min(lengths.values()) > 0
    for party in parties:
        party.config.write_text(small_config(CLIENTS))
        if party.client is not None:
            party.budget.unlink()
            Permission().with_plan(party.agreed.plan).save(party.allowed)
    runner, _ = coordinator(parties, Direct(parties), "third")
    assert runner.go().rounds == 3
    seen = {client: one.length for client, one in Witness(parties[0].ledgers_seen).seen().items()}
    assert all(seen[client] > lengths[client] for client in lengths)


def test_a_lost_journal_means_a_new_epoch(parties):
    """Without it a client cannot tell what it answered: the same noise must not be asked for again."""
    server = opened(parties, rounds=2)
    (parties[1].run_folder("run") / "journal").unlink()
    for node in (server.nodes[0], Node(parties[1])):
        server.nodes[0] = node
        for round_ in (0, 1):
            refusal(Reason.LOST, server.ask, 0, 0, round_, 1.0)
    server.open(1, range(CLIENTS))
    server.ask(0, 1, 1)
    assert [(entry.run, entry.round) for entry in entries(parties[1])] == [
        ("run/0", 0),
        ("run/0", 1),
        ("run/1", 1),
    ]


@pytest.mark.parametrize("name", ["session", "journal"])
def test_what_another_run_left_behind_is_as_good_as_lost(parties, name):
    """Its round and epoch are the same; its keys, and the state after it, are not."""
    servers = {run: Server(parties, run) for run in ("run", "other")}
    for server in servers.values():
        server.open(0, range(CLIENTS))
        server.ask(0, 0, 0)
    shutil.copy(parties[1].run_folder("other") / name, parties[1].run_folder("run") / name)
    server = servers["run"]
    server.nodes[0] = Node(parties[1])
    refusal({"session": Reason.RUN, "journal": Reason.LOST}[name], server.ask, 0, 0, 0, 1.0)
    server.open(1, range(CLIENTS))
    server.ask(0, 1, 0)


def test_keys_of_another_client_are_nobodys_keys(parties):
    """Whose folder was copied over another's would add noise that a third one has taken away already."""
    server = opened(parties)
    shutil.copy(parties[2].run_folder("run") / "session", parties[1].run_folder("run") / "session")
    server.nodes[0] = Node(parties[1])
    refusal(Reason.RUN, server.ask, 0, 0, 0)
    assert entries(parties[1]) == []


# --- terms, runs and sizes -------------------------------------------------------------------------------


def test_terms_that_a_client_refuses_are_refused_after_a_restart_too(parties):
    """Four of five change their minds between two rounds: whoever restarts, they answer no more questions."""

    class Restart(Exception):
        pass

    class Mortal(Direct):
        def send(self, blocks, lifetime):
            if asks(next(iter(blocks.values())), 1):
                raise Restart
            return super().send(blocks, lifetime)

    with pytest.raises(Restart):
        coordinator(parties, Mortal(parties))[0].go()
    for party in parties[2:]:
        with party.config.open("a") as file:
            file.write("# another\n")
    runner, said = coordinator(parties, Direct(parties))
    with pytest.raises(EpochsStopped):
        runner.go()
    assert runner.log.last().rounds == 1, "round 1 was not committed with answers of those who refused"
    assert [len(entries(party)) for party in parties[2:]] == [1] * 4
    assert any("rejected client 4: " in line and "terms: " in line for line in said)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_client_that_runs_while_its_terms_change_does_not_use_the_old_ones(tmp_path, restarted):
    """Everybody agrees on more noise; a process that has loaded the configuration before takes the new.

    Also one that was asked something before its first hello.
    """
    parties = make(tmp_path / "federation", CLIENTS, small_config(CLIENTS, *PRIVATE), budget=1e6)
    server = opened(parties)
    if restarted:
        server = Server(parties)
    server.ask(0, 0, 0)
    for party in parties:
        party.config.write_text(small_config(CLIENTS, *PRIVATE, "privacy.sigma_ind=0.2"))
        Permission().with_plan(party.agreed.plan).save(party.allowed)
    refusal(Reason.TERMS, server.ask, 0, 0, 1)
    server.open(1, range(CLIENTS))
    server.ask(0, 1, 1)
    assert server.nodes[0].task.resolved.release.law.sigma_ind == pytest.approx(
        2
        * Node(
            make(tmp_path / "old", CLIENTS, small_config(CLIENTS, *PRIVATE))[1]
        ).task.resolved.release.law.sigma_ind
    )


def test_a_result_of_a_run_nobody_joined_is_not_written_down(parties):
    node = Node(parties[1])
    finished = wire.dumps(kinds.Finished(run="elsewhere"), {"params": torch.zeros(DIM)})
    refusal(Reason.RUN, node.answer, finished)
    assert not parties[1].run_folder("elsewhere").exists()


@pytest.mark.parametrize(
    "header", [kinds.Ask(run="run", epoch=0, round=0, heard={}, unused=[]), kinds.Finished(run="run")]
)
def test_a_block_longer_than_declared_is_not_read(parties, header, monkeypatch):
    """The declared size is known from the client's own configuration: nothing is allocated for more."""
    server = opened(parties)
    block = wire.dumps(header, {"params": torch.zeros(100_000)})
    monkeypatch.setattr(torch, "frombuffer", lambda *_, **__: pytest.fail("it was read"))
    refusal(Reason.BLOCK, server.nodes[0].answer, block)
    assert "bytes where at most" in parties[1].log.read_text()


# --- broken disks -----------------------------------------------------------------------------------------


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x01
    path.write_bytes(content)


def test_a_broken_journal_is_a_lost_one(parties, capfd):
    """A number of the answer changed on the disk: it is not sent, nor is the round drawn again."""
    server = opened(parties, rounds=1)
    flip(parties[1].run_folder("run") / "journal")
    server.nodes[0] = Node(parties[1])
    refusal(Reason.LOST, server.ask, 0, 0, 0)
    assert "its checksum is another; it was moved to journal.broken" in capfd.readouterr().err
    server.open(1, range(CLIENTS))
    server.ask(0, 1, 0)
    assert [(entry.run, entry.round) for entry in entries(parties[1])] == [("run/0", 0), ("run/1", 0)]


def test_broken_pair_keys_cost_an_epoch(parties):
    """Noise drawn from other keys than its partner's would cancel nowhere, and be known to nobody."""
    server = opened(parties, rounds=1)
    flip(parties[1].run_folder("run") / "session")
    server.nodes[0] = Node(parties[1])
    refusal(Reason.RUN, server.ask, 0, 0, 1)
    refusal(Reason.KEYS, server.hello, 0, (0,))
    server.open(1, range(CLIENTS))
    server.ask(0, 1, 1)


@pytest.mark.parametrize("error", [ValueError, UserError, MemoryError, SystemExit, wire.WireError])
def test_what_goes_wrong_inside_stays_inside(parties, monkeypatch, error):
    server = opened(parties)

    def fails(self, *_):
        raise error("patient 4711 has a loss of 3.5")

    monkeypatch.setattr(RunAnswers, "_step", fails)
    refusal(Reason.BLOCK if error is wire.WireError else Reason.FAILED, server.ask, 0, 0, 0)
    assert "patient 4711" in parties[1].log.read_text()


def test_a_log_that_cannot_be_written_changes_no_answer_and_no_reason(parties, capfd):
    """On a full disk nobody learns more, or less, than otherwise; what the log would say is said aloud."""
    server = opened(parties)
    parties[1].log.mkdir(parents=True)
    refusal(Reason.ROUND, server.ask, 0, 0, 99)
    assert "node.log cannot be written (Is a directory): " in capfd.readouterr().err
    (parties[1].run_folder("run") / "notes.jsonl").mkdir()
    server.ask(0, 0, 0)


def test_notes_are_begun_anew(parties, monkeypatch):
    """Where rounds cost nothing a server may ask for them without end."""
    monkeypatch.setattr(sessions, "LARGEST_NOTES", 300)
    session = Session(parties[1], "run")
    session.open(0, parties[1].agreed)
    for number in range(50):
        session.note({"round": number})
    assert sum(path.stat().st_size for path in parties[1].run_folder("run").glob("notes*")) < 1000


@pytest.mark.parametrize("full", ["ledger-head", "journal"])
def test_a_client_whose_disk_is_full_says_so_and_goes_on_in_the_next_epoch(parties, monkeypatch, full):
    """What was paid for and not written down does not leave, nor does it later under the same keys."""
    server = opened(parties)
    honest = files.write_atomically

    def write(path, *parts, **options):
        if path.name == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        honest(path, *parts, **options)

    with monkeypatch.context() as patches:
        patches.setattr(files, "write_atomically", write)
        refusal(Reason.DISK, server.ask, 0, 0, 0)
    assert "No space left on device" in parties[1].log.read_text()
    refusal(Reason.LOST, server.ask, 0, 0, 0)
    server.open(1, range(CLIENTS))
    server.ask(0, 1, 0)
    assert [(entry.run, entry.round) for entry in entries(parties[1])] == [("run/0", 0), ("run/1", 0)]


class Talkative(Direct):
    """A carrier that hands on, as a client's reason, whatever `says` is."""

    says = ""

    def reply(self, node, block):
        if node == FIRST_NODE + 2 and kind(block) == "ask":
            return Reply(node, error=self.says, refused=True)
        return super().reply(node, block)


@pytest.mark.parametrize(
    ("says", "believed"),
    [
        ("budget: " + "x" * 2_000_000, "budget: the client's own budget does not allow it"),
        ("Traceback: " + "\x1b[2J\n" * 500_000, "unknown: Traceback: ?[2J?"),
    ],
)
def test_a_reason_of_two_megabytes_is_one_of_two_hundred_characters(parties, says, believed):
    """It went into the round's record, and the commit that held it could never be read again."""
    transport = Talkative(parties)
    transport.says = says
    runner, said = coordinator(parties, transport)
    assert runner.go().rounds == 3
    assert runner.log.last().rounds == 3
    rejected = [reason for record in runner.log.records() for _, reason in record["rejected"]]
    assert rejected[0].startswith(f"no message but an error: {believed}")
    assert max(map(len, [*rejected, *said])) <= 230


def test_a_header_of_one_megabyte_goes_into_no_record(parties):
    """The same by another way: a reply that is rejected for what it says is quoted in the reason."""

    def lie(client, asked, answer):
        if client != 2 or kind(asked) != "ask":
            return answer
        header, tensors = wire.loads(answer, kinds.Answer)
        return wire.dumps(header, {"x" * 3000: next(iter(tensors.values()))})

    runner, _ = coordinator(parties, Direct(parties, tamper=lie))
    runner.go()
    assert all(len(reason) <= 200 for record in runner.log.records() for _, reason in record["rejected"])


def test_a_shape_that_no_tensor_has_costs_its_sender_and_nobody_else(parties):
    """One client's reply must not end everybody's run, again after every restart."""

    def overflowing(client, asked, answer):
        if client != 2 or kind(asked) != "ask":
            return answer
        start = len(wire.MAGIC) + 8
        length = int.from_bytes(answer[len(wire.MAGIC) : start], "big")
        header = {
            **json.loads(answer[start : start + length]),
            "tensors": [["x", "uint8", [2**39, 2**39, 0]]],
        }
        text = json.dumps(header).encode()
        return wire.MAGIC + len(text).to_bytes(8, "big") + text

    runner, _ = coordinator(parties, Direct(parties, tamper=overflowing))
    assert runner.go().rounds == 3
    assert all([client for client, _ in record["rejected"]] == [2] for record in runner.log.records())


@pytest.mark.parametrize("text", ["\ud800", "\u202e", "\x1b[2J"])
def test_what_a_server_writes_does_not_keep_a_client_from_refusing(parties, text):
    hello = kinds.Hello(run="run", epoch=0, terms=text)
    refusal(Reason.TERMS, Node(parties[1]).answer, wire.dumps(hello))


def test_what_nobody_can_read_in_a_confirmation():
    """A ledger's digest is keyed: equal ledgers of two clients look different, and its lines stay hidden."""
    people = [Identity.generate() for _ in range(2)]
    roster = Roster(tuple(one.public for one in people))
    members = MemberList("run", 0, "terms", {0: "a", 1: "b"})
    shown = [
        Confirmation.sign(members, roster, client, Position(3, "ab").covered(one), one)
        for client, one in enumerate(people)
    ]
    assert shown[0].ledger.digest != shown[1].ledger.digest
    assert "ab" not in (one.ledger.digest for one in shown)
    for client, one in enumerate(shown):
        Confirmation.decode(one.encode()).check(members, roster, client)


def test_a_witness_remembers(tmp_path):
    Witness(tmp_path / "seen").see({0: Position(2, "b"), 1: Position(5, "e")})
    Witness(tmp_path / "seen").see({0: Position(4, "d")})
    assert Witness(tmp_path / "seen").seen() == {0: Position(4, "d"), 1: Position(5, "e")}
    for older in (Position(3, "c"), Position(4, "x")):
        with pytest.raises(UserError, match="set back"):
            Witness(tmp_path / "seen").see({0: older})


# --- results, and what a client writes down ---------------------------------------------------------------


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"params": torch.zeros(DIM - 1)},
        {"params": torch.zeros(DIM).double()},
        {"weights": torch.zeros(DIM)},
    ],
)
def test_a_result_that_is_no_model_of_the_run_is_not_kept(parties, tensors):
    """An owner finds in the folder what can be loaded, whatever the server sends at the end."""
    server = opened(parties)
    block = wire.dumps(kinds.Finished(run="run"), tensors)
    refusal(Reason.BROADCAST, server.nodes[0].answer, block)
    assert not (parties[1].run_folder("run") / "result").exists()


def test_the_log_gives_the_reason_that_travels(parties):
    """A block that cannot be read is the sender's failure, and needs no traceback."""
    refusal(Reason.BLOCK, Node(parties[1]).answer, wire.MAGIC + b"gibberish")
    written = parties[1].log.read_text()
    assert Reason.BLOCK.told in written
    assert "Traceback" not in written
