"""The papers' experiments: each one's grid, the numbers it printed, and how ours compare.

A module per paper; nothing here computes anything that `trilemma.simulate` does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trilemma.errors import ConfigError, nearest

if TYPE_CHECKING:
    from trilemma.papers.grid import Cell

STUDIES: dict[str, tuple[str, dict[str, Any]]] = {
    "safe-dshb": ("safe_dshb", {}),
    "cafcor-mnist": ("cafcor", {"name": "mnist"}),
    "cafcor-fashion": ("cafcor", {"name": "fashion"}),
    "byz-clip21": ("byz_clip21", {}),
}
"""The module of each study, and what its `cells` is told besides the seeds."""


def cells(name: str, seeds: str, only: str = "") -> list[Cell]:
    """Return the runs of a study; with `only`, those whose row or column contains it.

    >>> cells("safe-dsbh", "1")
    Traceback (most recent call last):
    trilemma.errors.ConfigError: no study is called 'safe-dsbh': did you mean 'safe-dshb'? Allowed: ...
    """
    if name not in STUDIES:
        raise ConfigError(f"no study is called {name!r}: {nearest(name, STUDIES)}")
    module, options = STUDIES[name]
    found: list[Cell] = importlib.import_module(f"{__name__}.{module}").cells(seeds, **options)
    return [cell for cell in found if only in cell.row or only in cell.column]


__all__ = ["STUDIES", "cells"]
