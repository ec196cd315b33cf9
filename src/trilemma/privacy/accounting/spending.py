"""What a history of releases has cost: ε or δ by each accountant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from trilemma.base.errors import UserError
from trilemma.privacy.accounting.accountants import AccountantAnswer, accountants, applicable, ask, default
from trilemma.privacy.accounting.gaussian import check_delta
from trilemma.privacy.mechanism import History, mechanism
from trilemma.privacy.threats.catalogue import Threat
from trilemma.privacy.types import Adjacency, Release, Unit

MOST = 1000
"""Rounds of a curve at most in which a slow accountant is asked: each takes milliseconds."""


def composed_epsilon(rounds: History, delta: float, accountant: str) -> float:
    """Return ε of all `rounds` together at δ, by `accountant`.

    >>> from trilemma.privacy.mechanism import Mechanism
    >>> round(composed_epsilon(((Mechanism(1.27128345), 30),), 1e-4, "exact"), 1)
    24.6
    """
    return accountants[accountant].epsilon(rounds, delta)


@dataclass(frozen=True)
class Spending:
    """What a run has cost at δ: ε by the name of the accountant, and what must be said beside it.

    >>> Spending(1e-4, {"exact": 24.5, "rdp": 26.4}, ()).tightest
    ('exact', 24.5)
    """

    delta: float
    epsilon: dict[str, float]
    notes: tuple[str, ...]

    @property
    def tightest(self) -> tuple[str, float]:
        """The smallest ε and its accountant."""
        return min(self.epsilon.items(), key=lambda item: item[1])


def spent(
    release: Release,
    threat: Threat,
    rounds: int,
    delta: float,
    accountants: tuple[str, ...] | None = None,
    beside: History = (),
) -> Spending:
    """Return what `rounds` rounds of `release` cost the worst honest client under `threat`.

    All accountants that apply are asked, unless `accountants` names some. What is released `beside` these
    rounds is in the cost.

    >>> from trilemma.privacy.types import NoiseLaw
    >>> release = Release(clip=2.25, law=NoiseLaw(sigma_cor=0.6))
    >>> threat = Threat("secldp", clients=100, byzantine=10, assume="published")
    >>> cost = spent(release, threat, rounds=30, delta=1e-4, accountants=("exact", "rdp"))
    >>> {name: round(epsilon, 1) for name, epsilon in cost.epsilon.items()}
    {'exact': 24.6, 'rdp': 26.4}
    """
    check_delta(delta)
    if rounds < 0:
        raise UserError(f"the number of rounds is not negative, got {rounds}")
    past: History = ((mechanism(release, threat), rounds), *beside)
    names = [able.name for able in applicable(past)] if accountants is None else accountants
    answers = {name: ask(name, lambda asked: asked.epsilon(past, delta)) for name in names}
    notes = [*threat.notes(), *_release_notes(release)]
    notes += [note for answer in answers.values() for note in answer.notes]
    return Spending(delta, {name: answer.figure for name, answer in answers.items()}, tuple(notes))


def protected(unit: Unit, adjacency: Adjacency) -> str:
    """Say what a guarantee protects, and against which change.

    >>> protected("example", "replace")
    'one record, if it is replaced by another'
    """
    one = unit == "example"
    change = {
        "replace": "it is replaced by another" if one else "they are replaced by others",
        "add-remove": f"{'it is' if one else 'they are'} added or removed",
    }
    what = "one record" if one else "all records of one client"
    return f"{what}, if {change[adjacency]}" if adjacency in change else f"{what}, by the papers' convention"


def _release_notes(release: Release) -> tuple[str, ...]:
    if release.law.silent:
        return ("no noise: no guarantee",)
    notes: tuple[str, ...] = (f"protects {protected(release.unit, release.adjacency)}",)
    if release.adjacency == "published":
        notes = (
            f"{release.unit} level, the papers' convention: noise over a replacement's move, in the "
            "add/remove formula for Poisson sampling",
        )
    if release.sampling.amplifies and release.unit == "user":
        notes += ("sampling examples does not amplify a user-level guarantee",)
    if not release.drawing.exact:
        notes += ("noise in whole steps of a grid: what drawing it costs is in the figure",)
    return notes


def certified_curve(
    release: Release,
    threat: Threat,
    rounds: int,
    delta: float,
    accountant: str | None = None,
    beside: Callable[[int], History] | None = None,
    most: int = MOST,
) -> AccountantAnswer[NDArray[np.float64]]:
    """Return ε after each of the rounds 1 … `rounds`, and the name of the accountant it is by.

    Each is what the accountant says of so many rounds, and it never falls. Beyond `most` rounds a slow
    accountant is asked at so many of them; in between stands the next one's ε. `beside` says what else has
    been released after so many rounds.

    >>> from trilemma.privacy.types import NoiseLaw
    >>> release = Release(clip=2.25, law=NoiseLaw(sigma_cor=0.6))
    >>> threat = Threat("secldp", 100, 10, assume="published")
    >>> curve = certified_curve(release, threat, 30, 1e-4)
    >>> curve.by, curve.figure.round(1)[[0, 9, 29]].tolist()
    ('exact', [2.9, 11.7, 24.6])
    """
    one = mechanism(release, threat)

    def after(done: int) -> History:
        return ((one, done), *(() if beside is None else beside(done)))

    name = accountant or default(after(rounds)).name
    every = np.arange(1, rounds + 1)
    asked = every if accountants[name].quick else places(rounds, most)
    answer = _curve(tuple(after(int(done)) for done in asked), delta, name)
    return replace(answer, figure=answer.figure[np.searchsorted(asked, every)])


def places(rounds: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` rounds from the first to the last, evenly spread.

    >>> places(3, 60).tolist(), places(100, 4).tolist()
    ([1, 2, 3], [1, 34, 67, 100])
    """
    return np.unique(np.linspace(1, rounds, min(rounds, most)).round().astype(int))


@lru_cache(maxsize=16)
def _curve(past: tuple[History, ...], delta: float, name: str) -> AccountantAnswer[NDArray[np.float64]]:
    """Every seed of a run asks for the same curve."""
    return ask(name, lambda asked: asked.curve(past, delta))


def certified(
    release: Release, threat: Threat, rounds: int, delta: float, beside: History = ()
) -> AccountantAnswer[float]:
    """Return ε of `rounds` rounds by the tightest accountant that applies, and that accountant's name.

    What is released `beside` these rounds is in the cost.

    >>> from trilemma.privacy.types import NoiseLaw
    >>> answer = certified(Release(clip=2.25, law=NoiseLaw(9.0)), Threat("ldp", 7), rounds=30, delta=1e-4)
    >>> answer.by, round(answer.figure, 1)
    ('exact', 13.3)
    """
    past: History = ((mechanism(release, threat), rounds), *beside)
    return ask(default(past).name, lambda asked: asked.epsilon(past, delta))
