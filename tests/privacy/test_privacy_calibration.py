"""Calibration returns the least noise, on the safe side."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trilemma.base.errors import UserError
from trilemma.privacy import (
    Mechanism,
    NoiseLaw,
    Release,
    Sampling,
    Threat,
    calibrate,
    mean_noise,
    multiplier,
    spent,
)
from trilemma.privacy.accounting.calibration import Price, allocate
from trilemma.privacy.accounting.spending import composed_epsilon
from trilemma.privacy.threats.covariance import complete_multiplier


@given(
    st.sampled_from(["cdp", "secldp", "byzldp", "ldp"]),
    st.integers(1, 60),
    st.floats(0, 0.49),
    st.floats(0.05, 200),
    st.floats(1e-12, 1e-2),
    st.integers(1, 500),
    st.sampled_from(["exact", "rdp"]),
)
def test_every_threat_model_gets_what_it_asked_for(name, n, share, epsilon, delta, rounds, accountant):
    threat = Threat(name, n, int(share * n))
    law = calibrate(epsilon, delta, rounds, 2.25, threat, accountant=accountant)
    cost = spent(Release(2.25, law), threat, rounds, delta, (accountant,)).epsilon[accountant]
    assert epsilon * (1 - 1e-4) <= cost <= epsilon


@pytest.mark.parametrize("scheme", ["poisson", "without-replacement"])
@pytest.mark.parametrize("adjacency", ["replace", "published"])
@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
def test_sampled_releases(scheme, adjacency, accountant):
    sampling, threat = Sampling(scheme, 0.01), Threat("ldp", 7, 3)
    law = calibrate(2.0, 1e-4, 50, 1.0, threat, "example", 25, sampling, accountant, adjacency=adjacency)
    release = Release(1.0, law, "example", 25, sampling, adjacency)
    cost = spent(release, threat, 50, 1e-4, (accountant,)).epsilon[accountant]
    assert 2.0 * (1 - 5e-3) <= cost <= 2.0


@pytest.mark.parametrize(
    ("n", "f", "q"), [(10, 0, 0), (10, 1, 0), (10, 3, 1), (100, 10, 10), (100, 10, 9), (7, 3, 3)]
)
@pytest.mark.parametrize("heavy", [0.0, 1.0])
@pytest.mark.parametrize("assume", ["guaranteed", "published"])
def test_no_other_pair_is_cheaper(n, f, q, heavy, assume):
    """By the noise in the honest mean alone, and with a multiple of all noise added to it."""
    threat = Threat("secldp", n, f, q, assume)
    law = allocate(1.0, threat, lambda asked: Price(f + heavy * n, 1 + heavy))
    release = Release(0.5, law)
    assert multiplier(release, threat) >= 1.0

    def price(law: NoiseLaw) -> float:
        ind, cor = law.sigma_ind**2, law.sigma_cor**2
        return f * cor + ind + heavy * (n * cor + ind)

    for angle in np.linspace(0, math.pi / 2, 181):
        ind, cor = math.cos(angle), math.sin(angle)
        if angle == math.pi / 2 and threat.hidden == 0:
            continue
        other = NoiseLaw(ind, cor)
        scale = 1.0 / multiplier(Release(0.5, other), threat)
        found = NoiseLaw(scale * ind, scale * cor)
        if f == 0 and found.sigma_cor > 10 * found.sigma_ind:
            continue  # more pairwise noise is ever so slightly better; the search stops at ten times
        assert price(law) <= price(found) * (1 + 1e-6)


def test_the_papers_setting_needs_pairwise_noise_only():
    published = Threat("secldp", 100, 10, assume="published")
    law = calibrate(26.4, 1e-4, 30, 2.25, published, accountant="rdp")
    assert law.sigma_ind == 0
    assert law.sigma_cor == pytest.approx(0.6, abs=2e-3)


@pytest.mark.parametrize(("f", "epsilon", "pair"), [(5, 27.8, (1.00, 0.65)), (10, 26.4, (1.19, 0.64))])
def test_a_guarantee_in_the_papers_setting_needs_own_noise_too(f, epsilon, pair):
    """Whoever turns out to be honest: ε is kept for 0, 1, … f liars, with the cheapest pair."""
    law = calibrate(epsilon, 1e-4, 30, 2.25, Threat("secldp", 100, f), accountant="rdp")
    assert (round(law.sigma_ind, 2), round(law.sigma_cor, 2)) == pair
    z = [complete_multiplier(law, 4.5, 100, liars, 0) for liars in range(f + 1)]
    assert z == sorted(z)  # nobody lying is the worst case
    assert epsilon * (1 - 1e-4) <= composed_epsilon(((Mechanism(z[0]), 30),), 1e-4, "rdp") <= epsilon


def test_exact_accounting_saves_noise():
    exact, renyi = (
        calibrate(26.4, 1e-4, 30, 2.25, Threat("ldp", 100), accountant=name).sigma_ind
        for name in ("exact", "rdp")
    )
    assert exact < 0.97 * renyi


def test_infinite_epsilon_is_the_plain_run():
    assert calibrate(math.inf, 1e-5, 100, 1.0, Threat("secldp", 10, 2)) == NoiseLaw()


def test_dropping_the_secrets_costs_a_factor_near_the_root_of_n():
    ldp = calibrate(5.0, 1e-5, 100, 1.0, Threat("ldp", 100, 0)).sigma_ind
    sec = calibrate(5.0, 1e-5, 100, 1.0, Threat("secldp", 100, 0)).sigma_ind
    assert 9.5 < ldp / sec < 10


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"epsilon": 0.0}, "positive"),
        ({"epsilon": math.nan}, "positive"),
        ({"delta": 1.0}, "strictly between"),
        ({"rounds": 0}, "at least one round"),
        ({"clip": math.inf}, "unclipped"),
        ({"accountant": "exakt"}, "did you mean 'exact'"),
        (
            {"unit": "example", "sampling": Sampling("poisson", 0.1), "accountant": "exact"},
            "without sampling",
        ),
    ],
)
def test_bad_input_says_why(arguments, reason):
    good = {"epsilon": 1.0, "delta": 1e-5, "rounds": 10, "clip": 1.0, "threat": Threat("secldp", 10, 2)}
    with pytest.raises(UserError, match=reason):
        calibrate(**{**good, **arguments})


@pytest.mark.parametrize("collusion", [0, 2])
def test_noise_for_neighbours_is_certified_on_their_graph(collusion):
    """What is calibrated for eight neighbours each costs ε on that graph, and more noise than with all."""
    few = Threat("secldp", 50, 4, collusion, neighbours=8)
    everybody = replace(few, neighbours=None)
    laws = [calibrate(5.0, 1e-5, 20, 1.0, threat) for threat in (few, everybody)]
    for law, threat in zip(laws, (few, everybody), strict=True):
        cost = spent(Release(1.0, law), threat, 20, 1e-5, accountants=("exact",)).epsilon["exact"]
        assert 4.99 < cost <= 5.0
    assert mean_noise(laws[0], 50, 4, 8) > mean_noise(laws[1], 50, 4)
