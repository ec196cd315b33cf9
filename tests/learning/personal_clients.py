"""Stand-ins for the tests of personalised learning: clients with given data, a plain rule, a linear model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trilemma import aggregation
from trilemma.base.keys import Key
from trilemma.data.types import Batch
from trilemma.learning import Algorithm, AlgorithmSettings, Setup
from trilemma.learning.protocol import State
from trilemma.models.layers.layers import Linear, Objective, sequential
from trilemma.models.types import Model
from trilemma.testing.test_algorithms import heard


@dataclass(frozen=True)
class Silence:
    """Noise for clients that release nothing."""

    def draw(self, law: object, ids: tuple[int, ...], dim: int, round_: int, device: torch.device) -> Tensor:
        return torch.zeros(len(ids), dim)


@dataclass(frozen=True)
class Seeded:
    """Independent noise for each client."""

    key: Key = field(default_factory=lambda: Key(5))

    def draw(self, law: Any, ids: tuple[int, ...], dim: int, round_: int, device: torch.device) -> Tensor:
        rows = [
            torch.randn(dim, generator=self.key.fold("noise", i, round_).torch()) * law.sigma_ind for i in ids
        ]
        return torch.stack(rows)


@dataclass(frozen=True)
class ArrayClients:
    """Clients who hold rows of x (N, m, …) and y (N, m)."""

    x: Tensor
    y: Tensor
    model: Model
    ids: tuple[int, ...]
    noise: Any = field(default_factory=Silence)

    def only(self, *ids: int) -> ArrayClients:
        return replace(self, ids=ids)

    def epochs(self, size: int, steps: int, key: Key) -> Iterator[Batch]:
        held = self.x.shape[1]
        orders: dict[tuple[int, int], Tensor] = {}
        per_epoch = -(-held // size)
        for step in range(steps):
            epoch, position = divmod(step, per_epoch)
            picks = []
            for i in self.ids:
                generator = key.fold("client", i, "epoch", epoch).torch()
                order = orders.setdefault((i, epoch), torch.randperm(held, generator=generator))
                picks.append(order[position * size : (position + 1) * size])
            rows = torch.tensor(self.ids)[:, None]
            yield Batch(self.x[rows, torch.stack(picks)], self.y[rows, torch.stack(picks)])

    def sample(self, size: int, key: Key) -> Batch:
        return next(self.epochs(size, 1, key))

    def everything(self) -> Batch:
        return Batch(self.x[list(self.ids)], self.y[list(self.ids)])


def setup(clients: int, rounds: int = 1, rule: str = "mean", release: Any = None) -> Setup:
    return Setup(clients, 0, rounds, aggregation.parse(rule, f=0), release)


def classification(
    model: Model, clients: int = 6, held: int = 40, features: int = 8, classes: int = 4
) -> ArrayClients:
    """Clients with Gaussian features and labels from their own linear teacher."""
    generator = Key(11).torch()
    x = torch.randn(clients, held, features, generator=generator)
    teacher = torch.randn(clients, features, classes, generator=generator)
    return ArrayClients(x, (x @ teacher).argmax(-1), model, tuple(range(clients)))


@dataclass(frozen=True)
class Walked:
    """A federation after some rounds."""

    broadcast: State
    state: State
    server: State
    reports: list[Mapping[str, Any]]
    messages: list[Any]


def rounds(settings: AlgorithmSettings, clients: ArrayClients, count: int, **given: Any) -> Walked:
    """Run all clients for `count` rounds."""
    return run(settings.build(setup(len(clients.ids), count, **given)), clients, count)


def run(algorithm: Algorithm, clients: ArrayClients, count: int, key: Key | None = None) -> Walked:
    key = key or Key(1)
    begin = algorithm.init(clients.model, clients.ids, key.fold("init"))
    broadcast, state, server = begin.broadcast, begin.clients, begin.server
    reports, messages = [], []
    for number in range(count):
        step = algorithm.client(broadcast, state, clients, number, key.fold("round", number))
        last = key.fold("server", number)
        done = algorithm.server(heard(algorithm, step, server, number, last), server, number, last)
        broadcast, state, server = done.broadcast, step.state, done.state
        reports.append(step.report)
        messages.append(step.messages)
    return Walked(broadcast, state, server, reports, messages)


HALF_SQUARE = Objective(lambda z, y: (z[..., 0] - y).square() / 2, lambda z: z[..., 0])


def least_squares(size: int) -> Model:
    """f(x) = ‖Ξ x − y‖²/(2n) in double precision; the last column of Ξ is the ones of the bias."""
    model = sequential("least-squares", [Linear("fc", size - 1, 1)], HALF_SQUARE)
    return replace(model, init=lambda key: torch.randn(size, dtype=torch.float64, generator=key.torch()))


def regression(designs: np.ndarray, y: np.ndarray) -> ArrayClients:
    """Clients who hold designs Ξ (N, n, D) with a last column of ones."""
    assert (designs[..., -1] == 1).all()
    x = torch.from_numpy(designs[..., :-1].copy())
    return ArrayClients(x, torch.from_numpy(y), least_squares(designs.shape[2]), tuple(range(len(designs))))


@dataclass(frozen=True)
class Dense:
    """A projection given as a matrix, in any precision."""

    matrix: Tensor

    @property
    def rows(self) -> int:
        return self.matrix.shape[0]

    @property
    def columns(self) -> int:
        return self.matrix.shape[1]

    def apply(self, x: Tensor) -> Tensor:
        return x @ self.matrix.T

    def lift(self, c: Tensor) -> Tensor:
        return c @ self.matrix

    def advance(self, x: Tensor, descent: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
        moved = x - descent + self.lift(pull)
        return moved, self.apply(moved)
