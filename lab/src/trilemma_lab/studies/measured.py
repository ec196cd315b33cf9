"""What studies gave, as files: `lab/results/NAME.json`, with all that is needed to judge and to repeat them.

    study, version, code, date, device      which study, by which code, when, where
    sources                                 by code: the sources that made it, with a digest of each
    rerun                                   cells that were run again since, and whether they are the same
    base                                    what all its configurations say, by key
    cells                                   table, row, column; what differs from the base; metrics by seed;
                                            of a grid of hyper-parameters, what each that was tried gave

`code` is a digest of the sources that make the study's results (`trilemma_lab.studies.sources`). It is empty
for results that were taken over from pages written by hand, and so is `per_seed` there. A cell that was kept
when others were measured anew says in `of` when, where and by which code it was measured.
"""

from __future__ import annotations

import datetime
import json
import math
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.base.records import Spread
from trilemma.base.typed import Count, Finite, Seed, typed
from trilemma.base.version import VERSION
from trilemma.report import Result
from trilemma_lab.studies.grid import SEEDS, Place
from trilemma_lab.studies.sources import Sources, changed, code_of, sources_of
from trilemma_lab.studies.staleness import Rerun, Staleness


@dataclass(frozen=True)
class Measured:
    """What one place of a study gave."""

    table: str
    row: str
    column: str
    metrics: Mapping[str, Spread]
    seeds: tuple[int, ...] = ()
    epsilon: Mapping[str, Finite | None] = field(default_factory=dict)
    diverged: Mapping[Seed, Count] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    of: str = ""
    """When, where and by which code, if not as the file says."""
    tried: Mapping[str, Mapping[Seed, Finite | None]] = field(default_factory=dict, repr=False)
    """By point of the place's grid that was tried: its accuracy for each seed. Empty where the place has no
    grid, or where it is not on record what was tried."""

    @property
    def place(self) -> tuple[str, str, str]:
        """Where it stands."""
        return (self.table, self.row, self.column)

    @property
    def code(self) -> str:
        """By which code it was measured, if not as the file says."""
        return self.of.rpartition("code ")[2]


@dataclass(frozen=True)
class Results:
    """What a study gave, and by which code, when and where."""

    study: str
    cells: tuple[Measured, ...]
    version: str = ""
    code: str = ""
    date: str = ""
    device: str = ""
    note: str = ""
    sources: Mapping[str, Sources] = field(default_factory=dict, repr=False)
    rerun: Rerun | None = None

    def staleness(self, compute: str = "") -> Staleness:
        """Say how far they are behind today's code; `compute` is the module of a study without runs."""
        by_code: dict[str, list[Measured]] = {}
        for cell in self.cells:
            by_code.setdefault(cell.code or self.code, []).append(cell)
        differing = {
            path
            for code, cells in by_code.items()
            if code in self.sources
            for path in changed(self.sources[code], sources_of((cell.settings for cell in cells), compute))
        }
        unknown = sum(len(cells) for code, cells in by_code.items() if code not in self.sources)
        behind = bool(differing or unknown)
        again = "" if self.rerun is None or not behind else self.rerun.words(self._by_todays_code())
        return Staleness(len(self.cells), unknown, tuple(sorted(differing)), again)

    def _by_todays_code(self) -> bool:
        """Whether what was run again was run by today's sources."""
        assert self.rerun is not None
        settings = [cell.settings for cell in self.cells if cell.place in self.rerun.places]
        return not changed(self.sources.get(self.rerun.code, {}), sources_of(settings))

    def with_rerun(self, rerun: Rerun, sources: Sources) -> Results:
        """Return them with what was run again since, and the sources it was run by."""
        return replace(self, rerun=rerun, sources={**self.sources, rerun.code: sources})

    def merged(self, cells: Sequence[Measured], compute: str = "") -> Results:
        """Return these results with new ones in the place of old ones; what is kept says of when it is.

        Seeds that only the old ones have stay beside the new, where both were run with the same settings.
        A note stays as long as one of its cells does, what was run again as long as all of those do. Nothing
        new changes nothing, not even the date.
        """
        there = {cell.place: cell for cell in self.cells}
        new = {cell.place: cell for cell in cells if not _known(cell, there.get(cell.place))}
        if not new:
            return self
        of_today = [cell for cell in self.cells if not cell.of]
        fresh = new_results(self.study, [*of_today, *new.values()], compute)
        if not self._continued_by(fresh):
            fresh = new_results(self.study, [*new.values()], compute)
            there = {place: replace(cell, of=cell.of or self.about) for place, cell in there.items()}
        together = {**there, **{at: _beside(there.get(at), cell, fresh) for at, cell in new.items()}}
        note = self.note if there.keys() - new.keys() else ""
        again = self.rerun if self.rerun is not None and new.keys().isdisjoint(self.rerun.places) else None
        codes = {cell.code for cell in together.values()} | ({again.code} if again is not None else set())
        kept = {code: found for code, found in self.sources.items() if code in codes}
        return replace(
            fresh,
            cells=tuple(together.values()),
            note=note,
            rerun=again,
            sources={**kept, **fresh.sources},
        )

    def _continued_by(self, fresh: Results) -> bool:
        """Whether those are of the same day, device and sources, though perhaps of more: another rule's."""
        then, now = self.sources.get(self.code), fresh.sources[fresh.code]
        same = (self.date, self.device, self.version) == (fresh.date, fresh.device, fresh.version)
        return same and then is not None and then.items() <= now.items()

    @property
    def about(self) -> str:
        """When, where and by which code."""
        code = f"code {self.code}" if self.code else "code before results were kept as data"
        return f"{self.device or 'device unknown'}, {self.date or 'date unknown'}; {code}"


def measured(
    place: Place, result: Result, metrics: Mapping[str, Spread], of: str = "", point: str = ""
) -> Measured:
    """Return what a finished run gave; `of` says when, where and by which code, if not today's here.

    `point` names which of the place's grid it is, where there is one.
    """
    summary = result.summary
    return Measured(
        *(place.table, place.row, place.column, metrics),
        seeds=place.config.run.seeds,
        epsilon=summary.epsilon or summary.printed,
        diverged=summary.diverged,
        settings=place.settings,
        of=of,
        tried={point: dict(metrics[CHOSEN_BY].per_seed) if CHOSEN_BY in metrics else {}} if point else {},
    )


def pooled(cells: Sequence[Measured]) -> list[Measured]:
    """Put what the same configuration gave at a place with different seeds together.

    >>> tried = [Measured("t", "r", "c", {"accuracy": Spread.of({seed: 0.5})}, (seed,)) for seed in (1, 2)]
    >>> [cell.seeds for cell in pooled(tried)]
    [(1, 2)]
    """
    groups: dict[tuple[object, ...], list[Measured]] = {}
    for cell in cells:
        settings = sorted((key, repr(value)) for key, value in cell.settings.items() if key != SEEDS)
        groups.setdefault((cell.place, repr(settings)), []).append(cell)
    return [_pool(group) for group in groups.values()]


CHOSEN_BY = "accuracy"
"""By which metric the best of a grid is chosen."""


def _pool(cells: Sequence[Measured]) -> Measured:
    """Return one cell with the seeds of all; everything else is the first one's."""
    if len(cells) == 1:
        return cells[0]
    seeds = tuple(sorted({seed for cell in cells for seed in cell.seeds}))
    values = {
        name: {seed: value for cell in cells for seed, value in cell.metrics[name].per_seed.items()}
        for name in cells[0].metrics
    }
    return replace(
        cells[0],
        metrics={name: Spread.of({i: one[str(i)] for i in seeds}) for name, one in values.items()},
        seeds=seeds,
        diverged={seed: round_ for cell in cells for seed, round_ in cell.diverged.items()},
        settings={**cells[0].settings, SEEDS: list(seeds)},
        of=next((cell.of for cell in cells if cell.of), ""),
        tried=_tried(cells),
    )


def _tried(cells: Sequence[Measured]) -> dict[str, dict[str, float | None]]:
    """Return all points that were tried; of those that several tried, the values of the first."""
    found: dict[str, dict[str, float | None]] = {}
    for cell in reversed(cells):
        for name, values in cell.tried.items():
            found.setdefault(name, {}).update(values)
    return found


def best(cells: Sequence[Measured], metric: str = CHOSEN_BY) -> list[Measured]:
    """Return one measurement for each place: where a grid was tried, the best of its first metric.

    What was run with more seeds is preferred: the others were tried and left.

    >>> tried = [Measured("t", "r", "c", {"accuracy": Spread.of({1: value})}) for value in (0.5, 0.7, 0.6)]
    >>> [cell.metrics["accuracy"].mean for cell in best(tried)]
    [0.7]
    """
    found: dict[tuple[str, str, str], list[Measured]] = {}
    for cell in cells:
        found.setdefault(cell.place, []).append(cell)
    return [
        replace(max(own, key=lambda cell: _score(cell, metric)), tried=_tried(own)) for own in found.values()
    ]


def _score(cell: Measured, metric: str) -> tuple[int, float]:
    """Return what the best of a grid is chosen by: more seeds, then more of the metric."""
    spread = cell.metrics.get(metric)
    return len(cell.seeds), -math.inf if spread is None or spread.mean is None else spread.mean


def new_results(study: str, cells: Sequence[Measured], compute: str = "") -> Results:
    """Return results of today's code on this machine; `compute` is the module of a study without runs."""
    today = datetime.date.today().isoformat()
    made_by = sources_of((cell.settings for cell in cells), compute)
    code = code_of(made_by)
    return Results(study, tuple(cells), VERSION, code, today, device_name(), sources={code: made_by})


def device_name() -> str:
    """Return what results call this machine."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def alike(settings: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether two runs are the same in all that both configurations know, seeds left out.

    A key that only one of them has came or went with the code. Of settings that are not on record nothing
    is known.

    >>> alike({"x": 1, "run.seeds": [1]}, {"x": 1, "run.seeds": [2], "y": 3}), alike({}, {"x": 1})
    (True, False)
    """
    shared = (settings.keys() & others.keys()) - {SEEDS}
    return bool(shared) and all(json.dumps(settings[key]) == json.dumps(others[key]) for key in shared)


def _known(cell: Measured, there: Measured | None) -> bool:
    """Whether a cell that was not run now is already there, where its code is on record."""
    return bool(cell.of) and there is not None and replace(cell, of=there.of, tried=there.tried) == there


def _beside(old: Measured | None, new: Measured, fresh: Results) -> Measured:
    """Put seeds that only the old one has beside the new ones; where they are older, say of when each is."""
    if old is None or old.metrics.keys() != new.metrics.keys():
        return new
    if not alike(old.settings, new.settings):
        return _better(old, new)
    # one more look at what is shown says nothing about the rest of a grid of which nothing is on record
    tried = _tried([new, old]) if old.tried or len(new.tried) > 1 else {}
    more = [seed for seed in old.seeds if seed not in new.seeds]
    if not more or any(str(seed) not in one.per_seed for one in old.metrics.values() for seed in more):
        return replace(new, tried=tried)
    of = new.of
    if old.of:
        of = f"{named_seeds(new.seeds)}: {fresh.device}, {fresh.date}; {_said_of_seeds(old.of, more)}"
    return replace(_pool([new, _of_seeds(old, more)]), of=of, tried=tried)


def _said_of_seeds(of: str, seeds: Sequence[int]) -> str:
    """Return what `of` says about some seeds: it names the seeds where they are not all of one day.

    >>> _said_of_seeds("a CPU, Monday", [1]), _said_of_seeds("seeds 2, 3: a CPU; seed 1: a GPU", [1, 3])
    ('seed 1: a CPU, Monday', 'seed 3: a CPU; seed 1: a GPU')
    """
    _, *parts = re.split(r"(?:^|; )seeds? ([\d, ]+): ", of)
    if not parts:
        return f"{named_seeds(seeds)}: {of}"
    said = []
    for named, words in zip(parts[::2], parts[1::2], strict=True):
        here = [seed for seed in map(int, named.split(",")) if seed in seeds]
        if here:
            said.append(f"{named_seeds(here)}: {words}")
    return "; ".join(said)


def _better(old: Measured, new: Measured) -> Measured:
    """Return the better of two points of a grid by the seeds of both, with all that was tried there.

    Where they are not of one grid, or no seed of both is there, the new one.
    """
    searched = {part.partition("=")[0] for name in (*old.tried, *new.tried) for part in name.split(", ")}

    def unsearched(cell: Measured) -> dict[str, Any]:
        return {key: value for key, value in cell.settings.items() if key not in searched}

    if not (old.tried and new.tried and alike(unsearched(old), unsearched(new))):
        return new
    then, now = (one.metrics[CHOSEN_BY].per_seed if CHOSEN_BY in one.metrics else {} for one in (old, new))
    both = then.keys() & now.keys()
    old_is_better = both and _sum(then[seed] for seed in both) >= _sum(now[seed] for seed in both)
    return replace(old if old_is_better else new, tried=_tried([new, old]))


def _sum(values: Iterable[float | None]) -> float:
    """Add up; a run that diverged is worse than any other."""
    return sum(-math.inf if one is None else one for one in values)


def _of_seeds(cell: Measured, seeds: Sequence[int]) -> Measured:
    """Return what some of a cell's seeds gave."""
    values = {name: {seed: one.per_seed[str(seed)] for seed in seeds} for name, one in cell.metrics.items()}
    return replace(
        cell,
        metrics={name: Spread.of(one) for name, one in values.items()},
        seeds=tuple(seeds),
        diverged={seed: round_ for seed, round_ in cell.diverged.items() if int(seed) in seeds},
    )


def named_seeds(seeds: Sequence[int]) -> str:
    """Name seeds.

    >>> named_seeds((2, 3)), named_seeds([1])
    ('seeds 2, 3', 'seed 1')
    """
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def write_results(results: Results, path: Path) -> None:
    """Write results into a file."""
    settings = [dict(cell.settings) for cell in results.cells]
    base = {
        key: value
        for key, value in (settings[0] if settings else {}).items()
        if _shared(key, value, settings)
    }
    cells = [
        {
            "table": cell.table,
            "row": cell.row,
            "column": cell.column,
            "seeds": list(cell.seeds),
            "settings": {key: value for key, value in own.items() if key not in base},
            "metrics": {
                name: {"mean": one.mean, "std": one.std, "per_seed": dict(one.per_seed)}
                for name, one in cell.metrics.items()
            },
            "epsilon": dict(cell.epsilon),
            "diverged": dict(cell.diverged),
            **({"of": cell.of} if cell.of else {}),
            **({"tried": {name: dict(one) for name, one in cell.tried.items()}} if cell.tried else {}),
        }
        for cell, own in zip(results.cells, settings, strict=True)
    ]
    about = {name: getattr(results, name) for name in ("study", "version", "code", "date", "device", "note")}
    again = {} if results.rerun is None else {"rerun": asdict(results.rerun)}
    said = {**about, "sources": results.sources, **again, "base": base, "cells": cells}
    text = json.dumps(said, indent=1, ensure_ascii=False)
    files.write_atomically(path, (text + "\n").encode())


def read_results(path: Path) -> Results:
    """Read results from a file."""
    if not path.is_file():
        raise UserError(f"there are no results in {str(path)!r}; trilemma papers run NAME writes them")
    with files.readable(path, "results of a study"):
        return _results(json.loads(path.read_text("utf-8")))


def _results(said: Mapping[str, Any]) -> Results:
    """Return what a file says; what all cells share stands in it once."""
    cells = [{**cell, "settings": {**said["base"], **cell["settings"]}} for cell in said["cells"]]
    return typed(Results, {**said, "cells": cells})


def _shared(key: str, value: Any, settings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all configurations say this of a key."""
    return all(key in one and one[key] == value for one in settings)
