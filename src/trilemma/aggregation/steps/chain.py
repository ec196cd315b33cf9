"""Chains: mixing steps, then a rule.

A mixing step replaces the n messages by k combinations of them: X becomes A X with A of shape (k, n). The
Gram matrix becomes A G Aᵀ and the weights w of the mixed messages are the weights Aᵀ w of the clients. A
chain of any length that ends in a geometric rule therefore still costs one pass for the geometry and one
for the weighted sum, and is itself a map from the Gram matrix to weights. Before a coordinate-wise rule, A
is applied block by block while the columns are in cache.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from trilemma.aggregation.passes import many
from trilemma.aggregation.passes.gram import Geometry, from_gram
from trilemma.aggregation.steps.decision import Selection
from trilemma.aggregation.steps.rule import DEFAULT_KEY, Rule, Step, like
from trilemma.aggregation.steps.types import Array, Weighing
from trilemma.base.errors import UserError
from trilemma.base.keys import Key


class Mixing(Step):
    """A step that replaces n messages by combinations of them."""

    passes: ClassVar[bool] = False
    """Whether messages pass through it as they are."""

    @abstractmethod
    def matrix(self, geometry: Geometry, f: int, key: Key) -> Array:
        """Return A (k, n) for n finite messages, at most f of them Byzantine."""

    @property
    def matrices(self) -> Callable[[Tensor], Tensor] | None:
        """The map from many inner products (B, n, n) to A (B, k, n) each; None for one at a time."""
        return None

    def count(self, n: int) -> int:
        """Return how many messages n messages become."""
        return n

    def kappa(self, after: float, n: int) -> float | None:
        """Return the proven κ (trace criterion) of this step before a rule of coefficient `after`."""
        return None


class Staged(Rule):
    """A rule made of mixing steps and a last rule."""

    @abstractmethod
    def stages(self) -> tuple[tuple[Mixing, ...], Rule]:
        """Return the mixing steps, and the rule that comes after them."""

    @property
    def geometric(self) -> bool:  # type: ignore[override]
        """Whether the last rule is geometric."""
        return self.stages()[1].geometric

    def kappa(self, n: int) -> float | None:
        """Return the proven κ for n messages, or None."""
        self.check(n)
        (steps, last), counts = self.stages(), self._counts(n)
        result = last.kappa(counts[-1])
        for step, count in zip(reversed(steps), reversed(counts[:-1]), strict=True):
            result = None if result is None else step.kappa(result, count)
        return result

    def check(self, n: int) -> None:
        """Raise a `UserError` unless every stage is defined."""
        super().check(n)
        left = self._counts(n)[-1]
        try:
            self.stages()[1].check(left)
        except UserError as problem:
            raise UserError(f"{self.name} makes {left} messages out of {n}, but {problem}") from None

    def weights_from_gram(self, G: Tensor | Array, key: Key | None = None) -> Any:
        """Return the weights (n,) float64 for messages with Gram matrix G (n, n), of G's kind."""
        geometry = from_gram(G)
        self.check(geometry.n)
        settled = self.settle(self.of_weights(geometry), self.f, key or DEFAULT_KEY)
        if not isinstance(settled, Weighing):
            raise UserError(f"{self.name} is not geometric: a Gram matrix does not determine its weights")
        return like(G, settled.weights)

    @property
    def weights_from_grams(self) -> Callable[[Tensor], Tensor] | None:
        """See `Rule.weights_from_grams`: there is one where every stage takes many."""
        steps, last = self.stages()
        matrices = [step.matrices for step in steps if not step.passes]
        weigh = last.weights_from_grams
        if weigh is None or None in matrices:
            return None
        if not matrices:
            return weigh

        def weigh_many(grams: Tensor) -> Tensor:
            self.check(grams.shape[1])
            inner = many.recentred(grams.double())
            mixed = torch.eye(grams.shape[1], dtype=inner.dtype, device=grams.device)
            for matrix in matrices:
                assert matrix is not None
                A = matrix(inner)
                # Differences from one of the new rows have small coefficients: see `Geometry.mixed`.
                inner, mixed = many.recentred(A @ inner @ A.mT), A @ mixed
            return (weigh(inner)[:, None] @ mixed)[:, 0]

        return weigh_many

    def settle(self, geometry: Geometry, f: int, key: Key) -> Weighing | Selection:
        """Mix step by step in the geometry, then let the last rule settle."""
        A = np.eye(geometry.n)
        steps, last = self.stages()
        for place, step in enumerate(steps):
            if step.passes:
                continue
            one = step.matrix(geometry, f, key.fold(step.label, place))
            geometry, A = geometry.mixed(one), one @ A
        settled = last.settle(geometry, f, key)
        if isinstance(settled, Weighing):
            return dataclasses.replace(settled, weights=A.T @ settled.weights)
        return Selection(settled.window, A if settled.A is None else settled.A @ A)

    def _counts(self, n: int) -> list[int]:
        counts = [n]
        for step in self.stages()[0]:
            counts.append(step.count(counts[-1]))
        return counts


class Chain(Staged):
    """Mixing steps followed by a rule; itself a rule.

    >>> from trilemma.aggregation import caf, nnm
    >>> rule = chain(nnm(f=1), caf(f=1))
    >>> rule.name, rule.geometric
    ('nnm+caf', True)
    """

    steps: tuple[Mixing, ...]
    last: Rule

    @property
    def name(self) -> str:
        """The names of the steps, joined by +."""
        return "+".join(step.name for step in (*self.steps, self.last))

    def weighed(self, weights: Sequence[float]) -> Self:
        """See `Step.weighed`: every step of the chain has to have a meaning."""
        parts = [step.weighed(weights) for step in (*self.steps, self.last)]
        copy = self.model_copy(update={"steps": tuple(parts[:-1]), "last": parts[-1]})
        copy._weights = parts[-1].weights
        return copy

    def stages(self) -> tuple[tuple[Mixing, ...], Rule]:
        """Return what the chain was made of."""
        return self.steps, self.last


def chain(*steps: Mixing | Rule) -> Chain:
    """Put mixing steps before a rule (which may be a chain itself).

    >>> from trilemma.aggregation import arc, cwmed, nnm
    >>> chain(arc(f=2), nnm(f=2), cwmed(f=2)).name
    'arc+nnm+cwmed'
    >>> chain(nnm(f=2))
    Traceback (most recent call last):
    trilemma.base.errors.UserError: a chain is mixing steps followed by one rule; got nnm
    """
    *before, last = steps if steps else (None,)
    mixing = tuple(step for step in before if isinstance(step, Mixing))
    if not isinstance(last, Rule) or len(mixing) < len(before):
        names = ", ".join(step.name for step in steps) or "nothing"
        raise UserError(f"a chain is mixing steps followed by one rule; got {names}")
    different = {step.f for step in steps}
    if len(different) > 1:
        raise UserError(f"all steps of a chain must have the same f; got {sorted(different)}")
    return Chain(f=last.f, steps=mixing, last=last)
