"""Private statistics in words: every number with its interval."""

from __future__ import annotations

from collections.abc import Iterator

from trilemma.survey.figures import ColumnFigures
from trilemma.survey.result import StatisticsResult
from trilemma.survey.told import ToldFigure

MOST_DRIFTS = 6
"""Distances between sites that are shown: the largest; the JSON has all."""

SHOWN = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles that are shown."""


def _number(number: float | None) -> str:
    """Return a number in three or four digits; "…" where nothing is known."""
    if number is None:
        return "…"
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def said(figure: ToldFigure | None) -> str:
    """Return a number with its interval.

    >>> from trilemma.survey.told import ToldFigure
    >>> said(ToldFigure(53.807, 0.55, 52.69, None)), said(ToldFigure(None, None, 0.0, 12345.6))
    ('53.8 (52.7 to …)', '… (0 to 12,346)')
    """
    if figure is None:
        return "too few"
    return f"{_number(figure.value)} ({_number(figure.low)} to {_number(figure.high)})"


def lines(result: StatisticsResult) -> Iterator[str]:
    """Yield what private statistics told, a line for each thing."""
    held = result.verdict.get("guarantee")
    yield (
        f"ε = {held['epsilon']:.3g} at δ = {held['delta']:g} for one record, under {held['threat']}"
        if held
        else f"no privacy is promised: {result.verdict['no_guarantee']['reason']}"
    )
    yield (
        f"{len(result.heard)} of {result.clients} sites by {result.rule}, of which {result.liars} may lie; "
        f"in brackets intervals of {result.level:.0%}. {said(result.records)} records"
    )
    for one in result.columns:
        yield from _of_column(one)
    for pair in result.correlations:
        yield f"correlation of {' and '.join(pair.columns)}: {said(pair.figure)}"
    for site in result.sites:
        labels = "".join(f"; {cell.name}: {said(cell.count)}" for cell in site.labels if cell.count)
        yield f"site {site.site}: {said(site.records.count)} records{labels}"
    apart = [one for one in result.drift if (one.distance.low or 0.0) > 0]
    if result.drift and not apart:
        yield "no two sites are further apart than noise alone would put them"
    for drift in sorted(apart, key=lambda one: -(one.distance.low or 0.0))[:MOST_DRIFTS]:
        one_site, other = drift.sites
        yield f"sites {one_site} and {other} are {said(drift.distance)} apart in {drift.column}; √2 at most"
    yield from _proposed(result)
    for note in result.notes:
        yield f"note: {note}"


def _of_column(column: ColumnFigures) -> Iterator[str]:
    yield f"{column.name}: {said(column.records)} records, missing in a share of {said(column.missing)}"
    if column.mean is not None:
        yield f"    mean {said(column.mean)}, variance {said(column.variance)}"
    if column.quantiles:
        shown = (one for one in column.quantiles if one.share in SHOWN)
        yield "    quantiles " + ", ".join(f"{one.share:.0%}: {said(one.figure)}" for one in shown)
    else:
        cells = [f"{cell.name}: {said(cell.count)}" for cell in column.cells if cell.count]
        yield f"    {', '.join(cells) or 'no count stands out of the noise'}"


def _proposed(result: StatisticsResult) -> Iterator[str]:
    """Say what is proposed for training."""
    found = result.proposal
    for name, scale in found.scales.items():
        yield f"proposed: scale {name} as ({name} − {scale.centre:g}) / {scale.spread:g}"
    for name, bounds in found.bounds.items():
        yield f"proposed: columns.{name} = {{low = {bounds.low:g}, high = {bounds.high:g}}}"
    if found.clip is not None:
        yield f"proposed: [privacy] clip = {found.clip:g}"
    if found.class_weights:
        weights = ", ".join(f"{name}: {weight:g}" for name, weight in found.class_weights.items())
        yield f"proposed: class weights {weights}"
