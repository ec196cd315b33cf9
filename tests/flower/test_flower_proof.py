"""Deployed = simulated, number for number; and what travelled is as private as promised.

The simulation here is the stacked engine of `trilemma.simulate`, all clients at once, given the federation's
seeds and secrets. The deployment is one node per client. Messages and models must agree to 1e-6.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace

import pytest
import torch
from flower_harness import Direct, coordinator, make, real, small_config
from scipy import stats

from trilemma import config as configurations
from trilemma.federation import spending, wire
from trilemma.federation.layout import Timing
from trilemma.federation.node import Node
from trilemma.federation.sessions import Session
from trilemma.privacy import NoiseLaw
from trilemma.privacy.ledger import Ledger
from trilemma.privacy.secrets import SecretNoise, StackedSecretNoise
from trilemma.simulate import engine
from trilemma.simulate.experiment import assemble

CLIENTS, ROUNDS = 4, 3
INSTANT = Timing(round_limit=1.0, join_limit=0.3, poll=0.05)
SECLDP = ("privacy.threat=secldp", "privacy.clip=1.0", "privacy.sigma_cor=0.5", "privacy.sigma_ind=0.2")
LDP = ("privacy.threat=ldp", "privacy.clip=1.0", "privacy.sigma_ind=0.5")


def share_seeds(parties, config):
    """Give every client the simulation's seed for sampling, and noise that can be drawn again."""
    seed = configurations.parse(tomllib.loads(config)).run.seeds[0]
    for party in parties[1:]:
        party.seed.write_text(f"{seed:x}")
        (party.folder / "secrets" / "reproducible-noise").write_text(bytes([7 + party.client] * 32).hex())


def secrets_of(parties, run):
    """Every client's noise source, rebuilt from its own folder."""
    return [
        SecretNoise(party.client, Session(party, run).secrets.pairs, party.reproducible_noise)
        for party in parties[1:]
    ]


def transcript(parties, run, round_):
    folder = parties[0].run_folder(run) / "transcript"
    return torch.stack(
        [
            wire.loads((folder / f"{round_}-{i}").read_bytes(), wire.Answer)[1]["vector"]
            for i in range(CLIENTS)
        ]
    )


def simulation(parties, config, run):
    """The experiment of `config`, with the noise of the federation's secrets."""
    experiment = assemble(configurations.parse(tomllib.loads(config)), seed=1)
    noise = StackedSecretNoise.of(secrets_of(parties, run))
    return replace(experiment, clients=replace(experiment.clients, noise=noise))


def result_of(parties, run):
    return wire.loads((parties[0].run_folder(run) / "result").read_bytes(), wire.Finished)[1]


def check_against_simulation(parties, config, run):
    experiment = simulation(parties, config, run)
    progress = engine.start(experiment)
    algorithm = experiment.resolved.algorithm
    for round_ in range(ROUNDS):
        key = experiment.key.fold("round", round_)
        sent = algorithm.client(progress.broadcast, progress.clients, experiment.clients, round_, key)
        travelled = transcript(parties, run, round_)
        assert travelled.abs().max() > 0
        torch.testing.assert_close(travelled, sent.messages.vectors, rtol=1e-6, atol=1e-6)
        progress, _ = engine.step(experiment, progress)
    result = result_of(parties, run)
    assert set(result) == set(progress.broadcast)
    for name, tensor in result.items():
        torch.testing.assert_close(tensor, progress.broadcast[name], rtol=1e-6, atol=1e-6)


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
        timing=INSTANT,
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
    parties = make(tmp_path / "federation", CLIENTS, config, timing=INSTANT, budget=1e9)
    share_seeds(parties, config)
    exchange = Direct(parties)
    runner, _ = coordinator(parties, exchange)
    runner.go()
    experiment = simulation(parties, config, "run")
    progress = engine.start(experiment)
    for _ in range(rounds):
        progress, _ = engine.step(experiment, progress)
    torch.testing.assert_close(result_of(parties, "run")["params"], progress.chosen, rtol=1e-6, atol=1e-6)
    turns = [experiment.sampled(round_) for round_ in range(rounds)]
    asked = [client for client, kind in exchange.asked if kind == "ask"]
    assert sorted(asked) == sorted(client for turn in turns for client in turn)
    assert [set(record["weights"]) for record in runner.log.records()] == [set(map(str, t)) for t in turns]
    assert not any(record["absent"] for record in runner.log.records())
    for party in parties[1:]:
        with Ledger(party.state / "ledger", spending.read_budget(party)) as ledger:
            paid = [entry.round for entry in ledger.entries]
            assert paid == [round_ for round_, turn in enumerate(turns) if party.client in turn]
            assert not ledger.entries[-1].mechanism.sampling.amplifies, "who is asked is no secret"


MODEL = ("model.name=mlp", "model.hidden=[64]")  # thousands of numbers to do statistics on


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """A real federation that ran three rounds of CafCor, and what the server recorded."""
    config = small_config(
        CLIENTS,
        *ALGORITHMS["cafcor-secldp"],
        *MODEL,
        "algorithm.momentum=0.0",
        "data.holders=all",
        rounds=ROUNDS,
    )
    folder = tmp_path_factory.mktemp("proof") / "federation"
    with real(folder, CLIENTS, config, budget=1e9, transcript=True) as running:
        share_seeds(running.parties, config)
        running.go("proof")
    return running.parties, config


@pytest.mark.federation
@pytest.mark.slow
def test_a_real_federation_equals_the_simulation(deployed):
    """Four clients, three rounds, TLS, processes: every message and the model, to 1e-6."""
    check_against_simulation(*deployed, "proof")


@pytest.mark.federation
@pytest.mark.slow
@pytest.mark.parametrize("colluders", [(), (3,), (1, 3)])
def test_what_travelled_is_as_noisy_as_promised(deployed, colluders):
    """Take the messages, subtract what colluders know; the rest has the variance the accountant assumes.

    Residual of honest client i: own noise and pairs with honest others, variance σ_ind² + (h − 1) σ_cor², and
    −σ_cor² between two of them. The signal is known here and taken out. χ² with rounds·d degrees of freedom;
    each of the tests below is wrong with probability 1e-6, there are at most 10 of them.
    """
    parties, config = deployed
    settings = configurations.parse(tomllib.loads(config))
    law = Node(parties[1]).task.resolved.release.law
    assert (law.sigma_ind, law.sigma_cor) == (settings.privacy.sigma_ind, settings.privacy.sigma_cor)
    clipped_only = tomllib.loads(config) | {"privacy": {"clip": settings.privacy.clip}}
    quiet = assemble(configurations.parse(clipped_only), seed=1)
    honest = [i for i in range(CLIENTS) if i not in colluders]
    secrets = StackedSecretNoise.of(secrets_of(parties, "proof"))
    known = StackedSecretNoise(
        {ends: key for ends, key in secrets.pairs.items() if {*ends} & {*colluders}}, {}
    )
    noisy = assemble(settings, seed=1)
    noisy = replace(noisy, clients=replace(noisy.clients, noise=secrets))
    progress = engine.start(noisy)
    residuals = []
    for round_ in range(ROUNDS):
        sent = transcript(parties, "proof", round_)
        key = quiet.key.fold("round", round_)
        signal = quiet.resolved.algorithm.client(
            progress.broadcast, progress.clients, quiet.clients, round_, key
        ).messages.vectors
        assert signal.norm(dim=1).max() < 1.0 + 1e-3, "without noise a message is a clipped gradient"
        everyone = tuple(range(CLIENTS))
        pairwise = NoiseLaw(sigma_cor=law.sigma_cor)
        given_away = known.draw(pairwise, everyone, sent.shape[1], round_, torch.device("cpu"))
        residuals.append((sent - signal - given_away)[honest])
        progress, _ = engine.step(noisy, progress)
    sigma_ind, sigma_cor = law.sigma_ind, law.sigma_cor
    residual = torch.cat(residuals, dim=1).double()
    count = residual.shape[1]
    variance = sigma_ind**2 + (len(honest) - 1) * sigma_cor**2
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], count) / count
    for row in residual:
        assert low < float(row.square().mean()) / variance < high
    if len(honest) > 1:
        expected = -(sigma_cor**2)
        spread = math.sqrt((variance**2 + expected**2) / count)
        covariance = float((residual[0] * residual[1]).mean())
        assert abs(covariance - expected) < stats.norm.isf(5e-7) * spread
    aggregate = float(residual.sum(0).square().mean())
    assert low < aggregate / (len(honest) * sigma_ind**2) < high, "among the honest, shared noise cancels"
