"""Safeguard: a client whose summed messages drift away from the majority's is left out for good.

    B_i ← B_i + x_i / |good|                     over all rounds, or since the last window began
    r_i   the radius around B_i that holds more than half of the good clients;   j = argmin r_i, the centre
    good ← { i good : ‖B_i − B_j‖ ≤ factor · r_j }

The sum of a constant shift grows with the number of rounds, the spread of honest sums with its root. The
paper's analysis fixes a threshold 𝔗 in advance, takes as j any client with more than half within 𝔗, and keeps
those within 2𝔗. Here, as in its experiments, the threshold comes from the distances. With privacy noise all
distances are nearly √(2d) times the noise's size, and only shifts as long as that are seen. A client that is
left out still shares secrets with the others, so its noise stays uncancelled.

Reference: Allen-Zhu, Ebrahimian, Li, Alistarh, "Byzantine-resilient non-convex stochastic gradient descent",
ICLR 2021, with one safeguard and without the noise that it adds against saddle points.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from trilemma import aggregation
from trilemma.aggregation import mixings
from trilemma.aggregation.passes.gram import halfway
from trilemma.base.keys import Key
from trilemma.learning.defences.filter import FilteredRound, FilterStage, Seen
from trilemma.learning.protocol import Algorithm
from trilemma.learning.settings import Setup
from trilemma.models.types import Model


@mixings.register("safeguard")
class SafeguardStage(FilterStage):
    """Leave out for good the clients whose summed messages lie far from those of the majority.

    >>> from trilemma import aggregation as agg
    >>> agg.parse("safeguard(window=50)+mean", f=1).name
    'safeguard(window=50)+mean'
    """

    window: int = Field(default=0, ge=0, description="rounds after which sums begin anew; 0: never")
    factor: float = Field(
        default=1.5, ge=1, description="how far a sum may lie from the central one, in its distances to most"
    )

    def filter(self, algorithm: Algorithm, setup: Setup) -> Safeguard:
        """See `FilterStage.filter`."""
        return Safeguard(self, setup)


class Safeguard:
    """Leave out for good whose sums lie far from the majority's."""

    def __init__(self, stage: SafeguardStage, setup: Setup) -> None:
        self.stage, self.setup = stage, setup

    def begin(self, model: Model, key: Key) -> Mapping[str, Tensor]:
        """Return zero sums, and all clients as good."""
        clients = self.setup.clients
        return {"sums": torch.zeros(clients, model.dim), "good": torch.ones(clients, dtype=torch.bool)}

    def look(self, heard: FilteredRound, memory: Mapping[str, Tensor]) -> Seen:
        """Add the messages to their senders' sums, and drop clients whose sums are far from the centre."""
        sums, good, window = memory["sums"].to(heard.x), memory["good"].cpu().clone(), self.stage.window
        if window and heard.round % window == 0:
            sums = torch.zeros_like(sums)
        rows = torch.tensor(heard.senders, dtype=torch.int64, device=sums.device)
        sums = sums.index_add(0, rows, heard.x, alpha=1 / int(good.sum()))
        places = good.nonzero().flatten()
        apart = aggregation.geometry(sums[places.to(sums.device)]).distances
        near = halfway(apart)
        centre = int(np.argmin(near))
        good[places] = torch.from_numpy(apart[centre] <= self.stage.factor**2 * near[centre])
        return Seen(good[list(heard.senders)].double(), {"sums": sums, "good": good})
