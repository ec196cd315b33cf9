"""The covariance of what the adversary cannot subtract, against slow and obvious versions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trilemma.base.errors import PrivacyError, UserError
from trilemma.base.keys import Key
from trilemma.privacy import NoiseLaw, SecretGraph, covariance
from trilemma.privacy.threats.covariance import (
    bound_multiplier,
    complete_multiplier,
    multipliers,
    worst_multiplier,
)


def residual_covariance(graph: SecretGraph, law: NoiseLaw, senders: list[int], known: set[int]) -> np.ndarray:
    """Σ edge by edge: each unknown pair's noise enters two messages with opposite signs."""
    sigma = law.sigma_ind**2 * np.eye(len(senders))
    for i, j in itertools.combinations(range(graph.clients), 2):
        if graph.adjacency[i, j] and not {i, j} & known:
            share = np.array([(s == i) - (s == j) for s in senders], float)
            sigma += law.sigma_cor**2 * np.outer(share, share)
    return sigma


LARGE = pytest.param(40, marks=pytest.mark.slow)
GRAPHS = ((10, 5), (12, 6), (10, 9))


def slow_multipliers(graph, law, sensitivity, byzantine, colluding):
    senders = [i for i in range(graph.clients) if i not in byzantine]
    inverse = np.linalg.inv(residual_covariance(graph, law, senders, set(colluding)))
    return {i: 1 / (sensitivity * math.sqrt(inverse[k, k])) for k, i in enumerate(senders)}


@pytest.mark.parametrize("n", [2, 3, 7, 16, LARGE])
def test_closed_form_equals_numeric_for_every_f_and_q(n):
    law, graph = NoiseLaw(sigma_ind=0.37, sigma_cor=0.83), SecretGraph.complete(n)
    for f in range(n):
        for q in range(f + 1):
            z = multipliers(graph, law, 4.5, byzantine=range(f), colluding=range(q))
            closed = complete_multiplier(law, 4.5, n, f, q)
            assert len(z) == n - f
            np.testing.assert_allclose(list(z.values()), closed, rtol=1e-10)


@pytest.mark.parametrize("n", [3, 9, LARGE])
def test_closed_form_without_independent_noise(n):
    law, graph = NoiseLaw(sigma_cor=0.6), SecretGraph.complete(n)
    for f in range(1, n):
        for q in range(f):
            z = multipliers(graph, law, 2.0, byzantine=range(f), colluding=range(q))
            np.testing.assert_allclose(min(z.values()), complete_multiplier(law, 2.0, n, f, q), rtol=1e-10)


def test_lemma_a4_as_printed():
    n, f, q, clip, ind, cor = 23, 6, 2, 1.7, 0.4, 0.9
    rho = 2 * clip**2 / ((n - q) * cor**2 + ind**2) * (1 + cor**2 / ((f - q) * cor**2 + ind**2))
    z = complete_multiplier(NoiseLaw(ind, cor), 2 * clip, n, f, q)
    assert 1 / (2 * z**2) == pytest.approx(rho, rel=1e-13)


@given(
    n=st.integers(4, 12),
    degree=st.integers(2, 6),
    seed=st.integers(0, 10**6),
    ind=st.floats(0.05, 2),
    cor=st.just(0.0) | st.floats(1e-100, 3),
)
def test_any_graph_against_the_edge_by_edge_covariance(n, degree, seed, ind, cor):
    if degree >= n or n * degree % 2:
        return
    graph, law = SecretGraph.regular(n, degree, Key(seed)), NoiseLaw(ind, cor)
    byzantine = list(range(n // 3))
    colluding = byzantine[: len(byzantine) // 2]
    fast = multipliers(graph, law, 2.0, byzantine, colluding)
    slow = slow_multipliers(graph, law, 2.0, byzantine, colluding)
    assert fast.keys() == slow.keys()
    np.testing.assert_allclose(list(fast.values()), list(slow.values()), rtol=1e-9)


def test_dropouts_leave_their_pair_noise_uncancelled():
    graph, law = SecretGraph.complete(6), NoiseLaw(0.5, 1.0)
    dropped = covariance(graph, law, senders=[0, 1, 2, 3])
    np.testing.assert_allclose(dropped, residual_covariance(graph, law, [0, 1, 2, 3], set()))
    assert dropped[0, 0] == pytest.approx(0.25 + 5)
    everyone = multipliers(graph, law, 1.0)
    some = multipliers(graph, law, 1.0, dropped=[4, 5])
    assert all(some[i] > everyone[i] for i in some)


@pytest.mark.parametrize(
    ("n", "degree"), [(9, 4), (9, 8), *(pytest.param(*one, marks=pytest.mark.slow) for one in GRAPHS)]
)
def test_bound_holds_for_every_colluding_and_hidden_set(n, degree):
    graph = SecretGraph.regular(n, degree, Key(n)) if degree < n - 1 else SecretGraph.complete(n)
    for law in (NoiseLaw(0.3, 1.0), NoiseLaw(0.05, 0.7)):
        for f, q in ((0, 0), (1, 1), (2, 1), (2, 2), (3, 1)):
            bound = bound_multiplier(graph, law, 2.0, f, q)
            worst = min(
                min(multipliers(graph, law, 2.0, bad, known).values())
                for bad in itertools.combinations(range(n), f)
                for known in itertools.combinations(bad, q)
            )
            assert bound <= worst * (1 + 1e-12)


def test_bound_is_exact_on_the_complete_graph():
    for n, f, q in ((5, 2, 1), (12, 3, 3), (40, 11, 0)):
        law = NoiseLaw(0.2, 0.9)
        exact = complete_multiplier(law, 3.0, n, f, q)
        assert bound_multiplier(SecretGraph.complete(n), law, 3.0, f, q) == pytest.approx(exact, rel=1e-12)


def test_bound_survives_a_graph_that_colluders_can_cut():
    ring, law = SecretGraph.ring(12, 4), NoiseLaw(0.5, 1.0)
    assert ring.connectivity < 3
    assert bound_multiplier(ring, law, 2.0, 3, 3) > NoiseLaw(0.5).sigma_ind / 2.0
    with pytest.raises(PrivacyError, match="cut the graph"):
        bound_multiplier(ring, NoiseLaw(0.0, 1.0), 2.0, 3, 3)


@pytest.mark.parametrize("graph", [SecretGraph.complete(6), SecretGraph.ring(7, 4)])
@pytest.mark.parametrize("collusion", [0, 1, 2])
def test_the_worst_real_number_of_liars_is_that_of_the_colluders(graph, collusion):
    """Every set of at most three liars, every set of at most q of them colluding."""
    law, tolerated = NoiseLaw(0.4, 0.9), 3
    worst = {}
    for liars in range(tolerated + 1):
        for colluders in range(min(collusion, liars) + 1):
            worst[liars, colluders] = min(
                min(slow_multipliers(graph, law, 2.0, bad, known).values())
                for bad in itertools.combinations(range(graph.clients), liars)
                for known in itertools.combinations(bad, colluders)
            )
    assert min(worst.values()) == pytest.approx(worst[collusion, collusion], rel=1e-12)
    assert worst_multiplier(graph, law, 2.0, collusion) <= worst[collusion, collusion] * (1 + 1e-12)
    if graph.degrees.min() == graph.clients - 1:
        n, ind, cor = graph.clients, law.sigma_ind**2, law.sigma_cor**2
        assert worst_multiplier(graph, law, 2.0, collusion) == pytest.approx(worst[collusion, collusion])
        nobody = 1 / (n * ind) + (1 - 1 / n) / (n * cor + ind)
        assert worst[0, 0] == pytest.approx(1 / (2.0 * math.sqrt(nobody)))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_liar_that_leaves_its_own_noise_out_counts_as_a_colluder(count):
    """Every set of such liars among six: their messages are the sums of their secrets, and nothing else.

    The honest are without the liars' own noise, so the figure for q = 0 would be too good; the one that
    counts them among the q holds.
    """
    n, law = 6, NoiseLaw(0.4, 0.9)
    pairs = list(itertools.combinations(range(n), 2))
    for liars in itertools.combinations(range(n), count):
        mixing = np.zeros((n, n + len(pairs)))
        for i in set(range(n)) - set(liars):
            mixing[i, i] = law.sigma_ind
        for place, (i, j) in enumerate(pairs):
            mixing[i, n + place], mixing[j, n + place] = law.sigma_cor, -law.sigma_cor
        precision = np.diag(np.linalg.inv(mixing @ mixing.T))
        z = min(1 / (2.0 * math.sqrt(precision[i])) for i in set(range(n)) - set(liars))
        assert complete_multiplier(law, 2.0, n, count, count) <= z * (1 + 1e-12)
        assert z < 0.99 * complete_multiplier(law, 2.0, n, 0, 0)


@pytest.mark.parametrize(("n", "degree"), [(8, 3), (9, 4), (20, 7), (6, 1), (6, 0)])
def test_regular_graphs_are_regular(n, degree):
    graph = SecretGraph.regular(n, degree, Key(3))
    assert set(graph.degrees.tolist()) == {degree}
    assert np.array_equal(graph.adjacency, SecretGraph.regular(n, degree, Key(3)).adjacency)
    assert all(0 in graph.neighbours(j) for j in graph.neighbours(0))


def test_singular_noise_is_refused_with_the_reason():
    graph, law = SecretGraph.complete(5), NoiseLaw(sigma_cor=1.0)
    with pytest.raises(PrivacyError, match="cancels"):
        complete_multiplier(law, 2.0, 5, 2, 2)
    with pytest.raises(PrivacyError, match="cancels"):
        multipliers(graph, law, 2.0, byzantine=[0, 1], colluding=[0, 1])
    assert multipliers(graph, NoiseLaw(), 2.0)[0] == 0.0


@pytest.mark.parametrize(
    "call",
    [
        lambda g: multipliers(g, NoiseLaw(1), 1.0, byzantine=[1], colluding=[2]),
        lambda g: covariance(g, NoiseLaw(1), senders=[0, 9]),
        lambda g: covariance(g, NoiseLaw(1), senders=[]),
        lambda g: covariance(g, NoiseLaw(1), senders=[1], known=[1]),
        lambda g: bound_multiplier(g, NoiseLaw(1), 1.0, 1, 2),
        lambda g: SecretGraph.ring(5, 3),
        lambda g: SecretGraph.regular(5, 3, Key(1)),
        lambda g: SecretGraph.ring(5, 5),
        lambda g: SecretGraph(np.ones((2, 2), bool)),
    ],
)
def test_bad_input_is_refused(call):
    with pytest.raises(UserError):
        call(SecretGraph.complete(5))
