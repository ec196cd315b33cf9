"""Tables of results inside pages of the documentation, written from `lab/results/` (`make docs-results`).

    <!-- results: NAME -->                        what stands between these two lines is written here,
    <!-- end of results -->                       the rest of the page by people
    <!-- results: NAME / Table 5 / accuracy -->   one table of it, one metric of that
    <!-- results: NAME / sentences -->            what the paper says in words, each with a verdict
    <!-- results: NAME / findings -->             what we say of our own results, and where it holds
    <!-- results: NAME / settings -->             what the paper says of the experiment, and our key for it
    <!-- results: NAME / differences -->          what explains differences, and of how many
    <!-- results: NAME / orderings -->            per table, in how many comparisons the paper's order holds
    <!-- results: summary -->                     a line for each study that was run
    <!-- results: frontier / worst -->            the arena's worst cases; or / summary: those of few rules,
                                                  / adversaries: what each left, / missing: what was not run

python -m trilemma_lab.pages docs/results.md …
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trilemma.report import Table
from trilemma.report.tables import SHARES
from trilemma_lab.arena import arena, standings
from trilemma_lab.papers import studies
from trilemma_lab.papers.published import Claim, Paper, paper
from trilemma_lab.studies.claims import Judged, judged, sentences, written
from trilemma_lab.studies.filled import partly_searched
from trilemma_lab.studies.measured import Measured, Results, named_seeds, read_results
from trilemma_lab.studies.study import in_order
from trilemma_lab.studies.verdicts import Verdict, orderings, said, summed_up, verdicts

BLOCK = re.compile(r"(<!-- results: (.+?) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def page(text: str, results: Path) -> str:
    """Return a page with its blocks written anew from the files in `results`."""

    def block(found: re.Match[str]) -> str:
        begin, named, end = found.groups()
        name, *part = named.split(" / ")
        if name == "frontier":
            inside = standings.markdown(arena.read(results / "frontier.json"), *part)
        elif name == "summary":
            inside = _summary(results)
        else:
            printed = paper(studies[name].paper).of(name)
            there = results / f"{name}.json"
            inside = _inside(read_results(there) if there.exists() else Results(name, ()), printed, *part)
        return f"{begin}\n{inside}\n\n{end}"

    return BLOCK.sub(block, text)


def _inside(results: Results, printed: Paper, part: str = "", metric: str = "") -> str:
    """Return what a block shows: results, or what is said of them."""
    if part in ("sentences", "findings"):
        return _sentences(results, printed, printed.claims if part == "sentences" else printed.findings)
    if part == "settings":
        told = tuple((one.text, one.said) for one in printed.settings)
        return Table("", ("the paper", "ours"), told, words=2).markdown()
    if part == "differences":
        return _differences(results, printed)
    if part == "orderings":
        lines = tuple((one.table, one.words) for one in orderings(results, printed))
        return Table("", ("table", "accuracy"), lines, words=2).markdown()
    if not results.cells:
        return f"Not run yet: `trilemma papers run {results.study} --missing`."
    return markdown(results, printed, part, metric)


def _sentences(results: Results, printed: Paper, claims: Sequence[Claim]) -> str:
    """Lay sentences out with their verdicts; what was not run says so."""
    lines = tuple(
        (
            one.text,
            one.figure,
            one.verdict if one.places else "not run",
            printed.seeds_said(results.study, one.seeds) if one.places else "",
        )
        for one in sentences(claims, results, printed)
    )
    return Table("", ("sentence", "of", "verdict", "seeds"), lines, words=4).markdown()


def _differences(results: Results, printed: Paper) -> str:
    """Say what explains the differences, and of how many numbers and sentences at a place."""
    found: list[Verdict | Judged] = [*verdicts(results, printed), *judged(results, printed)]
    counts = Counter(one.cause for one in found if one.kind == "differs")
    if not counts:
        return "No number and no sentence differs at any place."
    lines = tuple((cause, str(count)) for cause, count in counts.most_common())
    return Table("", ("cause", "differences"), lines, words=1).markdown()


def _summary(folder: Path) -> str:
    """Return a line for every study: how it compares, and how much of it there is."""
    lines = []
    for name, study in studies.items():
        path = folder / f"{name}.json"
        results = read_results(path) if path.exists() else Results(name, ())
        much = f"{len(results.cells)} of {len(study.order) or len(results.cells)}"
        printed = paper(study.paper).of(name)
        lines.append((f"`{name}`", much, summed_up(name, results, printed) if results.cells else "not run"))
    return Table("", ("study", "places", "ours beside the paper's"), tuple(lines), words=3).markdown()


def markdown(results: Results, printed: Paper, table: str = "", metric: str = "") -> str:
    """Lay results out as Markdown, one table per `table`, the paper's number beside ours.

    A table of several columns with several metrics becomes a table for each metric. `table` and `metric` name
    the only ones to show.
    """
    shown = [_only(cell, metric) for cell in results.cells if table in ("", cell.table)]
    cells = [cell for cell in shown if cell.metrics]
    tables = [
        one
        for title in dict.fromkeys(cell.table for cell in cells)
        for one in _tables(title, [c for c in cells if c.table == title], results.study, printed)
    ]
    return "\n\n".join([*(one.markdown() for one in tables), _footer(cells, results, table)])


def _footer(cells: Sequence[Measured], results: Results, table: str) -> str:
    """Say what stands above it: how much of it is filled, of when and by which code, what was not tried."""
    origins = [*dict.fromkeys(cell.of or results.about for cell in cells)]
    of_one = len(origins) == 1
    origin = f" {origins[0]};" if of_one else ""
    said = f"{_filled(cells, results.study, table)};{origin} from `lab/results/{results.study}.json`."
    if table:
        said += _rounds(cells, results.study)
    if not of_one:
        said += _of_several(origins, len({cell.code or results.code for cell in cells}))
    return said + _searching(cells, results.study) + (f" {results.note}." if results.note else "")


UNKNOWN = "date unknown"
MADE = re.compile(rf"(?:^|: |; )([^:;]+?), (\d{{4}}-\d\d-\d\d|{UNKNOWN})")
"""On what and on which day, in what a cell says of its making."""


def _of_several(origins: Sequence[str], versions: int) -> str:
    """Say on what and from when to when cells were measured, that do not all have the same origin.

    >>> _of_several(["a GPU, 2026-11-16; code 1a", "seed 2: a CPU, 2026-11-17; seed 1: a GPU, 2026-11-16"], 2)
    ' Measured on a GPU, a CPU, 2026-11-16 to 2026-11-17, by 2 versions of the code: the file says which.'
    """
    made = [found for origin in origins for found in MADE.findall(origin)]
    known = [(device, day) for device, day in made if day != UNKNOWN]
    days = sorted({day for _, day in known})
    where = ", ".join(dict.fromkeys(device for device, _ in known)) or "a device that is not on record"
    when = "".join(f", {day}" for day in days[:1]) + "".join(f" to {day}" for day in days[1:][-1:])
    some = " (of some that is not on record)" if known and len(known) < len(made) else ""
    by = f"{versions} version{'s' if versions > 1 else ''} of the code"
    return f" Measured on {where}{when}{some}, by {by}: the file says which."


def _filled(cells: Sequence[Measured], study: str, table: str) -> str:
    """Say how many places of a study, or of one of its tables, have a result, and by which seeds.

    >>> from trilemma.base.records import Spread
    >>> half, name = {"accuracy": Spread.of({1: 0.5})}, "CNN, f = 5, IPM"
    >>> cells = [Measured(name, "SAFE-DSHB", f"ε = {one}", half, (1, 2)[: one % 3]) for one in (8, 13, 23)]
    >>> _filled(cells, "byz-clip21-figure1", name)
    '3 of 15 places are filled: 2 by seeds 1, 2; 1 by seed 1'
    """
    known = studies[study].order if study in studies else {}
    places = sum(table in ("", at[0]) for at in known) or len(cells)
    much = f"{len(cells)} of {places} places are" if len(cells) < places else f"All {places} places are"
    counts = Counter(cell.seeds for cell in cells).most_common()
    by = "; ".join(
        f"{f'{count} ' if len(counts) > 1 else ''}by {named_seeds(seeds)}" for seeds, count in counts if seeds
    )
    return f"{much} filled{': ' if len(counts) > 1 else ' '}{by}"


def _rounds(cells: Sequence[Measured], study: str) -> str:
    """Say after how many rounds each cell of a table is, where they differ.

    >>> def cell(row: str, column: str, rounds: int) -> Measured:
    ...     return Measured("t", row, column, {}, settings={"run.rounds": rounds})
    >>> _rounds([cell("a", "0 %", 20), cell("b", "0 %", 20), cell("a", "9 %", 20), cell("b", "9 %", 5)], "s")
    ' After 20 rounds: a; b (0 %). After 5: b (9 %).'
    """
    there: dict[int, dict[str, list[str]]] = {}
    for cell in cells:
        if "run.rounds" in cell.settings:
            there.setdefault(cell.settings["run.rounds"], {}).setdefault(cell.row, []).append(cell.column)
    if len(there) < 2:
        return ""
    columns = in_order(cells, study, 2)
    every = Counter(cell.row for cell in cells)
    said: list[str] = []
    for rounds, rows in sorted(there.items(), reverse=True):
        alike: dict[str, list[str]] = {}
        for row, own in rows.items():
            some = ", ".join(sorted(own, key=columns.index)) if len(own) < every[row] else ""
            alike.setdefault(some, []).append(row)
        groups = [
            ("every row" if len(names) == len(every) else ", ".join(names)) + (f" ({some})" if some else "")
            for some, names in alike.items()
        ]
        said.append(f" After {rounds}{'' if said else ' rounds'}: {'; '.join(groups)}.")
    return "".join(said)


def _searching(cells: Sequence[Measured], study: str) -> str:
    """Say where less than a whole grid of hyper-parameters was tried.

    >>> from trilemma.base.records import Spread
    >>> half, at = {"accuracy": Spread.of({1: 0.5})}, ("CNN, f = 5, IPM", "SAFE-DSHB", "ε = 8")
    >>> _searching([Measured(*at, half, (1,), tried={"algorithm.lr=0.1": {"1": 0.5}})], "byz-clip21-figure1")
    ' 1 cell shows the one point of its grid that was tried: the best may be higher.'
    """
    if study not in studies:
        return ""
    counts = Counter(
        (len(cell.tried), studies[study].points[cell.place])
        for cell in partly_searched(studies[study], cells)
    )
    said = ""
    for (tried, points), count in sorted(counts.items()):
        who = "1 cell shows" if count == 1 else f"{count} cells show"
        its = "its" if count == 1 else "their"
        what = (
            f"the one point of {its} grid that was tried"
            if tried == 1
            else f"the best of {tried} of the {points} points of {its} grid"
        )
        said += f" {who} {what}: the best may be higher."
    return said


def _only(cell: Measured, metric: str) -> Measured:
    return replace(cell, metrics={name: one for name, one in cell.metrics.items() if metric in ("", name)})


def _tables(title: str, own: Sequence[Measured], study: str, printed: Paper) -> list[Table]:
    """Lay out the cells of one table: together, or metric by metric where columns would multiply."""
    metrics = dict.fromkeys(name for cell in own for name in cell.metrics)
    if len(metrics) == 1 or len({cell.column for cell in own}) == 1:
        return [_table(title, own, study, printed)]
    return [
        _table(f"{title}: {name}", [_only(cell, name) for cell in own], study, printed) for name in metrics
    ]


def _table(title: str, cells: Sequence[Measured], study: str, printed: Paper) -> Table:
    """Lay cells out by row, and by column and metric."""
    down, across = (in_order(cells, study, axis) for axis in (1, 2))
    by_column = sorted(cells, key=lambda cell: across.index(cell.column))
    heads = dict.fromkeys((cell.column, metric) for cell in by_column for metric in cell.metrics)
    found = {(cell.row, cell.column): cell for cell in cells}
    rows = tuple(
        (row, *(_text(found.get((row, column)), metric, printed) for column, metric in heads)) for row in down
    )
    many_columns = len({column for column, _ in heads}) > 1
    many_metrics = len({metric for _, metric in heads}) > 1
    names = (_head(column, metric, many_metrics, many_columns) for column, metric in heads)
    return Table(title, ("", *names), rows, words=1 + len(heads))


def _head(column: str, metric: str, many_metrics: bool, many_columns: bool) -> str:
    """Name a column by what tells it from its neighbours."""
    said_metric = (
        metric.replace("_", " ") if many_metrics or (metric not in SHARES and not many_columns) else ""
    )
    return " ".join(part for part in (column if many_columns else "", said_metric) if part) or column


def _text(cell: Measured | None, metric: str, printed: Paper) -> str:
    if cell is None or metric not in cell.metrics:
        return ""
    theirs = printed.at(*cell.place, metric)
    return written(cell, metric) + (f" (paper: {said(theirs)})" if theirs is not None else "")


def main() -> None:
    """Write the blocks of the named pages anew."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(page(path.read_text("utf-8"), Path("lab/results")), "utf-8")


if __name__ == "__main__":
    main()
