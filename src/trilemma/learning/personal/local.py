"""Local: every client trains alone.

    steps times a round   x_k ← x_k − η ∇f_B(x_k)

Nothing is sent. In lp-proj's tables it takes one mini-batch step per round, while lp-proj takes R·K (up to
100). With `steps` = R·K both have the same budget; a fair comparison shows both settings.
"""

from __future__ import annotations

import torch
from pydantic import Field

from trilemma.base.keys import Key
from trilemma.learning.messages import Messages, one_vector
from trilemma.learning.personal.bilevel import personal_model
from trilemma.learning.protocol import Algorithm, Clients, ClientStep, ServerStep, Start, State
from trilemma.learning.settings import AlgorithmSettings, Setup, algorithms
from trilemma.learning.steps.local_steps import LocalStep, initial_models, statistics_of, walk
from trilemma.learning.steps.privatise import client_keys
from trilemma.models.types import Model


@algorithms.register("local")
class Local(AlgorithmSettings):
    """Local: every client trains alone, nothing is sent."""

    lr: float = Field(default=0.1, gt=0, description="learning rate (η_l)")
    steps: int = Field(default=1, ge=1, description="mini-batch steps per round; R·K: lp-proj's budget")
    batch_size: int = Field(default=64, ge=1, description="mini-batch; the last of an epoch is smaller")
    clip_gradients: float | None = Field(
        default=None, gt=0, allow_inf_nan=True, description="norm bound of each step's gradient"
    )
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay")

    def without_release(self, name: str) -> str:
        """See `AlgorithmSettings.without_release`."""
        return f"{name} sends nothing, so nothing needs protecting"

    def build(self, setup: Setup) -> Algorithm:
        """See `AlgorithmSettings.build`."""
        step = LocalStep(self.lr, self.clip_gradients, self.weight_decay)

        def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
            clients = {"x": initial_models(model, ids, key), **model.initial_buffers(len(ids))}
            return Start({}, clients, {})

        def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
            batches = clients.epochs(self.batch_size, self.steps, key.fold("batch"))
            trained = walk(
                clients.model,
                state["x"],
                batches,
                step,
                statistics_of(clients.model, state),
                keys=client_keys(clients, key),
            )
            nothing = torch.zeros(len(clients.ids), 0, device=trained.params.device)
            return ClientStep(
                Messages(nothing), {"x": trained.params, **trained.statistics}, {"loss": trained.loss}
            )

        def server(messages: Messages, state: State, round_: int, key: Key) -> ServerStep:
            # Nothing is aggregated, so every weight is 0.
            return ServerStep({}, {}, {"weights": messages.vectors.new_zeros(len(messages.vectors))})

        nothing_sent = one_vector("nothing", lambda _: 0)
        return Algorithm(
            *("local", init, client, server, nothing_sent),
            evaluated=personal_model,
            own_models=True,
            everyone_trains=True,
        )
