"""Ditto: a global model as in FedAvg, and personal models that are pulled towards it.

    v_k ← w;  R times  v_k ← v_k − η_l (clip(∇f_B(v_k), 60) + wd·v_k)                    sent and combined
    K times            x_k ← x_k − η_p (clip(∇f_B(x_k), 60) + wd·x_k + λ (x_k − w))      kept

The personal steps use the received w. All clients do both; only sampled ones are heard.

Reference: Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through personalization", ICML
2021.
"""

from __future__ import annotations

import torch
from pydantic import Field

from trilemma.base.keys import Key
from trilemma.learning.messages import one_vector
from trilemma.learning.personal.bilevel import personal_model
from trilemma.learning.protocol import Algorithm, Clients, ClientStep, Start, State
from trilemma.learning.settings import Setup, WholeClientSettings, algorithms
from trilemma.learning.steps.gridded import moved
from trilemma.learning.steps.local_steps import (
    LocalStep,
    initial_model,
    initial_models,
    statistics_of,
    walk,
)
from trilemma.learning.steps.privatise import client_keys, publish
from trilemma.learning.steps.server import blending_server
from trilemma.models.types import Model


@algorithms.register("ditto")
class Ditto(WholeClientSettings):
    """Ditto: FedAvg's global model, and personal models drawn towards it."""

    lr: float = Field(default=0.1, gt=0, description="step size of the global copy (η_l)")
    personal_lr: float = Field(default=0.1, gt=0, description="step size of the personal model (η_p)")
    lam: float = Field(default=1.0, ge=0, description="pull towards the global model (λ)")
    local_steps: int = Field(default=5, ge=1, description="steps of the global copy per round (R)")
    inner_steps: int = Field(default=20, ge=1, description="steps of the personal model per round (K)")
    batch_size: int = Field(default=64, ge=1, description="mini-batch; the last of an epoch is smaller")
    weight_decay: float = Field(default=0.001, ge=0, description="weight decay of both")
    beta: float = Field(default=1.0, gt=0, description="server: w ← (1−β) w + β R(messages)")

    def build(self, setup: Setup) -> Algorithm:
        """See `AlgorithmSettings.build`."""
        common = LocalStep(self.lr, decay=self.weight_decay)
        personal = LocalStep(self.personal_lr, decay=self.weight_decay)

        def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
            shared = {"params": initial_model(model, 0, key)}
            clients = {"x": initial_models(model, ids, key), **model.initial_buffers(len(ids))}
            return Start(shared, clients, shared)

        def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
            model, w = clients.model, broadcast["params"]
            statistics = statistics_of(model, state)
            shared = walk(
                model,
                w,
                clients.epochs(self.batch_size, self.local_steps, key.fold("global")),
                common,
                statistics,
                keys=client_keys(clients, key.fold("global")),
            )
            # The global copy's running statistics are dropped: only the personal model is ever scored.
            own = walk(
                model,
                state["x"],
                clients.epochs(self.batch_size, self.inner_steps, key.fold("personal")),
                personal,
                statistics,
                force=lambda x: self.lam * (x - w),
                keys=client_keys(clients, key.fold("personal")),
            )
            messages, private = publish(setup, clients, w, shared.params, round_)
            # A global copy that diverged ends the run too, even if the personal model is still finite.
            loss = torch.where(torch.isfinite(shared.loss), own.loss, shared.loss)
            report = {"loss": loss, "global_loss": shared.loss, **private}
            return ClientStep(messages, {"x": own.params, **own.statistics}, report)

        return Algorithm(
            "ditto",
            init,
            client,
            blending_server(setup, "params", self.beta),
            moved(setup, one_vector("params")),
            setup.release,
            evaluated=personal_model,
            own_models=True,
            everyone_trains=True,
        )
