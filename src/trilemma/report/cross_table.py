"""A metric by two keys: as Markdown, as comma-separated values, as a Parquet file, as a map of colours."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trilemma.base.errors import UserError
from trilemma.base.files import replaced, room_for
from trilemma.base.records import Spread
from trilemma.report.picture_files import save_picture
from trilemma.report.tables import SHARES, Table, number, percent
from trilemma.task.metrics import LOWER_IS_BETTER


@dataclass(frozen=True)
class TableSquare:
    """What stands where a row and a column meet: over `seeds`, of `cells` that share the place.

    `mean` is None where every seed diverged.
    """

    mean: float | None
    std: float | None
    seeds: int
    cells: int


@dataclass(frozen=True)
class Cross:
    """A metric by the values of two keys; `columns` is None where there is one key only.

    >>> squares = {("caf", "sf"): TableSquare(0.9, 0.01, 3, 1), ("mean", "ipm"): TableSquare(0.4, 0.0, 3, 1)}
    >>> cross = Cross("aggregation.rule", "attack.name", "mean", "accuracy", squares)
    >>> print(cross.table().markdown())
    **mean accuracy %**
    <BLANKLINE>
    | aggregation.rule × attack.name | sf | ipm |
    |---|---:|---:|
    | caf | 90.0 ± 1.0 |  |
    | mean |  | 40.0 ± 0.0 |
    """

    rows: str
    columns: str | None
    value: str
    metric: str
    squares: Mapping[tuple[str, str], TableSquare]
    remarks: tuple[str, ...] = ()

    @property
    def row_names(self) -> list[str]:
        """The values of the first key, in the order they came up."""
        return list(dict.fromkeys(row for row, _ in self.squares))

    @property
    def column_names(self) -> list[str]:
        """The values of the second key."""
        return list(dict.fromkeys(column for _, column in self.squares))

    @property
    def title(self) -> str:
        """What is shown."""
        return f"{self.value} {self.metric}{' %' if self.metric in SHARES else ''}"

    def text(self, row: str, column: str) -> str:
        """Write what stands at a place: mean ± deviation, a star where every seed diverged."""
        square = self.squares.get((row, column))
        if square is None:
            return ""
        spread = Spread(square.mean, square.std, {str(seed): None for seed in range(square.seeds)})
        return percent(spread) if self.metric in SHARES else number(spread)

    def table(self) -> Table:
        """Return it as a table."""
        names = self.column_names
        head = self.rows if self.columns is None else f"{self.rows} × {self.columns}"
        columns = names if self.columns is not None else [self.metric]
        lines = tuple((row, *(self.text(row, column) for column in names)) for row in self.row_names)
        return Table(self.title, (head, *columns), lines, self.remarks, words=1)

    def records(self) -> list[dict[str, Any]]:
        """Return one flat record per place."""
        keys = (self.rows, *([] if self.columns is None else [self.columns]))
        return [
            {
                **dict(zip(keys, place, strict=False)),
                "metric": self.metric,
                "value": self.value,
                **asdict(square),
            }
            for place, square in self.squares.items()
        ]

    def csv(self) -> str:
        """Return the records as comma-separated values, with a line of headings."""
        records = self.records()
        text = io.StringIO()
        writer = csv.DictWriter(text, records[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return text.getvalue()

    def parquet(self, path: Path | str) -> Path:
        """Write the records into a Parquet file."""
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise UserError(
                "Parquet needs pyarrow: pip install 'trilemma[tables]'; csv and markdown need nothing"
            ) from None
        target = room_for(Path(path))
        with replaced(target.resolve()) as new:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(self.records()), new)
        return target

    def heatmap(self, path: Path | str) -> Path:
        """Draw it as a map of colours into a PNG file, bright where the metric is good."""
        from matplotlib import colormaps
        from matplotlib.figure import Figure  # without pyplot: no global state, no display needed
        from matplotlib.ticker import PercentFormatter

        rows, columns = self.row_names, self.column_names
        means = np.array([[_mean(self.squares.get((row, column))) for column in columns] for row in rows])
        size = (2.5 + max(len(row) for row in rows) * 0.07 + 1.1 * len(columns), 1.8 + 0.45 * len(rows))
        figure = Figure(figsize=size, dpi=120, layout="constrained")
        axes = figure.add_subplot()
        name = "viridis_r" if self.metric in LOWER_IS_BETTER else "viridis"
        colours = colormaps[name].with_extremes(bad="lightgrey")
        limits = (0.0, 1.0) if self.metric in SHARES else (None, None)
        image = axes.imshow(means, aspect="auto", cmap=colours, vmin=limits[0], vmax=limits[1])
        for y, row in enumerate(rows):
            for x, column in enumerate(columns):
                red, green, blue, _ = image.cmap(image.norm(np.ma.masked_invalid(means[y, x])))
                ink = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white"
                axes.text(x, y, self.text(row, column), ha="center", va="center", color=ink, fontsize="small")
        axes.set_yticks(range(len(rows)), rows)
        turned = max(map(len, columns)) > 10
        axes.set_xticks(
            range(len(columns)), columns, rotation=30 if turned else 0, ha="right" if turned else "center"
        )
        axes.set(ylabel=self.rows, xlabel=self.columns or "", title=self.title)
        figure.colorbar(image, ax=axes, format=PercentFormatter(1.0) if self.metric in SHARES else None)
        return save_picture(figure, Path(path))


def _mean(square: TableSquare | None) -> float:
    return np.nan if square is None or square.mean is None else square.mean
