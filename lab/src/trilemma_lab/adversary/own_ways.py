"""Lies that differ from liar to liar: shifts that add up to one, and noise whose numbers change places.

    apart     liar j of r adds s (v + √r (w_j − w̄)), where w_1 … w_r are orthonormal, and orthogonal to v.
              The second parts add up to nothing, so all liars together push by s v each, as if they shifted
              alike. But no two shifts have an inner product: |v|² − 1 = 0. Each is √r times as long.
    ranked    liar j sends its own numbers in another order: at the places where |v| is largest, they stand in
              the order of v's. Length and distribution of the message stay what they were, up to
              rounding, and by the rearrangement inequality nothing that keeps them points further along v.

What a test of pairs sees of the first, and a test of single messages of the second, is honest.

Reference: the tests that `ranked` passes are those of Xiang et al., "Practical differentially private and
Byzantine-resilient federated learning", SIGMOD 2023 (`noise-test`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trilemma.base.keys import Key

SHARES = tuple(4.0**-k for k in range(8))
"""The shares of a message's numbers that `ranked` lies put in another order."""


def apart(ways: Tensor, liars: int, key: Key) -> Tensor:
    """Return each liar's shift for unit directions `ways` (q, d): (q, r, d), r = `liars`.

    If there are too few dimensions for shifts without inner products, all liars shift alike.

    >>> shifts = apart(torch.eye(1, 5, dtype=torch.float64), 3, Key(0))[0]
    >>> (shifts @ shifts.T).round(decimals=6).abs().tolist()
    [[3.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 3.0]]
    >>> shifts.mean(0).round(decimals=6).abs().tolist()
    [1.0, 0.0, 0.0, 0.0, 0.0]
    """
    q, d = ways.shape
    alike = ways[:, None].expand(q, liars, d)
    if liars < 2 or d < q + liars:
        return alike
    # Drawn on the CPU, so that a key gives the same shifts on every device.
    drawn = torch.randn(liars, d, generator=key.torch(), dtype=ways.dtype).to(ways.device)
    basis = torch.linalg.qr(torch.cat([ways, drawn]).T)[0].T[q:]
    own: Tensor = math.sqrt(liars) * (basis - basis.mean(0))
    return alike + own


def ranked(own: Tensor, way: Tensor, share: float) -> Tensor:
    """Return messages `own` (r, d) with that share of their numbers in the order of `way` (d,).

    >>> ranked(torch.tensor([[3.0, -1.0, 2.0, 5.0]]), torch.tensor([0.5, -0.1, -0.6, 0.2]), 0.5).tolist()
    [[3.0, -1.0, 2.0, 5.0]]
    >>> ranked(torch.tensor([[3.0, -1.0, 2.0, 5.0]]), torch.tensor([0.5, -0.1, -0.6, 0.2]), 1.0).tolist()
    [[5.0, 2.0, -1.0, 3.0]]
    """
    count = min(own.shape[1], max(2, math.ceil(share * own.shape[1])))
    places = way.abs().argsort(descending=True, stable=True)[:count]
    rising = places[way[places].argsort(stable=True)]
    found = own.clone()
    found[:, rising] = own[:, places].sort(dim=1).values
    return found
