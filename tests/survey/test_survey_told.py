"""Intervals of a survey's figures: as often right as they say, whatever liars send.

Every test draws noise of the law that is accounted for, and compares what is told with the sums themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from trilemma.base.errors import UserError
from trilemma.privacy.threats.covariance import SecretGraph, covariance
from trilemma.privacy.types import NoiseLaw
from trilemma.survey.columns import SurveyColumn
from trilemma.survey.figures import columns, correlations, shown
from trilemma.survey.layout import Layout
from trilemma.survey.sites import drifts, sites
from trilemma.survey.told import Told, ToldFigure, heard

LAYOUT = Layout(
    {
        "age": SurveyColumn(low=20, high=90, bins=10),
        "chol": SurveyColumn(low=100, high=400, bins=6),
        "sex": SurveyColumn(values=("f", "m")),
    },
    correlations=True,
)
SITES, BATCH = 6, 400
LAWS = [NoiseLaw(0.02), NoiseLaw(0.008, 0.08)]


def records(site: int, count: int = 300) -> list[dict[str, object]]:
    """Return records whose ages differ from site to site."""
    draw = np.random.default_rng(site)
    ages = draw.normal(50 + 2 * site, 10, count)
    return [
        {
            "age": age,
            "chol": 150 + 1.5 * age + draw.normal(0, 30) if row % 9 else None,
            "sex": "fm"[row % 5 == site % 5],
        }
        for row, age in enumerate(ages)
    ]


SUMS = np.stack([LAYOUT.vectors(records(site)).astype(np.float64).sum(0) for site in range(SITES)])


def told(law: NoiseLaw, seed: int, lie: Callable[[np.ndarray], np.ndarray] | None = None, f: int = 0) -> Told:
    """Return a survey with fresh noise of this law; the last f sites say what `lie` makes of the messages."""
    sigma = covariance(SecretGraph.complete(SITES), law, range(SITES))
    noise = np.linalg.cholesky(sigma) @ np.random.default_rng(seed).normal(size=(SITES, LAYOUT.dim))
    messages = SUMS / BATCH + noise
    if lie is not None:
        messages[SITES - f :] = lie(messages)
    ordered = np.sort(messages, axis=0)
    value = ordered[f : SITES - f].mean(0)
    weights = (1 / SITES,) * SITES
    return Told(LAYOUT, value, messages, tuple(range(SITES)), weights, SITES, f, law, BATCH)


def truth(over: np.ndarray, under: np.ndarray | None = None, kept: int = SITES) -> float:
    """Return a sum over the first sites, as if all were like them, or one such sum over another."""
    total = SUMS[:kept].sum(0)
    return total @ over * SITES / kept if under is None else (total @ over) / (total @ under)


def covered(figures: list[ToldFigure], exact: float) -> float:
    """Return how often an interval has the exact number."""
    ends = [
        (-np.inf if one.low is None else one.low, np.inf if one.high is None else one.high) for one in figures
    ]
    return float(np.mean([low <= exact <= high for low, high in ends]))


@pytest.mark.parametrize("law", LAWS, ids=["ldp", "secldp"])
def test_intervals_are_right_as_often_as_they_say(law: NoiseLaw) -> None:
    runs, least = [told(law, seed) for seed in range(200)], 0.95 - 3 * (0.95 * 0.05 / 200) ** 0.5
    age, chol = LAYOUT.present("age"), LAYOUT.present("chol")
    assert covered([one.total(age) for one in runs], truth(age)) >= least
    missing = [one.ratio(LAYOUT.cell("chol", 0), LAYOUT.records, (0, 1)) for one in runs]
    assert covered(missing, truth(LAYOUT.cell("chol", 0), LAYOUT.records)) >= least
    figures = [{one.name: one for one in columns(run, 0)} for run in runs[:60]]
    least = 0.95 - 3 * (0.95 * 0.05 / 60) ** 0.5
    mean = truth(LAYOUT.moment("chol", 1), chol)
    variance = (truth(LAYOUT.moment("chol", 2), chol) - mean**2) * 150**2
    assert covered([one["chol"].mean for one in figures], 250 + 150 * mean) >= least
    assert covered([one["chol"].variance for one in figures], variance) >= least
    everyone = np.sort([float(record["age"]) for site in range(SITES) for record in records(site)])
    for place, share in enumerate((0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)):
        exact = everyone[int(share * len(everyone))]
        assert covered([one["age"].quantiles[place].figure for one in figures], exact) >= least


@pytest.mark.parametrize("law", LAWS, ids=["ldp", "secldp"])
def test_noise_is_as_large_as_it_says(law: NoiseLaw) -> None:
    runs = [told(law, seed) for seed in range(300)]
    age = LAYOUT.present("age")
    for found in ([one.total(age) for one in runs], [one.of_site(2, age) for one in runs]):
        assert np.std([one.value for one in found]) == pytest.approx(found[0].noise, rel=0.15)
    means = [one.ratio(LAYOUT.moment("age", 1), age, (-1, 1)) for one in runs]
    said = np.mean([one.noise for one in means])
    assert np.std([one.value for one in means]) == pytest.approx(said, rel=0.15)


def test_correlations_and_distances_hold_what_is_true() -> None:
    every = [record for site in range(SITES) for record in records(site)]
    scaled = LAYOUT.columns["age"].read("age", every)[1], LAYOUT.columns["chol"].read("chol", every)[1]
    exact = np.corrcoef(*scaled)[0, 1]
    runs = [told(NoiseLaw(0.01), seed) for seed in range(60)]
    assert covered([next(correlations(run)).figure for run in runs], exact) >= 0.95
    shares = SUMS @ np.stack([LAYOUT.cell("sex", cell) for cell in range(4)], axis=1) / 300
    apart = {(i, j): np.linalg.norm(shares[i] - shares[j]) for i in range(SITES) for j in range(i)}
    found = [drift for run in runs for drift in drifts(run) if drift.column == "sex"]
    right = [one.distance.low <= apart[one.sites[::-1]] <= one.distance.high for one in found]
    assert len(right) == 60 * 15
    assert np.mean(right) >= 0.93


LIES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "everything is huge": lambda honest: np.full_like(honest[:1], 1e30),
    "nobody is there": lambda honest: np.zeros_like(honest[:1]),
    "all is the opposite": lambda honest: -10 * honest[:1],
    "a little more of all": lambda honest: honest[:-1].max(0, keepdims=True),
    "more in one cell": lambda honest: honest[:1] + 50 * LAYOUT.cell("sex", 2) / BATCH,
}


@pytest.mark.parametrize("law", LAWS, ids=["ldp", "secldp"])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_site_that_lies_about_everything_moves_no_figure_out_of_its_interval(lie, law: NoiseLaw) -> None:
    """The honest sites' figure is in the interval as often as that says, and the interval stays finite."""
    runs, least = [told(law, seed, lie, f=1) for seed in range(60)], 0.95 - 3 * (0.95 * 0.05 / 60) ** 0.5
    honest, age = SITES - 1, LAYOUT.present("age")
    for direction in (LAYOUT.records, LAYOUT.cell("sex", 2), LAYOUT.cell("age", 5)):
        found = [run.total(direction) for run in runs]
        assert covered(found, truth(direction, kept=honest)) >= least
        assert all(one.low <= one.value <= one.high for one in found)
        reach = SITES * (BATCH + 12 * runs[0].single * float(np.linalg.norm(direction)))
        assert max(one.high for one in found) <= reach
    means = [run.ratio(LAYOUT.moment("age", 1), age, (-1, 1)) for run in runs]
    assert covered(means, truth(LAYOUT.moment("age", 1), age, honest)) >= least
    everyone = np.sort([float(record["age"]) for site in range(honest) for record in records(site)])
    medians = [next(columns(run, 0)).quantiles[3].figure for run in runs[:20]]
    assert covered(medians, everyone[len(everyone) // 2]) >= 0.9


def test_who_is_not_heard_is_left_out_and_too_few_are_refused() -> None:
    messages = SUMS / BATCH
    messages[1] = np.nan
    known, there = heard(messages, (0, 3, 4, 7, 8, 9))
    assert there == (0, 4, 7, 8, 9)
    assert np.isfinite(known).all()
    with pytest.raises(UserError, match="fewer than 5"):
        Told(LAYOUT, messages[0], messages[:4], (0, 1, 2, 3), (0.25,) * 4, 6, 2, LAWS[0], BATCH)


def test_small_counts_are_not_shown_and_say_nothing_else() -> None:
    assert shown("rare", ToldFigure(9.0, 1.0, 7.0, 11.0), least=10).count is None
    assert shown("noise", ToldFigure(30.0, 16.0, -2.0, 62.0), least=10).count is None
    assert shown("many", ToldFigure(30.0, 14.0, -1.0, 60.0), least=10).count == ToldFigure(
        30.0, 14.0, 0.0, 60.0
    )


def test_nothing_is_said_of_single_sites_where_only_the_mean_may_be_known() -> None:
    value = (SUMS / BATCH).mean(0)
    sites_, weights = tuple(range(SITES)), (1 / SITES,) * SITES
    run = Told(LAYOUT, value, None, sites_, weights, SITES, 0, LAWS[0], BATCH)
    assert not [*sites(run, "sex", 0)]
    assert not [*drifts(run)]
    assert run.total(LAYOUT.records).value == pytest.approx(SITES * 300, rel=1e-4)
