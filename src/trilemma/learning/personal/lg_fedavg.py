"""LG-FedAvg: local representations below, a global head above.

The last layers of the network are shared, the others are each client's own: x_k = (body_k, head).

    R times  x_k ← x_k − η clip(∇f_B(x_k), 60)   on the whole network;   head ← R(head_1, …, head_S)

Everyone receives the head; only sampled clients train and send theirs.

Reference: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think locally, act globally:
federated learning with local and global representations", 2020 (arXiv:2001.01523).
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from trilemma.base.keys import Key
from trilemma.learning.fedavg import GlobalSettings
from trilemma.learning.messages import one_vector
from trilemma.learning.protocol import Algorithm, Clients, ClientStep, Start, State
from trilemma.learning.settings import Setup, algorithms
from trilemma.learning.steps.gridded import moved
from trilemma.learning.steps.local_steps import (
    LocalStep,
    clients_state,
    initial_model,
    initial_models,
    statistics_of,
    walk,
)
from trilemma.learning.steps.privatise import client_keys, publish
from trilemma.learning.steps.server import blending_server
from trilemma.models.types import Model


@algorithms.register("lg-fedavg")
class LGFedAvg(GlobalSettings):
    """LG-FedAvg: own layers below, a common head above."""

    head_layers: int = Field(default=1, ge=0, description="layers in the common head; 0: all of them")
    beta: float = Field(default=1.0, gt=0, description="server: head ← (1−β) head + β R(messages)")

    def build(self, setup: Setup) -> Algorithm:
        """See `AlgorithmSettings.build`."""
        step = LocalStep(self.lr)

        def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
            head = {"head": initial_model(model, 0, key)[model.last(self.head_layers).slice]}
            clients = {"x": initial_models(model, ids, key), **clients_state(model, ids)}
            return Start(head, clients, head)

        def joined(broadcast: State, state: State, clients: Clients, key: Key) -> Tensor:
            body = state["x"][:, : clients.model.last(self.head_layers).start]
            return torch.cat([body, broadcast["head"].expand(len(body), -1)], dim=1)

        def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
            model = clients.model
            batches = clients.epochs(self.batch_size, self.local_steps, key.fold("batch"))
            start = joined(broadcast, state, clients, key)
            trained = walk(
                model, start, batches, step, statistics_of(model, state), keys=client_keys(clients, key)
            )
            heads = trained.params[:, model.last(self.head_layers).slice]
            messages, private = publish(setup, clients, broadcast["head"], heads, round_)
            kept = {**state, "x": trained.params, **trained.statistics}
            return ClientStep(messages, kept, {"loss": trained.loss, **private})

        server = blending_server(setup, "head", self.beta)
        message = moved(setup, one_vector("head", lambda model: model.last(self.head_layers).size))
        return Algorithm(
            *("lg-fedavg", init, client, server, message, setup.release, joined),
            own_models=True,
            everyone_listens=True,
        )
