"""Maximise a function of one strength: on a grid, then by golden section around its highest points.

Golden section narrows a bracket by the factor (√5 − 1)/2 with every new value, and finds the maximum of a
unimodal function (Kiefer, "Sequential minimax search for a maximum", 1953). Harm is not always unimodal,
hence the grid: the result is never worse than its best point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

Objective = Callable[[float], float]
"""τ -> the attackers' objective; larger is worse for the server."""

GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0

PEAKS = 3
"""Grid points, higher than their neighbours, around which is searched: rules that drop messages make many."""

TIE = 1e-5
"""Strengths whose harm differs by no more than this share do the same harm: the largest is taken."""

AHEAD = 5
"""Steps of golden section that are evaluated together if the objective can: 2 + 4 + … + 32 points."""


@dataclass(frozen=True)
class Together:
    """An objective that evaluates many strengths at once and remembers their values.

    >>> objective = Together(lambda strengths: [tau**2 for tau in strengths])
    >>> objective.expect([1.0, 2.0])
    >>> objective(2.0), objective(3.0), sorted(objective.known)
    (4.0, 9.0, [1.0, 2.0, 3.0])
    """

    many: Callable[[list[float]], list[float]]
    known: dict[float, float] = field(default_factory=dict)

    def expect(self, strengths: Iterable[float]) -> None:
        """Evaluate strengths that will be asked for, except those already known."""
        missing = [tau for tau in dict.fromkeys(strengths) if tau not in self.known]
        if missing:
            self.known.update(zip(missing, self.many(missing), strict=True))

    def __call__(self, tau: float) -> float:
        """Return the objective at one strength."""
        self.expect([tau])
        return self.known[tau]


def maximise(objective: Objective, grid: list[float], refinements: int, margin: float = 0.0) -> float:
    """Return the best point of `grid`, or a better point beside its best ones; they share the `refinements`.

    A point off the grid must still be better than the grid's best after a relative change by ±`margin`.

    >>> round(maximise(lambda tau: -((tau - 1.3) ** 2), [0.0, 1.0, 2.0], refinements=20), 3)
    1.3
    """
    if isinstance(objective, Together):
        objective.expect(grid)
    values = [_number(objective(tau)) for tau in grid]
    peaks = [
        place
        for place, value in enumerate(values)
        if value == max(values[max(place - 1, 0) : place + 2])  # of equal neighbours, both
    ]
    peaks = sorted(peaks, key=lambda place: -values[place])[:PEAKS]
    alike = [place for place in peaks if math.isclose(values[place], values[peaks[0]], rel_tol=TIE)]
    best = max(alike, key=lambda place: grid[place])
    refined = [
        found
        for place in peaks
        for found in _golden_section(
            objective, grid[max(place - 1, 0)], grid[min(place + 1, len(grid) - 1)], refinements // len(peaks)
        )
    ]
    changes = (margin, -margin) if margin else ()
    for value, tau in sorted(refined, reverse=True):
        if value <= values[best]:
            break
        if isinstance(objective, Together):
            objective.expect(tau * (1.0 + change) for change in changes)
        if all(objective(tau * (1.0 + change)) > values[best] for change in changes):
            return tau
    return grid[best]


def _golden_section(objective: Objective, low: float, high: float, steps: int) -> list[tuple[float, float]]:
    """Return (value, τ) for every point that golden section evaluates in `steps` evaluations."""
    seen: list[tuple[float, float]] = []
    if steps < 2 or high <= low:
        return seen
    bracket = _Bracket(low, high - GOLDEN * (high - low), low + GOLDEN * (high - low), high)

    def look(tau: float) -> float:
        if isinstance(objective, Together) and tau not in objective.known:
            objective.expect(bracket.coming(min(AHEAD, steps - max(len(seen), 2))))
        seen.append((_number(objective(tau)), tau))
        return seen[-1][0]

    at_left, at_right = look(bracket.left), look(bracket.right)
    while len(seen) < steps:
        leftwards = at_left >= at_right
        bracket = bracket.narrowed(leftwards)
        if leftwards:
            at_left, at_right = look(bracket.left), at_left
        else:
            at_left, at_right = at_right, look(bracket.right)
    return seen


class _Bracket(NamedTuple):
    """The two inner points of golden section and the two ends."""

    low: float
    left: float
    right: float
    high: float

    def narrowed(self, leftwards: bool) -> _Bracket:
        """Return the next bracket: around the left point (`leftwards`), or around the right one."""
        if leftwards:
            return _Bracket(self.low, self.right - GOLDEN * (self.right - self.low), self.left, self.right)
        return _Bracket(self.left, self.right, self.left + GOLDEN * (self.high - self.left), self.high)

    def coming(self, steps: int) -> list[float]:
        """Return the inner points of this bracket, and of all brackets that may follow in so many steps."""
        points = [self.left, self.right]
        if steps > 0:
            for leftwards in (True, False):
                points += self.narrowed(leftwards).coming(steps - 1)
        return points


def _number(value: float) -> float:
    """Return the value, or −∞ for NaN, so that it ranks last."""
    return value if value == value else -math.inf
