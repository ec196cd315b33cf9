"""Privacy-loss distributions: the tightest accounting of sampled mechanisms, composed by dp-accounting.

What is handed over, and under which relation (`dp_accounting.NeighboringRelation`), with z the noise
multiplier against a replacement's move 2C/b:

* no sampling: `from_gaussian_mechanism(z / √T)`;
* Poisson sampling, add/remove: ADD_OR_REMOVE_ONE at the noise over one example's share C/b, that is 2z;
* Poisson sampling, the papers' convention: ADD_OR_REMOVE_ONE at z;
* Poisson sampling, replace: REPLACE_ONE at 2z. The pair is (1−r)N(0) + rN(±C/b); see
  `trilemma.privacy.accounting.rdp` for why no other shares ‖x‖, ‖x'‖ ≤ C/b are worse;
* without replacement, replace: dp-accounting has no such event. The hockey-stick profile of one round is
  δ(ε) = r G(t), e^ε = 1 + r(e^t − 1), with G that of the Gaussian mechanism (Balle, Barthe, Gaboardi 2018,
  Theorem 11). Replacement is symmetric, so δ(−ε) = 1 − e^{−ε} + e^{−ε}δ(ε) continues it; a pair of
  distributions with a dominating profile dominates under composition too (Zhu, Dong, Wang 2022), and
  connecting the dots of the profile on a grid gives such a pair (Doroshenko et al. 2022).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trilemma.privacy.accounting.gaussian import gaussian_delta
from trilemma.privacy.mechanism import History, Mechanism
from trilemma.privacy.types import AccountingFailure

_TAIL = -50.0  # log of the probability that may be cut off, counted as certain disclosure
_POINTS = 300_000
_FAR = 600.0  # a loss of one round whose exponential, over a rate, is near the end of floats


def pld_epsilon(rounds: History, delta: float, coarser: float = 1.0) -> float:
    """Return ε of the mechanisms `rounds`, each as often as its count says.

    `coarser` widens the grid: faster, and never smaller than the truth either.

    >>> from trilemma.privacy.types import Sampling
    >>> one = Mechanism(0.5, Sampling("poisson", 100 / 6000), "published")
    >>> round(pld_epsilon(((one, 400),), 1e-4), 1)
    11.5
    """
    return _read(rounds, lambda pld: pld.get_epsilon_for_delta(delta), coarser)


def pld_curve(past: Sequence[History], delta: float, interval: float) -> NDArray[np.float64]:
    """Return ε after each history of `past`, each of which goes on from the one before.

    `interval` is the grid's, unless the grid of `pld_epsilon` is wider.

    >>> from trilemma.privacy.types import Sampling
    >>> one = Mechanism(0.5, Sampling("poisson", 100 / 6000), "published")
    >>> pld_curve([((one, 1),), ((one, 400),)], 1e-4, 0.005).round(1).tolist()
    [2.4, 11.5]
    """
    width = (
        max(interval, min((_interval(one, count) for one, count in past[-1]), default=0.0)) if past else 0.0
    )
    laid_out = functools.cache(_distribution)

    def epsilons() -> Iterator[float]:
        done, whole = Counter[Mechanism](), None
        for history in past:
            counts = Counter[Mechanism]()
            for one, count in history:
                counts[one] += count
            for one, count in (counts - done).items():
                added = laid_out(one, count, width)
                # What a step cuts off counts as certain disclosure: a millionth of δ in all of them.
                whole = added if whole is None else whole.compose(added, 1e-6 * delta / len(past))
            done = counts
            yield 0.0 if whole is None else whole.get_epsilon_for_delta(delta)

    return np.array(_sound(lambda: list(epsilons())))


def pld_delta(rounds: History, epsilon: float) -> float:
    """Return δ of the mechanisms `rounds` at ε.

    >>> from trilemma.privacy.types import Sampling
    >>> one = Mechanism(0.5, Sampling("poisson", 100 / 6000), "published")
    >>> round(pld_delta(((one, 400),), 11.5), 5)
    0.0001
    """
    return min(1.0, _read(rounds, lambda pld: pld.get_delta_for_epsilon(epsilon)))


def _read(rounds: History, figure: Callable[[Any], float], coarser: float = 1.0) -> float:
    return float(_sound(lambda: [figure(_composed(rounds, coarser))])[0])


def _sound(question: Callable[[], list[float]]) -> list[float]:
    """Return what dp-accounting answers; where it fails, or answers nonsense, that is a failure of ours."""
    try:
        values = question()
    except (ImportError, ArithmeticError, MemoryError, ValueError, IndexError) as error:
        raise AccountingFailure(f"{type(error).__name__}: {error}") from error
    for value in values:
        if not value >= 0:
            raise AccountingFailure(f"got {value}")
    return values


@functools.lru_cache(maxsize=8)  # a ledger asks for the same again when it is opened the next time
def _composed(rounds: History, coarser: float) -> Any:
    interval = coarser * min(_interval(m, count) for m, count in rounds)
    parts = [_distribution(mechanism, count, interval) for mechanism, count in rounds]
    return functools.reduce(lambda all_, part: all_.compose(part), parts)


def _interval(m: Mechanism, count: int) -> float:
    """Return a grid fine enough for the round's spread r/z of the loss, and coarse enough for its range.

    Gaussian rounds are laid out as one of their composition, whose range counts.

    >>> one = Mechanism(0.5)
    >>> _interval(one, 1), round(_interval(one, 2820), 3)
    (0.001, 0.022)
    """
    z = m.effective_z
    laid_out = z / math.sqrt(count) if m.gaussian and count else z
    span = 0.5 / laid_out**2 + 10 / laid_out
    return max(min(1e-3, 0.01 * m.sampling.rate / z), span / _POINTS)


def _distribution(m: Mechanism, count: int, interval: float) -> Any:
    import dp_accounting
    from dp_accounting.pld import privacy_loss_distribution as losses

    z = m.effective_z
    if m.gaussian:
        return losses.from_gaussian_mechanism(z / math.sqrt(count), value_discretization_interval=interval)
    if m.adjacency == "replace" and m.sampling.scheme == "without-replacement":
        return _without_replacement(m, interval).self_compose(count)
    relation = dp_accounting.NeighboringRelation
    return losses.from_gaussian_mechanism(
        2 * z if m.adjacency == "replace" else z,
        value_discretization_interval=interval,
        sampling_prob=m.sampling.rate,
        neighboring_relation=relation.REPLACE_ONE if m.adjacency == "replace" else relation.ADD_OR_REMOVE_ONE,
    ).self_compose(count)


def _without_replacement(m: Mechanism, interval: float) -> Any:
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as losses

    # Beyond this loss the Gaussian of multiplier z keeps less than e^_TAIL.
    widest = 0.5 / m.z**2 + math.sqrt(-2 * _TAIL) / m.z
    largest = math.log1p(m.sampling.rate * math.expm1(widest)) if widest < 700 else widest
    steps = np.arange(math.ceil(largest / interval) + 1)
    deltas = without_replacement_profile(m, interval * steps.astype(float))
    upper = np.minimum.accumulate(deltas)
    lower = -np.expm1(-steps * interval) + np.exp(-steps * interval) * upper
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots(
        interval, np.concatenate((-steps[:0:-1], steps)), np.concatenate((lower[:0:-1], upper))
    )
    return losses.PrivacyLossDistribution(pmf)


def without_replacement_profile(m: Mechanism, epsilon: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return δ(ε), ε ≥ 0, of one round of `m` when an example is replaced.

    >>> from trilemma.privacy.types import Sampling
    >>> m = Mechanism(1.0, Sampling("without-replacement", 0.01))
    >>> without_replacement_profile(m, np.array([0.0])).round(6).tolist()
    [0.003829]
    """
    rate = m.sampling.rate
    near = np.log1p(np.expm1(np.minimum(epsilon, _FAR)) / rate)
    whole = np.where(epsilon < _FAR, near, epsilon - math.log(rate))  # e^−ε is nothing there, e^ε no float
    return rate * gaussian_delta(1 / m.z, whole)
