"""Noise of many clients from the secrets of a federation, to compare a simulation with it bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.privacy.noise.grid import step_for
from trilemma.privacy.secrets.noise import SecretNoise, _deviations, _own_stream, pair_stream
from trilemma.privacy.secrets.streams import add_gaussians
from trilemma.privacy.types import NoiseLaw


@dataclass(frozen=True)
class StackedSecretNoise:
    """The noise of several clients from the very secrets of a federation.

    `pairs[i, j]`, i < j, is the pair's key and `own[i]` client i's seed. Each pair's stream is drawn once.
    """

    pairs: Mapping[tuple[int, int], bytes] = field(repr=False)
    own: Mapping[int, bytes] = field(repr=False)

    @classmethod
    def of(cls, nodes: Iterable[SecretNoise]) -> StackedSecretNoise:
        """Collect the secrets of `nodes`; two nodes must hold the same key for their pair."""
        pairs: dict[tuple[int, int], bytes] = {}
        own: dict[int, bytes] = {}
        for node in nodes:
            for partner, key in node.pairs.items():
                ends = (min(node.index, partner), max(node.index, partner))
                if pairs.setdefault(ends, key) != key:
                    raise UserError(f"clients {ends[0]} and {ends[1]} hold different keys for their pair")
            if node.own is not None:
                own[node.index] = node.own
        return cls(pairs, own)

    def draw(
        self, law: NoiseLaw, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> Tensor:
        """Return the noise (k, dim) that clients `ids` add in round `round_`, float32."""
        step = 1.0 if law.silent else step_for(law)
        return (self.steps(law, step, ids, dim, round_, device).double() * step).float()

    def steps(
        self, law: NoiseLaw, step: float, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> Tensor:
        """Return the noise (k, dim) that clients `ids` add in round `round_`, in steps, int64."""
        if law.silent:
            return torch.zeros(len(ids), dim, dtype=torch.int64, device=device)
        row = {client: place for place, client in enumerate(ids)}
        total = np.zeros((len(ids), dim))
        most = max(Counter(chain.from_iterable(self.pairs)).values(), default=0)
        paired, own = _deviations(law, step, most)
        if law.sigma_cor > 0:
            stream = np.empty(dim)
            for (low, high), key in self.pairs.items():
                if low in row or high in row:
                    stream[:] = 0
                    add_gaussians(pair_stream(key, round_, dim).fill, stream, paired)
                    if low in row:
                        total[row[low]] += stream
                    if high in row:
                        total[row[high]] -= stream
        if law.sigma_ind > 0:
            for client, place in row.items():
                if client not in self.own:
                    raise UserError(
                        f"client {client}'s independent noise has no seed: it cannot be reproduced"
                    )
                fill = _own_stream(self.own[client], round_, dim).fill
                add_gaussians(fill, total[place], own)
        return torch.from_numpy(total.astype(np.int64)).to(device)
