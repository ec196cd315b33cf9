"""What private clients do to batches and vectors, the same in every algorithm: draw, clip, add noise.

Methods that send models send, without `[privacy]`, the vector w_k. With it, the move away from the broadcast
w is bounded and noised, so that replacing a whole client moves the message by at most 2C:

    m_k = w + clip(w_k − w, C) + noise_k                     clip(u, C) = u · min(1, C/‖u‖)

In lp-proj w lives in R^d, d ≪ D: noise of the same scale per coordinate then has a norm √(D/d) times smaller.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from trilemma import models
from trilemma.data.types import Batch
from trilemma.keys import Key
from trilemma.learning.protocol import Clients, State
from trilemma.privacy.types import NoiseLaw, Release


def draw_batch(clients: Clients, size: int, release: Release | None, key: Key) -> Batch:
    """Draw a batch as the accountant assumes: Poisson where the release says so, else without replacement."""
    if release is not None and release.sampling.scheme == "poisson":
        return clients.poisson(release.sampling.rate, size, key)
    return clients.sample(size, key)


def client_keys(clients: Clients, key: Key) -> list[Key]:
    """Return the key that each client's model draws from (dropout), the same in whatever company it steps."""
    return [key.fold("client", i) for i in clients.ids]


class BatchSettings(Protocol):
    """What an algorithm says about its gradients: examples in a batch, and weight decay."""

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
) -> models.Gradients:
    """Draw each client's batch of a round and return its gradients at the broadcast model."""
    return models.gradients(
        clients.model,
        broadcast["params"],
        draw_batch(clients, settings.batch_size, release, key.fold("batch")),
        clip=clip or models.Clip.none(),
        weight_decay=settings.weight_decay,
        keys=client_keys(clients, key),
    )


def clip_rows(vectors: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Clip every row to norm `threshold`; also return which rows were longer.

    >>> clip_rows(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)[0]
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    if math.isinf(threshold):
        return vectors, torch.zeros(len(vectors), device=vectors.device)
    norms = vectors.norm(dim=1)
    factor = (threshold / norms).clamp(max=1.0)  # a zero row divides to infinity and is clamped to 1
    return vectors * factor[:, None], (norms > threshold).float()


def noised(vectors: Tensor, release: Release | None, clients: Clients, round_: int) -> Tensor:
    """Add the noise the release asks for; without any, return the very same tensor."""
    if release is None or release.law == NoiseLaw():
        return vectors
    return vectors + clients.noise.draw(release.law, clients.ids, vectors.shape[1], round_, vectors.device)


def publish(
    release: Release | None, clients: Clients, origin: Tensor, vectors: Tensor, round_: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what clients send (k, d) in place of `vectors`, and a report of how far that is from them."""
    if release is None:
        return vectors, {}
    moves = vectors - origin
    bounded, longer = clip_rows(moves, release.clip)
    # A move within the bound is sent as it is: w + (w_k − w) would differ from w_k by a rounding error.
    messages = torch.where(longer[:, None] > 0, origin + bounded, vectors)
    messages = noised(messages, release, clients, round_)
    return messages, {"clipped": longer, "move": torch.linalg.vector_norm(moves, dim=1)}
