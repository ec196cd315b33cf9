"""Public weights of clients: what may be said, how heavy f of them may be, and what is left of sizes then.

W is the weight of the f heaviest clients: liars, whoever they are, weigh no more. Coefficients κ of weighted
rules are those of equal weights with W in place of f/n (`docs/concepts/weights.md`), and most grow like

    W (1 − W) / (1 − 2W)² = (1/(1 − 2W)² − 1) / 4,

so a cap on W bounds what weights cost in robustness. A cap on the ratio of the largest to the smallest bounds
what they cost small sites: noise that cancels in the weighted sum grows with one over a site's weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trilemma.aggregation.passes.gram import heaviest
from trilemma.base.errors import UserError

RATIO = 10.0
"""How many times as heavy as the lightest client the heaviest may be, where nothing else is said."""


def normalised(weights: Sequence[float]) -> tuple[float, ...]:
    """Return weights that sum to 1; () where all are alike, for then they say nothing.

    >>> normalised([300, 100]), normalised([2, 2, 2])
    ((0.75, 0.25), ())
    >>> normalised([0.5, -0.5])
    Traceback (most recent call last):
    trilemma.base.errors.UserError: weight -0.5 of client 1: allowed are finite numbers above 0
    """
    for client, weight in enumerate(weights):
        if not 0 < weight < math.inf:
            raise UserError(f"weight {weight} of client {client}: allowed are finite numbers above 0")
    if len(set(weights)) < 2:
        return ()
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


def usual_cap(f: int, clients: int) -> float:
    """Return the largest W for which κ_w is at most twice the κ of equal weights.

    >>> round(usual_cap(1, 4), 3), round(usual_cap(3, 15), 3)
    (0.311, 0.266)
    """
    equal = 1 / (1 - 2 * f / clients) ** 2
    return (1 - 1 / math.sqrt(2 * equal - 1)) / 2


def check(
    weights: Sequence[float], clients: int, f: int, cap: float | None = None, ratio: float = RATIO
) -> tuple[float, ...]:
    """Return the weights of a federation, normalised, or say what is wrong with them.

    They are whole numbers, for instance sizes, or shares that sum to 1.

    >>> check([0.3, 0.25, 0.25, 0.2], clients=4, f=1)
    (0.3, 0.25, 0.25, 0.2)
    >>> check([303, 261, 46, 130], clients=4, f=1)
    Traceback (most recent call last):
    trilemma.base.errors.UserError: weights: the f = 1 heaviest of 4 clients weigh W = 0.409, and the cap is
    0.311, where κ is twice that of equal weights; allowed, for instance: [144, 144, 46, 130], ...
    """
    if len(weights) != clients:
        raise UserError(f"{len(weights)} weights for {clients} clients; allowed: one for each")
    shares = normalised(weights)
    whole = all(float(weight).is_integer() for weight in weights)
    if not whole and abs(math.fsum(weights) - 1) > 1e-6:
        raise UserError(
            f"weights sum to {math.fsum(weights):g}; allowed: shares that sum to 1, or whole numbers (sizes)"
        )
    if not shares:
        return ()
    most = usual_cap(f, clients) if cap is None else cap
    if not most < 0.5:
        raise UserError(f"cap = {most:g}: liars of half the weight cannot be told from honest clients; < 0.5")
    heavy, apart = heaviest(np.array(shares), f), max(shares) / min(shares)
    if heavy <= most and apart <= ratio:
        return shares
    given = [round(weight) if whole else round(1000 * weight / max(weights)) for weight in weights]
    found = capped(given, f, most, ratio)
    instead = f"; allowed, for instance: {found}" if found else ""
    if heavy > most:
        usual = ", where κ is twice that of equal weights" if cap is None else ""
        raise UserError(
            f"weights: the f = {f} heaviest of {clients} clients weigh W = {heavy:.3g}, and the cap is "
            f"{most:.3g}{usual}{instead}, or another [federation] cap"
        )
    raise UserError(
        f"weights: the heaviest client weighs {apart:.3g} times as much as the lightest, whose noise would "
        f"be as many times larger, and the limit is {ratio:g}{instead}, or another [federation] ratio"
    )


def capped(sizes: Sequence[int], f: int, cap: float, ratio: float) -> list[int]:
    """Return whole sizes cut down to a largest and up to a smallest, so that both caps hold; [] if none do.

    >>> capped([303, 261, 46, 130], 1, cap=0.35, ratio=4)
    [214, 214, 54, 130]
    """
    for top in range(max(sizes), 0, -1):
        found = [min(top, max(size, math.ceil(top / ratio))) for size in sizes]
        if heaviest(np.array(found), f) <= cap * sum(found):
            return found
    return []
