"""Messages to aggregate: honest rows around a mean, Byzantine ones around another."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trilemma.testing.adversary import Array

N, F, D = 15, 3, 24
"""n ≥ 4f + 3, and f = 3 leaves Bulyan's last Krum two neighbours, hence no ties."""


def attacked(rng: np.random.Generator, n: int = N, f: int = F, d: int = D) -> Array:
    """Return honest rows around a mean and Byzantine ones (the last f) around another."""
    X = rng.standard_normal((n, d)) * rng.uniform(0.5, 2, d) + rng.standard_normal(d)
    X[n - f :] = X[n - f :] * 0.5 + 3
    return X


def sample(seed: int = 0, n: int = N, f: int = F, d: int = D) -> torch.Tensor:
    """Return attacked rows as a tensor."""
    return torch.from_numpy(attacked(np.random.default_rng(seed), n, f, d))


def spread(X: Array, honest: int = N - F) -> float:
    """Return the root mean square distance of the honest rows to their mean."""
    H = X[:honest]
    return float(np.sqrt(((H - H.mean(axis=0)) ** 2).sum(axis=1).mean()))


def float64(x: Any) -> Array:
    """Return a tensor or an array as numpy's float64."""
    return x.double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, np.float64)
