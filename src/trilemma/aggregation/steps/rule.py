"""What a rule is, and the one way all of them run.

A rule looks at the geometry of the messages and decides: on weights, if it is geometric; on a mixing matrix
and a window of sorted values, if it ends coordinate by coordinate. The decision is then carried out on the
messages themselves, on all columns or on any part of them. In memory, streamed and sharded runs share this:

    geometry(X)  →  rule.decide(geometry, key)  →  decision.apply(X)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self, overload

import numpy as np
import torch
from pydantic import ConfigDict, Field, PrivateAttr, ValidationError
from torch import Tensor

from trilemma.aggregation.passes.columns import Mixture, WeightQuantile, Window
from trilemma.aggregation.passes.gram import Geometry, from_gram, heaviest
from trilemma.aggregation.passes.source import InMemory, Source
from trilemma.aggregation.steps.decision import Columnwise, Decision, Selection, Weighted
from trilemma.aggregation.steps.types import Aggregate, Array, Criterion, Info, Numpy, Vectors, Weighing
from trilemma.aggregation.steps.weights import normalised
from trilemma.base.errors import UserError, nearest
from trilemma.base.keys import Key
from trilemma.base.options import Options, allowed_values, description

FLOAT32_SQUARED = 1e74
"""Rows nearer than this (squared) can be subtracted in float32."""

DEFAULT_KEY = Key(0, ("aggregation",))
"""The key of a rule that is called without one: the same draws in every call."""


Byzantine = Annotated[int, Field(ge=0, description="the number of Byzantine clients")]
"""f, which every rule and every mixing step is told."""


Promise = Literal["translation", "scale", "range", "permutation"]
"""What most definitions promise: F(X + b) = F(X) + b; F(aX) = a F(X), a of either sign; every coordinate of
the value lies between those of the messages; messages in another order have their weights in that order."""


class Step(Options, ABC):
    """What rules and mixing steps have in common: f, options, and a name that says them.

    f is given by name; options by name, or in the order they are declared, as `parse` reads them. Where there
    are none, f may stand alone.
    """

    model_config = ConfigDict(strict=True)

    f: Byzantine
    label: ClassVar[str] = ""
    """The name it is registered under."""
    lacks: ClassVar[frozenset[Promise]] = frozenset()
    """What its definition does not promise, so that `trilemma.testing` does not ask for it."""
    weighs: ClassVar[bool] = False
    """Whether its definition says what it does with clients of unequal weight."""
    _weights: tuple[float, ...] = PrivateAttr(())

    def __init__(self, *given: Any, **options: Any) -> None:
        places = self.parameters() or ["f"]
        if len(given) > len(places) or options.keys() & places[: len(given)]:
            raise UserError(f"{self.label} takes {', '.join(places)}, each once; got {given} and {options}")
        said = dict(zip(places, given, strict=False)) | options
        try:
            super().__init__(**{key: _plain(value) for key, value in said.items()})
        except ValidationError as error:
            raise UserError("; ".join(self._refusal(dict(detail)) for detail in error.errors())) from None

    @property
    def weights(self) -> tuple[float, ...]:
        """The clients' public weights, which sum to 1; () where all are alike."""
        return self._weights

    def weighed(self, weights: Sequence[float]) -> Self:
        """Return the same step for clients of these public weights; refuse where that has no meaning.

        A weight never comes from a client: whoever reports its own would report a large one.
        """
        shares = normalised(weights)
        if shares and not self.weighs:
            raise UserError(
                f"{self.label} has no meaning for clients of unequal weight; allowed: {weighing()}"
            )
        copy = self.model_copy()
        copy._weights = shares
        return copy

    def among(self, rows: Sequence[int]) -> Self:
        """Return the same step for some of the clients."""
        return self.weighed([self.weights[row] for row in rows]) if self.weights else self

    def counted(self, n: int) -> tuple[float, float]:
        """Return f and n, as they count in κ: with weights W, the weight of the f heaviest, and 1."""
        if not self.weights:
            return self.f, n
        return heaviest(np.array(self.weights), self.f), 1.0

    @classmethod
    def parameters(cls) -> list[str]:
        """Return the options other than f, in order."""
        return [name for name in cls.model_fields if name != "f"]

    @property
    def name(self) -> str:
        """The name under which `parse` builds the same again, with the parameters that are not defaults."""
        said = [
            f"{key}={getattr(self, key)}"
            for key in self.parameters()
            if getattr(self, key) != type(self).model_fields[key].default
        ]
        return f"{self.label}({','.join(said)})" if said else self.label

    @classmethod
    def _refusal(cls, detail: dict[str, Any]) -> str:
        """Say what is wrong with an option."""
        key = str(detail["loc"][0])
        if detail["type"] == "extra_forbidden":
            return f"{cls.label} has no option {key!r}: {nearest(key, cls.model_fields)}"
        field = cls.model_fields[key]
        got = "" if detail["type"] == "missing" else f"; got {detail['input']!r}"
        kind = f"{'finite ' if detail['type'] == 'finite_number' else ''}{allowed_values(field)}"
        return f"{cls.label}: {key} ({description(cls, key)}) must be a {kind}{got}"


def weighing() -> str:
    """Return the names of the rules and mixing steps that take weights."""
    from trilemma.aggregation.steps.registry import mixings, rules

    known: dict[str, type[Step]] = {**rules, **mixings}
    return ", ".join(sorted(name for name, kind in known.items() if kind.weighs))


def _plain(value: Any) -> Any:
    """Return numpy's numbers as Python's."""
    return value.item() if isinstance(value, np.generic) else value


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

    @property
    def weights_from_grams(self) -> Callable[[Tensor], Tensor] | None:
        """The map from many Gram matrices (B, n, n) to their weights (B, n), worked out where they lie.

        None for a rule that takes one at a time. The weights are those of `weights_from_gram`, up to
        rounding.
        """
        return None

    def check(self, n: int) -> None:
        """Raise a `UserError` unless the rule is defined for n messages."""
        if 2 * self.f >= n:
            raise UserError(f"{self.name} needs 2f < n; got f = {self.f}, n = {n}")
        if self.weights and len(self.weights) != n:
            raise UserError(f"{self.name} has weights for {len(self.weights)} clients; got n = {n}")
        if self.weights and 2 * (heavy := self.counted(n)[0]) >= 1:
            raise UserError(
                f"{self.name} needs 2W < 1; the f = {self.f} heaviest clients have weight {heavy:.3g}"
            )

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
        return aggregate(self, InMemory(X), key)

    def of_weights(self, geometry: Geometry) -> Geometry:
        """Return the geometry of messages that weigh what their clients do."""
        return replace(geometry, mass=np.array(self.weights)) if self.weights else geometry

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
        geometry = self.of_weights(geometry)
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
            near = inner.centre()
            averages = bool(np.allclose(settled.A.sum(axis=1), 1.0, rtol=0, atol=1e-12))
            fits = bool(inner.distances[near].max() < FLOAT32_SQUARED)
            mixture = Mixture(settled.A, int(rows[near]) if averages and fits else None)
        return Columnwise(rows, settled.window, mixture, Info(n, f, broken))


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
        geometry = from_gram(G)
        self.check(geometry.n)
        return like(G, self.weigh(self.of_weights(geometry), self.f).weights)


class Coordinate(Rule):
    """A rule that averages a window of the sorted values of each coordinate."""

    @abstractmethod
    def window(self, n: int, f: int) -> Window:
        """Return the window for n finite messages, at most f of them Byzantine."""

    def span(self, liars: float, everybody: float) -> tuple[float, float]:
        """Return between which cumulative weights values are averaged, where clients have weights."""
        raise NotImplementedError

    @property
    def needs_geometry(self) -> bool:
        """False: coordinates are looked at one by one."""
        return False

    def settle(self, geometry: Geometry, f: int, key: Key) -> Selection:
        """Return the window."""
        if geometry.mass is None:
            return Selection(self.window(geometry.n, f), None)
        return Selection(
            WeightQuantile(*self.span(*geometry.counted(f)), tuple(geometry.mass.tolist())), None
        )


def aggregate(rule: Rule, source: Source, key: Key | None = None) -> Aggregate[Any]:
    """Apply a rule to messages wherever they are: at most two passes over them."""
    rule.check(source.n)
    if rule.needs_geometry:
        return source.carry_out(rule.decide(source.geometry(), key))
    # Only finiteness matters: suppose all rows are finite and look again if the outcome disproves it.
    result = source.carry_out(rule.decide(featureless(np.ones(source.n, bool)), key))
    if bool(torch.as_tensor(result.scores, device="cpu").isfinite().all()):
        return result
    finite = source.finite()
    return result if finite.all() else source.carry_out(rule.decide(featureless(finite), key))


def featureless(finite: Any) -> Geometry:
    """Return a geometry that knows which rows are finite, and no distances."""
    return Geometry(np.diag(np.append(np.where(finite, 0.0, np.nan), 0.0)))


def like(given: Tensor | Array, weights: Array) -> Any:
    """Return the weights as a tensor where `given` is one."""
    return torch.from_numpy(weights).to(given.device) if isinstance(given, Tensor) else weights
