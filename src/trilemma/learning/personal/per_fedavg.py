"""Per-FedAvg: a global model one gradient step away from a good personal one (MAML).

    min_w (1/N) Σ_k f_k(w − α ∇f_k(w))

R local steps of client k, each on fresh big batches B1, B2:

    u = w_k − α ∇f_{B1}(w_k)
    v = ∇f_{B2}(u)
    first order      w_k ← w_k − β v
    Hessian product  w_k ← w_k − β (v − α H v),   H v ≈ (∇f_{B1}(w_k + s v) − ∇f_{B1}(w_k − s v))/(2s)

A client is scored by its adapted model w − α ∇f_B(w). The experiments of lp-proj are first order and adapt by
two steps, the second with rate β from where the first ended (`preset = "reference"`).

Reference: Fallah, Mokhtari, Ozdaglar, "Personalized federated learning with theoretical guarantees: a
model-agnostic meta-learning approach", NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from trilemma.base.keys import Key
from trilemma.data.types import Batch
from trilemma.learning.fedavg import GlobalSettings
from trilemma.learning.messages import one_vector
from trilemma.learning.protocol import Algorithm, Clients, ClientStep, Start, State
from trilemma.learning.settings import Setup, algorithms
from trilemma.learning.steps.gridded import moved
from trilemma.learning.steps.local_steps import (
    LocalStep,
    clients_state,
    initial_model,
    statistics_of,
    step_keys,
)
from trilemma.learning.steps.presets import Preset, switches
from trilemma.learning.steps.privatise import client_keys, publish
from trilemma.learning.steps.server import blending_server
from trilemma.models.types import Model

DIFFERENCE = 1e-2
"""Length of the step s·v in the central difference: its truncation error is O(s²), rounding about 1e-7/s."""


@algorithms.register("per-fedavg")
class PerFedAvg(GlobalSettings):
    """Per-FedAvg: a global model one gradient step away from personal ones."""

    personal_lr: float = Field(default=0.05, gt=0, description="rate of the adapting step (α)")
    order: Literal["first", "product"] = Field(
        default="first", description="first order, or with the Hessian-vector product"
    )
    beta: float = Field(default=1.0, gt=0, description="server: w ← (1−β) w + β R(messages)")
    preset: Preset = Field(default="correct", description="correct, or as the authors' code behaves")

    def build(self, setup: Setup) -> Algorithm:
        """See `AlgorithmSettings.build`."""
        outer, inner = LocalStep(self.lr, clip=None), LocalStep(self.personal_lr, clip=None)

        def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
            shared = {"params": initial_model(model, 0, key)}
            return Start(shared, clients_state(model, ids), shared)

        def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
            model, w = clients.model, broadcast["params"]
            statistics: Mapping[str, Tensor] = statistics_of(model, state)
            batches = iter(clients.epochs(self.batch_size, 2 * self.local_steps, key.fold("batch")))
            losses: list[Tensor] = []
            keys = client_keys(clients, key)
            for number in range(self.local_steps):
                support, query = next(batches), next(batches)
                # Each batch has its own dropout masks.
                first, second = step_keys(keys, 2 * number), step_keys(keys, 2 * number + 1)
                found = inner.gradient(model, w, support, statistics, first)
                u = w - inner.rate * found.value
                ahead = outer.gradient(model, u, query, found.buffers, second)
                direction, statistics = ahead.value, ahead.buffers
                if self.order == "product":
                    curved = hessian_product(model, w, direction, support, statistics, first)
                    direction = direction - inner.rate * curved
                w = w - outer.rate * direction
                losses.append(ahead.loss)
            messages, private = publish(setup, clients, broadcast["params"], w, round_)
            report = {"loss": torch.stack(losses).mean(0), **private}
            return ClientStep(messages, {**state, **statistics}, report)

        def adapted(broadcast: State, state: State, clients: Clients, key: Key) -> Tensor:
            w, statistics = broadcast["params"], statistics_of(clients.model, state)
            steps = switches(self.preset).tuning_steps
            batches = clients.epochs(self.batch_size, steps, key.fold("adapt"))
            keys = client_keys(clients, key.fold("adapt"))
            for number, (step, batch) in enumerate(zip((inner, outer)[:steps], batches, strict=True)):
                drawn = step_keys(keys, number)
                w = w - step.rate * step.gradient(clients.model, w, batch, statistics, drawn).value
            return w

        server = blending_server(setup, "params", self.beta)
        message = moved(setup, one_vector("params"))
        return Algorithm("per-fedavg", init, client, server, message, setup.release, adapted, own_models=True)


def hessian_product(
    model: Model,
    w: Tensor,
    v: Tensor,
    batch: Batch,
    statistics: Mapping[str, Tensor],
    keys: Sequence[Key] | None = None,
) -> Tensor:
    """Return ∇²f_B(w) v for k clients by a central difference of gradients, (k, D).

    Both gradients use the same `keys`, hence the same dropout masks.
    """
    length: Tensor = torch.linalg.vector_norm(v, dim=1, keepdim=True)
    size = length.clamp(min=torch.finfo(v.dtype).tiny)
    nudge, plain = DIFFERENCE * v / size, LocalStep(1.0, clip=None)
    after = plain.gradient(model, w + nudge, batch, statistics, keys).value
    before = plain.gradient(model, w - nudge, batch, statistics, keys).value
    return (after - before) * (size / (2.0 * DIFFERENCE))
