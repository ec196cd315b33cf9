"""`trilemma table`: a metric of many runs by the values of two keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def table_command(
    directory: Annotated[Path, typer.Argument(help="the directory of a sweep, or a folder of runs")],
    rows: Annotated[str, typer.Option(help="a key of the configurations, as in aggregation.rule")],
    columns: Annotated[str | None, typer.Option(help="another key, as in attack.name")] = None,
    value: Annotated[
        str, typer.Option(help="worst, mean or best of the cells that share a row and a column")
    ] = "mean",
    metric: Annotated[str | None, typer.Option(help="default: the first the runs were scored by")] = None,
    format_: Annotated[str, typer.Option("--format", help="markdown, csv, parquet or png")] = "markdown",
    to: Annotated[
        Path | None, typer.Option(help="file to write; default: the screen, or DIRECTORY/table.png, .parquet")
    ] = None,
) -> None:
    """Lay out a metric of a sweep's runs by two keys.

    As Markdown, CSV, Parquet, or a map of colours.
    """
    from trilemma import report
    from trilemma.base import files
    from trilemma.base.errors import ConfigError, nearest

    formats = ("markdown", "csv", "parquet", "png")
    if format_ not in formats:
        raise ConfigError(f"unknown format {format_!r}: {nearest(format_, formats)}")
    chosen: Any = value
    cross = report.load_sweep(directory).cross(rows, columns, chosen, metric)
    if format_ in ("parquet", "png"):
        path = to or directory / f"table.{format_}"
        print(cross.parquet(path) if format_ == "parquet" else cross.heatmap(path))
        return
    text = cross.csv() if format_ == "csv" else cross.table().markdown() + "\n"
    if to is None:
        print(text, end="")
    else:
        files.write_where_asked(to, text.encode())
        print(to)
