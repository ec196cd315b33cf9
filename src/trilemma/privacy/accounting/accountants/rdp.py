"""The Rényi accountant: divergences add up over rounds and are converted once, at the best order.

Formulas: `trilemma.privacy.accounting.rdp`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from trilemma.privacy.accounting.accountants.base import Accountant, Array, accountant
from trilemma.privacy.accounting.accountants.search import least_multiplier
from trilemma.privacy.accounting.rdp import (
    GAUSSIAN_ORDERS,
    SAMPLED_ORDERS,
    rdp_delta,
    rdp_epsilon,
    round_rdp,
)
from trilemma.privacy.mechanism import History, Mechanism


@accountant("rdp")
@dataclass(frozen=True)
class Rdp(Accountant):
    """Rényi divergences: quick, for every sampling scheme.

    >>> round(Rdp("rdp").epsilon(((Mechanism(1.27128345), 30),), 1e-4), 1)
    26.4
    """

    assumes: ClassVar[str] = "every release"
    rank: ClassVar[int] = 2
    quick: ClassVar[bool] = True

    def applies(self, rounds: History) -> bool:
        """Tell that it always applies."""
        return True

    def _epsilon(self, rounds: History, delta: float) -> float:
        return float(rdp_epsilon(_rho(rounds), _orders(rounds), delta))

    def _delta(self, rounds: History, epsilon: float) -> float:
        return rdp_delta(_rho(rounds), _orders(rounds), epsilon)

    def _multiplier(
        self, epsilon: float, delta: float, rounds: int, like: Mechanism, beside: History
    ) -> float:
        return least_multiplier(_near_best_orders(like, rounds, epsilon, delta, beside), epsilon, like.z)


def _orders(rounds: History) -> Array:
    return GAUSSIAN_ORDERS if all(one.gaussian for one, _ in rounds) else np.asarray(SAMPLED_ORDERS)


def _rho(rounds: History) -> Array:
    orders = tuple(_orders(rounds))
    return np.asarray(np.sum([count * round_rdp(one, orders) for one, count in rounds], axis=0))


def _near_best_orders(
    like: Mechanism, rounds: int, epsilon: float, delta: float, beside: History = ()
) -> Callable[[float], float]:
    """Return an RDP cost that tries only orders near the best one at `epsilon`: valid, and much faster."""
    orders = _orders(((like, rounds),))
    if like.sampling.scheme == "without-replacement" and like.adjacency == "replace":
        orders = orders[orders % 1 == 0]  # the others have no bound of their own

    def spent(z: float, orders: Array) -> Array:
        rho = rounds * round_rdp(replace(like, z=z), tuple(orders))
        return np.asarray(sum((count * round_rdp(one, tuple(orders)) for one, count in beside), start=rho))

    def cost(z: float, orders: Array = orders) -> float:
        return float(rdp_epsilon(spent(z, orders), orders, delta))

    if like.gaussian:
        return cost
    tried, best = np.concatenate((orders[::10], orders[-4:])), -len(orders)
    for _ in range(8):
        z = least_multiplier(partial(cost, orders=tried), epsilon, like.z, 1e-2)
        rho = spent(z, orders[::4])
        last, best = best, 4 * int(np.argmin(rho - np.log(delta) / (orders[::4] - 1)))
        if abs(best - last) <= 4:
            break
        tried = orders[max(0, best - 8) : best + 9]
    return partial(cost, orders=tried)
