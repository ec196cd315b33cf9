"""What drawn noise costs: the bound against exact laws of small samplers, and who pays it."""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest
from scipy import signal, stats

from trilemma.base.errors import PrivacyError
from trilemma.privacy import NoiseLaw, Release, Sampling, Threat, calibrate, judge
from trilemma.privacy.accounting.accountants import accountants
from trilemma.privacy.ledger.ledger import Ledger
from trilemma.privacy.ledger.lines import Budget
from trilemma.privacy.mechanism import Mechanism, mechanism
from trilemma.privacy.noise.drawing import EXACT, Drawing, likelihood, surcharge
from trilemma.privacy.noise.grid import Grid, in_steps
from trilemma.privacy.noise.grid_price import (
    EDGES,
    MOVED,
    MOVED_MOST,
    MOVED_NEAR,
    TAIL,
    drawing,
    pair_error,
)
from trilemma.privacy.secrets import streams

LAW = NoiseLaw(sigma_ind=0.1, sigma_cor=0.6)


def test_radius_and_circle_are_as_exact_as_the_price_takes_them_to_be():
    """Against 60 digits: words anywhere, near 1, near powers of two, and with a further word."""
    rng, transform = np.random.default_rng(1), streams._BoxMuller()
    near, powers = (2.0 ** rng.uniform(0, 60, 300)).astype(np.uint64), rng.integers(41, 64, 300)
    words = np.concatenate(
        [
            rng.integers(0, 2**64, 300, dtype=np.uint64),
            np.uint64(2**64 - 1) - near,
            np.uint64(2) ** powers.astype(np.uint64) + rng.integers(0, 9, 300).astype(np.uint64),
            (2.0 ** rng.uniform(0, 40, 300)).astype(np.uint64),
        ]
    )
    further: list[int] = []

    def fill(out: memoryview) -> None:
        more = rng.integers(0, 2**64, len(out) // 8, dtype=np.uint64)
        further.extend(more.tolist())
        out[:] = more.tobytes()

    radii, rest = transform._radius(transform._uniform(words, fill)).tolist(), iter(further)
    with mpmath.workdps(60):
        for word, radius in zip(words.tolist(), radii, strict=True):
            beyond = mpmath.mpf(next(rest)) / 2**64 + mpmath.mpf(2) ** -65 if word < 2**40 else 0.5
            exact = mpmath.sqrt(-2 * mpmath.log((mpmath.mpf(word) + beyond) / 2**64))
            assert abs(radius - exact) <= max(2.0**-48, 2.0**-51 / max(float(exact), 2.0**-27))
        sines, cosines = transform._quadrant(words)
        for word, sine, cosine in zip(words.tolist(), sines.tolist(), cosines.tolist(), strict=True):
            angle = mpmath.mpf(word >> 12) / 2**52 * mpmath.pi / 2
            assert abs((-sine if word & 1 else sine) - mpmath.sin(angle)) < 2.0**-51
            assert abs((-cosine if word & 2 else cosine) - mpmath.cos(angle)) < 2.0**-51


def moved(r: np.ndarray) -> np.ndarray:
    """D(r) of `grid_price`, term by term."""
    u = np.exp(-r * r / 2)
    snap = np.where(u < 2.0**-24, 2.0**-129, 2.0**-65) / (u * r)
    return np.maximum(2.0**-48, 2.0**-51 / r) + r * (2.0**-51.3 + 2.0**-51 + 2.0**-52) + snap


@pytest.mark.parametrize("steps", [2.0**10, 2.0**14, 2.0**20])
def test_the_constants_of_the_price_bound_how_far_points_move(steps):
    r = np.geomspace(0.5 / steps, 11.5, 200_000)
    assert (moved(r) <= MOVED_MOST + MOVED_NEAR * steps).all()
    # A square's edge is never nearer than 1/(2s), and within √2/s of any of its points.
    nearest = np.maximum(0.5 / steps, r - math.sqrt(2) / steps)
    inside = 0.5 * (0.5 / steps) ** 2 * float(moved(np.array([0.5 / steps]))[0]) ** 2
    square = np.trapezoid(moved(nearest) ** 2 * r * np.exp(-r * r / 2), r) + inside
    assert math.sqrt(square) < MOVED
    assert math.exp(-((11.5 - 2 / steps) ** 2) / 2) < TAIL
    assert pair_error(steps)[0] < pair_error(steps)[1]


def test_the_pairs_of_a_small_sampler_are_as_likely_as_their_squares_are_wide():
    """All 2²⁴ pairs of words of a sampler with short words, in one quadrant, against |p̃/p − 1| ≤ 9 s D."""
    bits_u, bits_theta, steps, reach = 12, 12, 32.0, 2.0
    u = (np.arange(2**bits_u) + 0.5) / 2**bits_u
    theta = np.arange(2**bits_theta) / 2**bits_theta * math.pi / 2
    radius = np.sqrt(-2 * np.log(u)) * steps
    side = int(reach * steps)
    seen = np.zeros((side + 1) ** 2)
    for r in radius:
        k, m = np.rint(r * np.cos(theta)).astype(int), np.rint(r * np.sin(theta)).astype(int)
        near = (k <= side) & (m <= side)
        seen += np.bincount(k[near] * (side + 1) + m[near], minlength=len(seen))
    drawn = seen.reshape(side + 1, side + 1) / (4 * 2 ** (bits_u + bits_theta))
    drawn[0, :] *= 2  # squares on an axis are half in another quadrant
    drawn[:, 0] *= 2
    one = np.diff(stats.norm.cdf((np.arange(side + 2) - 0.5) / steps))
    ideal = np.outer(one, one)
    k = np.arange(side + 1)
    near = np.maximum(0.5, np.hypot(*np.meshgrid(k, k)) - math.sqrt(2)) / steps
    far = (np.hypot(*np.meshgrid(k, k)) + math.sqrt(2)) / steps
    inside = far < reach
    snap = np.maximum(*(2.0 ** -(bits_u + 1) / (np.exp(-r * r / 2) * r) for r in (near, far)))
    d = far * (math.pi / 2 / 2**bits_theta) + snap
    error = np.abs(drawn / ideal - 1)
    assert (error <= EDGES * steps * d)[inside].all()
    assert error[inside].max() > 0.02, "the words are short enough to be seen"


def composed(losses: np.ndarray, chances: np.ndarray, rounds: int, epsilon: float) -> float:
    """Return δ of `rounds` independent losses, each rounded down to a fine grid: never above the truth."""
    fine = 1e-4
    whole = np.floor(losses / fine).astype(int)
    least = whole.min()
    law = np.bincount(whole - least, weights=chances)
    total = np.ones(1)
    for _ in range(rounds):
        total = np.maximum(signal.fftconvolve(total, law), 0.0)
    loss = (np.arange(len(total)) + rounds * least) * fine
    return float((total * np.maximum(0.0, -np.expm1(epsilon - loss))).sum()) - 1e-12


def test_a_sampler_that_leans_on_the_data_costs_more_than_a_gaussian_and_less_than_it_is_billed():
    """Probabilities off by ±x in the pattern that a move of the data shows best, exactly composed."""
    steps, x, rounds, epsilon = 8.0, 0.03, 20, 1.0
    k = np.arange(-60, 61)
    upper = -np.diff(stats.norm.sf((np.arange(62) - 0.5) / steps))
    ideal = np.concatenate([upper[:0:-1], upper])
    leaning = ideal * (1 + x * np.where(k % 2 == 0, 1.0, -1.0))
    leaning /= leaning.sum()

    def truth(law: np.ndarray) -> float:
        here, there = law[1:], law[:-1]  # the neighbour's noise is one step further
        return composed(np.log(here / there), here, rounds, epsilon)

    error = leaning / ideal - 1
    drawn = Drawing(float((ideal * error**2).sum()), float(np.abs(error).max()))
    plain = Mechanism(steps)
    exact = accountants["exact"]
    accounted = exact.delta(((plain, rounds),), epsilon)
    billed = exact.delta(((replace(plain, drawing=drawn), rounds),), epsilon)
    assert truth(ideal) <= accounted < truth(leaning) <= billed
    delta = truth(leaning)
    assert exact.epsilon(((plain, rounds),), delta) < epsilon
    assert exact.epsilon(((replace(plain, drawing=drawn), rounds),), delta) >= epsilon


def test_likelihoods_of_a_run_are_apart_as_often_as_stated():
    """The chance that log p̃/p exceeds e, exactly: the number of draws with +x is binomial."""
    x, draws, rarity = 0.01, 4000, 8.0
    e = likelihood(Drawing(x * x, x) * draws, rarity)
    up, down = math.log1p(x), math.log1p(-x)
    plus = np.arange(draws + 1)
    ratio = plus * up + (draws - plus) * down
    for chance, sign in (((1 + x) / 2, 1.0), (0.5, -1.0)):  # under what is drawn, under what is accounted
        exceeded = stats.binom.pmf(plus, draws, chance)[sign * ratio > e].sum()
        assert 1e-8 < exceeded <= math.exp(-rarity)


def test_what_a_round_costs_grows_with_clients_numbers_and_fineness():
    release = Release(2.25, LAW)
    grid = Grid.of(release, 431_080, 100)
    found = drawing(LAW, grid, 100)
    streams_in_all = 100 * pair_error(in_steps(0.1, grid.step))[0] ** 2
    streams_in_all += 4950 * pair_error(in_steps(0.6, grid.step))[0] ** 2
    assert found.spread == pytest.approx(431_080 / 2 * streams_in_all)
    alone = drawing(LAW, grid, 100, shares=False)
    assert alone.spread == pytest.approx(431_080 / 2 * pair_error(in_steps(0.1, grid.step))[0] ** 2)
    with pytest.raises(PrivacyError, match="finer than what is drawn is exact"):
        drawing(NoiseLaw(0.1, 0.6), replace(grid, step=2.0**-24), 100)


def test_noise_that_ends_somewhere_certifies_no_move_of_many_deviations():
    """What is drawn never exceeds 13.4 σ: a move of 30 σ shows for certain, whatever a Gaussian would do."""
    one = Mechanism(1 / 30)
    drawn = replace(one, drawing=drawing(NoiseLaw(1.0), Grid.of(Release(1.0, NoiseLaw(1.0)), 2, 1), 1))
    assert math.isfinite(accountants["exact"].epsilon(((one, 1),), 1e-5))
    assert accountants["exact"].epsilon(((drawn, 1),), 1e-5) == math.inf


@pytest.mark.parametrize("name", ["exact", "rdp"])
def test_a_certificate_on_a_grid_pays_for_being_drawn(name):
    law = NoiseLaw(10.0, 4.0)
    release, threat = Release(2.25, law), Threat("secldp", 100, 10)
    grid = Grid.of(release, 431_080, 100)
    drawn = replace(release, drawing=drawing(law, grid, 100))
    assert any("drawing it costs" in note for note in judge(drawn, threat, 1, 1e-5).assumptions)
    asked = accountants[name]
    plain, paid = (asked.epsilon(((mechanism(one, threat), 400),), 1e-5) for one in (release, drawn))
    least = surcharge(drawn.drawing * 400, plain, 1e-5)
    assert plain + least.epsilon <= paid < plain + 0.05
    law = calibrate(8.0, 1e-5, 400, 2.25, threat, accountant=name, drawing=drawn.drawing)
    assert law.sigma_ind > calibrate(8.0, 1e-5, 400, 2.25, threat, accountant=name).sigma_ind
    spent = asked.epsilon(((mechanism(replace(drawn, law=law), threat), 400),), 1e-5)
    assert 7.99 < spent <= 8.0 * (1 + 1e-6)


def test_a_sampled_curve_pays_in_every_round_and_ends_in_the_figure():
    one = Mechanism(1.0, Sampling("poisson", 0.01), drawing=Drawing(spread=1e-9, worst=1e-6, missed=1e-16))
    past = [((one, done),) for done in range(1, 41)]
    undrawn = [((replace(one, drawing=EXACT), done),) for done in range(1, 41)]
    for name in ("pld", "rdp"):
        curve = accountants[name].curve(past, 1e-5)
        plain = accountants[name].curve(undrawn, 1e-5)
        assert (curve > plain).all()
        assert curve[-1] == pytest.approx(accountants[name].epsilon(((one, 40),), 1e-5), rel=1e-12)


def test_a_ledger_pays_for_being_drawn_and_remembers_it(tmp_path):
    release, threat = Release(1.0, NoiseLaw(4.0)), Threat("ldp", 10)
    grid = Grid.of(release, 1000, 10)
    drawn = replace(
        release, drawing=drawing(release.law, grid, 10, shares=False) * 1e6
    )  # a price that can be seen
    budget = Budget(3.0, 1e-5)
    with Ledger(tmp_path / "plain", budget) as ledger:
        plain = [ledger.authorise(release, threat, "run", t).epsilon["exact"] for t in range(2)]
    with Ledger(tmp_path / "drawn", budget) as ledger:
        paid = [ledger.authorise(drawn, threat, "run", t).epsilon["exact"] for t in range(2)]
        history = ((Mechanism(2.0, drawing=drawn.drawing), 2),)
        assert paid[1] == accountants["exact"].epsilon(history, 1e-5)
    assert paid[0] > plain[0]
    assert paid[1] > plain[1]
    with Ledger(tmp_path / "drawn", budget) as ledger:
        assert ledger.epsilon["exact"] == paid[1]
        assert ledger.entries[0].mechanism.drawing == drawn.drawing
