"""A client takes part in what its owner allowed, and in nothing else."""

from __future__ import annotations

import os
import shutil
import threading

import pytest
import torch
from malicious_server import opened, refusal

from federation_harness import INSTANT, PRIVATE, Direct, command, coordinator, make, small_config
from trilemma.base.errors import PrivacyError, UserError
from trilemma.cli import federation_owner
from trilemma.federation.client import joined
from trilemma.federation.client.account import own_statement, read_budget
from trilemma.federation.client.node import Node
from trilemma.federation.client.proposals import KEPT, allow, proposed
from trilemma.federation.client.spending import planned_epsilon, reach
from trilemma.federation.identity.authority import Authority
from trilemma.federation.identity.rosters import Member
from trilemma.federation.party import layout, provisioning
from trilemma.federation.party.adoption import adopt, vouch
from trilemma.federation.party.permission import Permission
from trilemma.federation.party.public_facts import Federation
from trilemma.federation.party.task import load_task
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.epochs import EpochsStopped
from trilemma.federation.protocol.reasons import Reason, Refused
from trilemma.privacy.secrets import Identity

CLIENTS = 5


@pytest.fixture
def parties(tmp_path):
    """A federation of machines: nothing is allowed yet."""
    config = small_config(CLIENTS, *PRIVATE)
    return make(tmp_path / "federation", CLIENTS, config, budget=1e6, host="fl.example.org")


def say_hello(parties, run="run", client=0):
    hello = kinds.Hello(run=run, epoch=0, terms=parties[0].agreed.terms)
    return Node(parties[1 + client]).answer(wire.dumps(hello))


def refused(parties, run="run", client=0):
    with pytest.raises(Refused) as caught:
        say_hello(parties, run, client)
    return caught.value.reason is Reason.ALLOWED


def test_nothing_is_allowed_by_default_and_nothing_is_left_behind(parties):
    """The server says of each why it did not join."""
    runner, said = coordinator(parties, Direct(parties, gone={3}))
    with pytest.raises(EpochsStopped, match="0 of 5 clients joined epoch 0") as stopped:
        runner.go()
    why = "clients 0 to 2, 4: allowed: the client's owner has not allowed this run (yet)"
    assert str(stopped.value).endswith(f"{why}; client 3: not connected")
    assert sum("allowed: the client's owner has not allowed this run" in line for line in said) == 4
    for party in parties[1:]:
        assert not party.run_folder("run").exists()
        assert not (party.state / "joined").exists()
        assert not party.ledger.exists()


def test_a_pilot_on_one_machine_allows_what_it_was_made_for(tmp_path):
    parties = make(tmp_path / "federation", CLIENTS, small_config(CLIENTS, *PRIVATE), budget=1e6)
    say_hello(parties, "any-name")
    for party in parties:
        party.config.write_text(small_config(CLIENTS, *PRIVATE, rounds=300))
    assert refused(parties, "any-name"), "another configuration is another plan"


def test_an_owner_looks_and_allows(parties):
    """What is shown is what the client worked out itself; what is allowed is this run of this plan."""
    assert refused(parties)
    (manifest,) = proposed(parties[1])
    assert (manifest.run, manifest.members, manifest.threshold, manifest.rounds) == ("run", CLIENTS, 3, 3)
    assert manifest.epsilon > 0
    shown = command("proposals", parties[1].folder)
    assert all(word in shown for word in ("client-0", "run", f"{manifest.epsilon:.3g}"))
    assert manifest.configuration[:12] in shown
    assert "client-0 allows run 'run'" in command("allow", parties[1].folder, "run")
    assert "nothing was proposed" in command("proposals", parties[1].folder)
    say_hello(parties)
    assert refused(parties, "another")
    assert refused(parties, client=1), "each owner decides for itself"


OWN = """
import torch
from trilemma import models

def model():
    return models.build("multinomial", (4,), 2)

def data(client):
    return torch.full((30, 4), {number}), torch.zeros(30, dtype=torch.int64)
"""


@pytest.mark.parametrize("restarted", [False, True])
def test_code_that_was_not_asked_about_does_not_run_in_an_epoch_joined_before(tmp_path, restarted):
    """An owner puts another task.py in place: it runs once it is allowed, and then the old one does not."""
    (tmp_path / "task.py").write_text(OWN.format(number=1.0))
    config, facts = small_config(2, tolerate=0), Federation("own", 2, examples=30, timing=INSTANT)
    parties = provisioning.init(tmp_path / "federation", facts, config, task=tmp_path / "task.py")
    server = opened(parties)
    numbers = {"params": torch.zeros(10)}
    ask = wire.dumps(kinds.Ask(run="run", epoch=0, round=0, heard={}, unused=[]), numbers)
    (parties[1].folder / "task.py").write_text(OWN.format(number=2.0))
    node = Node(parties[1]) if restarted else server.nodes[0]
    refusal(Reason.ALLOWED, node.answer, ask)
    hello = wire.dumps(kinds.Hello(run="run", epoch=1, terms=parties[0].agreed.terms))
    refusal(Reason.ALLOWED, node.answer, hello)
    allow(parties[1], "run")
    node.answer(hello)
    assert float(node.task.data.dataset.x_train[0, 0]) == 2.0, "what runs is what was allowed"


def test_a_run_that_cannot_end_is_refused_unless_it_is_asked_for(tmp_path, capsys):
    """ε of two of three rounds: each client works it out before anything is paid."""
    config = small_config(CLIENTS, *PRIVATE)
    parties = make(tmp_path / "federation", CLIENTS, config, budget=6.6, host="fl.example.org")
    said = command("allow", parties[1].folder, "run")
    assert "the budget reaches 2 of 3 rounds: of ε = 6.6, nothing is spent; it is refused unless" in said
    refusal(Reason.REACH, say_hello, parties)
    assert "reaches 2 of 3 rounds" in parties[1].log.read_text()
    federation_owner.say_reach(parties, "run")
    assert f"`trilemma federation allow {parties[1].folder} run --partly`" in capsys.readouterr().out
    assert not parties[1].ledger.exists()
    assert "refused unless" not in command("allow", parties[1].folder, "run", "--partly")
    say_hello(parties)
    command("budget", parties[2].folder, "--epsilon", 9.0)
    assert "the budget reaches the run's end" in command("allow", parties[2].folder, "run")
    say_hello(parties, client=1)


def test_a_second_run_knows_what_the_first_has_spent(tmp_path):
    """The budget is that of one run, a tenth of it repeated: the next is refused before its first round."""
    config = small_config(CLIENTS, *PRIVATE, rounds=20)
    parties = make(tmp_path / "federation", CLIENTS, config)
    coordinator(parties, Direct(parties), "first")[0].go()
    before = parties[1].ledger.read_bytes()
    runner, said = coordinator(parties, Direct(parties), "second")
    with pytest.raises(EpochsStopped, match="0 of 5 clients joined"):
        runner.go()
    assert any("reach: the client's budget is too small for the whole run" in line for line in said)
    assert parties[1].ledger.read_bytes() == before
    far = reach(parties[1], load_task(parties[1]), "second")
    assert 0 < far.rounds < 5
    assert far.spent == own_statement(parties[1]).spent[1]
    assert reach(parties[1], load_task(parties[1]), "first") is None, (
        "it has begun: it goes on as far as it can"
    )


@pytest.mark.parametrize("evaluated", [(), ("evaluation.clients=true", "evaluation.every=2")])
def test_what_init_announces_is_what_was_asked(tmp_path, evaluated):
    """The price of repeated rounds, of noise drawn on a grid, and of evaluations is inside ε = 8."""
    asked = ("privacy.threat=secldp", "privacy.clip=0.1", "privacy.epsilon=8", "data.holders=all", *evaluated)
    (tmp_path / "asked.toml").write_text(small_config(CLIENTS, *PRIVATE[:2], *asked, rounds=10))
    text = (tmp_path / "asked.toml").read_text().replace("repeated = 0.0\n", "")
    (tmp_path / "asked.toml").write_text(text)
    said = command("init", tmp_path / "federation", "--config", tmp_path / "asked.toml")
    assert "Every client will spend at most ε = 8 (budget.toml)" in said
    assert "`replay` needs one to check the server afterwards (init --transcript)" in said
    party = layout.parties(tmp_path / "federation")[1]
    task = load_task(party)
    assert read_budget(party).epsilon == 8.0
    assert 7.9 < planned_epsilon(task, party) <= 8.0
    assert bool(task.resolved.beside(10)) == bool(evaluated)


def test_in_advance_by_its_cost(parties):
    assert refused(parties)
    cost = next(proposed(parties[1])).epsilon
    said = command("allow", parties[1].folder, "--epsilon", cost / 2)
    assert f"client-0 still refuses run 'run': ε = {cost:.3g}" in said
    assert refused(parties)
    command("allow", parties[1].folder, "--epsilon", cost * 1.001)
    say_hello(parties)


def test_what_is_allowed_in_advance_does_not_count_on_invented_clients(parties):
    """An authority that lists twenty clients more makes a run look cheaper; not to who does not know them."""
    assert refused(parties)
    cost = next(proposed(parties[1])).epsilon
    command("allow", parties[1].folder, "--epsilon", cost * 0.999)
    authority = Authority.open(parties[0].folder.parent)
    invented = [
        Member(name=f"invented-{number}", identity=Identity.generate().public.hex(), tls=f"{number:064x}")
        for number in range(20)
    ]
    roster = authority.sign("test", (*authority.roster.clients, *invented))
    adopt(parties[0], roster.text)
    hello = kinds.Hello(run="run", epoch=0, terms=parties[0].agreed.terms, roster=roster.text)
    with pytest.raises(Refused, match="allowed: "):
        Node(parties[1]).answer(wire.dumps(hello))
    assert parties[1].signed_roster == roster
    (manifest,) = proposed(parties[1])
    assert manifest.epsilon == pytest.approx(cost, rel=1e-4)
    vouch(parties[1], range(CLIENTS, CLIENTS + 20))
    assert next(proposed(parties[1])).epsilon < 0.999 * cost, "what a run costs now, not when it was proposed"
    assert f"{CLIENTS + 20} members" in command("proposals", parties[1].folder)


def test_a_server_does_not_fill_the_disk_with_names(parties):
    for number in range(KEPT + 5):
        assert refused(parties, f"run-{number}")
        path = parties[1].proposals / f"run-{number}.json"
        os.utime(path, ns=(number, number))
    assert len(list(proposed(parties[1]))) == KEPT
    with pytest.raises(Refused):
        say_hello(parties, "../../elsewhere")
    assert not (parties[1].folder.parent / "elsewhere.json").exists()


def test_a_server_does_not_fill_the_disk_with_runs_that_are_allowed_in_advance(parties):
    """Joining costs nothing: a client keeps the newest it joined, and every one in which it has answered."""
    command("allow", parties[1].folder, "--epsilon", 1e6)
    node, runs = Node(parties[1]), parties[1].state / "runs"
    for number in range(KEPT + 5):
        node.answer(wire.dumps(kinds.Hello(run=f"run-{number}", epoch=0, terms=parties[0].agreed.terms)))
        os.utime(runs / f"run-{number}", ns=(number, number))
        if number == 0:
            (runs / "run-0" / "journal").touch()
    kept = {path.name for path in runs.iterdir()}
    assert kept == {"run-0", *(f"run-{number}" for number in range(5, KEPT + 5))}
    refusal(
        Reason.KEYS, node.answer, wire.dumps(kinds.Hello(run="run-1", epoch=0, terms=parties[0].agreed.terms))
    )
    node.answer(wire.dumps(kinds.Hello(run="run-1", epoch=1, terms=parties[0].agreed.terms)))


def test_a_server_does_not_fill_the_disk_with_epochs(parties):
    """Of each run the last epoch is known for good: none before it is joined again, whatever else is lost."""
    command("allow", parties[1].folder, "--epsilon", 1e6)
    node, sizes = Node(parties[1]), []

    def joins(epoch, run="run"):
        node.answer(wire.dumps(kinds.Hello(run=run, epoch=epoch, terms=parties[0].agreed.terms)))
        sizes.append((parties[1].state / "joined").stat().st_size)

    for epoch in range(10, 40):
        joins(epoch)
    assert len(set(sizes)) == 1
    joins(0, "other")
    shutil.rmtree(parties[1].state / "runs")
    for epoch in (5, 10, 39):
        refusal(Reason.KEYS, joins, epoch)
    joins(40)


def test_joined_runs_that_came_to_nothing_are_forgotten_some_day(tmp_path, monkeypatch):
    monkeypatch.setattr(joined, "KEPT", 3)
    log = joined.JoinedEpochs(tmp_path / "joined", tmp_path / "runs")
    (tmp_path / "runs" / "run-1").mkdir(parents=True)
    for number in range(9):
        log.claim(f"run-{number}", 7)
    for number in (1, 5, 6, 7, 8):
        with pytest.raises(PrivacyError, match="epoch 7 was joined before"):
            log.claim(f"run-{number}", 7)
    log.claim("run-2", 7)


def test_a_line_that_a_disk_changed_is_none(tmp_path):
    log = joined.JoinedEpochs(tmp_path / "joined", tmp_path / "runs")
    log.claim("monday", 4)
    log.path.write_bytes(log.path.read_bytes().replace(b" 4 monday", b" 9 monday"))
    log.claim("monday", 5)


def test_names_of_runs_that_nobody_joined_take_no_memory(parties):
    node = Node(parties[1])
    for number in range(3):
        with pytest.raises(Refused):
            node.answer(wire.dumps(kinds.Finished(run=f"run-{number}")))
    assert not node.sessions


def test_an_unreadable_permission_allows_nothing(parties):
    parties[1].allowed.write_text("runs = 7\n[")
    refusal(Reason.FAILED, say_hello, parties)
    with pytest.raises(UserError, match="does not say what is allowed"):
        command("allow", parties[1].folder, "run")
    with pytest.raises(UserError, match="decided by its owner"):
        command("allow", parties[0].folder, "run")
    with pytest.raises(UserError, match="either a run"):
        command("allow", parties[1].folder)


def test_two_decisions_at_once_are_both_kept(parties, monkeypatch):
    """An owner's second command, given while the first one works, waits for it."""
    party, honest, second = parties[1], Permission.save, []

    def slow(self, path):
        if not second:
            second.append(threading.Thread(target=allow, args=(party, "tuesday")))
            second[0].start()
            second[0].join(0.5)  # as long as it would take, were it not for the lock
        honest(self, path)

    monkeypatch.setattr(Permission, "save", slow)
    allow(party, "monday")
    second[0].join()
    assert set(Permission.load(party.allowed).runs) == {"monday", "tuesday"}


@pytest.mark.parametrize("epsilon", ["nan", "-1", "0"])
def test_no_runs_cost_is_at_most_that(parties, epsilon):
    with pytest.raises(UserError, match="more than 0"):
        command("allow", parties[1].folder, "--epsilon", epsilon)
    assert not parties[1].allowed.exists()
