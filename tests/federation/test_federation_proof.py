"""Deployed = simulated, number for number, without a network.

The simulation here is the stacked engine of `trilemma.simulate`, all clients at once, given the federation's
seeds and secrets. The deployment is one node per client. Messages and models must agree to 1e-6.
"""

from __future__ import annotations

import pytest
import torch

from federation_harness import (
    Direct,
    check_against_simulation,
    coordinator,
    make,
    result_of,
    share_seeds,
    simulation,
    small_config,
)
from trilemma.federation import spending
from trilemma.privacy.ledger import Ledger
from trilemma.simulate import engine

CLIENTS, ROUNDS = 4, 3
SECLDP = ("privacy.threat=secldp", "privacy.clip=1.0", "privacy.sigma_cor=0.5", "privacy.sigma_ind=0.2")
LDP = ("privacy.threat=ldp", "privacy.clip=1.0", "privacy.sigma_ind=0.5")


ALGORITHMS = {
    "dsgd": ("algorithm.name=dsgd", "aggregation.rule=cwtm"),
    "dp-dsgd": ("algorithm.name=dsgd", "aggregation.rule=mean", "privacy.threat=cdp", *LDP[1:]),
    "safe-dshb": (
        "algorithm.name=safe-dshb",
        "aggregation.rule=nnm+cwmed",
        "privacy.threat=ldp",
        "privacy.clip=1.0",
        "privacy.sigma_ind=0.05",
    ),
    "cafcor-secldp": ("algorithm.name=cafcor", "aggregation.rule=caf", *SECLDP),
    "cafcor-byzldp": ("algorithm.name=cafcor", "aggregation.rule=caf", "privacy.threat=byzldp", *SECLDP[1:]),
    "cafcor-ldp": ("algorithm.name=cafcor", "aggregation.rule=caf", *LDP),
    "cafcor-cdp": (
        "algorithm.name=cafcor",
        "aggregation.rule=caf",
        "privacy.threat=cdp",
        "privacy.uncertified=true",
        *LDP[1:],
    ),
    "byz-clip21": ("algorithm.name=byz-clip21-sgd2m", "aggregation.rule=nnm+cwmed", *LDP),
    "lp-proj-1": ("algorithm.name=lp-proj", "algorithm.dim=7", "aggregation.rule=mean"),
    "lp-proj-2": ("algorithm.name=lp-proj", "algorithm.p=2", "algorithm.dim=7", "aggregation.rule=cwmed"),
    "lp-proj private": ("algorithm.name=lp-proj", "algorithm.dim=7", "aggregation.rule=cwmed", *SECLDP),
    "fedavg+krum": ("algorithm.name=fedavg", "aggregation.rule=krum"),
    "fedavg private": ("algorithm.name=fedavg", "aggregation.rule=cwmed", *SECLDP),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_nodes_equal_the_stacked_simulation(tmp_path, name):
    """One node per client, through blocks and disks, without a network."""
    config = small_config(CLIENTS, *ALGORITHMS[name], "data.holders=all", rounds=ROUNDS)
    noisy = any("sigma" in option for option in ALGORITHMS[name])
    parties = make(
        tmp_path / "federation",
        CLIENTS,
        config,
        transcript=True,
        budget=1e9 if noisy else None,
    )
    share_seeds(parties, config)
    coordinator(parties, Direct(parties))[0].go()
    check_against_simulation(parties, config, "run")


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
    config = small_config(CLIENTS, *ALGORITHMS["cafcor-secldp"], "data.holders=all", *options, rounds=rounds)
    parties = make(tmp_path / "federation", CLIENTS, config, budget=1e9)
    share_seeds(parties, config)
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
        with Ledger(party.state / "ledger", spending.read_budget(party)) as ledger:
            paid = [entry.round for entry in ledger.entries]
            assert paid == [round_ for round_, turn in enumerate(turns) if party.client in turn]
            assert not ledger.entries[-1].mechanism.sampling.amplifies, "who is asked is no secret"
