"""A deployed server with evidence: liars are expelled, secrets shared anew, and what they did taken back."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from federation_harness import Direct, asks, coordinator, make, result_of, share_seeds, small_config
from federation_liars import (
    CARELESS,
    CLIENTS,
    EVIDENCE,
    LIARS,
    Liars,
    careless_from,
    check_against_lying_simulation,
    expelling,
    protocol_message,
    repeatable_secrets,
    secrets_by_client,
)
from trilemma.base.errors import UserError
from trilemma.cli.federation import federation_app
from trilemma.federation.client import spending
from trilemma.federation.client.proposals import Manifest
from trilemma.federation.client.sessions import Session
from trilemma.federation.operations import membership
from trilemma.federation.party.task import load_task
from trilemma.federation.protocol import disk_backed, events, kinds, wire
from trilemma.federation.protocol.epochs import Epoch, decide
from trilemma.federation.protocol.reasons import Reason, Refused
from trilemma.federation.server.commits import CommitLog
from trilemma.federation.server.replay import replay
from trilemma.learning.defences.evidence.history import ClientHistory
from trilemma.privacy.ledger.ledger import Ledger
from trilemma.report import federations
from trilemma.report.client_events import doings
from trilemma.report.federations import with_events

pytestmark = pytest.mark.slow


class Lying(Direct):
    """Nodes of whom the last lie, as adaptive liars do; `secrets` are everybody's, by epoch."""

    def __init__(self, parties, config, attack, dies=lambda asked: False):
        super().__init__(parties, tamper=self.lie)
        self.parties, self.liars, self.dies = parties, Liars.of(parties[0], config, LIARS, attack), dies
        self.secrets, self.lies = {}, {}

    def lie(self, client, asked, answer):
        if self.dies(asked):
            raise RuntimeError("the server dies")
        if wire.kind_of(asked) == "confirm":
            self._note_secrets()
        if not asks(asked) or client not in self.liars.clients:
            return answer
        ask, broadcast = wire.loads(asked, kinds.Ask)
        if (ask.epoch, ask.round) not in self.lies:
            commit, task = CommitLog(self.parties[0].run_folder("run")).last(), self.liars.task
            protocol = {}
            for other in commit.epoch.members:  # they know what everybody will answer
                self.clients[other].answer(asked)
                party = self.parties[1 + other]
                protocol[other] = protocol_message(party, task, "run", ask.round, broadcast)
            self.lies[ask.epoch, ask.round] = self.liars.lie(ask, broadcast, commit.server, protocol)
        header, _ = wire.loads(answer, kinds.Answer)
        return wire.dumps(header, self.lies[ask.epoch, ask.round][client])

    def _note_secrets(self):
        for epoch, noise in secrets_by_client(self.parties, "run"):
            self.secrets.setdefault(epoch, {})[noise.index] = noise


def federation(folder, *changes):
    config = expelling(*changes)
    parties = make(folder, CLIENTS, config, budget=1e9, transcript=True)
    share_seeds(parties, config)
    return parties, config


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """Two adaptive liars who become careless, one after the other."""
    parties, config = federation(tmp_path_factory.mktemp("expulsion") / "federation")
    with repeatable_secrets():
        transport = Lying(parties, config, careless_from(CARELESS))
        told = {party.client: [] for party in parties[1:]}
        for client, node in transport.clients.items():
            node.say = told[client].append
        runner, said = coordinator(parties, transport)
        runner.go()
    return parties, config, transport, runner, said, told


def test_liars_are_expelled_and_the_others_share_secrets_anew(deployed):
    _, _, transport, runner, said, _ = deployed
    records = runner.log.records()
    assert [[one["client"] for one in record["expelled"]] for record in records] == [[], [], [3], [4], []]
    assert [record["epoch"] for record in records] == [0, 0, 0, 1, 2]
    assert [record["facts"]["members"] for record in records] == [5, 5, 5, 4, 3]
    assert not any(record["absent"] or record["rejected"] for record in records)
    assert [sorted(map(int, record["weights"])) for record in records[2:]] == [
        [*range(5)],
        [0, 1, 2, 4],
        [*range(3)],
    ]
    assert records[2]["weights"]["3"] == 0, "its last message never moved the model"
    assert any("client 3 expelled for good" in line for line in said)
    assert transport.secrets.keys() == {0, 1, 2}
    keys = [transport.secrets[epoch][0].pairs for epoch in range(3)]
    assert [sorted(pairs) for pairs in keys] == [[1, 2, 3, 4], [1, 2, 4], [1, 2]]
    assert len({pairs[1] for pairs in keys}) == 3
    asked = [client for client, kind in transport.asked if kind == "ask"]
    assert (asked.count(3), asked.count(4), asked.count(0)) == (3, 4, 5)


def test_a_federation_that_expels_equals_the_simulation(deployed):
    """Every message, the liars' too, who is expelled with which statistic, and the model."""
    parties, config, transport, _, _, _ = deployed
    attack = careless_from(CARELESS)
    assert check_against_lying_simulation(parties, config, "run", LIARS, attack, transport.secrets) == [3, 4]


def test_a_replay_gives_the_same_model_to_the_bit_and_the_same_expulsions(deployed, tmp_path):
    parties, _, _, runner, _, _ = deployed
    replayed, last = replay(parties[0], "run"), runner.log.last()
    assert torch.equal(replayed.broadcast["params"], last.broadcast["params"])
    assert replayed.expelled == last.expelled
    assert [(one.client, one.round) for one in last.expelled] == [(3, 3), (4, 4)]


def test_on_a_graph_of_secrets_liars_are_expelled_and_the_graph_is_drawn_anew(tmp_path):
    """Two neighbours each, of four and of two others; then replayed, and compared with the simulation."""
    parties, config = federation(tmp_path / "federation", "privacy.neighbours=2")
    attack = careless_from(CARELESS)
    with repeatable_secrets():
        transport = Lying(parties, config, attack)
        runner, _ = coordinator(parties, transport)
        runner.go()
    records = runner.log.records()
    assert [[one["client"] for one in record["expelled"]] for record in records] == [[], [], [3], [4], []]
    assert [record["sharing"] for record in records] == [[*range(5)]] * 3 + [[0, 1, 2, 4], [0, 1, 2]]
    assert [len(transport.secrets[epoch][0].pairs) for epoch in range(3)] == [2, 2, 2]
    assert check_against_lying_simulation(parties, config, "run", LIARS, attack, transport.secrets) == [3, 4]
    replayed, last = replay(parties[0], "run"), runner.log.last()
    assert torch.equal(replayed.broadcast["params"], last.broadcast["params"])
    assert replayed.expelled == last.expelled


def test_a_run_with_sampled_clients_is_replayed(tmp_path):
    """More share secrets than a round asks."""
    parties, _ = federation(tmp_path / "federation", "federation.sampled=4", "federation.tolerate=1")
    runner, _ = coordinator(parties, Direct(parties))
    runner.go()
    records = runner.log.records()
    assert all(len(record["sharing"]) == 5 > len(record["weights"]) for record in records)
    replayed, last = replay(parties[0], "run"), runner.log.last()
    assert torch.equal(replayed.broadcast["params"], last.broadcast["params"])


@pytest.mark.parametrize(
    "said", ["[]", "[0, 1, 2, 3]", "[0, 1, 2, 3, 3]", "[0, 1, 2, 3, 4, 5]", "[0, 1, 2, 3, 1000000000000]"]
)
def test_a_replay_of_records_that_do_not_say_who_shared_secrets_is_refused(deployed, tmp_path, said):
    folder = tmp_path / "federation"
    shutil.copytree(deployed[0][0].folder, folder)
    server = replace(deployed[0][0], folder=folder)
    path = server.run_folder("run") / "rounds.jsonl"
    path.write_text(path.read_text().replace('"sharing": [0, 1, 2, 3, 4]', f'"sharing": {said}'))
    with pytest.raises(UserError, match="who shared secrets"):
        replay(server, "run")


def test_a_replay_without_all_records_is_none(deployed):
    """A line that a disk broke is left out of the records: without its round another model would follow."""
    parties = deployed[0]
    path = parties[0].run_folder("run") / "rounds.jsonl"
    kept = path.read_bytes()
    first, _, *others = kept.splitlines(keepends=True)
    try:
        path.write_bytes(b"".join([first, b"broken\n", *others]))
        with pytest.raises(UserError, match="not complete"):
            replay(parties[0], "run")
    finally:
        path.write_bytes(kept)


def test_an_operator_compares_a_run_with_its_replay(deployed):
    """`trilemma federation replay`: what was committed, handed out and said about liars follows, or not."""
    folder = deployed[0][0].folder

    def told(*options: str) -> tuple[int, str]:
        outcome = CliRunner().invoke(federation_app, ["replay", str(folder), *options])
        return outcome.exit_code, outcome.output or str(outcome.exception)

    code, said = told("--run", "run")
    assert (code, "5 rounds again, the same model to the bit" in said) == (0, True)
    assert "expelled: client 3 in round 3, client 4 in round 4" in said
    result = deployed[0][0].run_folder("run") / "result"
    kept = result.read_bytes()
    header, tensors = wire.read_file(result, kinds.Finished)
    try:
        tensors["params"][7] += 1e-6
        result.write_bytes(wire.dumps(header, tensors))
        code, said = told("--run", "run")
    finally:
        result.write_bytes(kept)
    assert (code, "the result: params differs in 1 of" in said) == (1, True)
    assert "there is no run 'default'" in told()[1]


def test_what_liars_did_before_is_taken_back(deployed):
    """The same messages, without undo: another model."""
    parties, _, _, runner, _, _ = deployed
    party = parties[0]
    kept = party.config.read_text()
    try:
        party.config.write_text(kept.replace("evidence+mean", "evidence(undo=0)+mean"))
        stubborn = replay(party, "run").broadcast["params"]
    finally:
        party.config.write_text(kept)
    assert not torch.allclose(stubborn, runner.log.last().broadcast["params"], atol=1e-3)


def test_everybody_is_told(deployed):
    """The others see who, which test, statistic and threshold; the expelled a reason of the catalogue."""
    parties, _, transport, runner, _, told = deployed
    expelled = runner.log.last().expelled
    announced = [event.facts for event in told[0] if event.code == events.EXPULSION_ANNOUNCED.code]
    assert [(one["client"], one["test"], one["epoch"]) for one in announced] == [
        (3, expelled[0].test, 1),
        (4, expelled[1].test, 2),
    ]
    assert announced[0]["figures"] == {"statistic": expelled[0].statistic, "threshold": expelled[0].threshold}
    assert Session(parties[1], "run").secrets.expelled == expelled
    (own,) = [event for event in told[3] if event.code == events.EXPELLED.code]
    assert own.facts["reason"] == Reason.EXPELLED.code
    assert Session(parties[4], "run").expelled == expelled[0]
    assert not (parties[4].run_folder("run") / "result").exists(), "it gets no model"
    assert (parties[1].run_folder("run") / "result").exists()
    terms = parties[0].agreed.terms
    again = kinds.Hello(run="run", epoch=9, terms=terms, expelled=list(expelled[1:]))
    with pytest.raises(Refused) as refusal:
        transport.clients[3].answer(wire.dumps(again))
    assert str(refusal.value) == Reason.EXPELLED.told


def test_records_and_status_say_who_and_why(deployed):
    parties = deployed[0]
    (run,) = federations.standing(parties[0].folder)[0].runs
    words = {one.client: one.expelled for one in run.members if one.expelled}
    assert words.keys() == {3, 4}
    assert words[3].startswith("round 3, length")
    assert with_events(run.members, [{"event": "epoch-opened", "clients": [0, 1, 2]}])[3].why == "expelled"


def test_a_clients_own_status_says_who_was_expelled(deployed):
    about = (events.EXPELLED.code, events.EXPULSION_ANNOUNCED.code)
    seen = {
        client: doings([{"event": one.code, **one.facts} for one in said if one.code in about])
        for client, said in deployed[5].items()
    }
    assert [line.partition(",")[0] for line in seen[0].expelled] == [
        "run run: client 3 in round 3",
        "run run: client 4 in round 4",
    ]
    assert seen[3].expelled[0].startswith("run run: this client in round 3, length: statistic")


def test_a_smaller_epoch_costs_more_and_never_more_than_what_was_allowed(deployed):
    parties = deployed[0]
    task = load_task(parties[1])
    with Ledger(parties[1].ledger, spending.read_budget(parties[1])) as ledger:
        paid = [entry.mechanism.z for entry in ledger.entries]
        spent = min(ledger.epsilon.values())
    assert paid[0] == paid[1] == paid[2] > paid[3] > paid[4]
    manifest = Manifest.of(parties[1], task, "run")
    assert manifest.threshold == CLIENTS - LIARS
    assert spent <= manifest.epsilon == spending.planned_epsilon(task)


@pytest.mark.parametrize("in_files", [False, True], ids=["in memory", "in files"])
def test_a_server_that_dies_after_an_expulsion_goes_on_as_it_would_have(
    deployed, tmp_path, monkeypatch, in_files
):
    """It calls the same epoch again, with the same words, and everything else follows, to the bit."""
    if in_files:
        monkeypatch.setattr(disk_backed, "IN_MEMORY", 0)
    parties, config = federation(tmp_path / "federation")
    with repeatable_secrets():
        transport = Lying(parties, config, careless_from(CARELESS), dies=lambda asked: asks(asked, 3))
        with pytest.raises(RuntimeError, match="dies"):
            coordinator(parties, transport)[0].go()
        assert [one.client for one in CommitLog(parties[0].run_folder("run")).last().expelled] == [3]
        transport.dies = lambda asked: False
        transport.clients = Direct(parties).clients
        coordinator(parties, transport)[0].go()
    last, undisturbed = (one.log.last() for one in (coordinator(parties, transport)[0], deployed[3]))
    assert last.expelled == undisturbed.expelled
    assert last.epoch.number == undisturbed.epoch.number
    assert torch.equal(last.broadcast["params"], undisturbed.broadcast["params"])


def test_who_is_absent_is_no_liar(tmp_path):
    """Absent for a round or when the epoch was called: nobody is expelled, and the run is its replay."""
    parties, _ = federation(tmp_path / "federation")

    def absent(client, asked, answer):
        return None if client == 1 and asks(asked, 3, 4) else answer

    with repeatable_secrets():
        runner, _ = coordinator(parties, Direct(parties, tamper=absent, gone={4}))
        runner.go()
    records = runner.log.records()
    assert [record["absent"] for record in records] == [[4], [4], [4], [1, 4], [1, 4]]
    assert not any(record["expelled"] for record in records)
    assert {record["facts"]["members"] for record in records} == {4}
    params = result_of(parties, "run")["params"]
    assert torch.equal(replay(parties[0], "run").broadcast["params"], params)


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_who_is_expelled_counts_against_f_as_who_is_absent_does(deployed, gone):
    """Whoever of five is lost, and why: three have to answer, as many as clients want to share noise."""
    parties, _, _, runner, _, _ = deployed
    policy = replace(runner, expelled=runner.log.last().expelled[:gone]).policy
    left = policy.everyone
    assert (len(left), policy.tolerated) == (CLIENTS - gone, LIARS - gone)
    least = spending.least_members(parties[1], runner.task)
    assert least == CLIENTS - LIARS
    epoch = Epoch(0, left, left)
    assert decide(policy, epoch, left[:least], policy.repeats) == "commit"
    assert decide(policy, epoch, left[: least - 1], policy.repeats) == "rekey"


def test_noise_that_is_worked_out_anew_for_fewer_clients_accuses_nobody(tmp_path):
    """A client leaves the roster in the middle of a run: every round is judged by the noise it had."""
    rounds, clients = 4, 6
    shared = [option for option in EVIDENCE if "sigma" not in option]
    config = small_config(clients, *shared, "privacy.epsilon=30", tolerate=1, rounds=rounds)
    parties = make(tmp_path / "federation", clients, config, budget=1e9)
    before = load_task(parties[0]).resolved.release.law

    def one_leaves(client, asked, answer):
        if client == 5 and asks(asked, 1):
            membership.leave(tmp_path / "federation", "1")
        return answer

    with repeatable_secrets():
        runner, _ = coordinator(parties, Direct(parties, tamper=one_leaves))
        runner.go()
    records = runner.log.records()
    assert [record["facts"]["members"] for record in records] == [6, 6, 5, 5]
    assert not any(record["expelled"] for record in records)
    after = load_task(parties[0]).resolved.release.law
    assert after != before
    shared = ClientHistory.read(runner.log.last().server).shared.tolist()
    assert shared == pytest.approx([before.sigma_cor**2] * 2 + [after.sigma_cor**2] * 2)
