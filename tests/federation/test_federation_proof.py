"""Deployed = simulated, number for number, without a network.

The simulation here is the stacked engine of `trilemma.simulate`, all clients at once, given the federation's
seeds and secrets. The deployment is one node per client. Messages and models must agree to 1e-6.
"""

from __future__ import annotations

import pytest
import torch
from malicious_server import entries

from federation_harness import (
    Direct,
    asks,
    check_against_simulation,
    coordinator,
    result_of,
    seeded,
    simulation,
)
from trilemma.base.errors import UserError
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.server.replay import replay
from trilemma.simulate import engine

CLIENTS, ROUNDS = 4, 3
SECLDP = ("privacy.threat=secldp", "privacy.clip=0.1", "privacy.sigma_cor=0.5", "privacy.sigma_ind=0.2")
LDP = ("privacy.threat=ldp", "privacy.clip=0.1", "privacy.sigma_ind=0.5")


ALGORITHMS = {
    "dsgd": ("algorithm.name=dsgd", "aggregation.rule=cwtm"),
    "dp-dsgd": (
        "algorithm.name=dsgd",
        "algorithm.momentum=0",
        "aggregation.rule=mean",
        "privacy.threat=cdp",
        *LDP[1:],
    ),
    "safe-dshb": (
        "algorithm.name=safe-dshb",
        "aggregation.rule=nnm+cwmed",
        "privacy.threat=ldp",
        "privacy.clip=0.1",
        "privacy.sigma_ind=0.05",
    ),
    "safe-dshb adaptive": (
        "algorithm={name='safe-dshb', quantile=0.3, weight_decay=1e-3}",
        "aggregation.rule=nnm+cwmed",
        *("privacy.threat=ldp", "privacy.clip=0.1", "privacy.sigma_ind=0.05"),
    ),
    "cafcor-secldp adaptive": ("algorithm={name='cafcor', quantile=0.5}", "aggregation.rule=caf", *SECLDP),
    "cafcor-secldp": ("algorithm.name=cafcor", "aggregation.rule=caf", *SECLDP),
    "cafcor-byzldp": ("algorithm.name=cafcor", "aggregation.rule=caf", "privacy.threat=byzldp", *SECLDP[1:]),
    "cafcor-ldp": ("algorithm.name=cafcor", "aggregation.rule=caf", *LDP),
    "cafcor-cdp": (
        "algorithm.name=cafcor",
        "algorithm.momentum=0",
        "aggregation.rule=mean",
        "privacy.threat=cdp",
        *LDP[1:],
    ),
    "byz-clip21": ("algorithm.name=byz-clip21-sgd2m", "aggregation.rule=nnm+cwmed", *LDP),
    "lp-proj-1": ("algorithm.name=lp-proj", "algorithm.dim=7", "aggregation.rule=mean"),
    "lp-proj-2": ("algorithm.name=lp-proj", "algorithm.p=2", "algorithm.dim=7", "aggregation.rule=cwmed"),
    "lp-proj private": ("algorithm.name=lp-proj", "algorithm.dim=7", "aggregation.rule=cwmed", *SECLDP),
    "fedavg+krum": ("algorithm.name=fedavg", "aggregation.rule=krum"),
    "fedavg averaged": ("algorithm.name=fedavg", "algorithm.statistics=averaged", "aggregation.rule=cwtm"),
    "fedavg private": ("algorithm.name=fedavg", "aggregation.rule=cwmed", *SECLDP),
    "fedavg whitened": ("algorithm.name=fedavg", "aggregation.rule=cwmed", "data.whiten=true", *SECLDP),
}


def federation(tmp_path, *options, rounds=ROUNDS):
    return seeded(tmp_path / "federation", CLIENTS, *options, "data.holders=all", rounds=rounds)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("lp-proj")) for name in ALGORITHMS]
)
def test_nodes_equal_the_stacked_simulation(tmp_path, name):
    """One node per client, through blocks and disks, without a network."""
    parties, config = federation(tmp_path, *ALGORITHMS[name])
    coordinator(parties, Direct(parties))[0].go()
    check_against_simulation(parties, config, "run")
    replayed = replay(parties[0], "run")
    assert replayed.expelled == ()
    for part, tensor in result_of(parties, "run").items():
        assert torch.equal(tensor, replayed.broadcast[part])


COMPRESSED = {
    "qsgd": ("algorithm.name=qsgd", "algorithm.bucket=20"),
    "dgc": ("algorithm.name=dgc",),
    "lbgm": ("algorithm.name=lbgm", "algorithm.threshold=0.5"),
    "sketch": ("algorithm.name=sketch", "algorithm.columns=12", "algorithm.rows=5", "algorithm.kept=6"),
}


@pytest.mark.parametrize("rule", ["mean", "krum"])
@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_messages_travel_encoded_and_are_as_long_as_counted(tmp_path, name, rule):
    """Bytes sent, bytes on the server's record, bytes of the simulation: one number; and the same model."""
    parties, config = federation(tmp_path, *COMPRESSED[name], f"aggregation.rule={rule}")
    sent = [0] * ROUNDS

    def count(client, asked, answer):
        answers = {kind.kind: kind for kind in (kinds.Answer, kinds.Detail)}
        if (kind := answers.get(wire.kind_of(answer))) is not None:
            header, tensors = wire.loads(answer, kind)
            sent[header.round] += sum(tensor.nbytes for tensor in tensors.values())
        return answer

    runner, _ = coordinator(parties, Direct(parties, tamper=count))
    runner.go()
    check_against_simulation(parties, config, "run")
    experiment = simulation(parties, config, "run")
    progress, counted = engine.start(experiment), []
    for _ in range(ROUNDS):
        progress, record = engine.step(experiment, progress)
        counted.append(record.facts)
    assert [facts["up_bytes"] for facts in counted] == sent
    for kind in ("up_bytes", "up_scalars"):
        assert [record["facts"][kind] for record in runner.log.records()] == [one[kind] for one in counted]
    whole = 4 * experiment.clients.model.dim * CLIENTS
    assert name == "sketch" or sent[-1] < whole, "it is compressed"


def test_a_server_that_is_started_again_understands_multiples_of_earlier_gradients(tmp_path):
    """LBGM's full gradients are in the commit: a second server reads what refers to them."""
    parties, config = federation(tmp_path, *COMPRESSED["lbgm"])

    def dies(client, asked, answer):
        if asks(asked, 1):
            raise RuntimeError("the server dies")
        return answer

    with pytest.raises(RuntimeError, match="dies"):
        coordinator(parties, Direct(parties, tamper=dies))[0].go()
    coordinator(parties, Direct(parties))[0].go()
    check_against_simulation(parties, config, "run")


def test_a_client_silent_in_the_second_exchange_is_absent(tmp_path):
    """It gave its table and then nothing: the round goes on, its state is as before, others' are used."""
    parties, _ = federation(tmp_path, *COMPRESSED["sketch"])
    runner, _ = coordinator(
        parties,
        Direct(
            parties,
            tamper=lambda client, asked, answer: (
                None if client == 2 and wire.kind_of(asked) == "inquire" else answer
            ),
        ),
    )
    runner.go()
    assert [record["absent"] for record in runner.log.records()] == [[2]] * ROUNDS
    replayed = replay(parties[0], "run")
    assert torch.equal(result_of(parties, "run")["params"], replayed.broadcast["params"])


def test_a_client_answers_one_second_question_of_its_last_round(tmp_path):
    parties, _ = federation(tmp_path, *COMPRESSED["sketch"])
    inquiries: list[bytes] = []

    def keep(client, asked, answer):
        if client == 0 and wire.kind_of(asked) == "inquire":
            inquiries.append(asked)
        return answer

    transport = Direct(parties, tamper=keep)
    coordinator(parties, transport)[0].go()
    node = transport.clients[0]
    header, question = wire.loads(inquiries[-1], kinds.Inquire)
    assert node.answer(inquiries[-1]) == node.answer(inquiries[-1])
    with pytest.raises(UserError, match="repeated"):
        node.answer(wire.dumps(header, {"candidates": question["candidates"].flip(0)}))
    with pytest.raises(UserError, match="round: "):
        node.answer(inquiries[0])


@pytest.mark.parametrize(
    "options",
    [
        ("run.returned=average",),
        ("run.returned=sampled",),
        ("federation.sampled=3",),
        ("federation.sampled=3", "run.returned=average"),
    ],
    ids=" ".join,
)
def test_sampled_clients_and_returned_models_equal_the_simulation(tmp_path, options):
    """The server asks the clients the simulation hears, and returns the model the simulation returns."""
    rounds = 8
    parties, config = federation(tmp_path, *ALGORITHMS["cafcor-secldp"], *options, rounds=rounds)
    transport = Direct(parties)
    runner, _ = coordinator(parties, transport)
    runner.go()
    experiment = simulation(parties, config, "run")
    progress = engine.start(experiment)
    for _ in range(rounds):
        progress, _ = engine.step(experiment, progress)
    torch.testing.assert_close(result_of(parties, "run")["params"], progress.chosen, rtol=1e-6, atol=1e-6)
    turns = [experiment.sampled(round_) for round_ in range(rounds)]
    asked = [client for client, kind in transport.asked if kind == "ask"]
    assert sorted(asked) == sorted(client for turn in turns for client in turn)
    assert [set(record["weights"]) for record in runner.log.records()] == [set(map(str, t)) for t in turns]
    assert not any(record["absent"] for record in runner.log.records())
    for party in parties[1:]:
        paid = entries(party)
        assert [entry.round for entry in paid] == [
            round_ for round_, turn in enumerate(turns) if party.client in turn
        ]
        assert not paid[-1].mechanism.sampling.amplifies, "who is asked is no secret"
