"""What compressed-gradient methods share: a gradient at the global model, and a descent step.

client   g_k = clip(∇f_B(w), 60) on one big batch  →  compress  →  send
server   w ← w − η R(m_1, …, m_S)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from trilemma.base.keys import Key
from trilemma.learning.protocol import Clients, ServerFunction, Start, State
from trilemma.learning.settings import AlgorithmSettings, Setup
from trilemma.learning.steps.local_steps import (
    GRADIENT_CLIP,
    LocalStep,
    clients_state,
    initial_model,
    statistics_of,
)
from trilemma.learning.steps.presets import Preset
from trilemma.learning.steps.privatise import client_keys
from trilemma.learning.steps.server import aggregate, descent_server
from trilemma.models.engines.clipping import clip_rows
from trilemma.models.types import Model


class CompressedSettings(AlgorithmSettings):
    """Methods that compress gradients of one global model."""

    lr: float = Field(default=0.1, gt=0, description="learning rate (η_l)")
    batch_size: int = Field(
        default=1280, ge=1, description="mini-batch; larger than a client's data: all of it"
    )
    preset: Preset = Field(default="correct", description="correct, or as the authors' code behaves")

    def without_release(self, name: str) -> str:
        """Say that messages carry over what earlier rounds held back: one round's sensitivity is no bound."""
        return f"{name} has no privacy mechanism: its messages carry over what earlier rounds left out"

    def server(self, setup: Setup) -> ServerFunction:
        """Return the server w ← w − η R(messages)."""
        return descent_server(setup, lambda _: self.lr, aggregate)


@dataclass(frozen=True)
class Computed:
    """Gradients (k, D) of one round, the loss (k,), and the clients' state afterwards."""

    gradient: Tensor
    loss: Tensor
    state: dict[str, Tensor]


def compute(
    settings: CompressedSettings, broadcast: State, state: State, clients: Clients, key: Key, carries: bool
) -> Computed:
    """Return each client's clipped gradient at the broadcast model.

    With `carries`, the gradient is added to those of the client's earlier rounds before it is clipped, as in
    code that never clears a gradient buffer. The state then has an entry "carried".
    """
    model = clients.model
    batch = next(iter(clients.epochs(settings.batch_size, 1, key.fold("batch"))))
    step = LocalStep(1.0, clip=None if carries else GRADIENT_CLIP)
    statistics, keys = statistics_of(model, state), client_keys(clients, key)
    found = step.gradient(model, broadcast["params"], batch, statistics, keys)
    gradient, kept = found.value, {**state, **found.buffers}
    if carries:
        gradient, _ = clip_rows(state["carried"] + gradient, GRADIENT_CLIP)
        kept["carried"] = gradient
    return Computed(gradient, found.loss, kept)


def start(model: Model, ids: tuple[int, ...], key: Key, *memories: str) -> Start:
    """Return a start with the global model of client 0 and zero vectors (k, D) under the names `memories`."""
    shared = {"params": initial_model(model, 0, key)}
    kept = {name: torch.zeros(len(ids), model.dim) for name in memories}
    return Start(shared, {**clients_state(model, ids), **kept}, shared)
