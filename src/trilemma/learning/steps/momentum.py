"""Clipped, noised, momentum-averaged gradients and a robust descent step: the body shared by a family.

Client i, round t, with θ the broadcast model, b examples drawn from its own data:

    g_i = clip(∇f_i(θ))                      per client, per example, or not at all
    m_i ← β m_i + (1−β) (g_i + noise_i)      m_i = 0 before the first round, or m_i = g_i + noise_i in it
    send m_i

Server, with a robust rule R and learning rate γ:

    θ ← θ − γ R(m_1, …, m_n)

DSGD, DP-DSGD, SAFE-DSHB and CafCor are this loop with different clipping and noise. The file of each says
which, and cites its paper.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from trilemma.base.keys import Key
from trilemma.learning.messages import Asked, Parts, one_vector
from trilemma.learning.protocol import Algorithm, Clients, ClientStep, Start, State
from trilemma.learning.settings import AlgorithmSettings, Setup
from trilemma.learning.steps.adaptive_clip import adaptive_algorithm
from trilemma.learning.steps.gridded import declared, followed
from trilemma.learning.steps.privatise import batch_gradients, clip_of, noised
from trilemma.learning.steps.schedules import Schedule, Theory
from trilemma.learning.steps.server import descent_server
from trilemma.learning.steps.trace import Trace
from trilemma.models.types import Model
from trilemma.privacy.types import NoiseLaw, Release, Sampling, Unit


class MomentumSettings(AlgorithmSettings):
    """Parameters of the momentum family.

    Where `[privacy]` aims at an ε, what is not said of rate, momentum and batch is chosen (`config.auto`).
    """

    lr: float = Field(
        default=1.0,
        gt=0,
        description='learning rate γ; "auto", the default where [privacy] aims at an ε: chosen',
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description='momentum β; 0: plain SGD; "auto": chosen')
    start: Literal["zero", "first"] = Field(
        default="zero",
        description="the momentum before the first round: zero, or what the first round averages into it",
    )
    batch_size: int = Field(default=25, ge=1, description='examples b per client and round; "auto": chosen')
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay λ: adds λθ to every gradient")
    unit: Unit = Field(default="user", description="what privacy protects: clip per client or per example")
    sampling: Literal["without-replacement", "poisson"] = Field(
        default="without-replacement",
        description="how a batch is drawn; poisson needs [privacy] and unit = example",
    )
    schedule: Theory | None = Field(
        default=None, description="the theorems' learning rates and momenta instead of lr and momentum"
    )
    quantile: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="the clip follows this quantile of the lengths, by counts with noise that are paid for; "
        "it begins at [privacy] clip. Default: the clip stays",
    )

    @property
    def least_examples(self) -> int:
        """One batch."""
        return self.batch_size

    @property
    def fresh_noise(self) -> bool:
        """True without momentum: momentum repeats the noise of earlier rounds."""
        return self.momentum == 0 and self.schedule is None

    def exposure(self, clip: float, examples: int) -> Release:
        """See `AlgorithmSettings.exposure`. Sampling examples amplifies privacy of examples, not of users."""
        if self.unit == "user":
            return Release(clip, NoiseLaw())
        sampling = Sampling(self.sampling, min(1.0, self.batch_size / examples))
        return Release(clip, NoiseLaw(), unit="example", batch=self.batch_size, sampling=sampling)

    def schedules(self, rounds: int) -> tuple[Schedule, Schedule]:
        """Return learning rate and momentum as functions of the round."""
        if self.schedule is not None:
            return self.schedule.at(rounds)
        return lambda _: self.lr, lambda _: self.momentum

    def build(self, setup: Setup) -> Algorithm:
        """See `AlgorithmSettings.build`."""
        if self.quantile is not None:
            return adaptive_algorithm(self, setup, self.quantile)
        return momentum_algorithm(self, setup)


def momentum_algorithm(settings: MomentumSettings, setup: Setup) -> Algorithm:
    """Return the loop of the family for these settings."""
    lr, beta = settings.schedules(setup.rounds)
    release = setup.release

    def follow(fresh: Tensor, before: Parts, asked: Asked, spent: bool = False) -> Parts:
        """Average a release into the momentum; overwrite it if nobody needs it any more (`spent`)."""
        if asked.round == 0 and settings.start == "first":
            return {"momentum": fresh}
        place = fresh if spent else None
        return {"momentum": torch.lerp(fresh, before["momentum"], beta(asked.round), out=place)}

    def decayed(fresh: Tensor, before: Parts, asked: Asked) -> Parts:
        """Add weight decay, which is public, to a release that was sent without it, then average."""
        if not settings.weight_decay:
            return follow(fresh, before, asked)
        return follow(fresh.add(asked.broadcast["params"], alpha=settings.weight_decay), before, asked)

    def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
        params = model.init(key.fold("model"))
        state = {"params": params}
        return Start(state, {"momentum": torch.zeros(len(ids), model.dim)}, state)

    def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
        grid = setup.grid(clients.model.dim)
        clip = clip_of(release, grid)
        step = batch_gradients(settings, clients, broadcast, release, key, clip, decayed=grid is None)
        sent = noised(step.value, setup, clients, round_, spent=True)
        if grid is None:
            after = follow(sent.numbers, state, Asked(round_, broadcast), spent=True)
        else:
            after = followed(decayed, sent.numbers, state, Asked(round_, broadcast))
        report = {"loss": step.loss, "clipped": step.clipped}
        return ClientStep(sent.messages(after["momentum"]), after, report)

    server = descent_server(setup, lr)
    message = declared(setup, one_vector("momentum"), decayed, remembered=("momentum",), columnwise=True)

    def takes(round_: int) -> float:
        """Return the coefficient of a round's release in its message."""
        return 1.0 if round_ == 0 and settings.start == "first" else 1.0 - beta(round_)

    trace = Trace(lambda t: -lr(t), beta, takes, decay=settings.weight_decay)
    return Algorithm(settings.called, init, client, server, message, release, trace=trace)
