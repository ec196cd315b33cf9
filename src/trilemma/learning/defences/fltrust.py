"""FLTrust: the weight of a message is its cosine with the server's own message.

The server holds a few public examples, its root set. Its own message g_0 is what a client with these examples
would send, without noise.

    TS_i = max(0, cos(x_i, g_0))
    g = Σ_i TS_i (‖g_0‖/‖x_i‖) x_i / Σ_i TS_i

All messages are scaled to the length of g_0, and those that point away from it are left out. A message that
is mostly noise has a cosine of about ‖contribution‖/(noise √d) with g_0, so that trust is mostly random.

Reference: Cao, Fang, Liu, Gong, "FLTrust: Byzantine-robust federated learning via trust bootstrapping", NDSS
2021.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trilemma.aggregation import mixings
from trilemma.base.keys import Key
from trilemma.learning.defences.filter import FilteredRound, FilterStage, Seen
from trilemma.learning.defences.root_client import RootClient
from trilemma.learning.protocol import Algorithm
from trilemma.learning.settings import Setup
from trilemma.models.types import Model


@mixings.register("fltrust")
class FLTrustStage(FilterStage):
    """Scale messages to the length of the server's own, and weigh them by their cosine with it.

    The server makes its message on public examples: `[aggregation] root = 100`.

    >>> from trilemma import aggregation as agg
    >>> agg.parse("fltrust+mean", f=1).name
    'fltrust+mean'
    """

    def filter(self, algorithm: Algorithm, setup: Setup) -> FLTrust:
        """See `FilterStage.filter`."""
        return FLTrust(algorithm, setup)


class FLTrust:
    """Weigh messages by their cosine with the server's own, all equally long."""

    def __init__(self, algorithm: Algorithm, setup: Setup) -> None:
        self.root = RootClient("fltrust", algorithm, setup)

    def begin(self, model: Model, key: Key) -> Mapping[str, Tensor]:
        """Return a client's state before the first round."""
        return self.root.begin(model, key)

    def look(self, heard: FilteredRound, memory: Mapping[str, Tensor]) -> Seen:
        """Compute the server's own message and compare the others with it."""
        own, kept = self.root.message(heard, memory)
        return Seen(trusted(heard.x, own), kept)


def trusted(x: Tensor, own: Tensor) -> Tensor:
    """Return factors (k,) such that the mean of all c_i x_i with c_i > 0 is FLTrust's aggregate of x (k, d).

    >>> trusted(torch.tensor([[2.0, 0.0], [0.0, -1.0], [0.0, 4.0]]), torch.tensor([1.0, 1.0]))
    tensor([0.7071, 0.0000, 0.3536], dtype=torch.float64)
    """
    lengths = torch.linalg.vector_norm(x.double(), dim=1)
    length = torch.linalg.vector_norm(own.double())
    trust = ((x.double() @ own.double()) / (lengths * length).clamp(min=1e-300)).clamp(min=0.0)
    share = trust * (trust > 0).sum() / trust.sum().clamp(min=1e-300)
    factors: Tensor = share * length / lengths.clamp(min=1e-300)
    return factors.cpu()
