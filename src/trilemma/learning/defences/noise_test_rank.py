"""The noise test with both stages: clients that pass are ranked by the server's own message, over all rounds.

The server holds a few public examples, its root set. Its own message g_0 is what a client with these examples
would send, without noise. n − f of n clients are assumed honest, hence k = ⌊m (n − f)/n⌋ of m that are heard.

    v ← μ v + (1 − μ) g_0                                  the server's own direction
    c_i = cos(x_i, v),  0 for those who fail the noise test
    s_i ← s_i + c_i  where c_i is at least the mean of the k largest of the round;  others get nothing
    the mean of those x_i that pass, of the k clients with the largest s_i

This follows the authors' published program, not the paper's text: cosines (messages that pass the test have
nearly equal lengths) and μ = 0.99. In the paper's first stage a message that fails counts as zero; here it is
left out of the mean, as in `noise_test`. Clients with equal points are ranked by the round's cosine: after
one round all but about half of the k have no points, and ranking them by number would favour honest clients,
who come first in a simulation.

It needs the same root set as FLTrust, and no more trust. Liars who know v face a test along one direction
only: if they lean towards v as far as honest messages do, which is hardly more than noise, they rank among
them and can push elsewhere. Exactly n − f clients stay although f lie, so liars who rank well displace honest
clients, whose noise then stays uncancelled.

Reference: Xiang, Wang, Lin, Wang, "Practical differentially private and Byzantine-resilient federated
learning", SIGMOD 2023, both stages.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from trilemma.aggregation import mixings
from trilemma.base.keys import Key
from trilemma.learning.defences.filter import FilteredRound, MessageFilter, Seen
from trilemma.learning.defences.noise_test import NoiseTest, NoiseTestStage
from trilemma.learning.defences.root_client import RootClient
from trilemma.learning.protocol import Algorithm
from trilemma.learning.settings import Setup
from trilemma.models.types import Model

ROOT = "root."
"""Prefix of the names under which the server's state as a client is kept."""


@mixings.register("noise-test-rank")
class NoiseTestRankStage(NoiseTestStage):
    """The noise test, then the n − f clients that over rounds agree most with the server's own message.

    Needs public examples at the server, as `fltrust` does: `[aggregation] root = 100`.

    >>> from trilemma import aggregation as agg
    >>> agg.parse("noise-test-rank(momentum=0.9)+mean", f=1).name
    'noise-test-rank(momentum=0.9)+mean'
    """

    momentum: float = Field(
        default=0.99,
        ge=0,
        lt=1,
        description="how much of the server's own direction stays from round to round",
    )

    def filter(self, algorithm: Algorithm, setup: Setup) -> MessageFilter:
        """See `FilterStage.filter`."""
        return NoiseTestRank(self, algorithm, setup)


class NoiseTestRank:
    """Leave out who fails the noise test, then who points least to where the server's own messages do."""

    def __init__(self, stage: NoiseTestRankStage, algorithm: Algorithm, setup: Setup) -> None:
        self.stage, self.setup = stage, setup
        self.test = NoiseTest(stage, algorithm, setup)
        self.root = RootClient("noise-test-rank", algorithm, setup)

    def begin(self, model: Model, key: Key) -> Mapping[str, Tensor]:
        """Return zero noise, points and direction, and a client's state before the first round."""
        return {
            **self.test.begin(model, key),
            "points": torch.zeros(self.setup.clients, dtype=torch.float64),
            "direction": torch.zeros(model.dim),
            **_named(self.root.begin(model, key)),
        }

    def look(self, heard: FilteredRound, memory: Mapping[str, Tensor]) -> Seen:
        """Test every message, then rank the senders."""
        tested = self.test.look(heard, memory)
        before = {name[len(ROOT) :]: part for name, part in memory.items() if name.startswith(ROOT)}
        own, kept = self.root.message(heard, before)
        stays = self.stage.momentum
        direction = stays * memory["direction"].to(own) + (1 - stays) * own
        cosines = _cosines(heard.x, direction).cpu() * tested.factors
        rows, setup = list(heard.senders), self.setup
        points = memory["points"].cpu().clone()
        honest = max(1, len(rows) * (setup.clients - setup.byzantine) // setup.clients)
        points[rows] += earned(cosines, honest)
        ranked = first(points[rows], cosines, honest)
        after = {**tested.memory, "points": points, "direction": direction, **_named(kept)}
        return Seen(tested.factors * ranked, after)


def earned(cosines: Tensor, honest: int) -> Tensor:
    """Return the points of a round (m,): cosines that reach the mean of the `honest` largest; 0 for others.

    >>> earned(torch.tensor([0.5, -0.2, 0.3, 0.1]), 3)
    tensor([0.5000, 0.0000, 0.3000, 0.0000])
    """
    enough = cosines.topk(honest).values.mean()
    return torch.where(cosines >= enough, cosines, torch.zeros_like(cosines))


def first(points: Tensor, cosines: Tensor, honest: int) -> Tensor:
    """Return 1 for the `honest` clients with most points, ties broken by the cosine, and 0 for others (m,).

    >>> first(torch.tensor([0.5, 0.0, 0.3, 0.0]), torch.tensor([0.5, 0.1, 0.3, 0.2]), 3)
    tensor([1., 0., 1., 1.], dtype=torch.float64)
    """
    order = cosines.argsort(descending=True, stable=True)
    order = order[points[order].argsort(descending=True, stable=True)]
    return torch.zeros(len(points), dtype=torch.float64).index_fill(0, order[:honest], 1.0)


def _cosines(x: Tensor, direction: Tensor) -> Tensor:
    """Return the cosines (m,) of messages (m, d) with a direction (d,), in float64."""
    x, direction = x.double(), direction.double()
    lengths = torch.linalg.vector_norm(x, dim=1) * torch.linalg.vector_norm(direction)
    cosines: Tensor = (x @ direction) / lengths.clamp(min=1e-300)
    return cosines


def _named(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {ROOT + name: part for name, part in kept.items()}
