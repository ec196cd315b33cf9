"""The names of rules and mixing steps, as configurations and the command line write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trilemma.aggregation.steps.chain import Mixing
from trilemma.aggregation.steps.rule import Rule, Step
from trilemma.base.registry import Registry

Kind = TypeVar("Kind", bound=Step)


class Steps(Registry[type[Kind]]):
    """A registry that tells its entries their name."""

    def register(self, name: str, summary: str = "") -> Callable[[type[Kind]], type[Kind]]:
        """Return a decorator that enters a class under `name`, which becomes its label."""
        enter = super().register(name, summary)

        def labelled(kind: type[Kind]) -> type[Kind]:
            kind.label = name
            return enter(kind)

        return labelled


rules: Steps[Rule] = Steps("aggregation rule")
"""Rules by name: `rules["caf"](f=3)`."""

mixings: Steps[Mixing] = Steps("mixing step")
"""Mixing steps by name: `mixings["nnm"](f=3)`."""
