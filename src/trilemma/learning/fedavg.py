"""FedAvg: clients take a few steps from the global model, the server combines the results.

    w_k ← w;   R times  w_k ← w_k − η clip(∇f_B(w_k), 60);   w ← (1−β) w + β R(w_1, …, w_S)

R(…) is any rule of `trilemma.aggregation`. With mean, cwmed and krum this is Global+Mean, Global+Median and
Global+Krum of lp-proj's tables. With `[privacy]` it is DP-FedAvg: each client's move w_k − w is clipped and
noised.

Running statistics of batch normalisation either stay with the client ("local"), so that each client evaluates
the global model with its own statistics, or are sent and aggregated like parameters ("averaged").

References: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep
networks from decentralized data", AISTATS 2017; with privacy: McMahan, Ramage, Talwar, Zhang, "Learning
differentially private recurrent language models", ICLR 2018.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from trilemma import models
from trilemma.base.keys import Key
from trilemma.learning.messages import MessageLayout, Messages, Part
from trilemma.learning.protocol import Algorithm, Clients, ClientStep, ServerStep, Start, State
from trilemma.learning.settings import Setup, WholeClientSettings, algorithms
from trilemma.learning.steps.gridded import moved
from trilemma.learning.steps.local_steps import LocalStep, clients_state, initial_model, statistics_of, walk
from trilemma.learning.steps.privatise import client_keys, publish
from trilemma.learning.steps.server import aggregate, blend
from trilemma.learning.steps.trace import Trace
from trilemma.models.layers.normalisation import EPSILON
from trilemma.models.types import Model


class GlobalSettings(WholeClientSettings):
    """Methods with one global model and big local batches."""

    lr: float = Field(default=0.1, gt=0, description="local learning rate (η_l)")
    local_steps: int = Field(default=5, ge=1, description="local steps per round (R)")
    batch_size: int = Field(
        default=1280, ge=1, description="mini-batch; larger than a client's data: all of it"
    )


@algorithms.register("fedavg")
class FedAvg(GlobalSettings):
    """FedAvg: local steps from a global model, combined by any rule; with [privacy]: DP-FedAvg."""

    clip_gradients: float | None = Field(
        default=60.0, gt=0, allow_inf_nan=True, description="norm bound of each step's gradient"
    )
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay of the local steps")
    beta: float = Field(default=1.0, gt=0, description="server: w ← (1−β) w + β R(messages)")
    statistics: Literal["local", "averaged"] = Field(
        default="local", description="batch-norm statistics: stay on clients, or travel and are averaged"
    )

    def build(self, setup: Setup) -> Algorithm:
        """See `AlgorithmSettings.build`."""
        step = LocalStep(self.lr, self.clip_gradients, self.weight_decay)

        def message(model: Model) -> MessageLayout:
            travel = model.buffers if self.statistics == "averaged" else ()
            parts = (Part("params", (model.dim,)), *(Part(name, shape) for name, shape in travel))
            return MessageLayout(parts, tuple(part.name for part in parts))

        def everyones(broadcast: State, clients: Clients) -> dict[str, Tensor]:
            """Return the broadcast statistics, repeated for each of k clients; empty if they stay local."""
            shared = {name: part for name, part in broadcast.items() if name != "params"}
            return {name: part.expand(len(clients.ids), *part.shape) for name, part in shared.items()}

        def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
            first = {"params": initial_model(model, 0, key)[None], **model.initial_buffers(1)}
            shared = {name: first[name][0] for name in message(model).aggregated}
            return Start(shared, clients_state(model, ids), shared)

        def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
            model = clients.model
            averaged = everyones(broadcast, clients)
            batches = clients.epochs(self.batch_size, self.local_steps, key.fold("batch"))
            trained = walk(
                model,
                broadcast["params"],
                batches,
                step,
                averaged or statistics_of(model, state),
                keys=client_keys(clients, key),
            )
            layout = message(model)
            origin = layout.join({name: part[None] for name, part in broadcast.items()})[0]
            vectors = layout.join({"params": trained.params, **trained.statistics})
            sent, private = publish(setup, clients, origin, vectors, round_)
            kept = state if averaged else {**state, **trained.statistics}
            return ClientStep(sent, kept, {"loss": trained.loss, **private})

        def server(messages: Messages, state: State, round_: int, key: Key) -> ServerStep:
            value, report = aggregate(setup, messages.vectors, key, messages.geometry)
            cut = torch.split_with_sizes(value, [part.numel() for part in state.values()])
            after = {
                name: blend(before, part.view_as(before), self.beta)
                for (name, before), part in zip(state.items(), cut, strict=True)
            }
            return ServerStep(after, after, report)

        def evaluated(broadcast: State, state: State, clients: Clients, key: Key) -> Tensor:
            params, averaged = broadcast["params"], everyones(broadcast, clients)
            return with_statistics(clients.model, params, averaged, EPSILON) if averaged else params

        declared, trace = moved(setup, message), Trace(lambda _: self.beta, around=True)
        return Algorithm("fedavg", init, client, server, declared, setup.release, evaluated, trace=trace)


def with_statistics(model: Model, params: Tensor, statistics: Mapping[str, Tensor], epsilon: float) -> Tensor:
    """Return parameters (k, D) that give with initial statistics the outputs of `params` with `statistics`.

    A normalised channel is γ (a − μ)/s + β with s² = variance + ε. With mean 0 and variance 1 the same value
    is γ' a/s_1 + β' for s_1² = 1 + ε, γ' = γ s_1/s, β' = β − γ μ/s. So a model can be scored with averaged
    statistics without writing them into the clients' state.
    """
    shared = params.expand(next(iter(statistics.values())).shape[0], -1).clone()
    tensors = models.unflatten(model, shared)
    for name, _ in model.buffers:
        layer, _, part = name.rpartition(".")
        if part != "mean":
            continue
        mean, variance = statistics[name], statistics[f"{layer}.variance"]
        gain, shift = tensors[f"{layer}.weight"], tensors[f"{layer}.bias"]
        ratio = gain * (variance + epsilon).rsqrt()
        shift -= ratio * mean
        gain.copy_(ratio * (1.0 + epsilon) ** 0.5)
    return shared
