"""Markdown tables, line by line as their rows are measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Cells = tuple[tuple[str, str], ...]
"""Heading and content of each cell of a row."""


def table(rows: Iterable[Cells]) -> Iterator[str]:
    r"""Yield the lines of a table; the headings are those of its first row.

    >>> print(*table([(("rule", "caf"), ("ms", "3"))]), sep="\n")
    | rule | ms |
    |---|---|
    | caf | 3 |
    """
    for number, row in enumerate(rows):
        if not number:
            yield _line(heading for heading, _ in row)
            yield "|" + "---|" * len(row)
        yield _line(content for _, content in row)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
