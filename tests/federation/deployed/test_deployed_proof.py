"""A real federation equals the simulation, number for number; what travelled is as private as promised.

`tests/federation/test_federation_proof.py` has every algorithm without a network; here one goes through TLS
and processes.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace

import pytest
import torch
from deployed_harness import real
from scipy import stats

from federation_harness import check_against_simulation, secrets_of, share_seeds, small_config, transcript
from stacked_noise import StackedSecretNoise
from trilemma import config as configurations
from trilemma.federation.client.node import Node
from trilemma.privacy import NoiseLaw
from trilemma.simulate import engine
from trilemma.simulate.experiment import assemble

pytestmark = [pytest.mark.federation, pytest.mark.slow]

CLIENTS, ROUNDS = 4, 3
CAFCOR = (
    "algorithm.name=cafcor",
    "aggregation.rule=caf",
    "privacy.threat=secldp",
    "privacy.clip=0.1",
    "privacy.sigma_cor=0.5",
    "privacy.sigma_ind=0.2",
)
MODEL = ("model.name=mlp", "model.hidden=[64]")  # thousands of numbers to do statistics on


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """A real federation that ran three rounds of CafCor, and what the server recorded."""
    config = small_config(
        CLIENTS, *CAFCOR, *MODEL, "algorithm.momentum=0.0", "data.holders=all", rounds=ROUNDS
    )
    folder = tmp_path_factory.mktemp("proof") / "federation"
    with real(folder, CLIENTS, config, budget=1e9, transcript=True) as running:
        share_seeds(running.parties, config)
        running.go("proof")
    return running.parties, config


def test_a_real_federation_equals_the_simulation(deployed):
    """Four clients, three rounds, TLS, processes: every message and the model, to 1e-6."""
    check_against_simulation(*deployed, "proof")


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
