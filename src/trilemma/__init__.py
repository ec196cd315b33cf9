"""Trilemma: federated learning that is private, Byzantine-robust and useful at the same time.

The rooms of the house, from the ground up:

* `trilemma.aggregation`: robust rules; a geometric rule is a map from the Gram matrix to weights.
* `trilemma.privacy`: a threat model is a covariance; accounting, calibration, ledger, secrets.
* `trilemma.attacks`: what Byzantine clients send, at fixed or searched strength.
* `trilemma.data`, `trilemma.models`: data sets and partitions; models and gradients for k clients at once.
* `trilemma.learning`: an algorithm is three pure functions on stacked state.
* `trilemma.task`: your own model, loss, metrics and data, stated once.
* `trilemma.simulate`: the engine that runs n clients on one machine.
* `trilemma.report`: what a run gave, simulated or deployed.

and, for short, `Task`, `Privacy` and `run`: a run in one call; `statistics`: private ones of the records,
before it; `Declaration` and `Values`: what a record may be; `split` and `fill`: what is decided about a
record by that record alone; `load`: the result in a folder; `inputs`: what an exported model takes;
`UserError`: what a user's mistake raises. What is named here is imported when it is first used, so that
`import trilemma` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trilemma.base.version import VERSION

if TYPE_CHECKING:
    from trilemma import aggregation, attacks, data, learning, models, privacy, report, simulate, task
    from trilemma import experiment as config
    from trilemma.api import Privacy, load, run, statistics
    from trilemma.base.errors import UserError
    from trilemma.data import Declaration, Values, fill, split
    from trilemma.experiment import inputs
    from trilemma.task import Task

__version__ = VERSION

_ROOMS = {
    "aggregation": "aggregation", "attacks": "attacks", "config": "experiment", "data": "data",
    "learning": "learning", "models": "models", "privacy": "privacy", "report": "report",
    "simulate": "simulate", "task": "task",
}  # fmt: skip
_SHORT = {
    "Declaration": "data", "Privacy": "api", "Task": "task", "UserError": "base.errors", "Values": "data",
    "fill": "data", "inputs": "experiment", "load": "api", "run": "api", "split": "data",
    "statistics": "api",
}  # fmt: skip
"""Names that belong to a room and are also found here."""

__all__ = [
    "Declaration",
    "Privacy",
    "Task",
    "UserError",
    "Values",
    "aggregation",
    "attacks",
    "config",
    "data",
    "fill",
    "inputs",
    "learning",
    "load",
    "models",
    "privacy",
    "report",
    "run",
    "simulate",
    "split",
    "statistics",
    "task",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{_ROOMS[name]}")
    if name in _SHORT:
        return getattr(importlib.import_module(f"{__name__}.{_SHORT[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
