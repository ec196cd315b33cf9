"""The steps of a private client that all algorithms share: draw a batch, clip, add noise.

Without `[privacy]`, methods that send models send w_k itself. With it, the move away from the broadcast w is
clipped and noised, so that replacing all data of a client changes the message by at most 2C before noise:

    m_k = w + clip(w_k − w, C) + noise_k                     clip(u, C) = u · min(1, C/‖u‖)

In lp-proj w lies in R^d, d ≪ D: noise of the same scale per coordinate then has a norm √(D/d) times smaller.

A contribution that is not finite is replaced by zero before noise is added, so that the message does not
reveal it. On a grid (`trilemma.privacy.noise.grid`) contribution and noise are integers, and their sum is
sent. Both ends compute the rest of the message (w, momenta, weight decay) themselves
(`trilemma.learning.steps.gridded`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trilemma import models
from trilemma.base.keys import Key
from trilemma.data.types import Batch
from trilemma.learning.messages import STEPS, Messages
from trilemma.learning.protocol import Clients, State
from trilemma.learning.settings import Setup
from trilemma.learning.steps.total import gradients
from trilemma.models.engines.clipping import clip_rows
from trilemma.privacy.noise.grid import LONG, Grid
from trilemma.privacy.types import PiecewiseNoise, Release


def draw_batch(clients: Clients, size: int, release: Release | None, key: Key) -> Batch:
    """Draw a batch as the accountant assumes: Poisson if the release says so, else without replacement."""
    if release is not None and release.sampling.scheme == "poisson":
        return clients.poisson(release.sampling.rate, size, key)
    return clients.sample(size, key)


def client_keys(clients: Clients, key: Key) -> list[Key]:
    """Return a key per client, for dropout. It depends on the client only, not on who is stepped with it."""
    return [key.fold("client", i) for i in clients.ids]


class BatchSettings(Protocol):
    """The settings that `batch_gradients` needs of an algorithm."""

    @property
    def batch_size(self) -> int:
        """Examples per client and round."""

    @property
    def weight_decay(self) -> float:
        """λ: adds λθ to every gradient."""


def batch_gradients(
    settings: BatchSettings,
    clients: Clients,
    broadcast: State,
    release: Release | None,
    key: Key,
    clip: models.Clip | None = None,
    decayed: bool = True,
) -> models.Gradients:
    """Draw each client's batch of a round and return its gradients at the broadcast model.

    If `decayed` is False, weight decay is not added: the receiver adds it, since the model is public.
    """
    return gradients(
        clients.model,
        broadcast["params"],
        draw_batch(clients, settings.batch_size, release, key.fold("batch")),
        clip=clip or models.Clip.none(),
        weight_decay=settings.weight_decay if decayed else 0.0,
        keys=client_keys(clients, key),
    )


def clip_of(release: Release | None, grid: Grid | None) -> models.Clip:
    """Return how gradients are clipped: per example or per client, as the release says.

    On a grid the threshold is a little lower, to leave room for rounding.
    """
    if release is None:
        return models.Clip.none()
    threshold = release.clip if grid is None else grid.clip
    if release.unit == "example":
        return models.Clip.example(threshold, careful=grid is not None)
    return models.Clip.client(threshold)


def contributions(vectors: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Clip as `clip_rows` does, and replace rows that are not finite by zeros if the threshold is finite.

    >>> contributions(torch.tensor([[3.0, 4.0], [torch.nan, 0.4], [torch.inf, 0.0]]), 1.0)
    (tensor([[0.6000, 0.8000],
            [0.0000, 0.0000],
            [0.0000, 0.0000]]), tensor([1., 0., 1.]))
    """
    bounded, norms = clip_rows(vectors, threshold)
    longer = (norms > threshold).to(vectors.dtype)
    return (bounded if math.isinf(threshold) else _finite(bounded)), longer


def _finite(vectors: Tensor) -> Tensor:
    """Replace rows that are not finite by zeros."""
    if math.isfinite(vectors.sum()):
        return vectors
    finite = torch.isfinite(vectors).all(1)
    return vectors if bool(finite.all()) else torch.where(finite[:, None], vectors, 0.0)


@dataclass(frozen=True)
class Noised:
    """What k clients release, contribution plus noise.

    `numbers` (k, d) are the released values. `contribution` (k, d) is the part without noise, before rounding
    to a grid. On a `grid`, `steps` (k, d) are the integers that are sent and `whole` is the contribution in
    steps, None if it was not kept. All three are None in floating-point arithmetic.
    """

    numbers: Tensor
    contribution: Tensor
    steps: Tensor | None = None
    grid: Grid | None = None
    whole: Tensor | None = None

    @property
    def kept(self) -> Tensor:
        """The contribution without noise, rounded to the grid if there is one. It never leaves the client."""
        if self.grid is None:
            return self.contribution
        whole = self.grid.contribution(self.contribution) if self.whole is None else self.whole
        return self.grid.numbers(whole)

    def messages(self, vectors: Tensor) -> Messages:
        """Return messages whose aggregated part is `vectors` (k, d), which are computed from the release."""
        return Messages(vectors) if self.steps is None else Messages(vectors, {STEPS: self.steps})


def noised(vectors: Tensor, setup: Setup, clients: Clients, round_: int, spent: bool = False) -> Noised:
    """Add the noise of the release to `vectors` (k, d); without noise, return the same tensor.

    `spent` says that the caller no longer needs `vectors`: a long one is then overwritten with the result.
    """
    release = setup.release
    if release is None or release.law.silent:
        return Noised(vectors, vectors)
    dim, device = vectors.shape[1], vectors.device
    grid = setup.grid(dim)
    if grid is None:
        kept = _finite(vectors)
        return Noised(kept + clients.noise.draw(release.law, clients.ids, dim, round_, device), kept)
    grid = grid.among(clients.ids)
    if dim > LONG and len(vectors) == 1 and isinstance(clients.noise, PiecewiseNoise):
        pieces = clients.noise.pieces(release.law, grid.step, clients.ids, dim, round_)
        return _in_pieces(vectors, pieces, grid, spent)
    whole = grid.contribution(vectors)
    noise = clients.noise.steps(release.law, grid.step, clients.ids, dim, round_, device)
    steps = grid.message(whole, noise)
    return Noised(grid.numbers(steps), vectors, steps, grid, whole)


def _in_pieces(vectors: Tensor, noise: Iterator[NDArray[np.float64]], grid: Grid, spent: bool) -> Noised:
    """Add noise to a long contribution (1, d) piece by piece, so that little of the noise is in memory."""
    row, steps = vectors[0], torch.empty_like(vectors, dtype=torch.int32)
    numbers = (
        vectors if spent and vectors.dtype == torch.float32 else torch.empty_like(steps, dtype=torch.float32)
    )
    bounded, start = grid.bounded(row), 0
    for piece in noise:
        columns = slice(start, start + len(piece))
        drawn = torch.from_numpy(piece).to(row.device, torch.int64)
        steps[0, columns] = grid.message(bounded(row[columns]), drawn)
        numbers[0, columns] = grid.numbers(steps[0, columns])
        start += len(piece)
    return Noised(numbers, vectors, steps, grid)


def publish(
    setup: Setup, clients: Clients, origin: Tensor, vectors: Tensor, round_: int
) -> tuple[Messages, dict[str, Tensor]]:
    """Return the messages that clients send for models `vectors` (k, d), and a report.

    With privacy a message is `origin` + the clipped and noised move away from it. The report then says which
    moves were clipped and how long they were; without privacy it is empty.
    """
    release = setup.release
    if release is None:
        return Messages(vectors), {}
    moves = vectors - origin
    bounded, longer = contributions(moves, release.clip)
    report = {"clipped": longer, "move": torch.linalg.vector_norm(moves, dim=1)}
    if setup.grid(vectors.shape[1]) is not None:
        sent = noised(vectors.double() - origin.double(), setup, clients, round_)
        return sent.messages(origin + sent.numbers), report
    # A model whose move needs no clipping is sent as it is: w + (w_k − w) has a rounding error.
    as_it_is = (longer == 0) & (math.isinf(release.clip) | torch.isfinite(moves).all(1))
    messages = torch.where(as_it_is[:, None], vectors, origin + bounded)
    return Messages(noised(messages, setup, clients, round_).numbers), report
