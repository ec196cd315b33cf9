"""Rules for clients of unequal, public weight: what they equal, what κ they keep, and what they refuse."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from trilemma import aggregation as agg
from trilemma.aggregation.passes.gram import Geometry, geometry, heaviest
from trilemma.aggregation.passes.spectral import reweightings
from trilemma.aggregation.steps.weights import capped, check, usual_cap
from trilemma.base.errors import UserError
from trilemma.testing.adversary import climb
from trilemma.testing.inputs import attacked, float64

RULES = ["mean", "caf", "smea", "filter(1.5)", "geomed", "cwmed", "cwtm"]
CHAINS = [f"nnm+{rule}" for rule in RULES] + ["clip(2.0)+caf", "clip(2.0)+nnm+cwtm"]
WEIGHTS = (3, 1, 2, 1, 1, 2)


def sample(seed: int, n: int = 6, d: int = 4) -> torch.Tensor:
    return torch.from_numpy(attacked(np.random.default_rng(seed), n, 1, d))


@pytest.mark.parametrize("rule", [*agg.rules, "nnm+krum"])
def test_equal_weights_give_the_bits_of_none(rule: str) -> None:
    X = sample(1, n=9).float()
    plain, equal = agg.parse(rule, f=1)(X), agg.parse(rule, f=1, weights=[0.3] * 9)(X)
    assert torch.equal(plain.value, equal.value)
    assert torch.equal(plain.weights, equal.weights)


@pytest.mark.parametrize("rule", ["caf", "filter(1.5)", "geomed", "mean"])
def test_weights_of_one_each_give_the_bits_of_none(rule: str) -> None:
    """The weighted formulas themselves, not a way around them."""
    G, built = geometry(sample(2, n=9)), agg.parse(rule, f=2)
    assert isinstance(built, agg.Geometric)
    plain, ones = built.weigh(G, 2), built.weigh(replace(G, mass=np.ones(9)), 2)
    np.testing.assert_array_equal(plain.weights, ones.weights)
    assert plain.iterations == ones.iterations


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", [*RULES, *CHAINS])
def test_whole_weights_equal_the_duplicated_problem(rule: str, seed: int) -> None:
    """Nearest neighbours, too: a row's own copies come first, and the last row counts by a fraction."""
    X = sample(seed)
    weighted, many = agg.parse(rule, f=1, weights=WEIGHTS), agg.parse(rule, f=max(WEIGHTS))
    once, copies = weighted(X), many(X[np.repeat(np.arange(6), WEIGHTS)])
    np.testing.assert_allclose(once.value, copies.value, atol=1e-9)
    owners = np.add.reduceat(float64(copies.weights), np.cumsum([0, *WEIGHTS[:-1]]))
    np.testing.assert_allclose(float64(once.weights), owners, atol=1e-9)
    assert (weighted.kappa(6) is None) == (many.kappa(10) is None)
    if weighted.kappa(6) is not None:
        assert weighted.kappa(6) == pytest.approx(many.kappa(10))


def test_values_that_are_equal_share_by_weight_and_halves_are_halves() -> None:
    X = torch.tensor([[1.0], [2.0], [2.0], [9.0]])
    assert agg.parse("cwmed", f=1, weights=[0.1, 0.3, 0.2, 0.4])(X).weights.tolist() == pytest.approx(
        [0.0, 0.6, 0.4, 0.0]
    )
    apart = agg.parse("cwmed", f=1, weights=[0.1, 0.2, 0.2, 0.3, 0.2])(torch.arange(5.0)[:, None])
    assert apart.value.item() == pytest.approx(2.5)  # .1 + .2 + .2 is half, whatever rounding makes of it


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("rule", [*RULES, *CHAINS])
def test_rows_that_are_not_finite_leave_with_their_weight(rule: str, bad: float) -> None:
    X = sample(3)
    X[2, 1] = bad
    rest = [0, 1, 3, 4, 5]
    out = agg.parse(rule, f=1, weights=WEIGHTS)(X)
    without = agg.parse(rule, f=0, weights=[WEIGHTS[i] for i in rest])(X[rest])
    np.testing.assert_allclose(out.value, without.value, atol=1e-9)
    assert out.weights[2] == 0


@pytest.mark.parametrize("rule", ["caf", "cwtm", "nnm+cwmed"])
def test_streams_and_gram_matrices_have_weights(rule: str) -> None:
    X, built = sample(4, d=40).float(), agg.parse(rule, f=1, weights=WEIGHTS)
    whole = built(X)
    chunks = torch.split(X, 7, dim=1)
    np.testing.assert_allclose(agg.stream(built, chunks).value, whole.value, atol=1e-5)
    if built.geometric:
        np.testing.assert_allclose(built.weights_from_gram(agg.gram(X)), whole.weights, atol=1e-6)
        assert built.weights_from_grams is None


# ------------------------------------------------------------------------------------------ robustness

UNEQUAL = [
    ((4, 3, 2, 2, 1), 1),
    ((0.3, 0.2, 0.2, 0.1, 0.1, 0.1), 1),
    ((5, 4, 4, 3, 3, 3, 2), 2),
    ((9, 3, 2, 2, 2, 1, 1), 1),
    ((6, 5, 5, 4, 4, 3, 3, 3, 2, 2), 3),
]


@pytest.mark.parametrize("weights", [pytest.param(*one, id=str(one)) for one in [(w,) for w in UNEQUAL]])
@pytest.mark.parametrize("rule", ["caf", "smea", "geomed", "cwmed", "cwtm", "nnm+caf", "nnm+cwmed"])
def test_kappa_bounds_the_error_for_all_subsets(rule: str, weights: tuple[tuple[float, ...], int]) -> None:
    """For every S of weight ≥ 1 − W, also of many light clients, on inputs searched to break it."""
    shares, f = np.array(weights[0]) / sum(weights[0]), weights[1]
    built = agg.parse(rule, f=f, weights=weights[0])
    spectral = built.criterion == "spectral"
    search = {"spectral": spectral, "starts": 5, "patience": 6, "weights": shares}
    ratio, _ = climb(lambda X: float64(built(X).value), len(shares), f, 2, **search)
    kappa = built.kappa(len(shares))
    assert kappa is not None
    assert ratio <= kappa * (1 + 1e-6)


def test_the_search_finds_what_breaks_a_mean() -> None:
    """It is no bound that anything keeps."""
    built = agg.parse("mean", f=1, weights=UNEQUAL[0][0])
    shares = np.array(UNEQUAL[0][0]) / 12
    search = {"spectral": True, "starts": 5, "patience": 6, "weights": shares}
    ratio, _ = climb(lambda X: float64(built(X).value), 5, 1, 2, **search)
    assert ratio > agg.caf(f=1).weighed(shares.tolist()).kappa(5)


def steps(weights: np.ndarray, f: int, G: Geometry) -> int:
    total = float(weights.sum())
    return sum(1 for _ in reweightings(replace(G, mass=weights), total - 2 * heaviest(weights, f)))


def test_a_walk_has_as_many_steps_as_light_clients_weigh_2w() -> None:
    """Each step takes one client away at least; twice f, which equal weights have, is too few."""
    weights, most = np.array([0.3, *[0.05] * 14]), 12  # 12 light ones weigh 2W
    found = [steps(weights, 1, geometry(sample(seed, n=15, d=30))) for seed in range(20)]
    assert max(found) <= most
    assert max(found) > 2


def later_steps(w: float) -> float:
    """Return the largest error over λ that the proof leaves to an answer after the first good step.

    docs/concepts/weights.md, the last case: b is the weight outside of S, r and x̄ r what S and the others
    have lost at the answer, r_t and q_t at the first step of slope ≤ ξ. Any ξ from x̄ to 1 may be chosen.
    """
    axes = ([0.2, 0.5, 0.8, 1.0], np.linspace(0, 1, 41), [0.25, 0.5, 0.75, 0.9, 1.0])
    earlier = (np.linspace(0, 1, 25), np.linspace(0, 1, 5))
    b, x, r, r_t, q_t = np.meshgrid(*axes, *earlier, indexing="ij", sparse=True)
    b = w * b
    s = 1 - b
    r = r * np.minimum(np.minimum(2 * w / (1 + x), s), b / np.maximum(x, 1e-12))
    left, best = 1 - r - x * r, np.inf
    for xi in (np.sqrt(x), (1 + x) / 2, (2 + x) / 3, np.maximum(x, 0.9), np.ones_like(x)):
        lost = r_t * np.minimum(r, x * r / np.maximum(xi, 1e-12))
        others = xi * lost + (x * r - xi * lost) * q_t
        gamma, apart = s - lost, s - lost - xi * (b - others)
        with np.errstate(all="ignore"):
            moved = (1 + xi) * s * (1 - lost - others) * (r - lost + b - x * r) / (apart * left * gamma)
            bound = (np.sqrt(np.maximum(moved, 0)) + np.sqrt(lost / gamma)) ** 2
        bound = np.where((apart <= 0) | (gamma <= 0) | (left <= 0), np.inf, bound)
        best = np.minimum(best, bound.max(axis=(3, 4)))
    return float(np.max(best))


@pytest.mark.parametrize("w", [0.001, 0.05, 0.1, 0.2, 0.25, 0.3, 0.32, 0.34, 0.36, 0.4, 0.45, 0.48, 0.499])
def test_the_last_inequality_of_the_proof_holds(w: float) -> None:
    assert later_steps(w) <= 6 * w * (1 - w) / (1 - 2 * w) ** 2


# ------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("rule", sorted(name for name, kind in agg.rules.items() if not kind.weighs))
def test_what_has_no_weighted_meaning_refuses(rule: str) -> None:
    with pytest.raises(UserError, match=r"no meaning for clients of unequal weight; allowed: caf"):
        agg.parse(rule, f=1, weights=WEIGHTS)


@pytest.mark.parametrize("step", ["bucketing", "arc"])
def test_no_step_of_a_chain_passes_weights_by(step: str) -> None:
    with pytest.raises(UserError, match=f"{step} has no meaning"):
        agg.parse(f"{step}+caf", f=1, weights=WEIGHTS)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1, 2, 3], "3 weights for 4 clients"),
        ([0.4, 0.3, 0.2, 0.2], r"sum to 1\.1; allowed"),
        ([1, 1, 1, 0], "weight 0 of client 3"),
        ([1, 1, -1, 3], "weight -1 of client 2"),
        ([1, 1, math.nan, 3], "weight nan of client 2"),
        ([1, 1, math.inf, 3], "weight inf of client 2"),
        ([303, 261, 46, 130], r"W = 0\.409, and the cap is 0\.311.*for instance: \[144, 144, 46, 130\]"),
    ],
)
def test_weights_that_cannot_be_are_refused_in_words(weights: list[float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check(weights, clients=4, f=1)


def test_sites_too_far_apart_are_refused() -> None:
    with pytest.raises(UserError, match=r"20 times as much as the lightest.*limit is 10; allowed, for inst"):
        check([20] * 7 + [1], clients=8, f=1)
    assert check([20] * 7 + [1], clients=8, f=1, ratio=25)


def test_what_is_proposed_is_allowed() -> None:
    for sizes in ([303, 261, 46, 130], [311, 196, 206, 162, 162, 51], [1000, 1, 1, 1, 1], [100, 90, 90, 5]):
        found = capped(sizes, 1, usual_cap(1, len(sizes)), 10.0)
        assert check(found, clients=len(sizes), f=1) or len(set(found)) == 1


def test_the_cap_is_where_kappa_doubles() -> None:
    for n, f in [(4, 1), (6, 1), (10, 3), (100, 10)]:
        w = usual_cap(f, n)
        shares = [w / f] * f + [(1 - w) / (n - f)] * (n - f)
        weighted, equal = agg.caf(f=f).weighed(shares).kappa(n), agg.caf(f=f).kappa(n)
        assert weighted == pytest.approx(2 * equal)


def test_too_heavy_liars_and_wrong_counts_are_refused() -> None:
    X = sample(5)
    with pytest.raises(UserError, match=r"2W < 1; the f = 2 heaviest clients have weight 0\.5"):
        agg.parse("caf", f=2, weights=WEIGHTS)(X)
    with pytest.raises(UserError, match=r"weights for 6 clients; got n = 5"):
        agg.parse("mean", f=1, weights=WEIGHTS)(X[:5])
    with pytest.raises(UserError, match="budget"):
        agg.parse("smea(budget=1000)", f=4, weights=range(10, 31))(sample(5, n=21))
