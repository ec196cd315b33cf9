"""Of ε, δ and the noise, any two give the third; and what the neighbouring questions would answer.

>>> from trilemma.privacy.types import NoiseLaw
>>> release = Release(clip=2.25, law=NoiseLaw(sigma_cor=0.6))
>>> threat = Threat("secldp", 100, 10, assume="published")
>>> round(find_delta(release, threat, rounds=30, epsilon=25.0).delta["exact"], 6)
6.8e-05
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trilemma.privacy.accounting.accountants import applicable, ask, worthwhile
from trilemma.privacy.accounting.calibration import Plan, default_accountant, plan
from trilemma.privacy.accounting.spending import certified_curve, places, spent
from trilemma.privacy.mechanism import History, mechanism
from trilemma.privacy.threats.catalogue import Threat, threat_models
from trilemma.privacy.types import Release
from trilemma.privacy.verdict import objections

DRAWN = 30
"""Rounds of a picture's curves at most."""


@dataclass(frozen=True)
class Solution:
    """What `rounds` rounds of `release` cost under `threat`, by each accountant that can tell.

    Of `epsilon` and `delta` one was given, the other has a figure per accountant.
    """

    release: Release
    threat: Threat
    rounds: int
    epsilon: float | Mapping[str, float]
    delta: float | Mapping[str, float]
    notes: tuple[str, ...]


def find_epsilon(release: Release, threat: Threat, rounds: int, delta: float) -> Solution:
    """Return ε of given noise at δ."""
    cost = spent(release, threat, rounds, delta)
    return Solution(release, threat, rounds, cost.epsilon, delta, cost.notes)


def find_delta(release: Release, threat: Threat, rounds: int, epsilon: float) -> Solution:
    """Return δ of given noise at ε."""
    past: History = ((mechanism(release, threat), rounds),)
    able = [accountant.name for accountant in applicable(past) if accountant.tells_delta]
    answers = {name: ask(name, lambda asked: asked.delta(past, epsilon)) for name in able}
    notes = [*threat.notes(), *(note for answer in answers.values() for note in answer.notes)]
    figures = {name: answer.figure for name, answer in answers.items()}
    return Solution(release, threat, rounds, epsilon, figures, tuple(notes))


@dataclass(frozen=True)
class Calibration:
    """The least noise for a guarantee: as asked, for other numbers of colluders, and in each threat model."""

    accountant: str
    asked: Plan
    collusions: tuple[Plan, ...]
    models: tuple[Plan, ...]


def find_noise(
    shape: Release,
    threat: Threat,
    rounds: int,
    epsilon: float,
    delta: float,
    accountant: str | None = None,
) -> Calibration:
    """Return the least noise for releases like `shape` that keeps to ε and δ.

    >>> from trilemma.privacy.types import NoiseLaw
    >>> shape, threat = Release(clip=2.25, law=NoiseLaw()), Threat("secldp", 100, 10)
    >>> found = find_noise(shape, threat, rounds=30, epsilon=26.4, delta=1e-4)
    >>> found.accountant, [other.threat.collusion for other in found.collusions]
    ('exact', [0, 2, 5, 8, 10])
    """
    name = accountant or default_accountant(shape)
    several, models = _collusions(threat), _models(threat)
    asked, *others = plan(shape, (threat, *several, *models), epsilon, delta, rounds, name)
    return Calibration(name, asked, tuple(others[: len(several)]), tuple(others[len(several) :]))


@dataclass(frozen=True)
class PrivacyCurves:
    """ε by accountant after some `rounds`, and the noise each threat model needs for the last of them."""

    threat: Threat
    delta: float
    rounds: NDArray[np.int64]
    curves: Mapping[str, NDArray[np.float64]]
    spent: float
    plans: tuple[Plan, ...]
    certified: bool


def picture(release: Release, threat: Threat, rounds: int, delta: float) -> PrivacyCurves:
    """Return what is worth drawing about `rounds` rounds of `release`."""
    able = worthwhile(((mechanism(release, threat), rounds),))
    drawn = places(rounds, DRAWN)
    curves = {
        one.name: certified_curve(release, threat, rounds, delta, one.name, most=DRAWN).figure[drawn - 1]
        for one in able
    }
    last = min(float(curve[-1]) for curve in curves.values())
    plans = plan(release, _models(threat), last, delta, rounds)
    return PrivacyCurves(threat, delta, drawn, curves, last, plans, not objections(release, threat))


def _collusions(threat: Threat) -> tuple[Threat, ...]:
    """Return SecLDP for a handful of q between none and all of the Byzantine clients."""
    chosen = sorted({round(share * threat.byzantine) for share in (0, 0.25, 0.5, 0.75, 1)})
    n, f, assume, scales = threat.clients, threat.byzantine, threat.assume, threat.scales
    return tuple(Threat("secldp", n, f, q, assume, scales=scales) for q in chosen)


def _models(threat: Threat) -> tuple[Threat, ...]:
    """Return all threat models of the same federation."""
    n, f = threat.clients, threat.byzantine
    return tuple(Threat(name, n, f, assume=threat.assume, scales=threat.scales) for name in threat_models)
