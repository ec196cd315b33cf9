"""The noise test: each message is tested on its own against the law of the noise it must contain.

A message is a contribution of length at most b plus noise of known variance v per coordinate. With β = b/√v,
it is left out if its length or the distribution of its d numbers is not that of the noise:

    ‖x_i‖/√v  outside  √(d ± deviations · √(2d)) ± β               (a χ² of d degrees)
    sup_u | F_i(u) − Φ(u/√v) | > K⁻¹(level)/√d + φ(0) β/√d         (Kolmogorov and Smirnov)

F_i is the empirical distribution function of the numbers of x_i, K⁻¹ the upper quantile of Kolmogorov's law.
With momentum, v and b accumulate: v ← keeps² v + adds² (σ_ind² + k σ_cor²), b ← keeps · b + adds · C, where
each client shares secrets with k others. The paper assumes contributions that are negligible beside the
noise, β = 0; if they are not, that would leave out everybody. A shift by a vector a moves a distribution
function by at most φ(0) mean|a_i| ≤ φ(0) ‖a‖/√d, which is the last term.

Clients and rounds are tested one by one. So a liar that has its noise and adds a shift too short for the
tests passes, and the shifts of many liars add up. The paper's second stage is `noise_test_rank`.

Reference: Xiang, Wang, Lin, Wang, "Practical differentially private and Byzantine-resilient federated
learning", SIGMOD 2023, first stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import scipy
import torch
from pydantic import Field
from torch import Tensor

from trilemma.aggregation import mixings
from trilemma.base.keys import Key
from trilemma.learning.defences.filter import FilteredRound, FilterStage, MessageFilter, Seen
from trilemma.learning.protocol import Algorithm
from trilemma.learning.settings import Setup
from trilemma.models.types import Model
from trilemma.privacy.threats.covariance import agreed_graph

PEAK = 1 / math.sqrt(2 * math.pi)
"""φ(0), the largest density of a standard Gaussian."""


@mixings.register("noise-test")
class NoiseTestStage(FilterStage):
    """Leave out messages whose length, or distribution of coordinates, does not fit the agreed noise.

    Needs an algorithm that adds noise. Every client and every round is tested by itself.

    >>> from trilemma import aggregation as agg
    >>> agg.parse("noise-test(level=0.01)+mean", f=1).name
    'noise-test(level=0.01)+mean'
    """

    deviations: float = Field(
        default=3.0, gt=0, description="standard deviations that a squared length may be off"
    )
    level: float = Field(
        default=0.05, gt=0, lt=1, description="level of the test of Kolmogorov and Smirnov on the numbers"
    )

    def filter(self, algorithm: Algorithm, setup: Setup) -> MessageFilter:
        """See `FilterStage.filter`."""
        return NoiseTest(self, algorithm, setup)


class NoiseTest:
    """Leave out messages whose length or whose numbers' distribution is not that of the noise."""

    def __init__(self, stage: NoiseTestStage, algorithm: Algorithm, setup: Setup) -> None:
        self.stage, self.setup = stage, setup
        assert algorithm.trace is not None
        self.trace = algorithm.trace

    def begin(self, model: Model, key: Key) -> Mapping[str, Tensor]:
        """Return variance and bound 0 for every client: nothing was sent yet."""
        nothing = torch.zeros(self.setup.clients, dtype=torch.float64)
        return {"variance": nothing, "bound": nothing}

    def look(self, heard: FilteredRound, memory: Mapping[str, Tensor]) -> Seen:
        """Test every message against the noise that it must contain."""
        release, trace = self.setup.release, self.trace
        if release is None or release.law.silent:
            return Seen(torch.ones(len(heard.x), dtype=torch.float64), memory)
        law, rows = release.law, list(heard.senders)
        fresh = law.sigma_ind**2 + self._partners * law.sigma_cor**2
        model = heard.broadcast[trace.model]
        clip = release.clip + trace.decay * float(torch.linalg.vector_norm(model))
        keeps, adds = trace.keeps(heard.round), trace.adds(heard.round)
        variance, bound = (memory[name].clone().cpu() for name in ("variance", "bound"))
        variance[rows] = keeps**2 * variance[rows] + adds**2 * fresh
        bound[rows] = keeps * bound[rows] + adds * clip
        deviation = variance[rows].sqrt()
        unit = heard.x / deviation.to(heard.x)[:, None]
        usual = self._usual(unit, (bound[rows] / deviation).to(unit.device))
        return Seen(usual.double().cpu(), {"variance": variance, "bound": bound})

    @cached_property
    def _partners(self) -> int:
        """With how many others each client shares secrets."""
        return int(agreed_graph(self.setup.clients, self.setup.neighbours).degrees[0])

    def _usual(self, unit: Tensor, slack: Tensor) -> Tensor:
        """Tell which rows (k, d) may be standard Gaussian noise plus a vector no longer than `slack` (k,)."""
        dim = unit.shape[1]
        length = torch.linalg.vector_norm(unit, dim=1, dtype=torch.float64)
        off = self.stage.deviations * math.sqrt(2 * dim)
        high, low = math.sqrt(dim + off), math.sqrt(max(0.0, dim - off))
        far = (float(scipy.special.kolmogi(self.stage.level)) + PEAK * slack) / math.sqrt(dim)
        usual: Tensor = (length <= high + slack) & (length >= low - slack) & (distances(unit) <= far)
        return usual


def distances(unit: Tensor) -> Tensor:
    """Return Kolmogorov's distance of every row's numbers (k, d) from the standard Gaussian law (k,).

    >>> distances(torch.tensor([[0.0], [10.0]])).tolist()
    [0.5, 1.0]
    """
    dim = unit.shape[1]
    below = torch.special.ndtr(unit.sort(dim=1).values)
    rank = torch.arange(dim + 1, device=unit.device, dtype=unit.dtype) / dim
    return torch.maximum((rank[1:] - below).amax(1), (below - rank[:-1]).amax(1))
