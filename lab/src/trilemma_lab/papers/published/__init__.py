"""What the papers printed, one TOML file each: every number with its figure or table, read-off ones marked.

[[printed]]
study = "cafcor-mnist"          # where it stands in ours: study, row and column, in any table; or lists
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

[[claim]]                       # a sentence of its text as a function of the data, judged place by place
text = "SGD2M is typically best"  # the sentence
study = "byz-clip21-figure2"
row = "Byz-Clip21-SGD2M"        # studies and rows may be lists: a claim for each
says = "beats"                  # or another of `Says`
others = ["Byz-Clip-SGD"]       # whom it is held against: rows, beside it if not said otherwise in `there`
figure = "Figure 2"
within = 0.01                   # what the words leave open, or what can be told apart on its curves
columns = ["ε = 13"]            # where, if not everywhere: tables, columns
there = {column = "no attack"}  # where the others stand: a table, a column
metric = "accuracy"             # or a loss or a cost, of which less is better
by = 0.08                       # of "is behind": by how much; of "stays below": below what
mostly = true                   # "typically", "in most settings": it holds if it does at more than half

[[setting]]                     # what it says of an experiment, and the key of ours that says it
study = "cafcor-mnist"          # or a list of studies; where, if not everywhere: tables, rows
text = "T = 30 iterations"
key = "run.rounds"
values = [30]                   # all that the key is in the study's runs

[[finding]]                     # a claim, of what we say ourselves; a test fails where one does not hold

[seeds]
safe-dshb = 5                   # how many seeds the paper has, by study
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from trilemma.base.errors import nearest
from trilemma_lab.papers.published.said import Cause, Claim, Paper, Printed, Setting

__all__ = ["Cause", "Claim", "Paper", "Printed", "Setting", "line", "paper"]


@cache
def paper(name: str) -> Paper:
    """Read the published numbers of a paper.

    >>> table = "mnist, n = 100, f = 5, printed ε = 27.8"
    >>> found = paper("cafcor").of("cafcor-mnist").at(table, "DSGD-CDP", "no attack")
    >>> found.value, found.figure
    (0.83, 'Figure 1, Section 5.1')
    """
    said = _said(name)
    printed = [found for one in said.get("printed", []) for found in _printed(**one)]
    printed += [one for rows in said.get("rows", []) for one in _row(**rows)]
    causes = [cause for one in said.get("cause", []) for cause in _causes(**one)]
    claims, findings = (
        tuple(found for one in said.get(kind, []) for found in _claims(**one))
        for kind in ("claim", "finding")
    )
    settings = tuple(found for one in said.get("setting", []) for found in _settings(**one))
    seeds = said.get("seeds", {})
    return Paper(said["reference"], tuple(printed), tuple(causes), claims, findings, settings, seeds)


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


def _printed(**said: Any) -> list[Printed]:
    """Return what is printed; lists of studies, tables, rows and columns stand for all their combinations.

    >>> [one.row for one in _printed(study="s", row=["a", "b"], column="c", figure="Figure 1", value=0.5)]
    ['a', 'b']
    """
    where = ("study", "table", "row", "column")
    lists = [said[name] if isinstance(said.get(name), list) else [said.get(name, "")] for name in where]
    return [Printed(**{**said, **dict(zip(where, one, strict=True))}) for one in itertools.product(*lists)]


def _causes(study: str | Sequence[str], text: str, **where: Sequence[str]) -> list[Cause]:
    named = {name: tuple(names) for name, names in where.items()}
    return [Cause(one, text, **named) for one in ([study] if isinstance(study, str) else study)]


def _settings(study: str | Sequence[str], text: str, key: str, **said: Sequence[Any]) -> list[Setting]:
    names = [study] if isinstance(study, str) else study
    return [Setting(one, text, key, **{name: tuple(found) for name, found in said.items()}) for one in names]


def _claims(study: str | Sequence[str], row: str | Sequence[str], **said: Any) -> list[Claim]:
    """Return a claim for each of the studies and rows that are named.

    "itself" among the others is the row, for a claim about one row at two places.
    """
    plain: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in said.items()}
    names, rows = ([one] if isinstance(one, str) else one for one in (study, row))
    others = plain.pop("others", ())
    return [
        Claim(name, each, others=tuple(each if one == "itself" else one for one in others), **plain)
        for name, each in itertools.product(names, rows)
    ]


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
