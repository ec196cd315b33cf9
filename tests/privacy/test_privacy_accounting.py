"""Accountants against printed figures, each other, and slow obvious versions."""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from trilemma.base.errors import PrivacyError, UserError
from trilemma.privacy import (
    Mechanism,
    NoiseLaw,
    Release,
    Sampling,
    Threat,
    certified_curve,
    multiplier,
    spent,
)
from trilemma.privacy.accounting.accountants import accountants
from trilemma.privacy.accounting.gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu
from trilemma.privacy.accounting.rdp import SAMPLED_ORDERS, round_rdp, theorem_c1
from trilemma.privacy.accounting.spending import composed_epsilon
from trilemma.privacy.mechanism import mechanism
from trilemma.privacy.noise.drawing import Drawing

CAFCOR = Release(clip=2.25, law=NoiseLaw(sigma_cor=0.6))
PUBLISHED = Threat("secldp", 100, 10, assume="published")
POISSON = Sampling("poisson", 100 / 6000)


def times(m: Mechanism, rounds: int):
    return ((m, rounds),)


class TestPrintedFigures:
    """δ = 1e-4, rdp: to the printed digit."""

    def test_user_level_cafcor(self):
        cost = spent(CAFCOR, PUBLISHED, 30, 1e-4, ("rdp", "exact"))
        assert f"{cost.epsilon['rdp']:.1f}" == "26.4"
        assert cost.epsilon["exact"] < cost.epsilon["rdp"] - 1.5

    def test_example_level_cafcor(self):
        release = Release(
            5.0, NoiseLaw(0.5 * 2 * 5.0 / 100), "example", batch=100, sampling=POISSON, adjacency="published"
        )
        cost = spent(release, Threat("ldp", 10), 400, 1e-4, ("rdp",))
        assert f"{cost.epsilon['rdp']:.1f}" == "13.7"
        assert any("papers' convention" in note for note in cost.notes)

    @pytest.mark.parametrize(("sigma_nm", "printed"), [(1, "1.14"), (2, "0.32"), (3, "0.19")])
    def test_safe_dshb(self, sigma_nm, printed):
        sampling = Sampling("poisson", 25 / (11055 / 4))
        release = Release(1.0, NoiseLaw(sigma_nm * 2 / 25), "example", 25, sampling, "published")
        cost = spent(release, Threat("ldp", 7, 3), 400, 1e-4, ("rdp",))
        assert f"{cost.epsilon['rdp']:.2f}" == printed
        without = replace(release, sampling=replace(sampling, scheme="without-replacement"))
        assert spent(without, Threat("ldp", 7, 3), 400, 1e-4, ("rdp",)).epsilon == cost.epsilon


class TestExact:
    def test_delta_is_the_hockey_stick_integral(self):
        for mu, epsilon in ((0.3, 0.1), (1.0, 0.0), (2.0, 3.0), (5.0, 12.0)):
            gap = lambda x, m=mu, e=epsilon: max(  # noqa: E731
                0.0, stats.norm.pdf(x, m) - math.exp(e) * stats.norm.pdf(x)
            )
            start = epsilon / mu + mu / 2  # where the difference turns positive
            slow = integrate.quad(gap, start, start + 40, epsabs=1e-15, epsrel=1e-12)[0]
            assert float(gaussian_delta(mu, epsilon)) == pytest.approx(slow, rel=1e-8)

    @pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-10])
    @pytest.mark.parametrize("mu", [1e-8, 1e-6, 1.3e-4, 0.01, 0.49, 0.51, 3.0, 50.0])
    def test_epsilon_is_safe_to_the_last_digit(self, mu, delta):
        """The smaller μ, the nearer to each other is what is subtracted: in sixty digits it makes no odds."""
        epsilon = gaussian_epsilon(mu, delta)
        with mpmath.workdps(60):
            half, ratio = mpmath.mpf(mu) / 2, mpmath.mpf(float(epsilon)) / mu
            exact = mpmath.ncdf(half - ratio) - mpmath.exp(ratio * mu) * mpmath.ncdf(-half - ratio)
        assert exact <= delta
        assert float(gaussian_delta(mu, epsilon)) == pytest.approx(float(exact), rel=1e-13)

    @given(st.floats(1e-4, 300), st.floats(1e-300, 0.999))
    def test_epsilon_is_tight_and_safe(self, mu, delta):
        epsilon = float(gaussian_epsilon(mu, delta))
        assert epsilon >= 0
        assert float(gaussian_delta(mu, epsilon)) <= delta
        if epsilon > 1e-9:
            assert float(gaussian_delta(mu, epsilon * (1 - 1e-6))) > delta * (1 - 1e-9)

    @given(st.floats(1e-3, 1e6), st.floats(1e-100, 0.9))
    def test_mu_is_the_inverse_on_the_safe_side(self, epsilon, delta):
        mu = gaussian_mu(epsilon, delta)
        assert float(gaussian_epsilon(mu, delta)) <= epsilon
        assert float(gaussian_epsilon(mu * (1 + 1e-6), delta)) > epsilon * (1 - 1e-9)

    def test_agrees_with_dp_accounting(self):
        reference = pytest.importorskip("dp_accounting").get_epsilon_gaussian
        for z in (0.1, 1.0, 7.0):
            for delta in (1e-12, 1e-5, 0.1):
                ours = composed_epsilon(times(Mechanism(z), 1), delta, "exact")
                assert ours == pytest.approx(reference(z, delta), rel=1e-8, abs=1e-9)

    def test_mixed_rounds_compose_by_adding_precisions(self):
        past = ((Mechanism(1.0), 3), (Mechanism(2.0), 4))
        assert composed_epsilon(past, 1e-5, "exact") == float(gaussian_epsilon(2.0, 1e-5))

    def test_not_for_sampled_releases(self):
        with pytest.raises(UserError, match="without sampling"):
            composed_epsilon(times(Mechanism(1.0, POISSON), 5), 1e-5, "exact")


class TestRenyi:
    def test_plain_gaussian_against_a_scan_over_orders(self):
        z, rounds, delta = 1.3, 30, 1e-4
        slow = min(
            rounds * a / (2 * z * z) + math.log(1 - 1 / a) - math.log(delta * a) / (a - 1)
            for a in 1 + np.linspace(0.01, 20, 200_000)
        )
        assert composed_epsilon(times(Mechanism(z), rounds), delta, "rdp") == pytest.approx(slow, rel=1e-4)

    @pytest.mark.parametrize("order", [2.0, 3.7, 17.0])
    @pytest.mark.parametrize(("z", "rate"), [(0.5, 0.02), (2.0, 0.3)])
    def test_poisson_replacement_is_the_divergence_of_the_worst_pair(self, order, z, rate):
        c = 0.5 / z

        def log_density(y, mean):
            parts = ((1 - rate, stats.norm.logpdf(y)), (rate, stats.norm.logpdf(y, mean)))
            return np.logaddexp(*(math.log(weight) + log for weight, log in parts))

        def integrand(y):
            return math.exp(order * log_density(y, c) + (1 - order) * log_density(y, -c))

        total = integrate.quad(integrand, -9, order * c + 9, limit=500, epsrel=1e-10)[0]
        slow = math.log(total) / (order - 1)
        fast = round_rdp(Mechanism(z, Sampling("poisson", rate)), (order,))[0]
        assert fast == pytest.approx(min(slow, order / (2 * z**2)), rel=1e-6)

    @given(st.floats(0, 1), st.floats(0, 1), st.floats(0, math.pi), st.floats(1.0, 8.0))
    def test_no_pair_of_shares_is_worse_than_the_opposite_one(self, norm, other, angle, alpha):
        """Kahane's inequality, checked by quadrature in the plane of the two shares."""
        rate, width = 0.2, 1.3
        axis = np.linspace(-8, 8, 401)
        x, y = np.meshgrid(axis, axis)

        def density(mean):
            return np.exp(-((x - mean[0]) ** 2 + (y - mean[1]) ** 2) / 2) / (2 * math.pi)

        def hockey(first, second):
            p = (1 - rate) * density((0, 0)) + rate * density(first)
            q = (1 - rate) * density((0, 0)) + rate * density(second)
            return np.maximum(p - alpha * q, 0).sum() * (axis[1] - axis[0]) ** 2

        some = hockey((width * norm, 0), (width * other * math.cos(angle), width * other * math.sin(angle)))
        assert some <= hockey((width, 0), (-width, 0)) + 1e-6

    def test_sampling_never_costs_more_than_using_everything(self):
        plain = round_rdp(Mechanism(0.7), SAMPLED_ORDERS)
        for scheme in ("poisson", "without-replacement"):
            sampled = round_rdp(Mechanism(0.7, Sampling(scheme, 0.9)), SAMPLED_ORDERS)
            assert (sampled <= plain).all()
            assert (sampled >= 0).all()

    def test_rate_one_is_no_sampling(self):
        for scheme in ("poisson", "without-replacement"):
            whole = Mechanism(0.8, Sampling(scheme, 1.0))
            for name in ("exact", "rdp", "pld"):
                expected = composed_epsilon(times(Mechanism(0.8), 7), 1e-5, name)
                assert composed_epsilon(times(whole, 7), 1e-5, name) == expected

    def test_theorem_c1_against_its_formula_over_real_orders(self):
        z, rate, rounds, delta = 1.1, 0.01, 50, 1e-5

        def one_round(order: int) -> float:
            if order == 1:
                return 0.0
            eps = lambda j: j / (2 * z * z)  # noqa: E731
            second = rate**2 * math.comb(order, 2) * min(4 * math.expm1(eps(2)), 2 * math.exp(eps(2)))
            higher = sum(
                rate**j * math.comb(order, j) * math.exp((j - 1) * eps(j)) for j in range(3, order + 1)
            )
            return math.log(1 + second + 2 * higher) / (order - 1)

        def real(a: float) -> float:
            low, high = math.floor(a), math.ceil(a)
            mixed = (1 - a + low) * (low - 1) * one_round(low) + (a - low) * (high - 1) * one_round(high)
            return rounds * mixed / (a - 1) + math.log(1 / delta) / (a - 1)

        slow = min(real(a) for a in np.arange(1.05, 30, 0.05))
        assert theorem_c1(z, rate, rounds, delta) == pytest.approx(slow, rel=1e-9)

    def test_theorem_c1_is_looser_than_dp_accountings_bound(self):
        past = times(Mechanism(1.0, Sampling("without-replacement", 0.01)), 400)
        c1, ours, tight = (composed_epsilon(past, 1e-4, name) for name in ("c1", "rdp", "pld"))
        assert c1 > ours > tight


class TestLossDistributions:
    @pytest.mark.parametrize("z", [0.6, 3.0])
    def test_plain_gaussian_is_the_exact_one(self, z):
        past = times(Mechanism(z), 20)
        exact = composed_epsilon(past, 1e-5, "exact")
        assert exact * (1 - 1e-9) <= composed_epsilon(past, 1e-5, "pld") <= exact * 1.001

    @pytest.mark.parametrize("scheme", ["poisson", "without-replacement"])
    @pytest.mark.parametrize("z", [0.7, 2.0])
    def test_one_sampled_round_against_its_profile(self, scheme, z):
        """One round of replacement: δ(ε) has a closed form without replacement, an integral under Poisson."""
        rate, epsilon = 0.1, 0.3
        m = Mechanism(z, Sampling(scheme, rate))
        if scheme == "without-replacement":
            slow = rate * float(gaussian_delta(1 / z, math.log1p(math.expm1(epsilon) / rate)))
        else:
            y = np.linspace(-10, 12, 2_000_001)
            up, down = (
                (1 - rate) * stats.norm.pdf(y) + rate * stats.norm.pdf(y, sign * 0.5 / z) for sign in (1, -1)
            )
            slow = np.maximum(up - math.exp(epsilon) * down, 0).sum() * (y[1] - y[0])
        pessimistic = accountants["pld"].delta(times(m, 1), epsilon)
        assert slow * (1 - 1e-6) <= pessimistic <= slow * 1.02

    @pytest.mark.parametrize("adjacency", ["replace", "add-remove", "published"])
    def test_tighter_than_renyi(self, adjacency):
        past = times(Mechanism(1.0, POISSON, adjacency), 100)
        assert 0 < composed_epsilon(past, 1e-5, "pld") < composed_epsilon(past, 1e-5, "rdp")

    def test_mixed_mechanisms_compose(self):
        one, two = Mechanism(1.0, POISSON), Mechanism(2.0, POISSON)
        both = composed_epsilon(((one, 50), (two, 50)), 1e-5, "pld")
        assert composed_epsilon(times(two, 100), 1e-5, "pld") < both
        assert both < composed_epsilon(times(one, 100), 1e-5, "pld")


class TestAdjacency:
    def test_adding_or_removing_moves_half_as_far(self):
        replaced, added = (
            composed_epsilon(times(Mechanism(z, adjacency=adjacency), 9), 1e-5, "exact")
            for z, adjacency in ((2.0, "replace"), (1.0, "add-remove"))
        )
        assert replaced == added

    def test_the_papers_convention_overstates_add_remove(self):
        strict, printed = (
            composed_epsilon(times(Mechanism(0.5, POISSON, adjacency), 400), 1e-4, "rdp")
            for adjacency in ("add-remove", "published")
        )
        assert strict < printed / 3

    def test_sampling_does_not_amplify_a_user(self):
        sampled = replace(CAFCOR, sampling=POISSON)
        threat = PUBLISHED
        cost = spent(sampled, threat, 30, 1e-4, ("exact",))
        assert cost.epsilon == spent(CAFCOR, threat, 30, 1e-4, ("exact",)).epsilon
        assert any("does not amplify" in note for note in cost.notes)


class TestThreats:
    def test_order_of_the_four_models_at_equal_noise(self):
        release = Release(1.0, NoiseLaw(0.5, 0.5))
        z = {name: multiplier(release, Threat(name, 20, 4)) for name in ("cdp", "secldp", "byzldp", "ldp")}
        assert z["ldp"] < z["byzldp"] < z["secldp"] < z["cdp"]

    def test_cdp_reads_the_sum_of_the_covariance(self):
        from trilemma.privacy import SecretGraph, covariance

        law = NoiseLaw(0.3, 0.8)
        sigma = covariance(SecretGraph.complete(9), law, senders=range(4, 9), known=range(1))
        z = multiplier(Release(1.0, law), Threat("cdp", 9, 4, 1, "published"))
        assert z == pytest.approx(math.sqrt(sigma.sum()) / 2)

    @given(st.integers(2, 30), st.data())
    def test_monotone_in_noise_rounds_and_colluders(self, n, data):
        f = data.draw(st.integers(0, n - 1))
        q = data.draw(st.integers(0, f))
        ind, cor = data.draw(st.floats(0.05, 3)), data.draw(st.just(0.0) | st.floats(1e-100, 3))
        rounds = data.draw(st.integers(1, 50))

        def cost(ind, cor, q, rounds):
            release = Release(1.0, NoiseLaw(ind, cor))
            return spent(release, Threat("secldp", n, f, q), rounds, 1e-5, ("exact",)).epsilon["exact"]

        base = cost(ind, cor, q, rounds)
        slack = 1e-9 * base
        assert cost(1.1 * ind, cor, q, rounds) <= base + slack
        assert cost(ind, cor + 0.1, q, rounds) <= base + slack
        assert cost(ind, cor, q, rounds + 1) >= base - slack
        if q < f:
            assert cost(ind, cor, q + 1, rounds) >= base - slack

    def test_a_cdp_figure_says_it_is_for_the_mean(self):
        cost = spent(Release(1.0, NoiseLaw(1.0)), Threat("cdp", 10), 5, 1e-5, ("exact",))
        assert any("only for the mean" in note for note in cost.notes)


class TestEdges:
    def test_no_noise_is_infinite_and_says_so(self):
        cost = spent(Release(1.0, NoiseLaw()), Threat("ldp", 10), 5, 1e-5)
        assert set(cost.epsilon.values()) == {math.inf}
        assert "no noise: no guarantee" in cost.notes

    def test_no_rounds_cost_nothing(self):
        cost = spent(CAFCOR, PUBLISHED, 0, 1e-5)
        assert set(cost.epsilon.values()) == {0.0}

    @pytest.mark.parametrize("delta", [1e-300, 1e-30, 0.5, 1 - 1e-9])
    @pytest.mark.parametrize("z", [1e-4, 1.0, 1e6])
    @pytest.mark.parametrize("accountant", ["exact", "rdp"])
    def test_extreme_values_stay_numbers(self, z, delta, accountant):
        for rounds in (1, 10**6):
            epsilon = composed_epsilon(times(Mechanism(z), rounds), delta, accountant)
            assert epsilon >= 0

    def test_huge_epsilon_is_finite(self):
        assert 1e9 < composed_epsilon(times(Mechanism(1e-5), 1), 1e-5, "exact") < 1e11

    @pytest.mark.parametrize("accountant", ["exact", "rdp", "pld"])
    def test_delta_is_the_third_of_the_three(self, accountant):
        threat = PUBLISHED
        epsilon = spent(CAFCOR, threat, 30, 1e-4, (accountant,)).epsilon[accountant]
        past = times(mechanism(CAFCOR, threat), 30)
        assert accountants[accountant].delta(past, epsilon) == pytest.approx(1e-4, rel=1e-3)

    @pytest.mark.parametrize("accountant", ["exact", "rdp"])
    def test_the_curve_is_spent_after_each_round(self, accountant):
        threat = PUBLISHED
        curve = certified_curve(CAFCOR, threat, 300, 1e-4, accountant).figure
        for t in (1, 2, 30, 300):
            assert curve[t - 1] == pytest.approx(
                spent(CAFCOR, threat, t, 1e-4, (accountant,)).epsilon[accountant]
            )

    @pytest.mark.parametrize(
        ("call", "reason"),
        [
            (lambda: spent(CAFCOR, PUBLISHED, 30, 0.0), "strictly between 0 and 1"),
            (lambda: spent(CAFCOR, PUBLISHED, 30, 1.0), "strictly between 0 and 1"),
            (lambda: spent(CAFCOR, Threat("byzldp", 100, 10), 30, 1e-4), "cancels in the sum"),
            (lambda: spent(CAFCOR, Threat("secldp", 100, 10), 30, 1e-4), "when nobody lies"),
            (lambda: Threat("secldp", 100, 10, assume="publishd"), "did you mean 'published'"),
            (lambda: Mechanism(1.0, drawing=Drawing(missed=-0.1)), "less than nothing away"),
            (lambda: Mechanism(1.0, drawing=Drawing(worst=0.3)), "too far from a Gaussian"),
            (lambda: spent(CAFCOR, Threat("ldp", 100, 10), 30, 1e-4), "known to the adversary"),
            (lambda: spent(CAFCOR, Threat("cdp", 100), 30, 1e-4), "cancels in the mean"),
            (lambda: Threat("secldp", 100, 10, 11), "q ≤ f"),
            (lambda: Threat("byzldp", 100, 10, 3), "use 'secldp'"),
            (lambda: Threat("secldp", 10, 10), "at least one client is honest"),
            (lambda: Threat("secdp", 10, 1), "did you mean 'secldp'"),
            (lambda: NoiseLaw(-1.0), "not negative"),
            (lambda: NoiseLaw(sigma_cor=math.nan), "finite"),
            (lambda: Release(0.0, NoiseLaw(1.0)), "positive"),
            (lambda: Release(1.0, NoiseLaw(1.0), adjacency="add-remove"), "replaces a user"),
            (lambda: Sampling("poisson", 1.5), "lies in"),
            (lambda: Sampling("none", 0.5), "rate is 1"),
            (lambda: spent(CAFCOR, PUBLISHED, -1, 1e-4), "not negative"),
            (lambda: composed_epsilon(times(Mechanism(1.0), 1), 1e-5, "rpd"), "did you mean 'rdp'"),
            (lambda: accountants["exact"].delta(times(Mechanism(1.0), 1), -1.0), "not negative"),
            (lambda: Mechanism(math.nan), "not negative"),
            (lambda: Mechanism(1.0, Sampling("without-replacement", 0.1), "add-remove"), "batch size fixed"),
        ],
    )
    def test_bad_input_says_why(self, call, reason):
        with pytest.raises(UserError, match=reason):
            call()

    def test_privacy_errors_are_user_errors(self):
        assert issubclass(PrivacyError, UserError)


def test_without_dp_accounting_integer_orders_serve(monkeypatch):
    """The package's own numbers at integer orders, and a valid ε, where it cannot be imported."""
    import sys

    from trilemma.privacy.accounting import rdp

    orders = (2.0, 3.0, 7.0, 20.0)
    mechanisms = [
        Mechanism(0.8, Sampling("poisson", 0.02), "published"),
        Mechanism(0.8, Sampling("without-replacement", 0.02)),
    ]
    with_package = [round_rdp(m, orders) for m in mechanisms]
    rdp._accounted.cache_clear()
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    without = [round_rdp(m, orders) for m in mechanisms]
    release = Release(1.0, NoiseLaw(0.08), "example", 25, Sampling("poisson", 0.01), "published")
    cost = spent(release, Threat("ldp", 7, 3), 400, 1e-4)
    rdp._accounted.cache_clear()
    np.testing.assert_allclose(without[0], with_package[0], rtol=1e-9)
    assert (without[1] >= with_package[1] * (1 - 1e-9)).all()
    assert cost.epsilon["pld"] == cost.epsilon["rdp"]
    assert any("pld failed" in note for note in cost.notes)


def test_the_least_noise_at_a_delta_near_one_is_found_in_a_few_steps(monkeypatch):
    """There δ hardly moves with μ: steps of a rounding error would take minutes."""
    asked = []

    def epsilon(mu, delta):
        asked.append(mu)
        return gaussian_epsilon(mu, delta)

    monkeypatch.setattr("trilemma.privacy.accounting.gaussian.gaussian_epsilon", epsilon)
    for delta in (0.9, 0.999, 0.999999):
        mu = gaussian_mu(1.0, delta)
        assert gaussian_delta(mu, 1.0) <= delta <= gaussian_delta(1.001 * mu, 1.0)
    assert len(asked) < 200


def test_a_delta_that_floats_cannot_tell_apart_is_refused():
    """Below the least normal number they lose digits, and with them the safe side: δ was 1.25 times that."""
    for asked in (5e-324, 1e-320, 1e-310):
        with pytest.raises(PrivacyError, match=r"at least 2\.3e-308"):
            composed_epsilon(((Mechanism(1.0), 1),), asked, "exact")
    epsilon = composed_epsilon(((Mechanism(1.0), 1),), 2.3e-308, "exact")
    with mpmath.workdps(60):
        a, b = mpmath.mpf(1) / 2 - epsilon, -mpmath.mpf(1) / 2 - epsilon
        assert mpmath.ncdf(a) - mpmath.exp(epsilon) * mpmath.ncdf(b) <= mpmath.mpf(2.3e-308)


@pytest.mark.parametrize("z", [1e-300, 1e-101, 1e101, 1e300, math.inf])
def test_noise_whose_square_is_no_number_is_refused(z: float):
    clip = 0.5 / z if z < math.inf else 1e-320
    with pytest.raises(PrivacyError, match="noise multiplier"):
        spent(Release(clip, NoiseLaw(1.0)), Threat("ldp", 10), 10, 1e-5)
