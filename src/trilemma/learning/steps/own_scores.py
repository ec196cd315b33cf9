"""Scores of the model on examples that clients hold themselves and do not train on.

**What is released.** A client reports one number, its share of right answers, with independent noise if its
messages have noise. As a release, each example contributes ±1/2 to a mean over the client's examples, of
which it holds at least `batch`, a public number. Replacing one example moves the share by at most 1/batch,
replacing all of a client's data by at most 1. If examples are added or removed instead, the mean also moves
by at most 1/batch, which clip = 1 expresses. No noise is shared between clients and none cancels, so this
release is accounted as under ldp for every threat model, in addition to the messages, although no example is
in both.

**What the server computes.** Up to f of the n reports are lies. Reports are clamped to the range that honest
noise reaches, and the score is the mean without the f largest and the f smallest. Two bounds come with it.
The score would lie between them whatever any f clients had reported, and so does the true mean share of the
honest clients, in at least 19 of 20 evaluations.

**Why the bounds hold.** The mean of the n − 2f smallest reports is at most that of any n − f reports, hence
of the honest ones; the mean of the n − 2f largest is at least that. The mean noise of n − f reports is
sub-Gaussian with σ/√(n − f): it exceeds √(2 ln 40) times that with probability at most 1/40 on either side.
Clamping moves the mean by at most E(|z| − 4σ)₊ < 10⁻⁵ σ, rounding to a grid by at most two steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trilemma import models
from trilemma.base.errors import UserError
from trilemma.base.records import OWN_SCORE
from trilemma.data.types import Batch
from trilemma.models.types import Model
from trilemma.privacy.mechanism import History, mechanism
from trilemma.privacy.noise.grid import Grid
from trilemma.privacy.noise.grid_price import drawing
from trilemma.privacy.threats.catalogue import Threat
from trilemma.privacy.types import Adjacency, Arithmetic, NoiseLaw, NoiseSource, Release, Unit

REACH = 4.0
"""Reports are clamped to [0, 1] widened by this many standard deviations of the noise."""

BEYOND = 1e-5
"""The most by which clamping moves the mean, in standard deviations of the noise."""

DOUBT = 0.05
"""The largest probability that noise puts the true mean outside the bounds."""


def release_of(unit: Unit, adjacency: Adjacency, held: int, law: NoiseLaw | None = None) -> Release:
    """Return the release of one report, if every client scores at least `held` examples.

    >>> release_of("user", "replace", 20).sensitivity, release_of("example", "replace", 20).sensitivity
    (1.0, 0.05)
    """
    clip = 1.0 if adjacency == "add-remove" else 0.5
    return Release(clip, law or NoiseLaw(), unit, held if unit == "example" else 1, adjacency=adjacency)


def right_shares(model: Model, params: Tensor, held: Batch) -> Tensor:
    """Return each client's share of right answers (k,), float64, on `held`, which has one row per client."""
    score = models.evaluate(model, params, held.x, held.y, held.weight)
    if not bool(torch.isfinite(score.accuracy).all()):
        raise UserError("clients evaluate by counting right answers, and these targets are no classes")
    return score.correct.double() / score.examples


@dataclass(frozen=True)
class OwnScores:
    """When clients evaluate, what that releases, and how the server combines their reports.

    `turns` are the rounds after which they evaluate, `tolerated` is f. `release` is None without noise.
    `grid` is the grid on which noise is added, None in floating-point arithmetic.

    >>> plain = OwnScores(turns=(2, 4), tolerated=1)
    >>> plain.combined([0.6, 0.7, 0.8, 1e9])
    {'own_accuracy': 0.75, 'own_accuracy_low': 0.65, 'own_accuracy_high': 0.9}
    >>> plain.combined([0.6, 0.7])
    {}
    """

    turns: tuple[int, ...]
    tolerated: int
    release: Release | None = None
    grid: Grid | None = None

    @classmethod
    def noised(
        cls, turns: tuple[int, ...], tolerated: int, release: Release, clients: int, arithmetic: Arithmetic
    ) -> OwnScores:
        """Return evaluations with this release. On a grid, the release also says how its noise is drawn."""
        if arithmetic != "grid":
            return cls(turns, tolerated, release)
        grid = Grid.of(release, 1, clients)
        drawn = drawing(release.law, grid, clients, shares=False)
        return cls(turns, tolerated, replace(release, drawing=drawn), grid)

    @property
    def threat(self) -> Threat:
        """The threat that a report is protected against: ldp, in which everybody else may collude."""
        return Threat("ldp", 1)

    def history(self, rounds: int, repeated: float = 0.0) -> History:
        """Return what `rounds` rounds release if a share `repeated` of it is released twice, for planning."""
        times = sum(turn <= rounds for turn in self.turns)
        if self.release is None or not times:
            return ()
        return ((mechanism(self.release, self.threat), math.ceil((1 + repeated) * times)),)

    def told(self, shares: Tensor, noise: NoiseSource, ids: tuple[int, ...], round_: int) -> Tensor:
        """Return the reports (k,) of clients `ids` in a round: their `shares` (k,), float64, plus noise."""
        shares = shares.double().cpu()
        if self.release is None:
            return shares
        here, law, centred = shares.device, self.release.law, shares[:, None] - 0.5
        if self.grid is None:
            return (centred + noise.draw(law, ids, 1, round_, here).double())[:, 0] + 0.5
        grid = self.grid
        room = grid.clip / grid.bound  # leaves room for rounding within the declared sensitivity
        whole = grid.message(
            grid.contribution(centred * room), noise.steps(law, grid.step, ids, 1, round_, here)
        )
        return whole[:, 0].double() * (grid.step / room) + 0.5

    @property
    def reach(self) -> float:
        """How far beyond 0 and 1 reports may lie before they are clamped."""
        return 0.0 if self.release is None else REACH * self.release.law.sigma_ind

    def width(self, honest: int) -> float:
        """Return how far noise moves the mean of so many honest reports, except with probability `DOUBT`."""
        if self.release is None:
            return 0.0
        larger = 1.0 if self.grid is None else self.grid.bound / self.grid.clip
        rounding = 0.0 if self.grid is None else 2 * self.grid.step * larger
        likely = math.sqrt(2 * math.log(2 / DOUBT) / honest)
        return self.release.law.sigma_ind * larger * (likely + BEYOND) + rounding

    def combined(self, told: Iterable[float]) -> dict[str, float]:
        """Return the score and its two bounds (see the module); {} for 2f or fewer reports."""
        shares = torch.tensor(list(told), dtype=torch.float64)
        f, n = self.tolerated, len(shares)
        if n <= 2 * f:
            return {}
        rising = shares.clamp(-self.reach, 1 + self.reach).sort().values
        width = self.width(n - f)
        found = {
            "": rising[f : n - f].mean(),
            "_low": rising[: n - 2 * f].mean() - width,
            "_high": rising[2 * f :].mean() + width,
        }
        return {f"{OWN_SCORE}{end}": round(float(score.clamp(0, 1)), 6) for end, score in found.items()}
