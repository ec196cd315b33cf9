"""LBGM: a gradient that points where an earlier one did travels as one number.

Client and server remember the client's last full gradient L. With G the sum of R local steps' gradients:

    error = 1 − cos²(G, L)                      (infinite where G or L is 0)
    error ≤ δ:   send ρ = ⟨G, L⟩/‖L‖², both use ρ L
    else:        send G, and L ← G

    w ← w − η R(m_1, …, m_S)

Message: a byte saying which, then one float32 or D. The authors of lp-proj divide by ‖L‖ (`preset =
"reference"`), which scales the step by ‖L‖.

Reference: Azam, Hosseinalipour, Qiu, Brinton, "Recycling model updates in federated learning: are gradient
subspaces low-rank?", ICLR 2022.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from trilemma.keys import Key
from trilemma.learning.compressed.gradient import CompressedSettings, descending_server, start
from trilemma.learning.personal.descent import Step, statistics_of, walk
from trilemma.learning.personal.presets import switches
from trilemma.learning.protocol import Algorithm, Clients, ClientStep, Messages, Start, State
from trilemma.learning.settings import Setup, algorithms
from trilemma.models.types import Model


def look_back(g: Tensor, last: Tensor, threshold: float, power: int = 2) -> tuple[Tensor, Tensor]:
    """Return what k messages stand for (k, D), and who sends a full gradient (k,).

    `power` 2 projects onto `last`; 1 divides by its norm once only.

    >>> g, last = torch.tensor([[3.0, 0.1], [0.0, 1.0]]), torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    >>> message, full = look_back(g, last, 0.2)
    >>> message.tolist(), full.tolist()
    ([[3.0, 0.0], [0.0, 1.0]], [False, True])
    >>> look_back(g, last, 0.2, power=1)[0][0].tolist()
    [6.0, 0.0]
    """
    inner = (g * last).sum(1)
    norms, lengths = torch.linalg.vector_norm(g, dim=1), torch.linalg.vector_norm(last, dim=1)
    cosine = inner / (norms * lengths)
    # Written so that 0/0, which is NaN, counts as an infinite error.
    full = ~(1.0 - cosine.square() <= threshold)
    multiplier = torch.where(full, 0.0, inner / lengths**power)
    return torch.where(full[:, None], g, multiplier[:, None] * last), full


@algorithms.register("lbgm")
class LBGM(CompressedSettings):
    """LBGM: a gradient that points where an earlier one did travels as one number."""

    local_steps: int = Field(default=5, ge=1, description="local steps per round (R)")
    threshold: float = Field(
        default=0.2, ge=0, le=1, description="largest error 1 − cos² that is tolerated (δ)"
    )

    def build(self, setup: Setup) -> Algorithm:
        """See `AlgorithmSettings.build`."""
        power = switches(self.preset).look_back_power

        def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
            return start(model, ids, key, "last")

        def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
            model = clients.model
            batches = clients.epochs(self.batch_size, self.local_steps, key.fold("batch"))
            trained = walk(model, broadcast["params"], batches, Step(self.lr), statistics_of(model, state))
            vectors, full = look_back(trained.travelled, state["last"], self.threshold, power)
            scalars = torch.where(full, model.dim, 1)
            messages = Messages(vectors, scalars, 1 + 4 * scalars)
            last = torch.where(full[:, None], trained.travelled, state["last"])
            kept = {**state, "last": last, **trained.statistics}
            return ClientStep(messages, kept, {"loss": trained.loss, "full": full})

        return Algorithm("lbgm", init, client, descending_server(setup, self.lr))
