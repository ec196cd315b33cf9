"""Personal models tied to a common vector by a penalty: the body shared by lp-proj, pFedMe and RSA.

    min_w (1/N) Σ_k F_k(w),     F_k(w) = min_x f_k(x) + λ h(w − P x)

    squared   h(c) = ½‖c‖₂²     ∂h = c
    norm p    h(c) = ‖c‖_p      ∂h = sign(c) (|c|/‖c‖_p)^(p−1),   which is sign(c) for p = 1

One round of client k, started from the received w and its own x_k, which is never reset:

    w_k ← w
    R times:   K steps   x_k ← x_k − η_p (clip(∇f_B(x_k), 60) + wd·x_k − λ Pᵀ ∂h(w_k − P x_k))
               w_k ← w_k − η_l λ ∂h(w_k − P x_k)

The K steps on x_k are called a solve. With `tolerance` ν > 0 a client's solve ends once the squared gradient
norm of its inner problem is at most ν, and K is the most steps it may take. Every step has a mini-batch and
dropout of its own.

A coordinate of w that is not finite has no meaningful pull. `nonfinite = "drop"` leaves out the penalty of
that coordinate and reports the share of such coordinates as `unregularised`; "star" lets NaN through, so that
the run diverges. The squared penalty has no such option: its pull grows with w and makes x_k diverge long
before w overflows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from trilemma.base.keys import Key
from trilemma.data.types import Batch
from trilemma.learning.messages import one_vector
from trilemma.learning.protocol import Algorithm, Clients, ClientStep, Start, State
from trilemma.learning.settings import Setup, WholeClientSettings
from trilemma.learning.steps.gridded import moved
from trilemma.learning.steps.local_steps import (
    LocalStep,
    initial_model,
    initial_models,
    statistics_of,
    step_keys,
)
from trilemma.learning.steps.privatise import client_keys, publish
from trilemma.learning.steps.server import blending_server
from trilemma.learning.steps.trace import Trace
from trilemma.models.coordinates.projection import IdentityProjection, Projection
from trilemma.models.types import Model

Penalty = Callable[[Tensor], Tensor]
"""The derivative ∂h of a penalty, row by row: (k, d) to (k, d)."""


def squared(c: Tensor) -> Tensor:
    """Return ∂h for h(c) = ½‖c‖₂².

    >>> squared(torch.tensor([[3.0, -4.0]]))
    tensor([[ 3., -4.]])
    """
    return c


def norm(p: float) -> Penalty:
    """Return ∂h for h(c) = ‖c‖_p, with 0 at c = 0.

    >>> norm(1.0)(torch.tensor([[3.0, -4.0, 0.0]]))
    tensor([[ 1., -1.,  0.]])
    >>> norm(2.0)(torch.tensor([[3.0, -4.0]]))
    tensor([[ 0.6000, -0.8000]])
    """

    def derivative(c: Tensor) -> Tensor:
        if p == 1.0:
            return torch.sign(c)
        size: Tensor = torch.linalg.vector_norm(c, ord=p, dim=1, keepdim=True)
        shape = (c.abs() / size.clamp(min=torch.finfo(c.dtype).tiny)).pow(p - 1.0)
        return torch.sign(c) * shape

    return derivative


def finite_only(penalty: Penalty) -> Penalty:
    """Return the penalty's derivative with 0 at coordinates that are not finite.

    The result then does not depend on sign(NaN), which is 0 in some libraries and NaN in others.

    >>> finite_only(norm(1.0))(torch.tensor([[torch.nan, torch.inf, -2.0]]))
    tensor([[ 0.,  0., -1.]])
    """

    def derivative(c: Tensor) -> Tensor:
        finite = torch.isfinite(c)
        return torch.where(finite, penalty(torch.where(finite, c, 0.0)), 0.0)

    return derivative


class BilevelSettings(WholeClientSettings):
    """Parameters of the family. Names in brackets are the papers'."""

    lr: float = Field(default=0.1, gt=0, description="step size of the common vector (η_l)")
    personal_lr: float = Field(default=0.1, gt=0, description="step size of the personal model (η_p)")
    lam: float = Field(default=1.0, ge=0, description="strength of the penalty (λ)")
    local_rounds: int = Field(default=5, ge=1, description="solves and w steps per round (R)")
    inner_steps: int = Field(default=20, ge=1, description="most SGD steps of one solve (K)")
    tolerance: float = Field(default=0.0, ge=0, description="squared gradient norm that ends a solve (ν)")
    batch_size: int = Field(default=64, ge=1, description="mini-batch; the last of an epoch is smaller")
    weight_decay: float = Field(default=0.001, ge=0, description="weight decay of the personal model")
    beta: float = Field(default=1.0, gt=0, description="server: w ← (1−β) w + β R(messages)")


@dataclass(frozen=True)
class Coupling:
    """What distinguishes the methods of the family.

    `penalty` is ∂h, `decay` the weight decay of x, and `tolerates` says whether a run continues after a w
    that is not finite. `project(model, seed, device)` returns P, `size(model)` the length of w,
    `start(model, key)` the first w; by default w is a model, and the first one that of client 0.
    """

    penalty: Penalty
    decay: float
    tolerates: bool = False
    project: Callable[[Model, int, torch.device], Projection] = lambda model, *_: IdentityProjection(
        model.dim
    )
    size: Callable[[Model], int] = lambda model: model.dim
    start: Callable[[Model, Key], Tensor] = lambda model, key: initial_model(model, 0, key)


def lenient(penalty: Penalty, nonfinite: Literal["drop", "star"]) -> Penalty:
    """Return the derivative with 0 ("drop") or NaN ("star") at coordinates that are not finite."""
    if nonfinite == "drop":
        return finite_only(penalty)
    return lambda c: torch.where(torch.isfinite(c), penalty(c), torch.nan)


@dataclass(frozen=True)
class _Solved:
    """Result of a solve: models x (k, D), P x (k, d), each step's loss, statistics, and steps taken (k,)."""

    x: Tensor
    px: Tensor
    losses: list[Tensor]
    statistics: Mapping[str, Tensor]
    steps: Tensor


def bilevel_algorithm(name: str, settings: BilevelSettings, coupling: Coupling, setup: Setup) -> Algorithm:
    """Return a method of the family."""
    step = LocalStep(settings.personal_lr, decay=coupling.decay)
    solver = _Solver(settings, coupling.penalty, step)

    def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
        w = {"w": coupling.start(model, key)}
        seed = key.fold("projection").integer()
        clients = {
            "x": initial_models(model, ids, key),
            # All clients learn the seed of P once, before the first round. P itself is never sent.
            "seed": torch.full((len(ids),), seed, dtype=torch.int64),
            **model.initial_buffers(len(ids)),
        }
        return Start(w, clients, w)

    def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
        received = broadcast["w"]
        projection = coupling.project(clients.model, int(state["seed"][0]), state["x"].device)
        w, solved = solver.rounds(clients, projection, received, state, key)
        messages, private = publish(setup, clients, received, w, round_)
        report = {
            "loss": torch.stack(solved.losses).mean(0),
            "gap": torch.linalg.vector_norm(w - solved.px, dim=1),
            "steps": solved.steps,
            "unregularised": (~torch.isfinite(w)).float().mean(1),
            **private,
        }
        return ClientStep(messages, {"x": solved.x, "seed": state["seed"], **solved.statistics}, report)

    return Algorithm(
        name,
        init,
        client,
        blending_server(setup, "w", settings.beta),
        moved(setup, one_vector("w", coupling.size)),
        setup.release,
        evaluated=personal_model,
        own_models=True,
        everyone_trains=True,
        tolerates_nonfinite=coupling.tolerates,
        trace=Trace(lambda _: settings.beta, model="w", around=True),
    )


def personal_model(broadcast: State, state: State, clients: Clients, key: Key) -> Tensor:
    """Return every client's own model (k, D) after local training, to be scored."""
    return state["x"]


@dataclass(frozen=True)
class _Solver:
    """The inner problem min_x f_B(x) + λ h(w − P x), by (stochastic) gradient steps."""

    settings: BilevelSettings
    penalty: Penalty
    step: LocalStep

    def rounds(
        self, clients: Clients, projection: Projection, received: Tensor, state: State, key: Key
    ) -> tuple[Tensor, _Solved]:
        """Take the local rounds; return w, and where they led, with all losses and the sum of steps."""
        settings, x = self.settings, state["x"]
        w = received.expand(len(clients.ids), -1)
        statistics: Mapping[str, Tensor] = statistics_of(clients.model, state)
        done = _Solved(x, projection.apply(x), [], statistics, torch.zeros(len(x), device=x.device))
        count = settings.local_rounds * settings.inner_steps
        batches = iter(clients.epochs(settings.batch_size, count, key.fold("batch")))
        for number in range(settings.local_rounds):
            keys = client_keys(clients, key.fold("solve", number))
            found = self.solve(clients.model, projection, done, w, batches, keys)
            done = replace(found, losses=done.losses + found.losses, steps=done.steps + found.steps)
            w = w - settings.lr * settings.lam * self.penalty(w - done.px)
        return w, done

    def solve(
        self,
        model: Model,
        projection: Projection,
        before: _Solved,
        w: Tensor,
        batches: Iterator[Batch],
        keys: Sequence[Key],
    ) -> _Solved:
        """Take the inner steps; with a tolerance, a client whose slope falls below it stays where it is."""
        settings, losses = self.settings, list[Tensor]()
        x, px, statistics = before.x, before.px, before.statistics
        active: Tensor | None = None
        steps = torch.zeros(len(x), device=x.device)
        for index in range(settings.inner_steps):
            found = self.step.gradient(model, x, next(batches), statistics, step_keys(keys, index))
            losses.append(found.loss)
            statistics = found.buffers
            force = settings.lam * self.penalty(w - px)
            descent = found.value.mul_(self.step.rate)
            pull = self.step.rate * force
            if settings.tolerance > 0:
                slope = (descent - projection.lift(pull)).square().sum(1) / self.step.rate**2
                still = slope > settings.tolerance
                active = still if active is None else active & still
                if not bool(active.any()):
                    break
                descent = torch.where(active[:, None], descent, 0.0)
                pull = torch.where(active[:, None], pull, 0.0)
            x, px = projection.advance(x, descent, pull)
            steps = steps + (1.0 if active is None else active.float())
        return _Solved(x, px, losses, statistics, steps)
