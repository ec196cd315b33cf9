"""Clients evaluate the model on their own examples: paid for, noised, replayed, and robust to liars."""

from __future__ import annotations

import pytest
import torch
from malicious_server import refusal

from federation_harness import Direct, coordinator, make, seeded, simulation, small_config
from trilemma.base.errors import UserError
from trilemma.federation.client.node import Node
from trilemma.federation.client.spending import change_budget, planned_epsilon
from trilemma.federation.party import provisioning
from trilemma.federation.party.permission import amend
from trilemma.federation.party.public_facts import Federation
from trilemma.federation.party.task import load_task
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.epochs import EpochsStopped
from trilemma.federation.protocol.reasons import Reason
from trilemma.federation.server.commits import CommitLog
from trilemma.privacy.accounting.accountants import accountants
from trilemma.privacy.ledger.lines import read_entries
from trilemma.privacy.mechanism import mechanism
from trilemma.simulate import engine

CLIENTS, ROUNDS = 4, 4
HELD = 1890
"""Training examples of the poorest client, when a tenth is set aside."""
ASKED = ("evaluation.clients=true", "evaluation.every=2", "data.holders=all")
USER = (
    *("algorithm.name=cafcor", "aggregation.rule=caf", "privacy.threat=secldp", "privacy.clip=0.1"),
    *("privacy.sigma_cor=0.5", "privacy.sigma_ind=0.2", "evaluation.noise_multiplier=0.3"),
)
EXAMPLE = (  # every client's batch is all it has: what sampling saves is for others to test, and takes long
    *("algorithm.name=safe-dshb", "privacy.threat=ldp", "privacy.clip=0.1", "privacy.sigma_ind=0.05"),
    *("evaluation.noise_multiplier=2", f"algorithm.batch_size={HELD}"),
)
KINDS = {"plain": (), "user": USER, "example": EXAMPLE}


def federation(tmp_path, kind="user", rounds=ROUNDS):
    return seeded(tmp_path / "federation", CLIENTS, *KINDS[kind], *ASKED, rounds=rounds)


def scores(runner):
    return {record["round"]: record["metrics"] for record in runner.log.records()}


@pytest.mark.parametrize("kind", ["plain", "user", pytest.param("example", marks=pytest.mark.slow)])
def test_scores_are_those_of_the_simulation(tmp_path, kind):
    parties, config = federation(tmp_path, kind)
    runner, _ = coordinator(parties, Direct(parties))
    runner.go()
    told = {turn: found for turn, found in scores(runner).items() if "own_accuracy" in found}
    assert set(told) == {2, 4}
    experiment = simulation(parties, config, "run")
    progress = engine.start(experiment)
    for _ in range(ROUNDS):
        progress, record = engine.step(experiment, progress)
        for name, score in record.metrics.items():
            assert told[record.round][name] == pytest.approx(score, abs=1e-6)
            assert kind == "plain" or record.metrics["own_accuracy_low"] < record.metrics["own_accuracy"]


@pytest.mark.slow
def test_the_ledger_has_every_evaluation_with_its_own_noise(tmp_path):
    parties, _ = federation(tmp_path)
    coordinator(parties, Direct(parties))[0].go()
    task = load_task(parties[1])
    entries = read_entries(parties[1].ledger)
    assert [(one.run, one.round) for one in entries] == [
        *(("run/0", 0), ("run/0", 1), ("run/0/evaluation", 1)),
        *(("run/0", 2), ("run/0", 3), ("run/0/evaluation", 3)),
    ]
    own = task.resolved.own_scores
    assert entries[2].mechanism == mechanism(own.release, own.threat)
    assert entries[2].mechanism.z == pytest.approx(0.3)
    assert entries[2].epsilon["exact"] > entries[1].epsilon["exact"]
    assert entries[-1].epsilon["exact"] == pytest.approx(task.resolved.verdict(4, 1e-5).epsilon, rel=1e-6)
    assert planned_epsilon(task) > entries[-1].epsilon["exact"], "a budget has room for what is repeated"


@pytest.mark.slow
def test_who_cannot_pay_is_left_out_and_the_round_goes_on(tmp_path):
    parties, _ = federation(tmp_path, rounds=2)
    coordinator(parties, Direct(parties), "first")[0].go()
    messages, evaluation = (read_entries(parties[1].ledger)[place].mechanism for place in (0, 2))
    for party in parties[1:]:  # enough for two more rounds, and for no evaluation
        limit = accountants["exact"].epsilon(((messages, 4), (evaluation, 1)), 1e-5)
        change_budget(party, 1.001 * limit)
    with pytest.raises(EpochsStopped, match="0 of 4"):
        coordinator(parties, Direct(parties), "second")[0].go()
    for party in parties[1:]:
        amend(party.allowed, lambda allowed: allowed.with_part("second"))
    runner, said = coordinator(parties, Direct(parties), "second")
    assert runner.go().rounds == 2
    assert "own_accuracy" not in scores(runner)[2]
    assert sum("no score: budget" in line for line in said) == CLIENTS


def question(parties, runner, round_=1, **changes):
    commit = runner.log.last()
    header = kinds.Evaluate(run="run", epoch=commit.epoch.number, round=round_, **changes)
    return wire.dumps(header, {"params": commit.broadcast["params"]})


def test_an_evaluation_is_told_once(tmp_path):
    """The same question gets the same bytes, at no cost; another one in its place gets nothing."""
    asked = {}

    def remember(client, block, answer):
        if wire.kind_of(block) == "evaluate":
            asked.setdefault(wire.loads(block, kinds.Evaluate)[0].round, {})[client] = (block, answer)
        return answer

    parties, _ = federation(tmp_path)
    (parties[1].folder / "secrets" / "reproducible-noise").unlink()
    runner, _ = coordinator(parties, Direct(parties, remember))
    runner.go()
    node, length = Node(parties[1]), len(read_entries(parties[1].ledger))
    block, answer = asked[3][0]
    assert node.answer(block) == answer
    assert len(read_entries(parties[1].ledger)) == length
    header, tensors = wire.loads(block, kinds.Evaluate)
    other = wire.dumps(header, {"params": tensors["params"] + 1})
    refusal(Reason.REPEATED, node.answer, other)
    refusal(Reason.ROUND, node.answer, asked[1][0][0])  # it is over
    for round_ in (2, 77):
        refusal(Reason.ROUND, node.answer, question(parties, runner, round_))  # not its turn
    (parties[1].run_folder("run") / "score").unlink()
    refusal(Reason.LOST, node.answer, other)  # paid for, and its answer is gone
    refusal(Reason.LOST, node.answer, block)
    assert len(read_entries(parties[1].ledger)) == length


def test_what_is_no_model_is_not_evaluated(tmp_path):
    parties, _ = federation(tmp_path)
    asked = []

    def keep(client, block, answer):
        if wire.kind_of(block) == "evaluate":
            asked.append(block)
        return answer

    coordinator(parties, Direct(parties, keep))[0].go()
    (parties[1].run_folder("run") / "score").unlink()
    header, tensors = wire.loads(asked[-1], kinds.Evaluate)
    node, params = Node(parties[1]), tensors["params"]
    for wrong in (
        {"params": params[:-1]},
        {"params": params.double()},
        {"params": params * torch.nan},
        {"params": params + 1e9},
        {"other": params},
        {},
    ):
        refusal(Reason.BROADCAST, node.answer, wire.dumps(header, wrong))


def test_a_configuration_without_evaluations_answers_none(tmp_path):
    parties = make(tmp_path / "federation", 3, small_config(3, "algorithm.name=dsgd"))
    runner, _ = coordinator(parties, Direct(parties))
    runner.go()
    refusal(Reason.BLOCK, Node(parties[1]).answer, question(parties, runner))


LIES = {
    0: torch.tensor([1e300], dtype=torch.float64),
    1: torch.tensor([torch.nan], dtype=torch.float64),
    2: torch.ones(10_000, dtype=torch.float64),
    3: torch.ones(2, dtype=torch.float64),
    4: torch.ones(1),
}
"""What client 0 tells after each round: far off, no number, too long, two numbers, in single precision."""


def test_a_liar_does_not_move_the_score_beyond_the_honest(tmp_path):
    def lies(client, block, answer):
        if client != 0 or wire.kind_of(block) != "evaluate":
            return answer
        header, _ = wire.loads(answer, kinds.Scored)
        return wire.dumps(header, {"share": LIES[header.round]})

    asked = (ASKED[0], "evaluation.every=1", ASKED[2])
    parties, _ = seeded(tmp_path / "federation", CLIENTS, *asked, rounds=len(LIES))
    truthful, _ = coordinator(parties, Direct(parties), "honest")
    truthful.go()
    runner, said = coordinator(parties, Direct(parties, lies))
    runner.go()
    for turn, honest in scores(truthful).items():
        found = scores(runner)[turn]["own_accuracy"]
        assert honest["own_accuracy_low"] <= found <= honest["own_accuracy_high"]
    assert sum("no score" in line for line in said) == len(LIES) - 1, "one was a number, and put aside"


def test_somebody_elses_score_is_not_taken(tmp_path):
    kept = {}

    def swaps(client, block, answer):
        if wire.kind_of(block) != "evaluate":
            return answer
        kept[client] = answer
        return kept[0]

    parties, _ = federation(tmp_path, "plain")
    runner, said = coordinator(parties, Direct(parties, swaps))
    runner.go()
    assert "own_accuracy" not in scores(runner)[4], "one of four is left, and one may lie"
    assert sum("it is about another client" in line for line in said) == 2 * (CLIENTS - 1)


@pytest.mark.slow
def test_a_server_that_dies_before_the_commit_gets_the_same_scores(tmp_path, monkeypatch):
    parties, _ = federation(tmp_path)
    (parties[1].folder / "secrets" / "reproducible-noise").unlink()
    transport = Direct(parties)
    runner, _ = coordinator(parties, transport)
    append, seen = CommitLog.append, []

    def dies(self, commit):
        if commit.rounds == 2 and not seen:
            seen.append(commit.record["metrics"])
            raise KeyboardInterrupt
        append(self, commit)

    monkeypatch.setattr(CommitLog, "append", dies)
    with pytest.raises(KeyboardInterrupt):
        runner.go()
    again, _ = coordinator(parties, transport)
    again.go()
    assert scores(again)[2] == seen[0]
    assert [one.round for one in read_entries(parties[1].ledger)] == [0, 1, 1, 2, 3, 3]


TASK = """
import numpy as np
from trilemma import models

def model():
    return models.build("mlp", (4,), 2, hidden=(3,))

def data(client):
    rng = np.random.default_rng(client)
    x = rng.normal(size=(40 + client, 4))
    return x, (x.sum(1) > 0).astype(int)
"""


@pytest.mark.slow
def test_clients_with_a_task_of_their_own_score_what_the_server_cannot(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    config = small_config(
        *(3, "algorithm.lr=1.0", "algorithm.batch_size=30", *ASKED[:1], "evaluation.hold_out=0.25"),
        tolerate=0,
        rounds=30,
    )
    facts = Federation("own", 3, examples=40)
    parties = provisioning.init(tmp_path / "federation", facts, config, task=tmp_path / "task.py")
    assert [len(load_task(party).data.holdings.valid[0]) for party in parties[1:]] == [10, 10, 10]
    runner, _ = coordinator(parties, Direct(parties))
    runner.go()
    found = scores(runner)
    assert found[30]["own_accuracy"] > 0.8
    assert [turn for turn, metrics in found.items() if metrics] == [6, 12, 18, 24, 30]
    with pytest.raises(UserError, match="batch_size = 31: the poorest client holds 30"):
        load_task_with(parties[1], config.replace("batch_size = 30", "batch_size = 31"))


def load_task_with(party, config):
    party.config.write_text(config)
    return load_task(party)


def test_where_messages_are_refused_for_want_of_a_guarantee_so_are_scores(tmp_path):
    """A budget that nothing can be held against allows neither."""
    parties, _ = federation(tmp_path, "plain", rounds=2)
    parties[1].budget.write_text('epsilon = 1.0\ndelta = 1e-5\nunit = "user"\nadjacency = "replace"\n')
    runner, said = coordinator(parties, Direct(parties))
    runner.go()
    assert [[who for who, _ in record["rejected"]] for record in runner.log.records()] == [[0]] * 2
    assert any("no score: budget" in line for line in said)
    refusal(Reason.BUDGET, Node(parties[1]).answer, question(parties, runner))
    assert not (parties[1].run_folder("run") / "score").exists()
