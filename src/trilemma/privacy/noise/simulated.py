"""Noise of the clients in a simulation: the exact joint law of all n, from n Gaussians.

In the complete secret-sharing graph client i adds v̄_i + Σ_j v_ij, and the n sums are jointly Gaussian with
covariance (σ_ind² + nσ_cor²) I − σ_cor² 11ᵀ in every coordinate. One Gaussian z_i per client suffices for
both parts:

    noise_i = a (z_i − z̄) + σ_ind z̄,      a = √(σ_ind² + nσ_cor²),   z̄ the mean of all n,

because it has variance σ_ind² along 1/√n and a² across it. That is O(nd) instead of the O(n²d) of drawing
pairs. Where each client shares secrets with k others only, pairs are drawn: O(nkd).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.privacy.threats.covariance import partners
from trilemma.privacy.types import NoiseLaw

AT_ONCE = 1 << 28
"""Numbers up to which a GPU draws the Gaussians of all clients in one launch: a millisecond, 1 GiB."""

TOGETHER = 16
"""Clients whose Gaussians are drawn at once, where only their sum is wanted."""

WORTH_THREADS = 1 << 18
"""Numbers below which starting threads costs more than it saves."""


@dataclass(frozen=True)
class SimulatedNoise:
    """Noise of simulated clients, a pure function of (key, client, round, dim, device type).

    Byzantine clients share secrets like everyone else, so the joint law is over all n `clients` whoever is
    asked for. Clients stepped one by one get the very numbers they get all at once. On a GPU one generator a
    round draws for all: a launch for each of a hundred clients takes longer than their numbers.

    >>> noise = SimulatedNoise(Key(1), clients=5)
    >>> law, cpu = NoiseLaw(sigma_ind=0.0, sigma_cor=1.0), torch.device("cpu")
    >>> together = noise.draw(law, (0, 1, 2, 3, 4), dim=8, round_=3, device=cpu)
    >>> alone = noise.draw(law, (2,), dim=8, round_=3, device=cpu)
    >>> bool(torch.equal(together[2], alone[0])), bool(together.sum(0).abs().max() < 1e-5)
    (True, True)
    """

    key: Key
    clients: int
    neighbours: int | None = None
    """With how many others each client shares secrets; None: with all."""
    members: tuple[int, ...] | None = None
    """Who shares secrets; None: all clients."""
    scales: tuple[float, ...] = ()
    """What every client's message counts in the sum in which noise cancels; (): all alike."""
    _means: dict[tuple[int, int, str], Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def sharing(self) -> Sequence[int]:
        """The clients among whom noise cancels."""
        return range(self.clients) if self.members is None else self.members

    def among(self, members: tuple[int, ...]) -> SimulatedNoise:
        """Return the noise once secrets are shared among `members` alone.

        >>> some = SimulatedNoise(Key(1), clients=5).among((0, 2, 4))
        >>> drawn = some.draw(NoiseLaw(sigma_cor=1.0), (0, 2, 4), 8, 3, torch.device("cpu"))
        >>> bool(drawn.sum(0).abs().max() < 1e-5)
        True
        """
        if tuple(self.sharing) == members:
            return self
        return SimulatedNoise(self.key, self.clients, self.neighbours, members, self.scales)

    def _times(self, ids: tuple[int, ...], device: torch.device) -> Tensor | float:
        """Return the scales of some clients (k, 1); 1 where all are alike."""
        if not self.scales:
            return 1.0
        return torch.tensor([[self.scales[i]] for i in ids], dtype=torch.float64, device=device)

    def _weighed(
        self, law: NoiseLaw, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> Tensor:
        """Return noise (k, dim), float64, of which the part that pairs share cancels in the weighted sum."""
        parts = (("pairs", NoiseLaw(sigma_cor=law.sigma_cor)), ("own", NoiseLaw(law.sigma_ind)))
        shared, own = (
            replace(self, key=self.key.fold(part), scales=()).draw(one, ids, dim, round_, device).double()
            for part, one in parts
        )
        return own + shared / self._times(ids, device)

    def draw(
        self, law: NoiseLaw, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> Tensor:
        """Return the noise (k, dim) that clients `ids` add in round `round_`, float32."""
        sharing = self.sharing
        for client in ids:
            if client not in sharing:
                raise UserError(f"client {client} is not one of the {len(sharing)} simulated")
        if law.silent:
            return torch.zeros(len(ids), dim, device=device)
        if self.scales:
            return self._weighed(law, ids, dim, round_, device).float()
        pairs = self.neighbours is not None and self.neighbours < len(sharing) - 1
        out, mean = self._gaussians(ids, dim, round_, device, averaged=law.sigma_cor > 0 and not pairs)
        if mean is None:
            out.mul_(law.sigma_ind)
            return self._add_pairs(out, law.sigma_cor, ids, round_) if law.sigma_cor > 0 else out
        spread = math.sqrt(law.sigma_ind**2 + len(sharing) * law.sigma_cor**2)
        return torch.add(mean * (law.sigma_ind - spread), out, alpha=spread, out=out)

    def steps(
        self, law: NoiseLaw, step: float, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> Tensor:
        """Return the noise in whole steps of a grid, int64.

        Each client's whole noise is rounded, where a real node rounds every stream: what that leaves in the
        sum, a twelfth of g² a client, is a millionth of what the law itself leaves there.
        """
        if self.scales and not law.silent:
            drawn = self._weighed(law, ids, dim, round_, device) * self._times(ids, device)
        else:
            drawn = self.draw(law, ids, dim, round_, device).double()
        return drawn.div_(step).round_().to(torch.int64)

    def _gaussians(
        self, ids: tuple[int, ...], dim: int, round_: int, device: torch.device, averaged: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Draw z_i of the clients `ids` (k, dim); if `averaged` also return z̄ of all that share."""
        if self._fits(dim, device):
            everybody = self._at_once(dim, round_, device)
            return _rows(everybody, ids), _rows(everybody, self.sharing).mean(0) if averaged else None
        out = torch.empty(len(ids), dim, device=device)
        rows = dict(zip(ids, out, strict=True))
        if averaged:
            return out, self._fill_and_mean(rows, round_, out)
        self._fill(rows, round_)
        return out, None

    def _fits(self, dim: int, device: torch.device) -> bool:
        return device.type == "cuda" and self.clients * dim <= AT_ONCE

    def _at_once(self, dim: int, round_: int, device: torch.device) -> Tensor:
        """Draw z (n, dim) of all clients in one launch."""
        generator = self.key.fold("noise", round_, "clients").torch(device)
        return torch.randn(self.clients, dim, generator=generator, device=device)

    def _add_pairs(self, out: Tensor, sigma: float, ids: tuple[int, ...], round_: int) -> Tensor:
        """Add each pair's Gaussian to the row of its smaller end and take it off that of the larger."""
        rows = dict(zip(ids, out, strict=True))
        pairs = {
            (min(client, other), max(client, other))
            for client in ids
            for other in partners(client, self.sharing, self.neighbours)
        }
        drawn = torch.empty_like(out[0])
        for low, high in sorted(pairs):
            generator = self.key.fold("noise", round_, "pair", low, high).torch(out.device)
            torch.randn(drawn.shape, generator=generator, out=drawn, device=out.device)
            for client, sign in ((low, sigma), (high, -sigma)):
                if client in rows:
                    rows[client].add_(drawn, alpha=sign)
        return out

    def _fill_and_mean(self, rows: Mapping[int, Tensor], round_: int, like: Tensor) -> Tensor:
        """Draw z_i into the given rows and return z̄ over all clients, added up in their order.

        The last round's mean is remembered: clients stepped one by one then cost O(nd) together.
        """
        key = (like.shape[1], round_, str(like.device))
        if key in self._means:
            self._fill(rows, round_)
            return self._means[key]
        mean = like.new_zeros(like.shape[1])
        sharing = self.sharing
        scratch = like.new_empty(min(TOGETHER, len(sharing)), like.shape[1])
        for first in range(0, len(sharing), TOGETHER):
            some = sharing[first : first + TOGETHER]
            drawn = {client: rows.get(client, scratch[place]) for place, client in enumerate(some)}
            self._fill(drawn, round_)
            for row in drawn.values():
                mean += row
        self._means.clear()
        self._means[key] = mean / len(sharing)
        return self._means[key]

    def _fill(self, rows: Mapping[int, Tensor], round_: int) -> None:
        """Draw z_i of each client into its row; on the CPU in parallel, for a row's draw is one thread's."""

        def fill(client: int) -> None:
            row = rows[client]
            generator = self.key.fold("noise", round_, "client", client).torch(row.device)
            torch.randn(row.shape, generator=generator, out=row, device=row.device)

        threads = torch.get_num_threads()
        small = sum(row.numel() for row in rows.values()) < WORTH_THREADS
        if threads == 1 or small or any(row.is_cuda for row in rows.values()):
            for client in rows:
                fill(client)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, rows))


def _rows(everybody: Tensor, ids: Sequence[int]) -> Tensor:
    """Return some rows: a view where they are the first ones, as honest clients usually are."""
    if tuple(ids) == tuple(range(len(ids))):
        return everybody[: len(ids)]
    return everybody[list(ids)]


class Noiseless:
    """A source of no noise at all: what clients would send if nothing were hidden."""

    def draw(
        self, law: NoiseLaw, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> Tensor:
        """Return zeros (k, dim)."""
        return torch.zeros(len(ids), dim, device=device)

    def steps(
        self, law: NoiseLaw, step: float, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> Tensor:
        """Return zeros (k, dim), int64."""
        return torch.zeros(len(ids), dim, dtype=torch.int64, device=device)
