"""Clipped, noised, momentum-averaged gradients and a robust descent step: the body shared by a family.

Client i, round t, with θ the broadcast model, b examples drawn from its own data:

    g_i = clip(∇f_i(θ))                      per client, per example, or not at all
    m_i ← β m_i + (1−β) (g_i + noise_i)      m_i = 0 before the first round
    send m_i

Server, with a robust rule R and learning rate γ:

    θ ← θ − γ R(m_1, …, m_n)

DSGD, DP-DSGD, SAFE-DSHB and CafCor are this loop under different clipping and different noise; each has a file
that says which, with its paper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field

from trilemma import models
from trilemma.keys import Key
from trilemma.learning.protocol import Algorithm, Clients, ClientStep, Messages, ServerStep, Start, State
from trilemma.learning.settings import AlgorithmSettings, Federation, rule_report
from trilemma.models.types import Model
from trilemma.privacy.types import NoiseLaw, Release, Sampling, Unit

Schedule = Callable[[int], float]
"""A quantity that may change from round to round."""


def descent_server(federation: Federation, lr: Schedule) -> Callable[..., ServerStep]:
    """Return the server function θ ← θ − γ_t R(messages)."""

    def server(messages: Messages, state: State, round_: int, key: Key) -> ServerStep:
        outcome = federation.rule(messages.vectors, key=key.fold("rule"))
        params = state["params"] - lr(round_) * outcome.value
        return ServerStep({"params": params}, {"params": params}, rule_report(outcome))

    return server


class MomentumSettings(AlgorithmSettings):
    """Parameters of the momentum family."""

    lr: float = Field(default=1.0, gt=0, description="learning rate γ")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum β; 0: plain SGD")
    batch: int = Field(default=25, ge=1, description="examples b per client and round")
    l2: float = Field(default=0.0, ge=0, description="L2 regularisation λ: adds λθ to every gradient")
    unit: Unit = Field(default="user", description="what privacy protects: clip per client or per example")
    sampling: Literal["without_replacement", "poisson"] = Field(
        default="without_replacement", description="how a batch is drawn"
    )

    def exposure(self, clip: float, examples: int) -> Release:
        """See `AlgorithmSettings.exposure`. A whole user's change is not amplified by sampling."""
        if self.unit == "user":
            return Release(clip, NoiseLaw())
        sampling = Sampling(self.sampling, min(1.0, self.batch / examples))
        return Release(clip, NoiseLaw(), unit="example", batch=self.batch, sampling=sampling)

    def build(self, federation: Federation) -> Algorithm:
        """See `AlgorithmSettings.build`."""
        return momentum_algorithm(
            type(self).__name__, self, federation, lr=lambda _: self.lr, beta=lambda _: self.momentum
        )


def momentum_algorithm(
    name: str, settings: MomentumSettings, federation: Federation, lr: Schedule, beta: Schedule
) -> Algorithm:
    """Build the shared loop with schedules for the learning rate and the momentum."""
    release = federation.release
    clip = models.Clip.none() if release is None else _clip_of(release)

    def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
        params = model.init(key.fold("model"))
        state = {"params": params}
        return Start(state, {"momentum": torch.zeros(len(ids), model.dim)}, state)

    def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
        if settings.sampling == "poisson":
            batch = clients.poisson(settings.batch, key.fold("batch"))
        else:
            batch = clients.sample(settings.batch, key.fold("batch"))
        step = models.gradients(
            clients.model, broadcast["params"], batch.x, batch.y, batch.weight, clip=clip, l2=settings.l2
        )
        gradient = step.value
        if release is not None and release.law != NoiseLaw():
            gradient = gradient + clients.noise.draw(
                release.law, clients.ids, gradient.shape[1], round_, gradient.device
            )
        momentum = torch.lerp(gradient, state["momentum"], beta(round_))
        report = {"loss": step.loss, "clipped": step.clipped}
        return ClientStep(Messages(momentum), {"momentum": momentum}, report)

    return Algorithm(name, init, client, descent_server(federation, lr), release)


def _clip_of(release: Release) -> models.Clip:
    if release.unit == "example":
        return models.Clip.example(release.clip)
    return models.Clip.client(release.clip)
