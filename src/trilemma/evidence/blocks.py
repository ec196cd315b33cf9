"""A page as a list of blocks, and its three renderings: HTML, Markdown and PDF.

Blocks hold text only. Whatever a stranger has put into it is escaped, and a link leads to a file of the pack.
PDF needs fpdf2 (pure Python, `pip install 'trilemma[evidence]'`); its letters are matplotlib's DejaVu.
"""

from __future__ import annotations

import datetime as dt
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilemma.base.errors import UserError


@dataclass(frozen=True)
class Link:
    """Words that lead to a file of the pack."""

    words: str
    file: str


Cell = str | Link


@dataclass(frozen=True)
class Heading:
    """A heading; `page` begins a new page where there are pages."""

    words: str
    level: int = 2
    page: bool = False


@dataclass(frozen=True)
class Words:
    """A paragraph; `strong`: one that nobody may overlook."""

    words: str
    strong: bool = False


@dataclass(frozen=True)
class Rows:
    """A table; without `head` its first column is the heading of each row. `widths` are shares of a page."""

    rows: tuple[tuple[Cell, ...], ...]
    head: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Image:
    """A picture of the pack, and what it shows in words."""

    file: str
    words: str


Block = Heading | Words | Rows | Image

STYLE = """
body{font:15px/1.45 system-ui,"DejaVu Sans",sans-serif;color:#1b2733}
body{max-width:46rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.55rem;line-height:1.2;border-bottom:3px solid #1f5fa8;padding-bottom:.4rem}
h2{font-size:1.15rem;color:#1f5fa8;margin:1.6rem 0 .4rem}
table{border-collapse:collapse;width:100%;margin:.6rem 0}
th,td{border-bottom:1px solid #d5dde5;padding:.35rem .5rem;text-align:left;vertical-align:top}
tbody th{width:24%;font-weight:600;color:#33506e}thead th{background:#eef3f8}
td{overflow-wrap:break-word}
p.strong{border-left:5px solid #b3261e;background:#fdf1f0;padding:.6rem .8rem}
img{max-width:100%}figcaption{color:#51606f;font-size:.9em}figure{margin:.6rem 0}
@media print{body{font-size:11.5px;margin:0 auto;max-width:none}
h2.page{break-before:page}tr{break-inside:avoid}}
"""


def as_html(title: str, blocks: Sequence[Block]) -> str:
    """Return a page that needs nothing but the folder it lies in, and runs no script."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' file:"
    head = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style></head>\n<body>\n"
    )
    return head + "\n".join(_html(one) for one in blocks) + "\n</body></html>\n"


def anchor(words: str) -> str:
    """Return by which name a heading is linked to.

    >>> anchor("What is not promised")
    'what-is-not-promised'
    """
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def _html(block: Block) -> str:
    match block:
        case Heading(words, level, page):
            mark = " class=page" if page else ""
            return f'<h{level} id="{anchor(words)}"{mark}>{html.escape(words)}</h{level}>'
        case Words(words, strong):
            return f"<p{' class=strong' if strong else ''}>{html.escape(words)}</p>"
        case Image(file, words):
            said = html.escape(words)
            return f'<figure><img src="{file}" alt="{said}"><figcaption>{said}</figcaption></figure>'
    head = "".join(f"<th>{html.escape(one)}</th>" for one in block.head)
    rows = "\n".join(
        "<tr>"
        + "".join(_html_cell(one, not place and not block.head) for place, one in enumerate(row))
        + "</tr>"
        for row in block.rows
    )
    wide = "".join(f'<col style="width:{one}%">' for one in block.widths)
    return (
        f"<table>{wide}{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>\n{rows}\n</tbody></table>"
    )


def _html_cell(cell: Cell, heads: bool) -> str:
    tag = "th" if heads else "td"
    if isinstance(cell, Link):
        return f'<{tag}><a href="{html.escape(cell.file)}">{html.escape(cell.words)}</a></{tag}>'
    return f"<{tag}>{html.escape(cell)}</{tag}>"


def as_markdown(blocks: Sequence[Block]) -> str:
    """Return the same as Markdown."""
    return "\n\n".join(_markdown(one) for one in blocks) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(words, level):
            return f"{'#' * level} {_plain(words)}"
        case Words(words, strong):
            return f"**{_plain(words)}**" if strong else _plain(words)
        case Image(file, words):
            return f"![{_plain(words)}]({file})"
    head = block.head or ("",) * max(map(len, block.rows), default=1)
    rows = [head, ("---",) * len(head), *(tuple(map(_markdown_cell, row)) for row in block.rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _markdown_cell(cell: Cell) -> str:
    return f"[{_plain(cell.words)}]({cell.file})" if isinstance(cell, Link) else _plain(cell)


def _plain(words: str) -> str:
    """Escape what Markdown, or HTML in it, would take for its own."""
    for one in ("\\", "`", "*", "_", "[", "]", "|"):
        words = words.replace(one, f"\\{one}")
    return words.replace("&", "&amp;").replace("<", "&lt;").replace("\n", " ")


def as_pdf(title: str, blocks: Sequence[Block], folder: Path, made: str) -> bytes:
    """Return the same as a PDF, the same bytes for the same blocks; pictures are read from `folder`."""
    try:
        from fpdf import FPDF
    except ImportError:
        raise UserError("a PDF needs fpdf2: pip install 'trilemma[evidence]'") from None
    from matplotlib import get_data_path

    fonts = Path(get_data_path()) / "fonts" / "ttf"
    page = FPDF(format="A4")
    page.set_creation_date(dt.datetime.fromisoformat(made).replace(tzinfo=dt.UTC))
    page.set_title(title)
    page.set_lang("en")
    page.set_margins(16, 14)
    page.set_auto_page_break(True, 14)
    page.set_draw_color(205)
    page.add_font("dejavu", "", fonts / "DejaVuSans.ttf")
    page.add_font("dejavu", "B", fonts / "DejaVuSans-Bold.ttf")
    page.add_page()
    for block in blocks:
        _onto(page, block, folder)
    return bytes(page.output())


def _onto(page: Any, block: Block, folder: Path) -> None:
    match block:
        case Heading(words, level, begins):
            if begins:
                page.add_page()
            page.ln(0 if level == 1 else 2)
            page.set_font("dejavu", "B", 15 if level == 1 else 11)
            page.set_text_color(31, 95, 168)
            page.multi_cell(0, 7 if level == 1 else 6, words, new_x="LMARGIN", new_y="NEXT", align="L")
            page.set_text_color(0)
        case Words(words, strong):
            page.set_font("dejavu", "B" if strong else "", 9)
            page.multi_cell(
                0, 4.6, words, new_x="LMARGIN", new_y="NEXT", align="L", border="L" if strong else 0
            )
            page.ln(1)
        case Image(file, words):
            page.image(folder / file, w=140, alt_text=words)
            page.set_font("dejavu", "", 8)
            page.multi_cell(0, 4, words, new_x="LMARGIN", new_y="NEXT", align="L")
        case Rows():
            _table_onto(page, block)


def _table_onto(page: Any, block: Rows) -> None:
    from fpdf.fonts import FontFace

    page.set_font("dejavu", "", 8)
    columns = max(map(len, block.rows), default=1)
    widths = block.widths or ((24, 76) if columns == 2 and not block.head else (1,) * columns)
    with page.table(
        col_widths=widths,
        text_align="LEFT",
        line_height=4,
        padding=1,
        borders_layout="HORIZONTAL_LINES",
        first_row_as_headings=bool(block.head),
        headings_style=FontFace(emphasis="BOLD", fill_color=(238, 243, 248)),
    ) as table:
        if block.head:
            table.row(block.head)
        for row in block.rows:
            line = table.row()
            for place, cell in enumerate(row):
                heads = not place and not block.head
                words = cell.words if isinstance(cell, Link) else cell
                line.cell(words, style=FontFace(emphasis="BOLD") if heads else None)
