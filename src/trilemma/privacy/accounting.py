"""What a history of releases has cost: ε or δ by each accountant.

* `exact`: a composition of plain Gaussian mechanisms, in closed form (`trilemma.privacy.gaussian`);
* `rdp`: Rényi divergences, for every sampling scheme (`trilemma.privacy.rdp`);
* `pld`: privacy-loss distributions, tight for every sampling scheme (`trilemma.privacy.pld`);
* `c1`: Theorem C.1 of the SAFE-DSHB paper, for sampling without replacement.

Each is an upper bound on the true ε, so the smallest of them is one too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trilemma.errors import PrivacyError, UserError
from trilemma.privacy.gaussian import check_delta, gaussian_delta, gaussian_epsilon
from trilemma.privacy.mechanism import Mechanism, mechanism
from trilemma.privacy.pld import PldFailure, pld_delta, pld_epsilon
from trilemma.privacy.rdp import (
    GAUSSIAN_ORDERS,
    SAMPLED_ORDERS,
    rdp_delta,
    rdp_epsilon,
    round_rdp,
    theorem_c1,
)
from trilemma.privacy.threats import Threat
from trilemma.privacy.types import Release, choice

Accountant = Literal["exact", "rdp", "pld", "c1"]
History = tuple[tuple[Mechanism, int], ...]
"""Mechanisms and how many rounds each ran, in a fixed order."""


def history(mechanisms: Iterable[Mechanism]) -> History:
    """Return the rounds `mechanisms` as counts.

    >>> history([Mechanism(1.0), Mechanism(2.0), Mechanism(1.0)])[0]
    (Mechanism(z=1.0, sampling=Sampling(scheme='none', rate=1.0), adjacency='replace'), 2)
    """
    return tuple(Counter(mechanisms).items())


def applicable(rounds: History) -> tuple[Accountant, ...]:
    """Return the accountants that can account for `rounds`.

    >>> applicable(((Mechanism(1.0), 30),))
    ('exact', 'rdp', 'pld')
    """
    mechanisms = [m for m, _ in rounds]
    if all(m.gaussian for m in mechanisms):
        return ("exact", "rdp", "pld")
    alone = mechanisms[0]
    if (
        len(mechanisms) == 1
        and alone.sampling.scheme == "without_replacement"
        and alone.adjacency == "replace"
    ):
        return ("rdp", "pld", "c1")
    return ("rdp", "pld")


def composed_epsilon(rounds: History, delta: float, accountant: Accountant) -> float:
    """Return ε of all `rounds` together at δ, by `accountant`.

    >>> round(composed_epsilon(((Mechanism(1.27128345), 30),), 1e-4, "exact"), 1)
    24.6
    """
    check_delta(delta)
    _check_accountant(rounds, accountant)
    if sum(count for _, count in rounds) == 0:
        return 0.0
    if any(m.z == 0 and count for m, count in rounds):
        return math.inf
    if accountant == "exact":
        return float(gaussian_epsilon(_mu(rounds), delta))
    if accountant == "rdp":
        return float(rdp_epsilon(_rho(rounds), _orders(rounds), delta))
    if accountant == "c1":
        ((alone, count),) = rounds
        return theorem_c1(alone.z, alone.sampling.rate, count, delta)
    return pld_epsilon(rounds, delta)


def composed_delta(rounds: History, epsilon: float, accountant: Accountant) -> float:
    """Return δ of all `rounds` together at ε, by `accountant`.

    >>> round(composed_delta(((Mechanism(1.27128345), 30),), 24.5, "exact"), 5)
    0.00011
    """
    if not epsilon >= 0:
        raise PrivacyError(f"epsilon is not negative, got {epsilon}")
    _check_accountant(rounds, accountant)
    if sum(count for _, count in rounds) == 0:
        return 0.0
    if any(m.z == 0 and count for m, count in rounds):
        return 1.0
    if accountant == "exact":
        return float(gaussian_delta(_mu(rounds), epsilon))
    if accountant == "rdp":
        return rdp_delta(_rho(rounds), _orders(rounds), epsilon)
    if accountant == "c1":
        raise UserError("Theorem C.1 is stated for ε at a given δ: use the accountant 'rdp' or 'pld' for δ")
    return pld_delta(rounds, epsilon)


def _check_accountant(rounds: History, accountant: Accountant) -> None:
    choice("accountant", accountant, Accountant)
    allowed = applicable(rounds)
    if accountant not in allowed:
        raise UserError(
            f"accountant {accountant!r} does not apply to these releases; use one of: {', '.join(allowed)}"
            + (". 'exact' is for releases without sampling" if accountant == "exact" else "")
        )


def _mu(rounds: History) -> float:
    return math.sqrt(math.fsum(count / m.effective_z**2 for m, count in rounds))


def _orders(rounds: History) -> NDArray[np.float64]:
    return GAUSSIAN_ORDERS if all(m.gaussian for m, _ in rounds) else np.asarray(SAMPLED_ORDERS)


def _rho(rounds: History) -> NDArray[np.float64]:
    orders = tuple(_orders(rounds))
    return np.asarray(np.sum([count * round_rdp(m, orders) for m, count in rounds], axis=0))


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
    accountants: tuple[Accountant, ...] | None = None,
) -> Spending:
    """Return what `rounds` rounds of `release` cost the worst honest client under `threat`.

    All accountants that apply are asked, unless `accountants` names some.

    >>> from trilemma.privacy.types import NoiseLaw
    >>> release = Release(clip=2.25, law=NoiseLaw(sigma_cor=0.6))
    >>> threat = Threat("secldp", clients=100, byzantine=10)
    >>> cost = spent(release, threat, rounds=30, delta=1e-4, accountants=("exact", "rdp"))
    >>> {name: round(epsilon, 1) for name, epsilon in cost.epsilon.items()}
    {'exact': 24.6, 'rdp': 26.4}
    """
    check_delta(delta)
    if rounds < 0:
        raise UserError(f"the number of rounds is not negative, got {rounds}")
    past: History = ((mechanism(release, threat), rounds),)
    epsilon: dict[str, float] = {}
    notes = [*threat.notes(), *_release_notes(release)]
    for name in applicable(past) if accountants is None else accountants:
        try:
            epsilon[name] = composed_epsilon(past, delta, name)
        except PldFailure as failure:
            epsilon[name] = composed_epsilon(past, delta, "rdp")
            notes.append(f"pld failed ({failure}); its figure is that of rdp")
    return Spending(delta, epsilon, tuple(notes))


def _release_notes(release: Release) -> tuple[str, ...]:
    if release.law.silent:
        return ("no noise: no guarantee",)
    unit = f"{release.unit} level, {release.adjacency.replace('_', '/')}"
    notes: tuple[str, ...] = (unit,)
    if release.adjacency == "published":
        notes = (
            f"{release.unit} level, the papers' convention: noise over a replacement's move, in the "
            "add/remove formula for Poisson sampling",
        )
    if release.sampling.amplifies and release.unit == "user":
        notes += ("sampling examples does not amplify a user-level guarantee",)
    return notes


def epsilon_curve(
    release: Release, threat: Threat, rounds: int, delta: float, accountant: Accountant = "exact"
) -> NDArray[np.float64]:
    """Return ε after each of the rounds 1 … `rounds`.

    `pld` and `c1` are evaluated at a few dozen rounds only; in between stands the next larger one's ε. Where
    `pld` fails, the curve is that of `rdp`.

    >>> from trilemma.privacy.types import NoiseLaw
    >>> release, threat = Release(clip=2.25, law=NoiseLaw(sigma_cor=0.6)), Threat("secldp", 100, 10)
    >>> epsilon_curve(release, threat, 30, 1e-4).round(1)[[0, 9, 29]].tolist()
    [2.9, 11.7, 24.6]
    """
    check_delta(delta)
    one = mechanism(release, threat)
    past: History = ((one, 1),)
    _check_accountant(past, accountant)
    steps = np.arange(1, rounds + 1)
    if one.z == 0:
        return np.full(rounds, np.inf)
    if accountant == "exact":
        return gaussian_epsilon(np.sqrt(steps) / one.effective_z, delta)
    if accountant == "rdp":
        rho, orders = _rho(past), _orders(past)
        return np.concatenate(
            [
                rdp_epsilon(part[:, None] * rho, orders, delta)
                for part in np.array_split(steps, rounds // 256 + 1)
            ]
        )
    chosen = np.unique(np.geomspace(1, rounds, min(rounds, 24)).round().astype(int))
    try:
        values = np.array([composed_epsilon(((one, int(t)),), delta, accountant) for t in chosen])
    except PldFailure:
        return epsilon_curve(release, threat, rounds, delta, "rdp")
    return values[np.searchsorted(chosen, steps)]


def spent_delta(
    release: Release, threat: Threat, rounds: int, epsilon: float, accountant: Accountant
) -> float:
    """Return δ at which `rounds` rounds of `release` cost `epsilon`.

    >>> from trilemma.privacy.types import NoiseLaw
    >>> release, threat = Release(clip=2.25, law=NoiseLaw(sigma_cor=0.6)), Threat("secldp", 100, 10)
    >>> round(spent_delta(release, threat, 30, 24.5, "exact"), 4)
    0.0001
    """
    return composed_delta(((mechanism(release, threat), rounds),), epsilon, accountant)
