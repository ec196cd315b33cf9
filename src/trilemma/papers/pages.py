"""Tables of results inside pages of the documentation, written from `results/` (`make docs-results`).

    <!-- results: NAME -->            what stands between these two lines is written here,
    <!-- end of results -->           the rest of the page by people

python -m trilemma.papers.pages docs/results.md …
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from trilemma.papers import studies
from trilemma.papers.measured import Measured, Results, read_results
from trilemma.papers.published import Paper, paper
from trilemma.papers.verdicts import said, written
from trilemma.report import Table
from trilemma.report.tables import SHARES

BLOCK = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def page(text: str, results: Path) -> str:
    """Return a page with its blocks written anew from the files in `results`."""

    def block(found: re.Match[str]) -> str:
        name = found[2]
        inside = markdown(read_results(results / f"{name}.json"), paper(studies[name].paper).of(name))
        return f"{found[1]}\n{inside}\n\n{found[3]}"

    return BLOCK.sub(block, text)


def markdown(results: Results, printed: Paper) -> str:
    """Lay results out as Markdown, one table per `table`, the paper's number beside ours."""
    titles = dict.fromkeys(cell.table for cell in results.cells)
    tables = [
        _table(title, [cell for cell in results.cells if cell.table == title], printed) for title in titles
    ]
    seeds = dict.fromkeys(", ".join(map(str, cell.seeds)) for cell in results.cells)
    about = (
        f"Seeds {'; '.join(seeds)}; {results.device or 'device unknown'}, {results.date or 'date unknown'}"
    )
    code = f"code {results.code}" if results.code else "code before results were kept as data"
    source = f"`results/{results.study}.json`"
    return "\n\n".join([*(table.markdown() for table in tables), f"{about}; {code}; from {source}."])


def _table(title: str, cells: Sequence[Measured], printed: Paper) -> Table:
    heads = dict.fromkeys((cell.column, metric) for cell in cells for metric in cell.metrics)
    found = {(cell.row, cell.column): cell for cell in cells}
    rows = tuple(
        (row, *(_text(found.get((row, column)), metric, printed) for column, metric in heads))
        for row in dict.fromkeys(cell.row for cell in cells)
    )
    names = (column if metric in SHARES else f"{column} {metric}".strip() for column, metric in heads)
    return Table(title, ("", *names), rows, words=1 + len(heads))


def _text(cell: Measured | None, metric: str, printed: Paper) -> str:
    if cell is None or metric not in cell.metrics:
        return ""
    theirs = printed.at(*cell.place, metric)
    return written(cell, metric) + (f" (paper: {said(theirs)})" if theirs is not None else "")


def main() -> None:
    """Write the blocks of the named pages anew."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(page(path.read_text("utf-8"), Path("results")), "utf-8")


if __name__ == "__main__":
    main()
