"""A clip that follows a private quantile of lengths, for clients that send momenta.

Client i counts which lengths ℓ are below the clip C_t that the server broadcasts, and releases the count
beside its contribution g_i (clipped at C_t, per client or per example) in one vector, of one number more:

    u_i = C (g_i / C_t,  w c_i)            c_i: the mean of cut(2 − 2ℓ/C_t), cut(·) into [0, 1]
    x_i = u_i + noise_i                    ‖u_i‖ ≤ C: what [privacy] clip declares
    m_i ← β m_i + (1−β) x_i                of the count nothing is averaged
    θ ← θ − γ R(m_1, …, m_n)               the length of a step is γC, whatever C_t is
    C_{t+1} = C_t exp(−η (ĉ − q))          ĉ = R(m)_{d+1} / ((1−β) w C), cut into [0, 1]

So a length counts as below up to C_t/2, what is clipped does not, and in between it counts in part: rounding
of another record's gradient flips nothing. The clip is longer than a share q of the lengths; a smaller q is a
shorter clip.

**What it costs.** Contribution and count are one Gaussian release of norm at most C, of d + 1 numbers: every
accountant, threat model, ledger and grid sees just that, whatever C_t a server sends, and no server sees a
count without noise. The count pays with the length that short gradients leave unused. With
ℓ = (1 − x/2) C_t and so c = x, for 0 ≤ x ≤ 1,

    ‖u‖²/C² = (1 − x/2)² + w²x² ≤ 1 − x + x² ≤ 1        for w² ≤ 3/4,

and longer ones count nothing: noise is what it would be without a count. (In the paper a count is a query
beside, and z⁻² = z_Δ⁻² + (2σ_b)⁻² says what it takes away from the gradient's z.)

**What liars can do.** The rule combines counts by the weights that it gives to messages. ĉ is cut into
[0, 1], and so a round changes C_t by a factor of e^η at most, whatever anybody sends; C_t stays within
[C/REACH, C·REACH].

Reference: Andrew, Thakkar, McMahan, Ramaswamy, "Differentially private learning with adaptive clipping",
NeurIPS 2021 (its Algorithm 1; their server is trusted, and no client lies).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trilemma.aggregation import Geometry
from trilemma.base.errors import ConfigError
from trilemma.base.keys import Key
from trilemma.learning.messages import Asked, Parts, one_vector
from trilemma.learning.protocol import Algorithm, Clients, ClientStep, ServerStep, Start, State
from trilemma.learning.settings import Setup
from trilemma.learning.steps.gridded import declared
from trilemma.learning.steps.privatise import client_keys, contributions, draw_batch, noised
from trilemma.learning.steps.server import apply_rule
from trilemma.learning.steps.total import gradients
from trilemma.learning.steps.trace import Trace
from trilemma.models import Clip
from trilemma.models.engines.clipping import norms_of_rows
from trilemma.models.types import Model
from trilemma.privacy.types import Release

if TYPE_CHECKING:
    from trilemma.learning.messages import Messages
    from trilemma.learning.steps.momentum import MomentumSettings

COUNT = 0.86
"""w, below √3/2."""

RATE = 0.2
"""η: a round changes the clip by a factor of e^η at most."""

REACH = 100.0
"""How many times shorter or longer than the first clip a clip may become."""

_ABOVE = 1 + 2.0**-20  # what single precision may take away from a length


@dataclass(frozen=True)
class AdaptiveClip:
    """The clip of a run: `first` is C, [privacy] clip, and `quantile` q.

    >>> clip = AdaptiveClip(first=2.0, quantile=0.5)
    >>> round(clip.following(2.0, 1.72), 3), round(clip.following(2.0, -9.0), 3)
    (1.81, 2.21)
    """

    first: float
    quantile: float

    @classmethod
    def of(cls, quantile: float, release: Release | None) -> AdaptiveClip:
        """Return the clip that follows a quantile from the release's own on."""
        if release is None or not math.isfinite(release.clip):
            raise ConfigError(
                f"[algorithm] quantile = {quantile:g}: the clip that follows it begins at [privacy] clip; "
                "give a finite one, or leave quantile out"
            )
        return cls(release.clip, quantile)

    def now(self, broadcast: State) -> float:
        """Return the clip of a broadcast: whatever a server says, one within reach."""
        said = float(broadcast["clip"])
        return self._within(said) if math.isfinite(said) else self.first

    def joined(self, value: Tensor, share: Tensor, now: float) -> Tensor:
        """Return u (k, d + 1): contributions (k, d) clipped at `now`, and the share (k,) of lengths below.

        >>> AdaptiveClip(2.0, 0.5).joined(torch.tensor([[0.0, 6.0]]), below(torch.tensor([6.0]), 8.0), 8.0)
        tensor([[0.0000, 1.5000, 0.8600]])
        """
        count = (COUNT * self.first) * share
        return torch.cat([value * (self.first / now), count.to(value)[:, None]], dim=1)

    def following(self, now: float, number: float) -> float:
        """Return the next clip, from the last number of an aggregate of releases."""
        share = number / (COUNT * self.first)
        if math.isnan(share):
            return now
        return self._within(now * math.exp(-RATE * (min(1.0, max(0.0, share)) - self.quantile)))

    def _within(self, clip: float) -> float:
        return min(self.first * REACH, max(self.first / REACH, clip))


def below(lengths: Tensor, clip: float) -> Tensor:
    """Return of each length how far it counts as below the clip.

    >>> below(torch.tensor([0.0, 1.0, 1.5, 2.0, torch.inf, torch.nan]), 2.0)
    tensor([1.0000, 1.0000, 0.5000, 0.0000, 0.0000, 0.0000])
    """
    return (2 - 2 * _ABOVE / clip * lengths.nan_to_num(nan=torch.inf)).clamp(0, 1)


def adaptive_algorithm(settings: MomentumSettings, setup: Setup, quantile: float) -> Algorithm:
    """Return the loop of the momentum family with a clip that follows a quantile."""
    release, (lr, beta) = setup.release, settings.schedules(setup.rounds)
    clip = AdaptiveClip.of(quantile, release)

    def takes(round_: int) -> float:
        """Return the coefficient of a round's release in its message."""
        return 1.0 if round_ == 0 and settings.start == "first" else 1.0 - beta(round_)

    def follow(fresh: Tensor, before: Parts, asked: Asked) -> Parts:
        """Average a release into the momentum, all of it but the count, of which the message has today's."""
        released, remembered = fresh.clone(), before["momentum"].clone()
        if settings.weight_decay:
            released[:, :-1].add_(asked.broadcast["params"], alpha=settings.weight_decay)
        remembered[:, -1] = 0.0
        return {"momentum": released.mul_(takes(asked.round)).add_(remembered, alpha=1 - takes(asked.round))}

    def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
        state = {"params": model.init(key.fold("model")), "clip": torch.tensor([clip.first])}
        return Start(state, {"momentum": torch.zeros(len(ids), model.dim + 1)}, state)

    def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
        now = clip.now(broadcast)
        value, share, report = _contribution(settings, setup, broadcast, clients, now, key)
        sent = noised(clip.joined(value, share, now), setup, clients, round_, spent=True)
        after = follow(sent.numbers, state, Asked(round_, broadcast))
        told = {**report, "clip": torch.full((len(clients.ids),), now)}
        return ClientStep(sent.messages(after["momentum"]), after, told)

    def server(messages: Messages, state: State, round_: int, key: Key) -> ServerStep:
        geometry: Geometry | None = messages.geometry
        value, report = apply_rule(setup, messages.vectors, key, geometry)
        following = clip.following(clip.now(state), float(value[-1]) / takes(round_))
        after = {
            "params": state["params"] - lr(round_) * value[:-1],
            "clip": torch.full_like(state["clip"], following),
        }
        return ServerStep(after, after, report)

    message = declared(setup, one_vector("momentum", lambda model: model.dim + 1), follow, ("momentum",))
    trace = Trace(lambda t: -lr(t), beta, takes, decay=settings.weight_decay)
    return Algorithm(settings.called, init, client, server, message, release, trace=trace)


def _contribution(
    settings: MomentumSettings, setup: Setup, broadcast: State, clients: Clients, now: float, key: Key
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return clients' contributions (k, d) clipped at `now`, their shares of lengths below, and a report."""
    release, grid = setup.release, setup.grid(clients.model.dim + 1)
    assert release is not None
    example = release.unit == "example"
    room = 1.0 if grid is None else grid.clip / grid.bound  # for rounding, of the whole vector
    batch = draw_batch(clients, settings.batch_size, release, key.fold("batch"))
    found = gradients(
        clients.model,
        broadcast["params"],
        batch,
        clip=Clip.example(room * now, careful=grid is not None) if example else Clip.none(),
        keys=client_keys(clients, key),
    )
    if not example:
        value, clipped = contributions(found.value, now)
        return value, below(norms_of_rows(found.value), now), {"loss": found.loss, "clipped": clipped}
    assert found.norms is not None
    weight = 1 / batch.y.shape[1] if batch.weight is None else batch.weight.double()
    share = room * (weight * below(found.norms.double(), room * now)).sum(1)
    return found.value, share, {"loss": found.loss, "clipped": found.clipped}
