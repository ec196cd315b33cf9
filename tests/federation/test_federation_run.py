"""Whole runs without a network: the server cannot cheat, crashes change nothing, absence is dealt with."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from malicious_server import entries

from federation_harness import (
    PRIVATE,
    Direct,
    asks,
    coordinator,
    dropped_out,
    make,
    result_of,
    seeded,
    small_config,
)
from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.federation.client.node import Node
from trilemma.federation.client.rounds import RunAnswers
from trilemma.federation.client.sessions import Session, epoch_name
from trilemma.federation.party import layout
from trilemma.federation.party.permission import Permission
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.epochs import EpochsStopped
from trilemma.federation.protocol.reasons import Refused
from trilemma.federation.protocol.transport import FIRST_NODE
from trilemma.privacy.secrets import Handshake, Identity, Offer, Roster

CLIENTS, ROUNDS = 5, 3


@pytest.fixture
def parties(tmp_path):
    config = small_config(CLIENTS, *PRIVATE)
    return make(tmp_path / "federation", CLIENTS, config, budget=1e6, transcript=True)


def ledger_entries(party):
    return [(entry.run, entry.round) for entry in entries(party)]


# --- honest runs ----------------------------------------------------------------------------------------


def test_an_honest_run(parties):
    runner, said = coordinator(parties, Direct(parties))
    commit = runner.go()
    assert commit.rounds == ROUNDS
    assert said[-1] == "run 'run' finished after 3 rounds"
    for party in parties[1:]:
        assert ledger_entries(party) == [("run/0", 0), ("run/0", 1), ("run/0", 2)]
        assert (party.run_folder("run") / "result").read_bytes() == (
            parties[0].run_folder("run") / "result"
        ).read_bytes()


def test_a_finished_run_is_not_run_again(parties):
    coordinator(parties, Direct(parties))[0].go()
    transport = Direct(parties)
    coordinator(parties, transport)[0].go()
    assert {kind for _, kind in transport.asked} == {"finished"}
    assert len(ledger_entries(parties[1])) == ROUNDS


def test_pairwise_noise_cancels_in_what_was_sent(tmp_path):
    """With hardly any own noise and clipping to almost nothing, the messages sum up to almost nothing."""
    config = small_config(
        CLIENTS,
        *PRIVATE[:3],
        "privacy.clip=1e-3",
        "privacy.sigma_ind=1e-3",
        "privacy.sigma_cor=1.0",
        "algorithm.momentum=0.0",
        rounds=1,
    )
    parties = make(tmp_path / "federation", CLIENTS, config, budget=1e12, transcript=True)
    coordinator(parties, Direct(parties))[0].go()
    sent = torch.stack(
        [
            wire.loads(path.read_bytes(), kinds.Answer)[1]["vector"]
            for path in sorted((parties[0].run_folder("run") / "transcript").iterdir())
        ]
    )
    assert sent.shape[0] == CLIENTS
    assert sent.std() > 1.0
    assert sent.sum(0).abs().max() < 0.02


# --- a server that cheats -------------------------------------------------------------------------------


def middleman(parties, victim, forge):
    """A transport that replaces client `victim`'s offer, on its way to the others, by what `forge` makes."""

    class Cheat(Direct):
        def send(self, blocks, lifetime):
            block = next(iter(blocks.values()))
            if wire.kind_of(block) == "keys":
                header, _ = wire.loads(block, kinds.Keys)
                keys = {int(client): key for client, key in header.keys.items()}
                forged = {**header.keys, str(victim): forge(keys, header.epoch)}
                blocks = dict.fromkeys(blocks, wire.dumps(header.model_copy(update={"keys": forged})))
            return super().send(blocks, lifetime)

    return Cheat(parties)


def impostor_offer(parties, index, epoch):
    """A perfect offer, signed by an identity that is not on the roster in the victim's place."""
    mallory = Identity.generate()
    honest = parties[0].keys
    forged = Roster(tuple(mallory.public if i == index else key for i, key in enumerate(honest.keys)))
    offer = Handshake(mallory, forged, epoch_name("run", epoch)).offer
    return replace(offer, signature=mallory.sign(offer.signed(honest))).encode().hex()


def foreign(parties, keys, epoch, how):
    match how:
        case "stranger signs":
            return impostor_offer(parties, 2, epoch)
        case "someone else's offer":
            return keys[3]
        case "signature of the old key on a new one":
            real, fake = (
                Offer.decode(bytes.fromhex(keys[2])),
                Offer.decode(bytes.fromhex(impostor_offer(parties, 2, epoch))),
            )
            return replace(fake, signature=real.signature).encode().hex()
        case "offer for another run":
            identity = Identity.load(parties[3].identity)
            return Handshake(identity, parties[0].keys, "other/0").offer.encode().hex()
        case "no offer at all":
            return "00" * 136


@pytest.mark.parametrize(
    "how",
    [
        "stranger signs",
        "someone else's offer",
        "signature of the old key on a new one",
        "offer for another run",
        "no offer at all",
    ],
)
def test_the_server_cannot_stand_in_the_middle(parties, how):
    transport = middleman(parties, 2, lambda keys, epoch: foreign(parties, keys, epoch, how))
    runner, said = coordinator(parties, transport)
    with pytest.raises(EpochsStopped):
        runner.go()
    assert sum("keys refused: keys" in line for line in said) == CLIENTS
    assert not any(kind == "ask" for _, kind in transport.asked)
    for party in parties[1:]:
        assert not Session(party, "run").secrets.pairs
        assert not (party.state / "ledger").exists()


def test_a_server_with_another_configuration_is_refused(parties):
    weaker = small_config(CLIENTS, *PRIVATE, "privacy.sigma_cor=0.001")
    parties[0].config.write_text(weaker)
    runner, said = coordinator(parties, Direct(parties))
    with pytest.raises(EpochsStopped):
        runner.go()
    assert sum("all parties must hold the same" in line for line in said) == CLIENTS


def test_the_same_round_with_other_numbers_is_refused(parties):
    coordinator(parties, Direct(parties))[0].go()
    node = Node(parties[1])
    ask = kinds.Ask(run="run", epoch=0, round=2, heard={}, unused=[])
    with pytest.raises(Refused, match="with other numbers"):
        node.answer(wire.dumps(ask, {"params": torch.zeros(69)}))
    assert len(ledger_entries(parties[1])) == ROUNDS


@pytest.mark.parametrize(
    ("ask", "broadcast", "reason"),
    [
        ({"round": ROUNDS}, torch.zeros(69), "round"),
        ({"round": 1}, torch.zeros(69), "round"),
        ({"epoch": 7, "round": 2}, torch.zeros(69), "epoch"),
        ({"run": "fresh", "round": 0}, torch.zeros(69), "run"),
        ({"run": "../fresh", "round": 0}, torch.zeros(69), "failed"),
        ({"epoch": 1, "round": 2}, torch.zeros(70), "broadcast"),
        ({"epoch": 1, "round": 2}, torch.full((69,), torch.nan), "broadcast"),
        ({"epoch": 1, "round": 2}, torch.full((69,), 1e20), "broadcast"),
    ],
)
def test_questions_a_client_does_not_answer(parties, ask, broadcast, reason):
    coordinator(parties, Direct(parties))[0].go()
    fields = {"run": "run", "epoch": 0, "round": 0, "heard": {}, "unused": []} | ask
    with pytest.raises(Refused, match=f"^{reason}: "):
        Node(parties[1]).answer(wire.dumps(kinds.Ask(**fields), {"params": broadcast}))
    assert len(ledger_entries(parties[1])) == ROUNDS


def test_a_server_that_forgot_cannot_start_over(parties):
    coordinator(parties, Direct(parties))[0].go()
    for path in parties[0].run_folder("run").rglob("*"):
        if path.is_file():
            path.unlink()
    runner, said = coordinator(parties, Direct(parties))
    with pytest.raises(EpochsStopped):
        runner.go()
    assert any("round: the round is over" in line for line in said)
    assert len(ledger_entries(parties[1])) == ROUNDS


@pytest.mark.slow
def test_a_client_refuses_to_overspend(tmp_path):
    """Budgets for two rounds; the third is refused by everybody, whatever the server asks."""
    parties = make(tmp_path / "federation", CLIENTS, small_config(CLIENTS, *PRIVATE), budget=6.6, partly=True)
    runner, said = coordinator(parties, Direct(parties))
    with pytest.raises(EpochsStopped, match="budget: the client's own budget does not allow it"):
        runner.go()
    assert runner.log.last().rounds == 2
    assert any("budget: the client's own budget does not allow it" in line for line in said)
    assert not any("6.6" in line or "epsilon" in line for line in said), "a code, and no private number"
    assert "over the budget of 6.6" in parties[1].log.read_text()
    assert all(len(ledger_entries(party)) == 2 for party in parties[1:])


def test_a_small_epoch_costs_more(tmp_path):
    """The price of a round counts the clients that really share noise, not those the server speaks of."""
    config = small_config(CLIENTS, *PRIVATE)
    parties = make(tmp_path / "federation", CLIENTS, config, budget=1e6)
    coordinator(parties, Direct(parties), "all")[0].go()
    coordinator(parties, Direct(parties, gone={0, 1}), "three")[0].go()
    full, *_, small = entries(parties[4])
    assert (full.run, small.run) == ("all/0", "three/0")
    assert small.mechanism.z < full.mechanism.z


def test_under_cdp_a_small_epoch_costs_more(tmp_path):
    """The server is trusted and the sum is what is seen: it hides less when fewer add their noise."""
    options = ("algorithm.name=dsgd", "aggregation.rule=mean", "privacy.threat=cdp", "privacy.clip=0.1")
    config = small_config(CLIENTS, *options, "privacy.sigma_ind=0.5", "algorithm.momentum=0")
    parties = make(tmp_path / "federation", CLIENTS, config, budget=1e6)
    coordinator(parties, Direct(parties), "all")[0].go()
    coordinator(parties, Direct(parties, gone={0, 1}), "three")[0].go()
    full, *_, small = (entry.mechanism for entry in entries(parties[4]))
    assert small.z == pytest.approx(full.z * (2 / 4) ** 0.5), "two honest clients in place of four"


# --- crashes --------------------------------------------------------------------------------------------


class Dies(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_server_killed_while_keys_are_agreed_on_opens_another_epoch(parties, when):
    """It comes back when one client is away. Some may hold keys with it: the rest agrees on new ones."""

    class Mortal(Direct):
        def send(self, blocks, lifetime):
            if wire.kind_of(next(iter(blocks.values()))) != "keys" or self.gone:
                return super().send(blocks, lifetime)
            self.gone = {3}
            if when == "after":
                super().send(blocks, lifetime)
            raise Dies

    transport = Mortal(parties)
    with pytest.raises(Dies):
        coordinator(parties, transport)[0].go()
    runner, said = coordinator(parties, transport)
    assert runner.go().rounds == ROUNDS, said
    assert [(record["epoch"], record["absent"]) for record in runner.log.records()] == [(1, [3])] * ROUNDS


def durable_writes(monkeypatch, victim, fail_at):
    """Make the `fail_at`-th durable write in the victim's folder the last thing its process does."""
    counted = 0
    honest = files.write_atomically

    def write(path, *parts, **options):
        nonlocal counted
        if victim.folder in path.parents:
            counted += 1
            if counted == fail_at:
                raise Dies
        honest(path, *parts, **options)

    monkeypatch.setattr(files, "write_atomically", write)


class Restarting(Direct):
    """Whoever dies is started again; where a carrier keeps open questions, it is asked once more."""

    keeps = False

    def reply(self, node, block):
        try:
            return super().reply(node, block)
        except Dies:
            client = node - FIRST_NODE
            self.clients[client] = Node(self.clients[client].party)
            return super().reply(node, block) if self.keeps else None


@pytest.mark.parametrize("fail_at", range(1, 12))
def test_a_client_killed_at_any_write_is_replaced_and_nothing_is_hidden(parties, monkeypatch, fail_at):
    """Writes: epoch, offer, pair keys, ledgers seen, confirmed; thrice the ledger's position and an answer.

    It dies in one of them and is started again.
    """
    victim = parties[3]
    durable_writes(monkeypatch, victim, fail_at)
    runner, said = coordinator(parties, Restarting(parties, pause=2.0))
    assert runner.go().rounds == ROUNDS, said
    folder = parties[0].run_folder("run") / "transcript"
    arrived = {int(path.name.split("-")[0]) for path in folder.glob(f"*-{victim.client}")}
    paid = [round_ for _, round_ in ledger_entries(victim)] if (victim.state / "ledger").exists() else []
    assert arrived <= set(paid), "everything that arrived was paid for"
    if fail_at > 5:
        assert len(arrived) == ROUNDS - 1, "it misses the round it died in and answers the others"
        assert len(paid) == ROUNDS


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A federation whose draws are the same every time, before its run, and the model that it leads to."""
    own = ("aggregation.rule=caf", "privacy.threat=ldp", "privacy.clip=0.1", "privacy.sigma_ind=0.5")
    folder = tmp_path_factory.mktemp("undisturbed")
    seeded(folder / "before", 3, "algorithm.name=cafcor", *own, rounds=ROUNDS)
    shutil.copytree(folder / "before", folder / "run")
    parties = layout.parties(folder / "run")
    coordinator(parties, Direct(parties))[0].go()
    return folder / "before", result_of(parties, "run")["params"]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("fail_at", [3, 6, 7, 8])
def test_the_model_is_the_undisturbed_one_unless_the_records_name_who_dropped_out(
    undisturbed, tmp_path, monkeypatch, fail_at, keeps
):
    """A client dies while keys are agreed on, or when it has paid for a round: that one it has lost."""
    before, model = undisturbed
    parties = layout.parties(shutil.copytree(before, tmp_path / "federation"))
    durable_writes(monkeypatch, parties[1], fail_at)
    transport = Restarting(parties, pause=2.0)
    transport.keeps = keeps
    for _ in range(3):
        runner, _ = coordinator(parties, transport)
        with suppress(EpochsStopped):  # too few were left in an epoch: somebody begins again
            runner.go()
            break
    same = torch.equal(result_of(parties, "run")["params"], model)
    assert same == (not dropped_out(runner.log.records()))


# --- absence --------------------------------------------------------------------------------------------


def test_up_to_f_absent_clients_count_against_f(parties):
    runner, _ = coordinator(parties, Direct(parties, gone={2}))
    runner.go()
    records = runner.log.records()
    assert [record["absent"] for record in records] == [[2]] * 3
    assert all(record["weights"]["2"] == 0 for record in records)
    assert all(record["epoch"] == 0 for record in records)


def test_two_dropouts_of_five_continue_in_a_new_epoch(parties):
    class Leaving(Direct):
        def send(self, blocks, lifetime):
            if asks(next(iter(blocks.values())), 1):
                self.gone = {1, 4}
            return super().send(blocks, lifetime)

    transport = Leaving(parties)
    runner, said = coordinator(parties, transport)
    runner.go()
    records = runner.log.records()
    assert [record["epoch"] for record in records] == [0, 1, 1]
    assert set(records[1]["weights"]) == {"0", "2", "3"}
    assert "round 2: asked again" in said
    stayed, left = ledger_entries(parties[1]), ledger_entries(parties[2])
    assert stayed == [("run/0", 0), ("run/0", 1), ("run/1", 1), ("run/1", 2)]
    assert left == [("run/0", 0)]
    fresh, old = (Session(party, "run").secrets for party in (parties[1], parties[2]))
    assert fresh.epoch == 1
    assert fresh.members == (0, 2, 3)
    assert set(fresh.pairs.values()).isdisjoint(old.pairs.values())


def test_a_run_that_stopped_goes_on_when_clients_are_back(parties):
    """Three leave after the first round, nobody can go on; when they are back the run does, at once."""

    class Leaving(Direct):
        asked_before = False

        def send(self, blocks, lifetime):
            if asks(next(iter(blocks.values())), 1) and not self.asked_before:
                self.asked_before, self.gone = True, {0, 1, 2}
            return super().send(blocks, lifetime)

    transport = Leaving(parties)
    with pytest.raises(EpochsStopped, match="2 of 5 clients joined epoch 1; with up to 1 liars at least 3"):
        coordinator(parties, transport)[0].go()
    transport.gone = set()
    runner, said = coordinator(parties, transport)
    assert runner.go().rounds == ROUNDS
    assert [record["epoch"] for record in runner.log.records()] == [0, 2, 2]
    assert not any("asked again" in line or "rejected" in line for line in said)


def test_an_unheard_step_is_taken_back_however_long_the_silence(parties):
    """Heard in no round from 0 to 2, in 3 again: its momentum is then that of a client that never moved."""
    config = small_config(CLIENTS, *PRIVATE, "algorithm.momentum=0.9", rounds=4)
    for party in parties:
        party.config.write_text(config)
        Permission().with_plan(party.agreed.plan).save(party.allowed)
    steps = []

    class Interrupted(Direct):
        def send(self, blocks, lifetime):
            self.gone = {2} if asks(next(iter(blocks.values())), 1, 2) else set()
            return super().send(blocks, lifetime)

    def lose(client, asked, answer):
        return None if client == 2 and asks(asked, 0) else answer

    transport = Interrupted(parties, tamper=lose, pause=3.0)
    honest = RunAnswers._step

    def step(self, ask, broadcast, state, noise):
        if self.loaded.client == 2:
            steps.append((ask.round, {name: tensor.clone() for name, tensor in state.items()}))
        return honest(self, ask, broadcast, state, noise)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunAnswers, "_step", step)
        runner, _ = coordinator(parties, transport)
        runner.go()
    assert [record["absent"] for record in runner.log.records()] == [[2], [2], [2], []]
    notes = (parties[3].run_folder("run") / "notes.jsonl").read_text().splitlines()
    assert [json.loads(note)["unheard"] for note in notes] == [[], [2]]
    (first, before), (second, later) = steps
    assert (first, second) == (0, 3)
    assert all(torch.equal(before[name], later[name]) for name in before)


def test_a_client_that_contradicts_itself_counts_as_byzantine(parties):
    """It is asked twice in a round and says two different things; the round goes on without it."""

    class Late(Direct):
        """Two clients' answers to the first question arrive together with those to its copy."""

        def __init__(self, parties):
            super().__init__(parties)
            self.kept = {101: [], 104: []}

        def fetch(self, questions):
            replies = []
            for reply in super().fetch(questions):
                if not self.holds_back(reply):
                    replies.append(reply)
                    continue
                kept = self.kept[reply.node]
                kept.append(reply)
                if len(kept) == 2:
                    replies += [kept[0], self.contradicted(kept[1])]
            return replies

        def holds_back(self, reply):
            answers = wire.kind_of(reply.block) == "answer"
            return answers and reply.node in self.kept and len(self.kept[reply.node]) < 2

        def contradicted(self, reply):
            header, tensors = wire.loads(reply.block, kinds.Answer)
            ((name, sent),) = tensors.items()
            sent[-1] ^= reply.node == 104
            return replace(reply, block=wire.dumps(header, {name: sent}))

    runner, said = coordinator(parties, Late(parties))
    assert runner.go().rounds == ROUNDS
    first = runner.log.records()[0]
    assert (first["epoch"], first["absent"]) == (0, [])
    assert first["rejected"] == [[4, "a second reply in one round"]]
    assert "round 1: asked again" in said


def test_a_client_cannot_speak_for_another(parties):
    def impersonate(client, asked, answer):
        if client == 3 and wire.kind_of(asked) == "ask":
            header, tensors = wire.loads(answer, kinds.Answer)
            return wire.dumps(header.model_copy(update={"client": 0}), tensors)
        return answer

    runner, said = coordinator(parties, Direct(parties, tamper=impersonate))
    runner.go()
    assert all([who for who, _ in record["rejected"]] == [3] for record in runner.log.records())
    assert any("claims to be client 0" in line for line in said)


def test_a_run_without_a_guarantee_needs_no_budget(tmp_path):
    """Noise whose ε is no guarantee is held against nothing: there is no budget, no ledger, and a run."""
    options = ("algorithm.name=cafcor", "aggregation.rule=caf", "privacy.threat=cdp", "privacy.clip=0.1")
    config = small_config(CLIENTS, *options, "privacy.sigma_ind=0.5", "privacy.uncertified=true")
    parties = make(tmp_path / "federation", CLIENTS, config)
    runner, said = coordinator(parties, Direct(parties))
    assert runner.go().rounds == ROUNDS, said
    assert not any(party.budget.exists() or party.ledger.exists() for party in parties[1:])


# --- two runs at once -------------------------------------------------------------------------------------


def test_a_second_run_is_refused_while_one_is_under_way(parties):
    """Each would see ledgers that the other has moved on, and take honest clients for liars."""
    refusals = []

    class Busy(Direct):
        def send(self, blocks, lifetime):
            if wire.kind_of(next(iter(blocks.values()))) == "confirm" and not refusals:
                with pytest.raises(UserError) as refusal:
                    coordinator(parties, Direct(parties), "another")[0].go()
                refusals.append(str(refusal.value))
            return super().send(blocks, lifetime)

    runner, said = coordinator(parties, Busy(parties))
    assert runner.go().rounds == ROUNDS
    assert refusals == [f"another run of the federation in {parties[0].folder} is under way: one at a time"]
    assert not any("ledger" in line for line in said)
    coordinator(parties, Direct(parties), "another")[0].go()
