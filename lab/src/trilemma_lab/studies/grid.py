"""A grid of runs as tables: where each run stands, and what it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trilemma.experiment import Cell, Config
from trilemma.experiment.sweep import leaves

SEEDS = "run.seeds"
"""The key of a run's seeds."""


SEARCHED = "attack.search={sides='positive', points=25, refinements=12, passes=12}"
"""How the papers' attacks search: τ > 0. The grid is that of the kept results; theirs is not stated."""


@dataclass(frozen=True)
class Place:
    """One run of a study and where it stands: in which table, row and column.

    A run may stand in several places, and several runs in one: a grid of hyper-parameters.
    """

    table: str
    row: str
    column: str
    config: Config

    @property
    def at(self) -> tuple[str, str, str]:
        """Where it stands."""
        return (self.table, self.row, self.column)

    @property
    def cell(self) -> Cell:
        """The run, as a sweep knows it."""
        return Cell({"table": self.table, "row": self.row, "column": self.column}, self.config)

    def with_(self, *changes: str) -> Place:
        """Return the same place with a changed run."""
        return replace(self, config=self.config.with_(*changes)) if changes else self

    @property
    def settings(self) -> dict[str, Any]:
        """What the run says, by key."""
        return dict(leaves(self.config.dump()))


Searched = Mapping[tuple[str, str, str], tuple[str, ...]]
"""By place, the keys in which the points of its grid of hyper-parameters differ."""


def searched(places: Iterable[Place]) -> Searched:
    """Return what is searched at the places that have a grid."""
    runs: dict[tuple[str, str, str], list[Place]] = {}
    for place in places:
        runs.setdefault(place.at, []).append(place)
    return {at: _differing([one.settings for one in own]) for at, own in runs.items() if len(own) > 1}


def _differing(settings: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    first = settings[0]
    keys = sorted(set().union(*settings) - {SEEDS})
    return tuple(key for key in keys if any(one.get(key) != first.get(key) for one in settings))


def point(settings: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Name a point of a grid by its values.

    >>> point({"algorithm.lr": 0.1, "run.rounds": 5}, ["algorithm.lr"])
    'algorithm.lr=0.1'
    """
    return ", ".join(f"{key}={settings.get(key)}" for key in keys)
