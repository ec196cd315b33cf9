"""What every accountant owes, whoever wrote it; and the one place that chooses between them."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from trilemma.base.errors import ConfigError, PrivacyError, UserError
from trilemma.privacy import Mechanism, NoiseLaw, Release, Sampling, Threat, certified_curve
from trilemma.privacy.accounting.accountants import (
    Accountant,
    accountants,
    applicable,
    ask,
    default,
    everyday,
)
from trilemma.privacy.accounting.calculator import find_delta, find_noise, picture
from trilemma.privacy.accounting.gaussian import gaussian_delta
from trilemma.privacy.noise.drawing import Drawing
from trilemma.privacy.types import AccountingFailure

RATE = 0.05
KINDS = {
    "plain": Mechanism(0.9),
    "poisson": Mechanism(0.9, Sampling("poisson", RATE)),
    "add-remove": Mechanism(0.9, Sampling("poisson", RATE), "add-remove"),
    "without-replacement": Mechanism(0.9, Sampling("without-replacement", RATE)),
}
EVERY = [
    pytest.param(accountants[name], one, id=f"{name}, {kind}")
    for name in sorted(accountants)
    for kind, one in KINDS.items()
    if accountants[name].applies(((one, 1),))
]

IN_CLOSED_FORM = [parameter for parameter in EVERY if parameter.values[1].sampling.scheme != "poisson"]


def true_delta(one: Mechanism, epsilon: float) -> float:
    """δ(ε) of a single round, in closed form: known without sampling and without replacement."""
    if one.gaussian:
        return float(gaussian_delta(1 / one.z, epsilon))
    return RATE * float(gaussian_delta(1 / one.z, math.log1p(math.expm1(epsilon) / RATE)))


def test_the_suite_meets_every_accountant():
    assert {parameter.values[0].name for parameter in EVERY} == set(accountants)


@pytest.mark.parametrize("accountant", accountants.values(), ids=accountants)
def test_an_accountant_says_what_it_is(accountant: Accountant):
    assert accountants[accountant.name] is accountant
    assert accountant.assumes
    assert accountants.summary(accountant.name).endswith(".")
    if accountant.instead:
        deputy = accountants[accountant.instead]
        assert not deputy.instead
        assert all(deputy.applies(((one, 1),)) for one in KINDS.values())
    with pytest.raises(AttributeError):
        accountant.rank = 0  # type: ignore[misc]


def rounds_of(one: Mechanism, rounds: int) -> list:
    """The history after each of so many rounds."""
    return [((one, done),) for done in range(1, rounds + 1)]


def test_no_two_accountants_share_a_rank():
    assert len({accountant.rank for accountant in accountants.values()}) == len(accountants)


@pytest.mark.parametrize(("accountant", "one"), EVERY)
def test_edges(accountant: Accountant, one: Mechanism):
    silent = replace(one, z=0.0)
    assert accountant.epsilon(((one, 0),), 1e-5) == 0.0
    assert accountant.epsilon(((silent, 3),), 1e-5) == math.inf
    assert accountant.delta(((one, 0),), 1.0) == 0.0
    assert accountant.delta(((silent, 3),), 1.0) == 1.0
    assert (accountant.curve(rounds_of(silent, 3), 1e-5) == math.inf).all()
    assert accountant.multiplier(math.inf, 1e-5, 3, one) == 0.0


@pytest.mark.parametrize("z", [0.03, 0.01])
@pytest.mark.parametrize(("accountant", "one"), IN_CLOSED_FORM)
def test_no_figure_is_below_the_truth_where_losses_are_in_the_thousands(
    accountant: Accountant, one: Mechanism, z: float
):
    """e^ε is no float there: δ(ε) = r G(t) with e^ε = 1 + r(e^t − 1) is taken at t = ε − log r."""
    r = one.sampling.rate
    t = accountant.epsilon(((replace(one, z=z), 1),), 1e-5) - math.log(r)
    assert r * float(gaussian_delta(1 / z, t)) <= 1e-5 * (1 + 1e-9)


@pytest.mark.parametrize(("accountant", "one"), EVERY)
def test_no_noise_is_said_to_leave_no_delta(accountant: Accountant, one: Mechanism):
    """Gaussian noise never does; what is less than floats can hold is not nothing."""
    if accountant.name == "c1":
        pytest.skip("a theorem about ε alone")
    assert 0.0 < accountant.delta(((replace(one, z=2.0), 1),), 2000.0) < 1e-9


@pytest.mark.parametrize(("accountant", "one"), EVERY)
@pytest.mark.parametrize("epsilon", [1e-10, 1e13])
def test_the_least_noise_for_an_epsilon_out_of_the_ordinary(
    accountant: Accountant, one: Mechanism, epsilon: float
):
    """It is found, or it is said that it is not."""
    with suppress(PrivacyError):
        z = accountant.multiplier(epsilon, 1e-5, 1, one)
        assert accountant.epsilon(((replace(one, z=z), 1),), 1e-5) <= epsilon


@pytest.mark.parametrize(("accountant", "one"), IN_CLOSED_FORM)
def test_no_figure_is_below_the_truth_of_one_round(accountant: Accountant, one: Mechanism):
    assert true_delta(one, accountant.epsilon(((one, 1),), 1e-4)) <= 1e-4
    if accountant.tells_delta:
        assert accountant.delta(((one, 1),), 0.4) >= true_delta(one, 0.4) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("accountant", "one"),
    [
        pytest.param(*case.values, id=case.id, marks=[] if case.values[1].gaussian else [pytest.mark.slow])
        for case in IN_CLOSED_FORM
    ],
)
def test_noise_that_is_not_quite_gaussian_is_paid_for(accountant: Accountant, one: Mechanism):
    """A sampler that gives everything away with chance τ is within τ of the Gaussian."""
    tau = 1e-7
    drawn = replace(one, drawing=Drawing(missed=tau))
    epsilon = accountant.epsilon(((drawn, 1),), 1e-4)
    assert epsilon > accountant.epsilon(((one, 1),), 1e-4)
    assert (1 - tau) * true_delta(one, epsilon) + tau <= 1e-4
    assert accountant.epsilon(((replace(one, drawing=Drawing(missed=1e-3)), 1),), 1e-4) == math.inf
    if accountant.tells_delta:
        assert accountant.delta(((drawn, 1),), 0.4) >= (1 - tau) * true_delta(one, 0.4) + tau
    assert accountant.curve(rounds_of(drawn, 3), 1e-4)[-1] == accountant.epsilon(((drawn, 3),), 1e-4)
    z = accountant.multiplier(3.0, 1e-4, 3, drawn)
    assert accountant.epsilon(((replace(drawn, z=z), 3),), 1e-4) <= 3.0 * (1 + 1e-8)
    with pytest.raises(UserError, match="too far from a Gaussian"):
        accountant.multiplier(3.0, 1e-4, 20, replace(one, drawing=Drawing(missed=1e-5)))


@pytest.mark.parametrize(("accountant", "one"), EVERY)
def test_the_curve_rises_in_every_round_and_is_epsilon_there(accountant, one):
    rounds = 6 if accountant.name == "c1" else 30
    curve = accountant.curve(rounds_of(one, rounds), 1e-4)
    assert len(curve) == rounds
    assert (np.diff(curve) > 0).all()
    for count in (1, 5, rounds - 1):
        alone = accountant.epsilon(((one, count),), 1e-4)
        assert alone * (1 - 1e-12) <= curve[count - 1] <= alone * (1 + 1e-3)
    assert curve[-1] == pytest.approx(accountant.epsilon(((one, rounds),), 1e-4), rel=1e-12)


def test_a_curve_counts_what_is_released_beside_the_rounds():
    one, beside = KINDS["poisson"], Mechanism(2.0)
    past = [((one, done), *([(beside, done // 5)] if done >= 5 else [])) for done in range(1, 41)]
    for name in ("pld", "rdp"):
        curve = accountants[name].curve(past, 1e-4)
        assert (np.diff(curve) > 0).all()
        for count in (4, 5, 40):
            alone = accountants[name].epsilon(past[count - 1], 1e-4)
            assert curve[count - 1] == pytest.approx(alone, rel=1e-3)


def test_thousands_of_rounds_ask_a_slow_accountant_at_some():
    release = Release(1.0, NoiseLaw(0.4), "example", 25, Sampling("poisson", 0.01))
    curve = certified_curve(release, Threat("ldp", 7, 3), 90, 1e-5, "pld", most=10).figure
    assert len(curve) == 90
    assert (np.diff(curve) >= 0).all()
    assert len(set(curve.tolist())) == 10


@pytest.mark.parametrize(("accountant", "one"), EVERY)
def test_the_multiplier_keeps_to_epsilon_and_is_the_least(accountant: Accountant, one: Mechanism):
    z = accountant.multiplier(3.0, 1e-4, 20, one)
    assert accountant.epsilon(((replace(one, z=z), 20),), 1e-4) <= 3.0
    assert accountant.epsilon(((replace(one, z=z * 0.995), 20),), 1e-4) > 3.0


@pytest.mark.parametrize(("accountant", "one"), EVERY)
def test_the_multiplier_leaves_room_for_what_is_released_beside(accountant: Accountant, one: Mechanism):
    """Together they keep to ε, with no more noise than that takes; what costs ε alone leaves no room."""
    other = Mechanism(6.0, adjacency=one.adjacency)
    beside = ((other, 4),)
    if not accountant.applies(((one, 20), *beside)):
        with pytest.raises(UserError, match=f"is for {accountant.assumes}"):
            accountant.multiplier(3.0, 1e-4, 20, one, beside)
        return
    z = accountant.multiplier(3.0, 1e-4, 20, one, beside)
    assert z > accountant.multiplier(3.0, 1e-4, 20, one)
    assert accountant.epsilon(((replace(one, z=z), 20), *beside), 1e-4) <= 3.0
    assert accountant.epsilon(((replace(one, z=z * 0.995), 20), *beside), 1e-4) > 3.0
    with pytest.raises(UserError, match="no noise"):
        accountant.multiplier(3.0, 1e-4, 20, one, ((replace(other, z=0.3), 4),))


@pytest.mark.parametrize("accountant", accountants.values(), ids=accountants)
def test_what_an_accountant_is_not_for_is_refused_by_every_question(accountant: Accountant):
    for one in KINDS.values():
        if accountant.applies(((one, 4),)):
            continue
        for question in (
            lambda one=one: accountant.epsilon(((one, 4),), 1e-5),
            lambda one=one: accountant.delta(((one, 4),), 1.0),
            lambda one=one: accountant.curve(rounds_of(one, 4), 1e-5),
            lambda one=one: accountant.multiplier(1.0, 1e-5, 4, one),
        ):
            with pytest.raises(UserError, match=f"is for {accountant.assumes}"):
                question()


class TestChoice:
    def test_in_order_of_rank(self):
        def names(kind: str) -> list[str]:
            return [able.name for able in applicable(((KINDS[kind], 5),))]

        assert names("plain") == ["exact", "pld", "rdp"]
        assert names("poisson") == ["pld", "rdp"]
        assert names("without-replacement") == ["pld", "rdp", "c1"]

    def test_theorem_c1_is_for_rounds_that_are_alike(self):
        one = KINDS["without-replacement"]
        mixed = ((one, 5), (replace(one, z=2.0), 5))
        assert [able.name for able in applicable(mixed)] == ["pld", "rdp"]

    def test_one_sampled_round_among_plain_ones_rules_out_the_exact_one(self):
        mixed = ((KINDS["plain"], 5), (KINDS["poisson"], 1))
        assert default(mixed).name == "pld"
        assert [able.name for able in everyday(mixed)] == ["rdp"]

    def test_a_batch_of_all_examples_is_no_sampling(self):
        release = Release(1.0, NoiseLaw(0.4), "example", 25, Sampling("poisson", 1.0))
        threat = Threat("ldp", 7, 3)
        curve = certified_curve(release, threat, 9, 1e-5).figure
        assert curve.tolist() == certified_curve(release, threat, 9, 1e-5, "exact").figure.tolist()

    def test_unknown_names_are_told_the_nearest(self):
        with pytest.raises(ConfigError, match="did you mean 'exact'"):
            ask("exakt", lambda accountant: accountant.rank)


@dataclass(frozen=True)
class Broken(Accountant):
    """Fails at everything."""

    assumes: ClassVar[str] = "every release"
    rank: ClassVar[int] = 99

    def applies(self, rounds) -> bool:
        return True

    def _epsilon(self, rounds, delta) -> float:
        raise AccountingFailure("no memory")

    def _delta(self, rounds, epsilon) -> float:
        raise AccountingFailure("no memory")


class TestFailure:
    PAST = ((Mechanism(0.9), 5),)

    def test_the_deputy_answers_and_the_answer_says_so(self, monkeypatch):
        broken = type("Broken", (Broken,), {"instead": "rdp"})("broken")
        monkeypatch.setitem(accountants._things, "broken", broken)
        answer = ask("broken", lambda asked: asked.epsilon(self.PAST, 1e-5))
        assert answer.figure == accountants["rdp"].epsilon(self.PAST, 1e-5)
        assert answer.by == "rdp"
        assert answer.notes == ("broken failed (no memory); its figure is that of rdp",)

    def test_without_a_deputy_the_failure_is_told(self, monkeypatch):
        monkeypatch.setitem(accountants._things, "broken", Broken("broken"))
        with pytest.raises(AccountingFailure, match="no memory"):
            ask("broken", lambda asked: asked.epsilon(self.PAST, 1e-5))

    @pytest.mark.usefixtures("nothing_remembered")
    def test_a_failing_pld_leaves_every_calculation_standing(self, monkeypatch):
        from trilemma.privacy.accounting import pld

        def fail(*_):
            raise MemoryError("grid too large")

        monkeypatch.setattr(pld, "_distribution", fail)
        threat = Threat("ldp", 7, 3)
        release = Release(1.0, NoiseLaw(0.08), "example", 25, Sampling("poisson", 0.01))
        found = find_delta(release, threat, rounds=10, epsilon=1.0)
        assert found.delta["pld"] == found.delta["rdp"]
        assert any("grid too large" in note for note in found.notes)
        by_pld = find_noise(release, threat, 10, 1.0, 1e-5, "pld")
        assert by_pld.asked == find_noise(release, threat, 10, 1.0, 1e-5, "rdp").asked
        curves = picture(release, threat, 10, 1e-5).curves
        assert curves["pld"].tolist() == curves["rdp"].tolist()


@pytest.mark.usefixtures("nothing_remembered")
def test_thousands_of_gaussian_rounds_are_laid_out_on_no_more_points_than_one(monkeypatch):
    """At an ε of thousands a grid of a thousandth had millions of points: 24 s at the end of a run."""
    from dp_accounting.pld import privacy_loss_distribution as losses

    from trilemma.privacy.accounting import pld

    steps = []

    def noted(z, value_discretization_interval, **more):
        steps.append(value_discretization_interval)
        return laid_out(z, value_discretization_interval=value_discretization_interval, **more)

    laid_out = losses.from_gaussian_mechanism
    monkeypatch.setattr(losses, "from_gaussian_mechanism", noted)
    past = ((Mechanism(0.47), 2820),)
    exact = accountants["exact"].epsilon(past, 4e-4)
    assert exact <= accountants["pld"].epsilon(past, 4e-4) <= exact * 1.0002
    assert 6700 / steps[0] < pld._POINTS
