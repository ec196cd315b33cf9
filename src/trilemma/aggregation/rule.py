"""What a rule is, and the one way all of them run.

A rule looks at the geometry of the messages and decides: on weights, if it is geometric; on a mixing matrix
and a window of sorted values, if it ends coordinate by coordinate. The decision is then carried out on the
messages themselves, on all columns or on any part of them. In memory, streamed and sharded runs share this:

    geometry(X)  →  rule.decide(geometry, key)  →  decision.apply(X)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, overload

import numpy as np
import torch
from torch import Tensor

from trilemma.aggregation import columns, combine, inputs
from trilemma.aggregation import gram as gram_
from trilemma.aggregation.columns import Mixture, Window
from trilemma.aggregation.gram import Geometry
from trilemma.aggregation.types import Aggregate, Array, Criterion, Info, Numpy, Vectors, Weighing
from trilemma.errors import UserError
from trilemma.keys import Key

DEFAULT_KEY = Key(0, ("aggregation",))
"""The key of a rule that is called without one: the same draws in every call."""


@dataclass(frozen=True)
class Weighted:
    """A decision for fixed weights, the same in every column."""

    weights: Array
    scores: Array
    info: Info

    def apply(self, X: Tensor) -> Tensor:
        """Return the value on these columns."""
        return combine.weighted_sum(X, self.weights)


@dataclass(frozen=True)
class Columnwise:
    """A decision for a window of sorted values in each column of X[rows], or of mixture.A X[rows]."""

    rows: Any
    window: Window
    mixture: Mixture | None
    info: Info

    def apply(self, X: Tensor) -> columns.Columns:
        """Return the value on these columns, with sums of shares and squared distances."""
        return columns.window_means(X, self.rows, self.window, self.mixture)

    def totals(self, shares: Array, squares: Array, d: int) -> tuple[Array, Array]:
        """Return (weights, scores) of all clients from the sums over all d columns."""
        n = self.info.n
        weights, scores = np.zeros(n), np.full(n, np.inf)
        own = shares if self.mixture is None else self.mixture.A.T @ shares
        weights[self.rows] = own / d if d else 1.0 / len(self.rows)
        scores[self.rows] = np.sqrt(squares)
        return weights, scores


Decision = Weighted | Columnwise


@dataclass(frozen=True)
class Selection:
    """What a rule settles on that ends coordinate by coordinate: the window, after mixing by A."""

    window: Window
    A: Array | None


@dataclass(frozen=True)
class Step(ABC):
    """What rules and mixing steps have in common: f, parameters, and a name that says them."""

    f: int
    label: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not isinstance(self.f, int | np.integer) or isinstance(self.f, bool) or self.f < 0:
            raise UserError(
                f"{self.label}: f must be a whole number ≥ 0, the number of Byzantine clients; got {self.f!r}"
            )

    @property
    def name(self) -> str:
        """The name under which `parse` builds the same again, with the parameters that are not defaults."""
        said = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if field.name != "f"
            and field.default is not MISSING
            and getattr(self, field.name) != field.default
        ]
        return f"{self.label}({','.join(said)})" if said else self.label


@dataclass(frozen=True)
class Rule(Step):
    """A robust aggregation rule: call it on messages (n, d).

    `f` is how many of the n clients may be Byzantine. Rows that are not finite are Byzantine: they get weight
    0 and f is reduced for the rest. `geometric` tells whether the value is a weighted sum with weights that
    depend on the Gram matrix only; then `weights_from_gram` exists.
    """

    geometric: ClassVar[bool] = False
    criterion: ClassVar[Criterion] = "trace"

    @abstractmethod
    def kappa(self, n: int) -> float | None:
        """Return a proven κ: ‖value − mean_S‖² ≤ κ·λ_max(Cov_S) for every S of n − f messages.

        With `criterion` "trace" it is the trace of Cov_S instead of λ_max. None where no bound is known.
        """

    @abstractmethod
    def settle(self, geometry: Geometry, f: int, key: Key) -> Weighing | Selection:
        """Settle on weights, or on a window and a mixing matrix, for messages that are all finite."""

    @property
    def needs_geometry(self) -> bool:
        """Whether distances between messages matter, and not only which messages are finite."""
        return True

    def check(self, n: int) -> None:
        """Raise a `UserError` unless the rule is defined for n messages."""
        if 2 * self.f >= n:
            raise UserError(f"{self.name} needs 2f < n; got f = {self.f}, n = {n}")

    @overload
    def __call__(self, X: Tensor, key: Key | None = None) -> Aggregate[Tensor]: ...
    @overload
    def __call__(self, X: Numpy, key: Key | None = None) -> Aggregate[Numpy]: ...
    @overload
    def __call__(self, X: Sequence[Tensor], key: Key | None = None) -> Aggregate[Tensor]: ...
    @overload
    def __call__(self, X: Sequence[Numpy], key: Key | None = None) -> Aggregate[Numpy]: ...
    def __call__(self, X: Vectors, key: Key | None = None) -> Aggregate[Any]:
        """Aggregate the messages. `key` is for steps that draw; without it, every call draws the same."""
        given = inputs.messages(X)
        self.check(len(given.X))
        if self.needs_geometry:
            return self._carry_out(given, self.decide(gram_.of(given.X), key))
        # Only finiteness matters: suppose all rows are finite and look again if the outcome disproves it.
        decision = self.decide(featureless(np.ones(len(given.X), bool)), key)
        result = self._carry_out(given, decision)
        if bool(torch.as_tensor(result.scores).isfinite().all()):
            return result
        finite = given.X.isfinite().all(1).cpu().numpy()
        return result if finite.all() else self._carry_out(given, self.decide(featureless(finite), key))

    def decide(self, geometry: Geometry, key: Key | None = None) -> Decision:
        """Decide on the weights, or on what to do in each column, from the geometry of all messages."""
        finite = geometry.finite
        n, broken = geometry.n, int((~finite).sum())
        self.check(n)
        if broken > self.f:
            raise UserError(
                f"{broken} of {n} messages are not finite (NaN or infinity): more than the f = {self.f} "
                f"that {self.name} may leave out"
            )
        f, rows = self.f - broken, np.flatnonzero(finite)
        inner = geometry.select(rows) if broken else geometry
        settled = self.settle(inner, f, key or DEFAULT_KEY)
        if isinstance(settled, Weighing):
            weights, scores = np.zeros(n), np.full(n, np.inf)
            weights[rows] = settled.weights
            scores[rows] = inner.spread(settled.weights)
            found = (settled.exact, settled.iterations, settled.objective, settled.lower_bound)
            return Weighted(weights, scores, Info(n, f, broken, *found))
        mixture = None
        if settled.A is not None:
            near = inner.reference()
            radius = float(np.sqrt(inner.distances[near].max()))
            mixture = Mixture(settled.A, int(rows[near]), radius)
        return Columnwise(rows, settled.window, mixture, Info(n, f, broken))

    def _carry_out(self, given: inputs.Messages, decision: Decision) -> Aggregate[Any]:
        if isinstance(decision, Weighted):
            value = decision.apply(given.X)
            return given.deliver(value, decision.weights, decision.scores, decision.info)
        out = decision.apply(given.X)
        weights, scores = decision.totals(out.shares, out.squares, given.X.shape[1])
        return given.deliver(out.value, weights, scores, decision.info)


@dataclass(frozen=True)
class Geometric(Rule):
    """A rule that maps the geometry of n messages to n weights."""

    geometric: ClassVar[bool] = True

    @abstractmethod
    def weigh(self, geometry: Geometry, f: int) -> Weighing:
        """Return the weights of n finite messages, at most f of them Byzantine."""

    def settle(self, geometry: Geometry, f: int, key: Key) -> Weighing:
        """Return the weights."""
        return self.weigh(geometry, f)

    def weights_from_gram(self, G: Tensor | Array) -> Any:
        """Return the weights (n,) float64 for messages with Gram matrix G (n, n), of G's kind."""
        geometry = gram_.from_gram(G)
        self.check(geometry.n)
        return like(G, self.weigh(geometry, self.f).weights)


@dataclass(frozen=True)
class Coordinate(Rule):
    """A rule that averages a window of the sorted values of each coordinate."""

    @abstractmethod
    def window(self, n: int, f: int) -> Window:
        """Return the window for n finite messages, at most f of them Byzantine."""

    @property
    def needs_geometry(self) -> bool:
        """False: coordinates are looked at one by one."""
        return False

    def settle(self, geometry: Geometry, f: int, key: Key) -> Selection:
        """Return the window."""
        return Selection(self.window(geometry.n, f), None)


def featureless(finite: Any) -> Geometry:
    """Return a geometry that knows which rows are finite, and no distances."""
    squares = np.zeros((len(finite) + 1, len(finite) + 1))
    squares[:-1, :-1][np.diag(~finite)] = np.nan
    return Geometry(squares)


def like(given: Tensor | Array, weights: Array) -> Any:
    """Return the weights as a tensor where `given` is one."""
    return torch.from_numpy(weights).to(given.device) if isinstance(given, Tensor) else weights
