"""Byz-Clip21-SGD2M: clipping with error feedback, momentum on both sides, any robust rule.

Client i:

    v_i ← (1−β) v_i + β ∇f_i(x; ξ)
    u_i = clip_τ(v_i − g_i)
    g_i ← g_i + β̂ u_i                             noiseless, stays at the client; u_i as rounded to the grid
    m_i ← m_i + β̂ (u_i + ω_i),  ω_i ~ N(0, σ_ω² I)     send m_i

Server: g ← RAgg(m_1, …, m_n), x ← x − γ g. Everything starts at zero, so m_i = g_i + β̂ Σ_t ω_i^t. In the
paper clients send c_i = u_i + ω_i and the server keeps m_i. Here the client computes m_i, which the paper
allows (it is post-processing), so that a message is what the rule aggregates, as in every algorithm here.

Each round releases c_i, a Gaussian mechanism on a vector of norm at most τ. T rounds therefore cost as much
privacy as those of CafCor without correlated noise, with C = τ ([privacy] clip).

Reference: Byz-Clip21-SGD2M (Byzantine robustness, clipping, double momentum and differential privacy),
Algorithm 1; Algorithm 5 for the variant with per-example clipping inside.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from trilemma.base.keys import Key
from trilemma.learning.messages import Asked, Parts, one_vector
from trilemma.learning.protocol import Algorithm, ClientFunction, Clients, ClientStep, Start, State
from trilemma.learning.settings import AlgorithmSettings, Setup, algorithms
from trilemma.learning.steps.gridded import Follow, declared
from trilemma.learning.steps.privatise import batch_gradients, clip_of, contributions, noised
from trilemma.learning.steps.server import descent_server
from trilemma.learning.steps.trace import Trace
from trilemma.models.engines.clipping import clip_rows
from trilemma.models.types import Model
from trilemma.privacy.types import NoiseLaw, Release, Sampling


def order_of_magnitude_noise(release: Release, epsilon: float, delta: float, rounds: int) -> NoiseLaw:
    """Return σ_ω = τ √(T log(1/δ)) / ε, times b/m under subsampling, as the paper sets it.

    This is an order of magnitude, not a certificate: the sensitivity is 2τ, and constants are dropped.
    """
    sigma = release.clip * math.sqrt(rounds * math.log(1.0 / delta)) / epsilon
    return NoiseLaw(sigma_ind=sigma * release.sampling.rate)


class _ErrorFeedbackSettings(AlgorithmSettings):
    """The options of both variants."""

    lr: float = Field(default=0.1, gt=0, description="learning rate γ")
    beta: float = Field(default=0.1, gt=0, le=1, description="client momentum β")
    beta_hat: float = Field(default=0.01, gt=0, le=1, description="server momentum β̂")
    batch_size: int = Field(default=32, ge=1, description="examples b per client and round")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay λ: adds λθ to every gradient")

    @property
    def least_examples(self) -> int:
        """One batch."""
        return self.batch_size

    def paper_noise(self, release: Release, epsilon: float, delta: float, rounds: int) -> NoiseLaw:
        """Return the noise of the paper's formula; see `order_of_magnitude_noise`."""
        return order_of_magnitude_noise(release, epsilon, delta, rounds)


@algorithms.register("byz-clip21-sgd2m")
class ByzClip21SGD2M(_ErrorFeedbackSettings):
    """Byz-Clip21-SGD2M: clipped error feedback, double momentum, local noise, any robust rule."""

    def exposure(self, clip: float, examples: int) -> Release:
        """See `AlgorithmSettings.exposure`: one round releases u_i, of norm at most τ = clip."""
        return Release(clip, NoiseLaw())

    def build(self, setup: Setup) -> Algorithm:
        """See `AlgorithmSettings.build`."""
        release = setup.release
        tau = math.inf if release is None else release.clip

        def follow(fresh: Tensor, before: Parts, asked: Asked) -> Parts:
            return {"m": before["m"] + self.beta_hat * fresh}

        def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
            step = batch_gradients(self, clients, broadcast, release, key)
            v = torch.lerp(state["v"], step.value, self.beta)
            update, clipped = contributions(v - state["g"], tau)
            sent = noised(update, setup, clients, round_)
            after = follow(sent.numbers, state, Asked(round_, broadcast))
            state = {"v": v, "g": state["g"] + self.beta_hat * sent.kept, **after}
            return ClientStep(sent.messages(after["m"]), state, {"loss": step.loss, "clipped": clipped})

        trace = Trace(lambda _: -self.lr, keeps=lambda _: 1.0, adds=lambda _: self.beta_hat)
        algorithm = _algorithm(self, setup, client, follow, remembered=("m",), columnwise=True)
        return replace(algorithm, trace=trace)


@algorithms.register("byz-clip21-sgd2m+")
class ByzClip21SGD2MPlus(_ErrorFeedbackSettings):
    """Byz-Clip21-SGD2M+: per-example clip and noise inside the momentum, outer clip on the feedback.

        v_i ← (1−β) v_i + β (mean_j clip_{τ_i}(∇f_ij) + ω_i),   c_i = clip_{τ_o}(v_i − g_i)

    τ_i is [privacy] clip. Noise enters v_i, so subsampling amplifies privacy, and c_i needs no further noise.
    """

    outer_clip: float = Field(default=1.0, gt=0, description="τ_o, the clip of the error feedback")
    sampling: Literal["without-replacement", "poisson"] = Field(
        default="without-replacement", description="how a batch is drawn"
    )

    def exposure(self, clip: float, examples: int) -> Release:
        """See `AlgorithmSettings.exposure`: examples are clipped at τ_i = clip and averaged."""
        sampling = Sampling(self.sampling, min(1.0, self.batch_size / examples))
        return Release(clip, NoiseLaw(), unit="example", batch=self.batch_size, sampling=sampling)

    def build(self, setup: Setup) -> Algorithm:
        """See `AlgorithmSettings.build`."""
        release = setup.release

        def follow(fresh: Tensor, before: Parts, asked: Asked) -> Parts:
            v = torch.lerp(before["v"], fresh, self.beta)
            update, _ = clip_rows(v - before["g"], self.outer_clip)
            step = self.beta_hat * update
            return {"v": v, "g": before["g"] + step, "m": before["m"] + step}

        def decayed(fresh: Tensor, before: Parts, asked: Asked) -> Parts:
            """Add weight decay, which is public, to a release that was sent without it, then follow."""
            return follow(fresh.add(asked.broadcast["params"], alpha=self.weight_decay), before, asked)

        def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
            grid = setup.grid(clients.model.dim)
            clip = clip_of(release, grid)
            step = batch_gradients(self, clients, broadcast, release, key, clip, decayed=grid is None)
            sent = noised(step.value, setup, clients, round_)
            after = (follow if grid is None else decayed)(sent.numbers, state, Asked(round_, broadcast))
            report = {"loss": step.loss, "clipped": step.clipped}
            return ClientStep(sent.messages(after["m"]), after, report)

        return _algorithm(self, setup, client, decayed, remembered=("v", "g", "m"))


def _algorithm(
    settings: _ErrorFeedbackSettings,
    setup: Setup,
    client: ClientFunction,
    follow: Follow,
    remembered: tuple[str, ...],
    columnwise: bool = False,
) -> Algorithm:
    def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
        params = {"params": model.init(key.fold("model"))}
        return Start(params, {name: torch.zeros(len(ids), model.dim) for name in ("v", "g", "m")}, params)

    server = descent_server(setup, lambda _: settings.lr)
    message = declared(setup, one_vector("m"), follow, remembered, columnwise)
    return Algorithm(settings.called, init, client, server, message, setup.release)
