"""Names of a package that are imported when they are first used.

A client of a federation waits for days for a round that takes seconds. While it waits it needs keys and
paths, and those live in rooms whose other half needs torch: a package that says `on_demand` lets its light
modules be imported alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def on_demand(package: str, names: Sequence[str], modules: Sequence[str]) -> None:
    """Let the package find `names` in its `modules`, which are imported, in this order, on first use.

    The modules themselves are found too. Where a name is also that of a module, it means what the module
    defines under it, as if the package had imported it.

    >>> from trilemma import privacy
    >>> privacy.SecretNoise.__module__, privacy.covariance.__name__, privacy.ledger.__name__
    ('trilemma.privacy.secrets.noise', 'covariance', 'trilemma.privacy.ledger')
    >>> privacy.SecretNose
    Traceback (most recent call last):
    AttributeError: module 'trilemma.privacy' has no attribute 'SecretNose'
    """

    class OnDemand(ModuleType):
        def __getattr__(self, name: str) -> Any:
            for module in modules if name in names else ():
                found = importlib.import_module(f"{package}.{module}")
                if hasattr(found, name):
                    setattr(self, name, getattr(found, name))
                    return getattr(found, name)
            if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
                return importlib.import_module(f"{package}.{name}")
            raise AttributeError(f"module {package!r} has no attribute {name!r}")

        def __setattr__(self, name: str, value: Any) -> None:
            # Python puts a module into its package under its name as soon as it is imported.
            shadows = name in names and isinstance(value, ModuleType)
            super().__setattr__(name, getattr(value, name) if shadows else value)

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *names})

    sys.modules[package].__class__ = OnDemand
