"""Noise of the clients in a simulation: the exact joint law of all n, from n Gaussians.

In the complete secret-sharing graph client i adds v̄_i + Σ_j v_ij, and the n sums are jointly Gaussian with
covariance (σ_ind² + nσ_cor²) I − σ_cor² 11ᵀ in every coordinate. One Gaussian z_i per client suffices for
both parts:

    noise_i = a (z_i − z̄) + σ_ind z̄,      a = √(σ_ind² + nσ_cor²),   z̄ the mean of all n,

because it has variance σ_ind² along 1/√n and a² across it. That is O(nd) instead of the O(n²d) of drawing
pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trilemma.errors import UserError
from trilemma.keys import Key
from trilemma.privacy.types import NoiseLaw


@dataclass(frozen=True)
class SimulatedNoise:
    """Noise of simulated clients, a pure function of (key, client, round, dim, device type).

    Byzantine clients share secrets like everyone else, so the joint law is over all n `clients` whoever is
    asked for. Clients stepped one by one get the very numbers they get all at once.

    >>> noise = SimulatedNoise(Key(1), clients=5)
    >>> law, cpu = NoiseLaw(sigma_ind=0.0, sigma_cor=1.0), torch.device("cpu")
    >>> together = noise.draw(law, (0, 1, 2, 3, 4), dim=8, round_=3, device=cpu)
    >>> alone = noise.draw(law, (2,), dim=8, round_=3, device=cpu)
    >>> bool(torch.equal(together[2], alone[0])), bool(together.sum(0).abs().max() < 1e-5)
    (True, True)
    """

    key: Key
    clients: int
    _means: dict[tuple[int, int, str], Tensor] = field(default_factory=dict, repr=False, compare=False)

    def draw(
        self, law: NoiseLaw, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> Tensor:
        """Return the noise (k, dim) that clients `ids` add in round `round_`, float32."""
        for client in ids:
            if not 0 <= client < self.clients:
                raise UserError(f"client {client} is not one of the {self.clients} simulated")
        out = (
            torch.zeros(len(ids), dim, device=device)
            if law.silent
            else torch.empty(len(ids), dim, device=device)
        )
        if law.silent:
            return out
        if law.sigma_cor == 0:
            for row, client in enumerate(ids):
                self._gaussian(client, round_, out[row])
            return out.mul_(law.sigma_ind)
        if ids == tuple(range(self.clients)):
            mean = torch.zeros(dim, device=device)
            for row, client in enumerate(ids):
                mean += self._gaussian(client, round_, out[row])
            mean /= self.clients
        else:
            mean = self._mean(dim, round_, device)
            for row, client in enumerate(ids):
                self._gaussian(client, round_, out[row])
        spread = math.sqrt(law.sigma_ind**2 + self.clients * law.sigma_cor**2)
        return torch.add(mean * (law.sigma_ind - spread), out, alpha=spread, out=out)

    def _gaussian(self, client: int, round_: int, out: Tensor) -> Tensor:
        generator = self.key.fold("noise", round_, "client", client).torch(out.device)
        return torch.randn(out.shape, generator=generator, out=out, device=out.device)

    def _mean(self, dim: int, round_: int, device: torch.device) -> Tensor:
        """Return z̄, remembering the last round's: clients stepped one by one then cost O(nd) together."""
        key = (dim, round_, str(device))
        if key not in self._means:
            mean, row = torch.zeros(dim, device=device), torch.empty(dim, device=device)
            for client in range(self.clients):
                mean += self._gaussian(client, round_, row)
            self._means.clear()
            self._means[key] = mean / self.clients
        return self._means[key]
