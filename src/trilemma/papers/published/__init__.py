"""What the papers printed, one TOML file each: every number with its figure or table, read-off ones marked.

[[printed]]
study = "cafcor-mnist"          # where it stands in ours: the study, row and column, in any table
row = "DSGD-CDP"
column = "no attack"
figure = "Figure 1"             # where it stands in theirs
value = 0.83                    # or below = 0.30: the paper says no more than that
std = 0.01                      # over seeds, where it is printed
within = 0.01                   # how exactly it can be read
read_off = true                 # from a curve or from the prose about it, not from a table

[[cause]]                       # why ours differ there, where it is known; of several the first is shown
study = "cafcor-fashion"        # or a list of studies
text = "…"
tables = ["Table 5"]            # where, if not everywhere: tables, rows, columns, metrics

[[claim]]                       # what it says in words of one row beside others, column by column
study = "byz-clip21-figure2"
row = "Byz-Clip21-SGD2M"
says = "beats"                  # or "matches or beats", "is close to"
others = ["Byz-Clip-SGD"]
figure = "Figure 2"
within = 0.01                   # what can be told apart on its curves
columns = ["ε = 13"]            # where, if not everywhere: tables, columns
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from trilemma.base.errors import nearest


@dataclass(frozen=True)
class Printed:
    """A number of a paper: `value`, or an upper bound `below`; neither: it prints that the run diverged."""

    study: str
    row: str
    column: str
    figure: str
    table: str = ""
    metric: str = "accuracy"
    value: float | None = None
    below: float | None = None
    std: float | None = None
    within: float = 0.0
    read_off: bool = False

    def stands_at(self, table: str, row: str, column: str, metric: str) -> bool:
        """Whether it is about this place; without a table, about any of the row and column."""
        return (self.row, self.column, self.metric) == (row, column, metric) and self.table in ("", table)


@dataclass(frozen=True)
class Cause:
    """Why ours differ from a paper's: in a whole study, or in the tables, rows, columns and metrics named."""

    study: str
    text: str
    tables: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()

    def about(self, table: str, row: str, column: str, metric: str) -> bool:
        """Whether it is about this number.

        >>> Cause("s", "fewer rounds", tables=("Table 5",)).about("Table 5", "Ditto", "clean", "accuracy")
        True
        """
        named = zip(
            (self.tables, self.rows, self.columns, self.metrics), (table, row, column, metric), strict=True
        )
        return all(not names or name in names for names, name in named)


@dataclass(frozen=True)
class Claim:
    """What a paper says of one row beside others, without a number: in the tables and columns named."""

    study: str
    row: str
    says: Literal["beats", "matches or beats", "is close to"]
    others: tuple[str, ...]
    figure: str
    within: float = 0.0
    tables: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    def about(self, table: str, row: str, column: str) -> bool:
        """Whether it is about this row here."""
        return (
            row == self.row and table in (self.tables or (table,)) and column in (self.columns or (column,))
        )

    @property
    def words(self) -> str:
        """What it says."""
        return f"{self.says} {' and '.join(self.others)}"


@dataclass(frozen=True)
class Paper:
    """A paper and what it printed."""

    reference: str
    printed: tuple[Printed, ...]
    causes: tuple[Cause, ...] = ()
    claims: tuple[Claim, ...] = ()

    def of(self, study: str) -> Paper:
        """Return what is about one study."""
        return Paper(
            self.reference,
            tuple(one for one in self.printed if one.study == study),
            tuple(one for one in self.causes if one.study == study),
            tuple(one for one in self.claims if one.study == study),
        )

    def at(self, table: str, row: str, column: str, metric: str = "accuracy") -> Printed | None:
        """Return what is printed for a place."""
        return next((one for one in self.printed if one.stands_at(table, row, column, metric)), None)


@cache
def paper(name: str) -> Paper:
    """Read the published numbers of a paper.

    >>> table = "mnist, n = 100, f = 5, printed ε = 27.8"
    >>> found = paper("cafcor").of("cafcor-mnist").at(table, "DSGD-CDP", "no attack")
    >>> found.value, found.figure
    (0.83, 'Figure 1, Section 5.1')
    """
    said = _said(name)
    printed = [Printed(**one) for one in said.get("printed", [])]
    printed += [one for rows in said.get("rows", []) for one in _row(**rows)]
    causes = [cause for one in said.get("cause", []) for cause in _causes(**one)]
    claims = [_claim(**one) for one in said.get("claim", [])]
    return Paper(said["reference"], tuple(printed), tuple(causes), tuple(claims))


@cache
def _said(name: str) -> dict[str, Any]:
    folder = resources.files(__name__)
    names = sorted(
        file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml")
    )
    if name not in names:
        raise KeyError(f"no paper is called {name!r}: {nearest(name, names)}")
    return tomllib.loads((folder / f"{name}.toml").read_text("utf-8"))


@cache
def line(name: str, study: str, table: str, row: str) -> str:
    """Return a row of a printed table as it stands in the file; empty where there is none.

    >>> line("lp-proj", "lp-proj-synthetic00", "Table 4", "Ditto")
    ''
    """
    found = (rows for rows in _said(name).get("rows", []) if (rows["study"], rows["table"]) == (study, table))
    return next((str(rows["lines"].get(row, "")) for rows in found), "")


def _causes(study: str | Sequence[str], text: str, **where: Sequence[str]) -> list[Cause]:
    named = {name: tuple(names) for name, names in where.items()}
    return [Cause(one, text, **named) for one in ([study] if isinstance(study, str) else study)]


def _claim(**said: Any) -> Claim:
    plain: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in said.items()}
    return Claim(**plain)


def _row(
    study: str, table: str, figure: str, heads: Sequence[Sequence[str]], lines: dict[str, str]
) -> list[Printed]:
    """Read the rows of a printed table: `heads` are column and metrics, a line has value/std for each.

    A star stands for a run that diverged, a dash for nothing. What is printed was rounded: it is known to
    half a unit of its last digit.

    >>> found = _row("s", "t", "Table 5", [["clean", "accuracy", "variance"]], {"Ditto": "0.9/0.100"})[1]
    >>> found.value, found.within
    (0.1, 0.0005)
    """
    found = []
    for row, line in lines.items():
        for (column, metric, *second), text in zip(heads, line.split(), strict=True):
            first, _, other = text.partition("/")
            if first == "-":
                continue
            value = None if first == "*" else float(first)
            std = None if second or other in ("*", "") else float(other)
            place = (study, row, column, figure, table)
            found.append(Printed(*place, metric, value, std=std, within=_half_a_digit(first)))
            if second:
                value = None if other == "*" else float(other)
                found.append(Printed(*place, second[0], value, within=_half_a_digit(other)))
    return found


def _half_a_digit(number: str) -> float:
    """Return half a unit of a number's last digit after the point; 0 where there is none.

    >>> _half_a_digit("0.88"), _half_a_digit("597800")
    (0.005, 0.0)
    """
    _, point, digits = number.partition(".")
    return 0.5 * 10.0 ** -len(digits) if point and digits.isdigit() else 0.0
