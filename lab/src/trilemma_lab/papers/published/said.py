"""What papers say, as types: numbers, sentences about results, words about settings, and why ours differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


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


Says = Literal["beats", "matches or beats", "is close to", "is behind", "has a wider gap", "stays below"]
"""How a claim relates a row to others."""


@dataclass(frozen=True)
class Claim:
    """A sentence about one row beside others, without a number: in the tables and columns named.

    `text` is the sentence. The others stand in the same table and column, or in those that `there` names.
    """

    study: str
    row: str
    says: Says
    others: tuple[str, ...]
    figure: str
    within: float = 0.0
    tables: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    text: str = ""
    there: Mapping[str, str] = field(default_factory=dict)
    metric: str = "accuracy"
    by: float = 0.0
    mostly: bool = False

    def about(self, table: str, row: str, column: str) -> bool:
        """Whether it is about this row here."""
        return (
            row == self.row and table in (self.tables or (table,)) and column in (self.columns or (column,))
        )

    def other(self, row: str, table: str, column: str) -> tuple[str, str, str]:
        """Return the place of one of the others, for a claim that is judged at `table` and `column`."""
        return self.there.get("table", table), row, self.there.get("column", column)

    @property
    def words(self) -> str:
        """What it says."""
        if self.says == "stays below":
            return f"{self.says} {self.by:g}"
        there = ", ".join(self.there.values())
        by = f" by {100 * self.by:g}" if self.says == "is behind" else ""
        than = " than" if self.says == "has a wider gap" else ""
        return f"{self.says}{by} {' and '.join(self.others)}{than}{f' ({there})' if there else ''}"


@dataclass(frozen=True)
class Setting:
    """A sentence about an experiment and the key of ours that says the same.

    `values` are all that the key is in the study's runs, or in those of the tables and rows named.
    """

    study: str
    text: str
    key: str
    values: tuple[Any, ...]
    tables: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()

    def about(self, table: str, row: str) -> bool:
        """Whether it is about this row."""
        return table in (self.tables or (table,)) and row in (self.rows or (row,))

    @property
    def said(self) -> str:
        """The key with its values, as a user types them.

        >>> Setting("s", "T = 30", "run.rounds", (30,)).said
        '`run.rounds` = 30'
        """
        return f"`{self.key}` = {', '.join(map(str, self.values))}"


@dataclass(frozen=True)
class Paper:
    """A paper and what it printed; `findings` are what we say of our own results, as claims."""

    reference: str
    printed: tuple[Printed, ...]
    causes: tuple[Cause, ...] = ()
    claims: tuple[Claim, ...] = ()
    findings: tuple[Claim, ...] = ()
    settings: tuple[Setting, ...] = ()
    seeds: Mapping[str, int] = field(default_factory=dict)

    def of(self, study: str) -> Paper:
        """Return what is about one study."""
        return Paper(
            self.reference,
            tuple(one for one in self.printed if one.study == study),
            tuple(one for one in self.causes if one.study == study),
            tuple(one for one in self.claims if one.study == study),
            tuple(one for one in self.findings if one.study == study),
            tuple(one for one in self.settings if one.study == study),
            {name: count for name, count in self.seeds.items() if name == study},
        )

    def seeds_said(self, study: str, ours: int) -> str:
        """Say how many seeds stand behind a number, and how many the paper has where those are more.

        >>> Paper("a paper", (), seeds={"s": 5}).seeds_said("s", 3), Paper("a paper", ()).seeds_said("s", 3)
        ('3 of 5', '3')
        """
        wanted = self.seeds.get(study, 0)
        return f"{ours} of {wanted}" if ours < wanted else str(ours)

    def at(self, table: str, row: str, column: str, metric: str = "accuracy") -> Printed | None:
        """Return what is printed for a place."""
        return next((one for one in self.printed if one.stands_at(table, row, column, metric)), None)
