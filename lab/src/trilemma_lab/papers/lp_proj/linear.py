"""Federated linear regression, small enough to be drawn many times: what every method's models lose.

y_k = Ξ_k w_k + z_k, z_k ~ N(0, σ² I_n), Ξ_k fixed (n × D), f_k(x) = ‖Ξ_k x − y_k‖²/(2n), A_k = Ξ_kᵀΞ_k/n and
ŵ_k the least-squares solution of client k. Here A_k = b I and P has orthonormal rows. Everything is numpy in
double precision, written after the formulas and not after the algorithms.

Reference: Lin, Han, Li, Zhang, NeurIPS 2022, appendix B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Attack = Literal["same-value", "gaussian", "sign_flip"]


@dataclass(frozen=True)
class LinearFederation:
    """True models `w` (N, D), n examples each, A_k = b I, noise σ, penalty λ, P (d, D) orthonormal."""

    w: np.ndarray
    n: int
    b: float
    sigma: float
    lam: float
    p: np.ndarray

    @property
    def clients(self) -> int:
        """N."""
        return len(self.w)

    @property
    def full(self) -> int:
        """D."""
        return int(self.w.shape[1])

    @property
    def sub(self) -> int:
        """d, the projected dimension."""
        return len(self.p)

    @property
    def s2(self) -> float:
        """The variance of a coordinate of ŵ_k."""
        return self.sigma**2 / (self.b * self.n)

    @property
    def shrink(self) -> float:
        """λ/(b+λ): how far a personal model goes to meet the common one."""
        return self.lam / (self.b + self.lam)


@dataclass(frozen=True)
class LinearResults:
    """One number, or one per client, for each method."""

    local: np.ndarray | float
    fedavg: np.ndarray | float
    pfedme: np.ndarray | float
    lp_proj: np.ndarray | float


def simulate(
    f: LinearFederation,
    rng: np.random.Generator,
    attack: Attack | None = None,
    tau: float = 0.0,
    liars: tuple[int, ...] = (),
) -> LinearResults:
    """Draw ŵ_k and the liars' messages once; return every benign client's loss σ²/2 + (b/2)‖x − w_k‖²."""
    what = f.w + np.sqrt(f.s2) * rng.standard_normal(f.w.shape)
    good = [k for k in range(f.clients) if k not in liars]

    def mean(messages: np.ndarray) -> np.ndarray:
        sent = messages.copy()
        for k in liars:
            match attack:
                case "same-value":
                    sent[k] = tau * rng.standard_normal()
                case "gaussian":
                    sent[k] = tau * rng.standard_normal(messages.shape[1])
                case "sign_flip":
                    sent[k] = -abs(tau * rng.standard_normal()) * messages[k]
        return np.asarray(sent.mean(0))

    def loss(x: np.ndarray) -> np.ndarray:
        return np.asarray(f.sigma**2 / 2 + f.b / 2 * np.square(x - f.w)[good].sum(1))

    whole, part = mean(what), mean(what @ f.p.T)
    me = what + f.shrink * (whole - what)
    l2 = what + f.shrink * (part - what @ f.p.T) @ f.p
    return LinearResults(loss(what), loss(np.broadcast_to(whole, f.w.shape)), loss(me), loss(l2))
