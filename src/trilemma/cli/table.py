"""`trilemma table`: the closing table of a run, or a metric of many runs by the values of two keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def table_command(
    directory: Annotated[
        Path, typer.Argument(help="the directory of a run, a federation or a sweep, or a folder of runs")
    ],
    rows: Annotated[
        str | None,
        typer.Option(help="a key of the configurations, as in aggregation.rule; default: a run's own table"),
    ] = None,
    columns: Annotated[str | None, typer.Option(help="another key, as in attack.name")] = None,
    value: Annotated[
        str, typer.Option(help="worst, mean or best of the cells that share a row and a column")
    ] = "mean",
    metric: Annotated[str | None, typer.Option(help="default: the first the runs were scored by")] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="screen, markdown, csv, parquet or png; default: screen in a terminal, else markdown",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object for each place, in a list")] = False,
    to: Annotated[
        Path | None, typer.Option(help="file to write; default: the screen, or DIRECTORY/table.png, .parquet")
    ] = None,
) -> None:
    """Show the table of a finished run, or lay out a metric of a sweep's runs by two keys.

    Prints a table in a terminal, and Markdown where it is piped. Also writes CSV, JSON, Parquet, or a map of
    colours.
    """
    from rich.console import Console

    from trilemma import report
    from trilemma.base import files
    from trilemma.base.errors import ConfigError, nearest
    from trilemma.report.plain import plain_json

    formats = ("screen", "markdown", "csv", "parquet", "png")
    if format_ is not None and format_ not in formats:
        raise ConfigError(f"unknown format {format_!r}: {nearest(format_, formats)}")
    if json and format_ is not None:
        raise ConfigError(f"--json is a format of its own: leave --format {format_} out")
    if rows is None:
        _of_one_run(directory)
        return
    chosen: Any = value
    cross = report.load_sweep(directory).cross(rows, columns, chosen, metric)
    if format_ in ("parquet", "png"):
        path = to or directory / f"table.{format_}"
        print(cross.parquet(path) if format_ == "parquet" else cross.heatmap(path))
        return
    screen = Console()
    if format_ == "screen" or (format_ is None and not json and to is None and screen.is_terminal):
        if to is not None:
            raise ConfigError("--format screen is no file's; allowed with --to: markdown, csv, parquet, png")
        screen.print(cross.table())
        return
    if json:
        text = plain_json(cross.records()) + "\n"
    else:
        text = cross.csv() if format_ == "csv" else cross.table().markdown() + "\n"
    if to is None:
        print(text, end="")
    else:
        files.write_where_asked(to, text.encode())
        print(to)


def _of_one_run(directory: Path) -> None:
    """Print the table that a run ended with."""
    from rich.console import Console

    from trilemma import report
    from trilemma.base.errors import UserError

    one = any((directory / name).is_file() for name in ("config.toml", "federation.toml"))
    if not one and not (directory / "server").is_dir():
        raise UserError(
            f"{str(directory)!r} is no single run: say with --rows by which key, as aggregation.rule"
        )
    screen, result = Console(), report.load(directory)
    screen.print(result if screen.is_terminal else result.table().markdown(), markup=False, soft_wrap=True)
