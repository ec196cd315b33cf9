"""FLTrust: messages are trusted as far as they point where the server's own message does.

The server holds a few public examples, its root set, and does with them what a client does, without noise:
that is g_0.

    TS_i = max(0, cos(x_i, g_0))
    g = Σ_i TS_i (‖g_0‖/‖x_i‖) x_i / Σ_i TS_i

No message counts for more than its direction, and none against the root set's. A message that is mostly noise
has a cosine of about ‖contribution‖/(noise √d) with anything, so that trust is mostly drawn by lot.

Reference: Cao, Fang, Liu, Gong, "FLTrust: Byzantine-robust federated learning via trust bootstrapping", NDSS
2021.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trilemma.keys import Key
from trilemma.learning.protocol import Algorithm
from trilemma.learning.screens.root_client import RootClient
from trilemma.learning.screens.screen import Heard, Seen, screens
from trilemma.learning.settings import Setup
from trilemma.models.types import Model


@screens.register("fltrust")
class FLTrust:
    """Weigh messages by their cosine with the server's own, all equally long."""

    def __init__(self, stage: object, algorithm: Algorithm, setup: Setup) -> None:
        self.root = RootClient("fltrust", algorithm, setup)

    def begin(self, model: Model, key: Key) -> Mapping[str, Tensor]:
        """What a client keeps before the first round."""
        return self.root.begin(model, key)

    def look(self, heard: Heard, memory: Mapping[str, Tensor]) -> Seen:
        """Do a client's work on the root set and compare."""
        own, kept = self.root.message(heard, memory)
        return Seen(trusted(heard.x, own), kept)


def trusted(x: Tensor, own: Tensor) -> Tensor:
    """Return the factors (k,) that make the mean of those above 0 FLTrust's aggregate of x (k, d).

    >>> trusted(torch.tensor([[2.0, 0.0], [0.0, -1.0], [0.0, 4.0]]), torch.tensor([1.0, 1.0]))
    tensor([0.7071, 0.0000, 0.3536], dtype=torch.float64)
    """
    lengths = torch.linalg.vector_norm(x.double(), dim=1)
    length = torch.linalg.vector_norm(own.double())
    trust = ((x.double() @ own.double()) / (lengths * length).clamp(min=1e-300)).clamp(min=0.0)
    share = trust * (trust > 0).sum() / trust.sum().clamp(min=1e-300)
    factors: Tensor = share * length / lengths.clamp(min=1e-300)
    return factors.cpu()
