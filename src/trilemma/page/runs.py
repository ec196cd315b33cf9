"""A run as the page shows it: its line in the list, its curves over seeds, what tells it from others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trilemma.base.errors import UserError
from trilemma.base.records import Record, Summary
from trilemma.page.answers import (
    Difference,
    Differences,
    Guaranteed,
    RunLine,
    RunView,
    Series,
    finite,
)
from trilemma.page.index import WatchedRun, shown
from trilemma.privacy import Guarantee
from trilemma.privacy.accounting.spending import protected
from trilemma.report import Curve, verdict_of
from trilemma.report.run_metadata import RunMetadata, ledgers_have
from trilemma.report.tables import SHARES, tightest_epsilon
from trilemma.report.tables import shown as shown_score

POINTS = 400
"""Points of a curve at most: more than a screen can tell apart."""

STAGE = " s"
"""How the name of a stage's seconds ends (`Record.figures`)."""


def line_of(one: WatchedRun, found: RunMetadata | UserError) -> RunLine:
    """Return a run's line in the list, or why there is none."""
    if isinstance(found, UserError):
        problem = shown(str(found))
        return RunLine(id=one.id, name=one.name, title=one.title, state="broken", problem=problem)
    summary, federation = found.summary, found.config["federation"]
    spread = summary.spread(summary.score)
    return RunLine(
        id=one.id,
        name=one.name,
        title=one.title,
        state=found.state,
        deployed=found.deployed,
        data=shown(found.config["data"]["name"]),
        algorithm=shown(summary.algorithm),
        rule=shown(summary.rule),
        clients=summary.clients,
        byzantine=summary.byzantine,
        tolerated=federation.get("tolerate", federation["byzantine"]),
        attack=shown(summary.attack),
        threat=shown(summary.threat),
        rounds=summary.rounds,
        done=min(found.done.values(), default=0),
        seeds=len(found.done),
        score=shown(summary.score),
        shown=scored(summary.score, summary) if spread.mean is not None else "",
        mean=finite(spread.mean),
        epsilon=epsilon_shown(found),
        guarantee=guarantee_of(found),
        changed=found.changed,
    )


def scored(name: str, summary: Summary) -> str:
    """Write a metric with its unit."""
    return f"{shown_score(name, summary)}{' %' if name in SHARES else ''}"


def epsilon_shown(found: RunMetadata) -> str:
    """Return ε of a finished run; of one under way what its newest record says is guaranteed so far."""
    if found.deployed and (elsewhere := ledgers_have(found.config)):
        return elsewhere
    if found.state in ("finished", "diverged"):
        return tightest_epsilon(found.summary)[0]
    so_far = finite(found.newest.epsilon) if found.newest else None
    return "∞" if so_far is None else f"{so_far:.3g} so far"


def guarantee_of(found: RunMetadata) -> Guaranteed:
    """Return the verdict on a run in words."""
    summary = found.summary
    if found.deployed and (elsewhere := ledgers_have(found.config)):
        return Guaranteed(held=None, text=elsewhere)
    if not summary.verdict:
        return Guaranteed(held=False, text="no noise is added")
    verdict = verdict_of(summary)
    if isinstance(verdict, Guarantee):
        text = (
            f"ε = {verdict.epsilon:.4g} at δ = {verdict.delta:g}, for "
            f"{protected(verdict.unit, verdict.adjacency)}; under {verdict.threat}, by {verdict.accountant}"
        )
        assumptions = [shown(text) for text in verdict.assumptions]
        return Guaranteed(held=True, text=shown(text), epsilon=verdict.epsilon, assumptions=assumptions)
    printed = "" if verdict.figure is None else f" (printed all the same: ε = {verdict.figure:.4g})"
    return Guaranteed(held=False, text=shown(verdict.reason + printed))


def view_of(
    line: RunLine,
    found: RunMetadata,
    seeds: Mapping[int, Sequence[Record]],
    baseline: Mapping[int, Sequence[Record]] | None,
) -> RunView:
    """Return everything about one run but whom its rule trusted."""
    series = curves(list(seeds.values()))
    first = {line.score, "loss"}
    reference = [] if baseline is None else curves(list(baseline.values()))
    return RunView(
        line=line,
        config=flat(found.config),
        notes=[shown(note) for note in found.summary.notes],
        target=finite(found.config["privacy"].get("epsilon")),
        series=[one for one in series if not one.name.endswith(STAGE)],
        stages=[one for one in series if one.name.endswith(STAGE)],
        baseline=[one for one in reference if one.name in first],
        seeds=list(seeds),
    )


def curves(seeds: Sequence[Sequence[Record]]) -> list[Series]:
    """Return every quantity of the records over rounds, decimated."""
    points: dict[str, list[dict[int, float | None]]] = {}
    for index, records in enumerate(seeds):
        for record in records:
            for name, value in record.figures().items():
                points.setdefault(name, [{} for _ in seeds])[index][record.round] = finite(value)
    named = [Curve.of_points(name, found) for name, found in points.items()]
    return [series(curve) for curve in named if curve.rounds.size]


def series(curve: Curve) -> Series:
    """Return a curve with as many points as a screen can show."""
    kept = decimated(curve.mean, POINTS)
    mean, deviation = curve.mean[kept], curve.deviation[kept]
    return Series(
        name=shown(curve.label),
        rounds=[int(round_) for round_ in curve.rounds[kept]],
        mean=_numbers(mean),
        low=_numbers(mean - deviation),
        high=_numbers(mean + deviation),
        seeds=len(curve.values),
    )


def _numbers(values: np.ndarray) -> list[float | None]:
    return [finite(float(f"{value:.6g}")) for value in values]


def decimated(values: np.ndarray, most: int) -> np.ndarray:
    """Return the places of at most `most` values: ends, and of each stretch the lowest and the highest.

    A spike of one round stays visible.

    >>> decimated(np.array([0.0, 0, 9, 0, 0, 0, 0, 0]), 6).tolist()
    [0, 1, 2, 4, 7]
    """
    if len(values) <= most:
        return np.arange(len(values))
    stretches = np.array_split(np.arange(1, len(values) - 1), (most - 2) // 2)
    lowest = [part[values[part].argmin()] for part in stretches]
    highest = [part[values[part].argmax()] for part in stretches]
    return np.unique([0, *lowest, *highest, len(values) - 1])


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a configuration as `table.key` and text.

    >>> flat({"run": {"rounds": 3, "seeds": [1, 2]}})
    {'run.rounds': '3', 'run.seeds': '[1, 2]'}
    """
    return {shown(key): shown(value) for key, value in _flat(config, "")}


def _flat(config: Mapping[str, Any], before: str) -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value if isinstance(value, str) else json.dumps(value, default=str)


def differences(named: Sequence[tuple[str, Mapping[str, Any]]]) -> Differences:
    """Return the keys in which configurations differ, and how many are the same in all.

    >>> found = differences([("a", {"run": {"rounds": 3}}), ("b", {"run": {"rounds": 4}})])
    >>> [(row.key, row.values) for row in found.rows], found.same
    ([('run.rounds', ['3', '4'])], 0)
    """
    configs = [flat(config) for _, config in named]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [Difference(key=key, values=[config.get(key, "") for config in configs]) for key in keys]
    told_apart = [row for row in rows if len(set(row.values)) > 1]
    return Differences(names=[name for name, _ in named], rows=told_apart, same=len(rows) - len(told_apart))
