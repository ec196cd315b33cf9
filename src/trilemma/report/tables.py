"""Tables, on a screen or as Markdown.

Accuracy never stands alone: ε, f, the attack and the run without liars are beside it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.console import Console, Group
from rich.table import Table as ScreenTable
from rich.text import Text

from trilemma.base.records import Spread, Summary
from trilemma.privacy import NoGuarantee
from trilemma.report.privacy import verdict_of

NAME = 30
"""Characters of a name at most that is never broken; longer ones go over several lines."""


@dataclass(frozen=True)
class Table:
    """Headings, rows of text, and remarks below; columns after the first `words` hold numbers.

    rich prints it as a table on a screen, a notebook as Markdown, `str` as plain text.

    >>> print(Table("", ("rule", "accuracy %"), (("caf", "89.5"),), words=1).markdown())
    | rule | accuracy % |
    |---|---:|
    | caf | 89.5 |
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()
    words: int = 4

    def __rich__(self) -> Group:
        """Return the table as rich draws it, and below it the remarks, as wide as the screen."""
        title = Text(self.title) if self.title else None
        table = ScreenTable(title=title, title_justify="left")
        first = max((len(row[0]) for row in self.rows if row), default=0)
        for index, heading in enumerate(self.headings):
            number = index >= self.words
            whole = index == 0 and first <= NAME  # a name that is cut short cannot be typed
            words = " ".join((heading, *(row[index] for row in self.rows))).split()
            least = max(map(len, words), default=1)  # a word that is cut short says nothing
            side: Any = "right" if number else "left"
            table.add_column(Text(heading), justify=side, no_wrap=whole, min_width=least)
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
        return Group(table, *map(Text, self.remarks))

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=120, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip()

    __repr__ = __str__

    def markdown(self) -> str:
        """Return the table as Markdown; a star and a bar in a cell are kept from being read as markup."""
        rules = ("---:" if index >= self.words else "---" for index in range(len(self.headings)))
        lines = [f"**{self.title}**", ""] if self.title else []
        lines += [_line(self.headings), "|" + "|".join(rules) + "|", *map(_line, self.rows)]
        return "\n".join(
            [*lines, *([""] if self.remarks else []), *(_escaped(text) for text in self.remarks)]
        )

    def _repr_markdown_(self) -> str:
        return self.markdown()

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], kind: str) -> str:
            sides = ["left"] * self.words + ["right"] * (len(cells) - self.words)
            both = zip(sides, cells, strict=False)
            found = (f'<{kind} style="text-align:{side}">{escape(cell)}</{kind}>' for side, cell in both)
            return f"<tr>{''.join(found)}</tr>"

        title = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        body = "".join(line(row, "td") for row in self.rows)
        table = f"<table>{title}<thead>{line(self.headings, 'th')}</thead><tbody>{body}</tbody></table>"
        return table + "".join(f"<p>{escape(remark)}</p>" for remark in self.remarks)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_escaped, cells)) + " |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def results_table(
    rows: Sequence[tuple[str, Summary]],
    without_liars: Summary | None,
    title: str,
    further: Sequence[str] = (),
) -> Table:
    """Lay out summaries, one per row; what an ε means stands below the table, and `further` remarks.

    The metrics are the first summary's; the run without liars is shown by the first of them.
    """
    names = [*rows[0][1].metrics] or ["loss"]
    compared = without_liars is not None and any(summary.byzantine for _, summary in rows)
    reference = shown(names[0], without_liars) if without_liars else "–"
    unit = " %" if names[0] in SHARES else ""
    scores = (f"{name} %" if name in SHARES else name for name in names)
    claims = any(_claim(summary) for _, summary in rows)  # figures that are printed, and no guarantee
    headings = (
        *("run", "rule", "liars", "attack", "ε"),
        *(("printed ε",) if claims else ()),
        *scores,
        *((f"no liars{unit}",) if compared else ()),
    )
    lines = tuple(
        (
            label,
            summary.rule,
            f"{'?' if summary.byzantine is None else summary.byzantine} of {summary.clients}",
            summary.attack,
            tightest_epsilon(summary)[0],
            *((_claim(summary) or "–",) if claims else ()),
            *(shown(name, summary) for name in names),
            *(("itself" if summary.byzantine == 0 else reference,) if compared else ()),
        )
        for label, summary in rows
    )
    remarks = dict.fromkeys(remark for _, summary in rows for remark in _remarks(summary))
    remarks |= dict.fromkeys(further)
    if without_liars is None and any(summary.byzantine for _, summary in rows):
        remarks["not compared with a run without liars: that is trilemma run --baseline"] = None
    return Table(title, headings, lines, tuple(remarks))


SHARES = frozenset({"accuracy", "backdoor"})
"""Metrics that are shown in per cent."""


def shown(name: str, summary: Summary) -> str:
    """Write a metric over seeds: in per cent where it is a share of examples, else as it is."""
    if name != "loss" and name not in summary.metrics:
        return "–"
    spread = summary.spread(name)
    return percent(spread) if name in SHARES else _written(spread, "{:.3g}".format, "{:.1g}".format)


def number(spread: Spread) -> str:
    """Write a spread with three digits; a star where every seed diverged.

    >>> number(Spread.of({1: 0.80, 2: 0.82}))
    '0.81 ± 0.0141'
    """
    return _written(spread, lambda value: f"{value:.3g}")


def percent(spread: Spread) -> str:
    """Write a spread in per cent; a star where every seed diverged.

    >>> percent(Spread.of({1: 0.80, 2: 0.82}))
    '81.0 ± 1.4'
    """
    return _written(spread, lambda value: f"{100 * value:.1f}")


def _written(
    spread: Spread, write: Callable[[float], str], deviation: Callable[[float], str] | None = None
) -> str:
    if spread.mean is None:
        return "*"
    if len(spread.per_seed) == 1:
        return write(spread.mean)
    return f"{write(spread.mean)} ± {(deviation or write)(spread.std or 0.0)}"


def tightest_epsilon(summary: Summary) -> tuple[str, str]:
    """Return the guaranteed ε of a run, the one its records hold, and what it means; ∞ and why without one.

    Where no run chose an accountant, it is the smallest ε.
    """
    known = {name: value for name, value in summary.epsilon.items() if value is not None}
    if not known and _claim(summary):
        verdict = verdict_of(summary)
        assert isinstance(verdict, NoGuarantee)  # others have no claim
        return "∞", f"ε = {_claim(summary)} is printed, and no guarantee: {verdict.reason}"
    if not known:
        return "∞", ""
    best = summary.accountant if summary.accountant in known else min(known, key=lambda name: known[name])
    figures = [f"{value:.3g}" for name, value in known.items() if name != best]
    give = "gives" if len(figures) == 1 else "give"
    others = f"; looser methods {give} {' and '.join(figures)}" if figures else ""
    meaning = f"under {summary.threat} at δ = {summary.delta:g} ({best}{others})"
    return f"{known[best]:.3g}", f"ε = {known[best]:.3g} {meaning}"


def _claim(summary: Summary) -> str:
    """Return the printed figure of a run without a guarantee; empty where there is none."""
    verdict = verdict_of(summary)
    figure = verdict.figure if isinstance(verdict, NoGuarantee) else None
    return "" if figure is None else f"{figure:.3g}"


def _remarks(summary: Summary) -> list[str]:
    meaning = tightest_epsilon(summary)[1]
    stars = [f"* seed {seed} diverged in round {round_}" for seed, round_ in summary.diverged.items()]
    return ([meaning] if meaning else []) + stars
