"""How good clients find the model on examples of their own, which they do not train on.

A client tells one number, its share of right answers, with noise of its own where messages have noise. In the
words of a release, an example contributes ±1/2 to a mean over the client's examples, of which it holds at
least `batch`, a public number: replacing one moves the share by at most 1/batch, replacing all of a client's
data by 1. Where an example may come or go instead, the mean is over one more or one fewer and moves by at
most 1/batch too, which is what clip = 1 says. Nothing is shared and nothing cancels: such a release is paid
for as under ldp, whatever the threat model, and beside the messages, though no example is in both.

Up to f of those who tell are liars. What they say is brought into the range that honest noise reaches, and
the score is the mean of what is left when the f largest and the f smallest are put aside. Beside it stand two
numbers: whatever any f of them had said instead, the score would lie between them, and so does the true mean
share of those who are honest, whatever the noise, in 19 evaluations of 20 and more.

The n − 2f smallest have a mean no larger than that of any n − f, the honest ones among them, and the largest
one no smaller. The mean noise of the n − f is sub-Gaussian with σ/√(n − f): it exceeds √(2 ln 40) of these
with a probability of 1/40 on either side. Bringing shares into the range moves their mean by at most E(|z| −
4σ)₊ < 10⁻⁵ σ, rounding by two steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trilemma import models
from trilemma.data.types import Batch
from trilemma.errors import UserError
from trilemma.models.types import Model
from trilemma.privacy.grid import Grid
from trilemma.privacy.grid_price import drawing
from trilemma.privacy.mechanism import History, mechanism
from trilemma.privacy.threats import Threat
from trilemma.privacy.types import Adjacency, Arithmetic, NoiseLaw, NoiseSource, Release, Unit
from trilemma.records import OWN_SCORE

REACH = 4.0
"""Standard deviations of noise beyond 0 and 1 within which a share is believed."""

BEYOND = 1e-5
"""Standard deviations by which bringing shares into that range moves their mean, at most."""

DOUBT = 0.05
"""How often, at most, noise hides where the true mean lies."""


def release_of(unit: Unit, adjacency: Adjacency, held: int, law: NoiseLaw | None = None) -> Release:
    """Return what telling a share releases, where every client holds at least `held` examples for it.

    >>> release_of("user", "replace", 20).sensitivity, release_of("example", "replace", 20).sensitivity
    (1.0, 0.05)
    """
    clip = 1.0 if adjacency == "add-remove" else 0.5
    return Release(clip, law or NoiseLaw(), unit, held if unit == "example" else 1, adjacency=adjacency)


def right_shares(model: Model, params: Tensor, held: Batch) -> Tensor:
    """Return each client's share of right answers (k,), float64, on examples that lie one client a row."""
    score = models.evaluate(model, params, held.x, held.y, held.weight)
    if not bool(torch.isfinite(score.accuracy).all()):
        raise UserError("clients evaluate by counting right answers, and these targets are no classes")
    return score.correct.double() / score.examples


@dataclass(frozen=True)
class OwnScores:
    """After which rounds clients evaluate, what that releases, and what the server makes of it.

    `tolerated` is f. `release` is None where nothing is hidden; it and what clients add up are on a `grid`
    where messages are.

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
        """Return evaluations with this release, on a grid or not; there it says how its noise is drawn."""
        if arithmetic != "grid":
            return cls(turns, tolerated, release)
        grid = Grid.of(release, 1, clients)
        drawn = drawing(release.law, grid, clients, "ldp")
        return cls(turns, tolerated, replace(release, drawing=drawn), grid)

    @property
    def threat(self) -> Threat:
        """Against whom a release holds: everybody else, all of whose secrets are known."""
        return Threat("ldp", 1)

    def history(self, rounds: int, repeated: float = 0.0) -> History:
        """Return what was released after so many rounds, a share of it `repeated`, for who reckons ahead."""
        times = sum(turn <= rounds for turn in self.turns)
        if self.release is None or not times:
            return ()
        return ((mechanism(self.release, self.threat), math.ceil((1 + repeated) * times)),)

    def told(self, shares: Tensor, noise: NoiseSource, ids: tuple[int, ...], round_: int) -> Tensor:
        """Return what clients `ids` tell in a round whose shares of right answers are (k,), float64."""
        shares = shares.double().cpu()
        if self.release is None:
            return shares
        here, law, centred = shares.device, self.release.law, shares[:, None] - 0.5
        if self.grid is None:
            return (centred + noise.draw(law, ids, 1, round_, here).double())[:, 0] + 0.5
        grid = self.grid
        room = grid.clip / grid.bound  # so that rounding stays within the declared move
        whole = grid.message(
            grid.contribution(centred * room), noise.steps(law, grid.step, ids, 1, round_, here)
        )
        return whole[:, 0].double() * (grid.step / room) + 0.5

    @property
    def reach(self) -> float:
        """How far beyond 0 and 1 a share is believed."""
        return 0.0 if self.release is None else REACH * self.release.law.sigma_ind

    def width(self, honest: int) -> float:
        """Return how far noise moves the mean of so many honest shares, but for a probability of `DOUBT`."""
        if self.release is None:
            return 0.0
        larger = 1.0 if self.grid is None else self.grid.bound / self.grid.clip
        rounding = 0.0 if self.grid is None else 2 * self.grid.step * larger
        likely = math.sqrt(2 * math.log(2 / DOUBT) / honest)
        return self.release.law.sigma_ind * larger * (likely + BEYOND) + rounding

    def combined(self, told: Iterable[float]) -> dict[str, float]:
        """Return the score, and what it and the honest mean lie between, liars and noise; {} from too few."""
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
