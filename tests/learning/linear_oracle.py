"""Federated linear regression solved exactly: what every method must find, and how well it must do.

A_k and ŵ_k are as in `trilemma_lab.papers.lp_proj.linear`. From `losses` on, A_k = b I and P has orthonormal
rows. Everything is numpy in double precision, written after the formulas and not after the algorithms, whose
tests hold them against it. Slips of the appendix are mended: E var_k below, and what is summed over whom.

Reference: Lin, Han, Li, Zhang, NeurIPS 2022, appendix B.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trilemma_lab.papers.lp_proj.linear import Attack, LinearFederation, LinearResults, simulate

__all__ = ["Attack", "LinearFederation", "LinearResults", "simulate"]


# Solutions for any design.


def average(a: np.ndarray, what: np.ndarray) -> np.ndarray:
    """FedAvg's and Ditto's global model: (Σ A_k)⁻¹ Σ A_k ŵ_k."""
    return np.linalg.solve(a.sum(0), np.einsum("kij,kj->i", a, what))


def personal(a: np.ndarray, what: np.ndarray, w: np.ndarray, lam: float, p: np.ndarray) -> np.ndarray:
    """x_k(w) = (A_k + λPᵀP)⁻¹ (A_k ŵ_k + λPᵀw); P = I for pFedMe and Ditto."""
    return np.stack(
        [np.linalg.solve(ak + lam * p.T @ p, ak @ wk + lam * p.T @ w) for ak, wk in zip(a, what, strict=True)]
    )


def common(a: np.ndarray, what: np.ndarray, lam: float, p: np.ndarray) -> np.ndarray:
    """lp-proj-2's w for any P; pFedMe's global model for P = I."""
    d = p.shape[0]
    left, right = np.zeros((d, d)), np.zeros(d)
    for ak, wk in zip(a, what, strict=True):
        inverse = np.linalg.inv(ak + lam * p.T @ p)
        left += np.eye(d) - lam * p @ inverse @ p.T
        right += p @ inverse @ ak @ wk
    return np.linalg.solve(left, right)


# Losses and fairness with A_k = b I.


def distances(f: LinearFederation, centre: np.ndarray) -> np.ndarray:
    """Squared distances of the true models to a centre (N,)."""
    return np.asarray(np.square(f.w - centre).sum(1))


def projected_distances(f: LinearFederation, centre: np.ndarray) -> np.ndarray:
    """The same after projection."""
    return np.asarray(np.square((f.w - centre) @ f.p.T).sum(1))


def losses(f: LinearFederation) -> LinearResults:
    """Expected test loss of every client without attack."""
    base, noise, big = f.sigma**2 / 2, f.sigma**2 / (2 * f.n), f.clients
    centre = f.w.mean(0)
    h, h1 = distances(f, centre), projected_distances(f, centre)
    g = (f.b**2 + 2 * f.b * f.lam / big + f.lam**2 / big) / (f.b + f.lam) ** 2
    pull = f.b * f.shrink**2 / 2
    return LinearResults(
        local=np.full(big, base + noise * f.full),
        fedavg=base + noise * f.full / big + f.b / 2 * h,
        pfedme=base + g * noise * f.full + pull * h,
        lp_proj=base + g * noise * f.sub + noise * (f.full - f.sub) + pull * h1,
    )


def best_lambdas(f: LinearFederation) -> tuple[float, float]:
    """The λ that minimises the mean test loss of pFedMe and of lp-proj-2."""
    centre = f.w.mean(0)
    common_part = (1 - 1 / f.clients) * f.sigma**2 / f.n
    return (
        float(common_part * f.full / distances(f, centre).mean()),
        float(common_part * f.sub / projected_distances(f, centre).mean()),
    )


def fairness(f: LinearFederation) -> LinearResults:
    """Population variance over clients of the expected test loss."""
    centre = f.w.mean(0)
    h, h1 = distances(f, centre).var(), projected_distances(f, centre).var()
    scale = f.b**2 / 4
    return LinearResults(0.0, scale * h, scale * f.shrink**4 * h, scale * f.shrink**4 * h1)


def expected_fairness(f: LinearFederation, spread: np.ndarray) -> LinearResults:
    """The same in expectation over w_k ~ N(μ, spread): E var_k(h_k) = 2 (1−1/N)(1−2/N) Σ_ij spread_ij²."""
    count = (1 - 1 / f.clients) * (1 - 2 / f.clients)
    whole = f.b**2 / 2 * count * np.square(spread).sum()
    part = f.b**2 / 2 * count * np.square(f.p @ spread @ f.p.T).sum()
    return LinearResults(0.0, whole, f.shrink**4 * whole, f.shrink**4 * part)


@dataclass(frozen=True)
class _Corrupted:
    """Benign mean distances to the expected server mean, the liars' total variance; both also projected."""

    h: float
    h1: float
    tr: float
    tr1: float
    benign: int
    liars: int


def _corrupted(f: LinearFederation, attack: Attack, tau: float, liars: list[int]) -> _Corrupted:
    """Return what an attack does to the mean of all models: where it is centred, and how much it varies."""
    good = [k for k in range(f.clients) if k not in liars]
    bad, count = f.w[liars], len(liars)
    if attack == "sign_flip":
        centre = (f.w[good].sum(0) - tau * np.sqrt(2 / np.pi) * bad.sum(0)) / f.clients
        waver = (np.pi - 2) / np.pi * tau**2
        tr = waver * np.square(bad).sum() + count * tau**2 * f.s2 * f.full
        tr1 = waver * np.square(bad @ f.p.T).sum() + count * tau**2 * f.s2 * f.sub
    else:
        centre = f.w[good].sum(0) / f.clients
        tr, tr1 = count * tau**2 * f.full, count * tau**2 * f.sub
    return _Corrupted(
        h=float(distances(f, centre)[good].mean()),
        h1=float(projected_distances(f, centre)[good].mean()),
        tr=float(tr),
        tr1=float(tr1),
        benign=len(good),
        liars=count,
    )


def attacked_losses(f: LinearFederation, attack: Attack, tau: float, liars: list[int]) -> LinearResults:
    """Mean expected test loss of the benign clients after one round of infinitely many local steps."""
    c, big = _corrupted(f, attack, tau, liars), f.clients
    base, noise = f.sigma**2 / 2, f.sigma**2 / (2 * f.n)
    u = f.b**2 + 2 * f.b * f.lam / big + c.benign * f.lam**2 / big**2
    pull, down = f.b * f.shrink**2 / 2, (f.b + f.lam) ** 2
    return LinearResults(
        local=base + noise * f.full,
        fedavg=base + f.b / (2 * big**2) * (c.benign * f.s2 * f.full + c.tr) + f.b / 2 * c.h,
        pfedme=base + f.b / 2 * (u * f.s2 * f.full + f.lam**2 * c.tr / big**2) / down + pull * c.h,
        lp_proj=base
        + f.b / 2 * (u * f.s2 * f.sub + f.lam**2 * c.tr1 / big**2) / down
        + noise * (f.full - f.sub)
        + pull * c.h1,
    )


def best_lambdas_attacked(
    f: LinearFederation, attack: Attack, tau: float, liars: list[int]
) -> tuple[float, float]:
    """The λ that minimises those losses for pFedMe and lp-proj-2."""
    c, big = _corrupted(f, attack, tau, liars), f.clients
    common_part = (1 - 1 / big) * f.sigma**2 / f.n
    me = common_part * f.full / (c.h + (c.tr - c.liars * f.full * f.s2) / big**2)
    l2 = common_part * f.sub / (c.h1 + (c.tr1 - c.liars * f.sub * f.s2) / big**2)
    return float(me), float(l2)
