"""Rooms of the package without their front doors, for machines that have torch and numpy only.

A room's `__init__` imports all of it, and with that what its settings need (pydantic). Kernels need none of
it: where pydantic is missing, a room becomes a plain folder of modules.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import trilemma


def rooms(*names: str) -> None:
    """Make modules of these rooms importable on a machine without pydantic; elsewhere do nothing."""
    if importlib.util.find_spec("pydantic") is not None:
        return
    for name in names:
        room = types.ModuleType(f"trilemma.{name}")
        room.__path__ = [str(Path(path) / name) for path in trilemma.__path__]
        sys.modules[room.__name__] = room
        setattr(trilemma, name, room)
