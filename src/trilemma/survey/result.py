"""What a survey told, as one result: figures, what they cost and what they propose; kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.base.typed import typed
from trilemma.survey.figures import ColumnFigures, Correlation
from trilemma.survey.proposal import Proposal
from trilemma.survey.sites import Drift, SiteFigures
from trilemma.survey.told import LEVEL, ToldFigure

FILE = "statistics.json"


@dataclass(frozen=True)
class StatisticsResult:
    """What a survey told: every number with its noise and its interval.

    An interval holds with the chance `level`, whatever `liars` of the sites have sent. `verdict` is what the
    survey guarantees, or why nothing, as in the summary of a run.
    """

    records: ToldFigure
    columns: tuple[ColumnFigures, ...]
    correlations: tuple[Correlation, ...]
    sites: tuple[SiteFigures, ...]
    drift: tuple[Drift, ...]
    proposal: Proposal
    verdict: Mapping[str, Any]
    heard: tuple[int, ...]
    clients: int
    liars: int
    rule: str
    level: float = LEVEL
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def plain(self) -> dict[str, Any]:
        """Return JSON values."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def column(self, name: str) -> ColumnFigures:
        """Return what is known of a column."""
        found = [one for one in self.columns if one.name == name]
        if not found:
            raise UserError(f"no column {name!r}; there are {', '.join(one.name for one in self.columns)}")
        return found[0]

    def save(self, folder: Path) -> Path:
        """Write it into a folder, as `statistics.json`; return where it is."""
        path = folder / FILE
        files.write_atomically(path, json.dumps(self.plain(), indent=2, ensure_ascii=False).encode())
        return path


def read_statistics(folder: Path) -> StatisticsResult:
    """Read what `StatisticsResult.save` wrote into a folder."""
    path = folder / FILE
    try:
        return typed(StatisticsResult, json.loads(path.read_text("utf-8"), parse_constant=_refused))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} holds no statistics: {error}") from None


def _refused(number: str) -> NoReturn:
    raise ValueError(f"{number} is no figure")
