"""The names of rules and mixing steps, as configurations and the command line write them."""

from __future__ import annotations

from collections.abc import Callable

from trilemma.aggregation.chain import Mixing
from trilemma.aggregation.rule import Rule
from trilemma.registry import Registry

rules: Registry[Callable[..., Rule]] = Registry("aggregation rule")
"""Factories of rules by name: `rules["caf"](f=3)`."""

mixings: Registry[Callable[..., Mixing]] = Registry("mixing step")
"""Factories of mixing steps by name: `mixings["nnm"](f=3)`."""
