"""FedAvg: clients take a few steps from the global model, the server combines the results.

    w_k ← w;   R times  w_k ← w_k − η clip(∇f_B(w_k), 60);   w ← (1−β) w + β R(w_1, …, w_S)

With the mean as the rule this is Global+Mean of lp-proj's tables, with cwmed or krum Global+Median and
Global+Krum; any rule of `trilemma.aggregation` will do, and with `[privacy]` it is DP-FedAvg: each client's
move w_k − w is clipped and noised.

Running statistics of batch normalisation stay with the client ("local"), which makes the global model a
personal one on networks that have them, or travel and are combined like parameters ("averaged").

References: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep
networks from decentralized data", AISTATS 2017; with privacy: McMahan, Ramage, Talwar, Zhang, "Learning
differentially private recurrent language models", ICLR 2018.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from trilemma.keys import Key
from trilemma.learning.personal.descent import (
    Step,
    clients_state,
    initial_model,
    pack_statistics,
    statistics_of,
    unpack_statistics,
    walk,
    with_statistics,
)
from trilemma.learning.personal.exchange import ExchangeSettings, aggregate, publish
from trilemma.learning.protocol import Algorithm, Clients, ClientStep, Messages, ServerStep, Start, State
from trilemma.learning.settings import Setup, algorithms
from trilemma.models.normalisation import EPSILON
from trilemma.models.types import Model


class GlobalSettings(ExchangeSettings):
    """Methods with one global model and big local batches."""

    lr: float = Field(default=0.1, gt=0, description="local learning rate (η_l)")
    local_steps: int = Field(default=5, ge=1, description="local steps per round (R)")
    batch_size: int = Field(
        default=1280, ge=1, description="mini-batch; larger than a client's data: all of it"
    )


@algorithms.register("fedavg")
class FedAvg(GlobalSettings):
    """FedAvg: local steps from a global model, combined by any rule; with [privacy]: DP-FedAvg."""

    clip_gradients: float | None = Field(default=60.0, gt=0, description="norm bound of each step's gradient")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay of the local steps")
    beta: float = Field(default=1.0, gt=0, description="server: w ← (1−β) w + β R(messages)")
    statistics: Literal["local", "averaged"] = Field(
        default="local", description="batch-norm statistics: stay on clients, or travel and are averaged"
    )

    def build(self, setup: Setup) -> Algorithm:
        """See `AlgorithmSettings.build`."""
        step = Step(self.lr, self.clip_gradients, self.weight_decay)

        def averages(model: Model) -> bool:
            return self.statistics == "averaged" and bool(model.buffers)

        def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
            shared = {"params": initial_model(model, 0, key)}
            if averages(model):
                shared["statistics"] = pack_statistics(model, model.initial_buffers(1))[0]
            return Start(shared, clients_state(model, ids), shared)

        def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
            model, origin = clients.model, broadcast["params"]
            statistics = statistics_of(model, state)
            if averages(model):
                everyones = broadcast["statistics"].expand(len(clients.ids), -1)
                statistics = unpack_statistics(model, everyones)
            batches = clients.epochs(self.batch_size, self.local_steps, key.fold("batch"))
            trained = walk(model, origin, batches, step, statistics)
            vectors, kept = trained.params, {**state, **trained.statistics}
            if averages(model):
                vectors = torch.cat([vectors, pack_statistics(model, trained.statistics)], dim=1)
                origin, kept = torch.cat([origin, broadcast["statistics"]]), dict(state)
            messages, private = publish(setup.release, clients, origin, vectors, round_)
            return ClientStep(Messages(messages), kept, {"loss": trained.loss, **private})

        def server(messages: Messages, state: State, round_: int, key: Key) -> ServerStep:
            before = torch.cat(list(state.values()))
            value, report = aggregate(setup, messages.vectors, key)
            moved = value if self.beta == 1.0 else torch.lerp(before, value, self.beta)
            parts = torch.split_with_sizes(moved, [len(part) for part in state.values()])
            after = dict(zip(state, parts, strict=True))
            return ServerStep(after, after, report)

        def evaluated(broadcast: State, state: State, clients: Clients, key: Key) -> Tensor:
            params = broadcast["params"]
            if "statistics" not in broadcast:
                return params
            everyones = unpack_statistics(clients.model, broadcast["statistics"].expand(len(clients.ids), -1))
            return with_statistics(clients.model, params, everyones, EPSILON)

        return Algorithm("fedavg", init, client, server, setup.release, evaluated)
