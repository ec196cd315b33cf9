"""The result of a run: every round, the summary, the model, and how to look at them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from trilemma.config import Config
from trilemma.errors import UserError
from trilemma.records import Record, Summary
from trilemma.report.curves import Curve, plot_curves
from trilemma.report.tables import Table, results_table, tightest_epsilon


@dataclass(frozen=True)
class Suspect:
    """A client, and how far the rule trusted it: its mean weight over the `heard` rounds it was heard in.

    `absent` and `rejected` count the rounds it was asked in and did not answer, and answers turned away.
    """

    client: int
    weight: float
    heard: int
    absent: int = 0
    rejected: int = 0


@dataclass(frozen=True)
class Result:
    """What a run gave, simulated or deployed. `trilemma.report.load` reads one from a folder.

    `seeds` has the records of every seed, a federation's under the seed of its configuration; `baseline` is
    the same run with nobody lying, where it was run too.
    """

    directory: Path
    config: Config = field(repr=False)
    summary: Summary
    seeds: Mapping[int, Sequence[Record]] = field(repr=False)
    read_model: Callable[[int], Tensor] = field(repr=False, compare=False)
    name_tensors: Callable[[Tensor, int], dict[str, Tensor]] = field(repr=False, compare=False)
    baseline: Result | None = field(default=None, repr=False)

    @property
    def records(self) -> list[Record]:
        """Every round, seed after seed."""
        return [record for records in self.seeds.values() for record in records]

    @property
    def title(self) -> str:
        """Data, algorithm and rounds, for a heading."""
        return f"{self.config.data.name}, {self.summary.algorithm}, {self.summary.rounds} rounds"

    def model(self, seed: int | None = None) -> Tensor:
        """Return the parameters a seed returned, the first one's by default.

        A flat vector (d,), or (k, d) where the clients that compute keep models of their own.
        """
        wanted = next(iter(self.seeds)) if seed is None else seed
        if wanted not in self.seeds:
            raise UserError(f"there is no seed {wanted}; allowed: {', '.join(map(str, self.seeds))}")
        return self.read_model(wanted)

    def state_dict(self, seed: int | None = None, client: int | None = None) -> dict[str, Tensor]:
        """Return a seed's model under its own names: `net.load_state_dict(result.state_dict())`.

        `client` says whose, where clients keep models of their own: its row in `model()`.
        """
        flat = self.model(seed)
        if flat.dim() == 2:
            if client is None or not 0 <= client < len(flat):
                raise UserError(
                    f"{len(flat)} clients keep models of their own; say whose: client = 0 to {len(flat) - 1}"
                )
            flat = flat[client]
        return self.name_tensors(flat, next(iter(self.seeds)) if seed is None else seed)

    def table(self) -> Table:
        """Return the scores beside ε, f, the attack and the run without liars."""
        free = self.baseline.summary if self.baseline is not None else None
        return results_table([(self.summary.algorithm, self.summary)], free, self.title)

    def markdown(self) -> str:
        """Return the table as Markdown."""
        return self.table().markdown()

    def suspects(self, seed: int | None = None) -> list[Suspect]:
        """Return the clients, the least trusted first; over all seeds, or in one of them.

        Liars placed at random are other clients in every seed: ask seed by seed then.
        """
        records = self.records if seed is None else self.seeds[seed]
        weights: dict[int, list[float]] = {i: [] for i in range(self.summary.clients)}
        for record in records:
            for client, weight in record.weights.items():
                weights[client].append(weight)
        found = [
            Suspect(
                client,
                round(math.fsum(own) / len(own), 6) if own else 0.0,
                len(own),
                sum(client in record.absent for record in records),
                sum(client == who for record in records for who, _ in record.rejected),
            )
            for client, own in weights.items()
        ]
        return sorted(found, key=lambda suspect: (suspect.weight, -suspect.rejected, suspect.client))

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat row per seed and round: scores and facts by name, weights as `weight_3`."""
        return [
            {
                "seed": seed,
                "round": record.round,
                "epsilon": record.epsilon,
                "train_loss": record.train_loss,
                **record.metrics,
                **record.facts,
                "attack_strength": record.attack_strength,
                "absent": len(record.absent),
                "rejected": len(record.rejected),
                "seconds": math.fsum(record.seconds.values()),
                **{f"weight_{client}": weight for client, weight in record.weights.items()},
            }
            for seed, records in self.seeds.items()
            for record in records
        ]

    def to_pandas(self) -> Any:
        """Return the rows as a pandas DataFrame."""
        try:
            import pandas
        except ImportError:
            raise UserError("to_pandas needs pandas: pip install pandas; rows() needs nothing") from None
        return pandas.DataFrame(self.rows())

    def curve(self, label: str = "", quantity: str | None = None, dashed: bool = False) -> Curve:
        """Return a score or another number of the records over rounds, mean and deviation over seeds.

        By default the metric that counts: the first.
        """
        quantity = quantity or self.summary.score
        return Curve.from_records(label or self.summary.rule, list(self.seeds.values()), quantity, dashed)

    def plot(self, path: Path | None = None, quantity: str | None = None) -> Path:
        """Draw a score over rounds, the run without liars dashed; by default into the run's own folder."""
        target = self.directory / "curves.png" if path is None else path
        facts = f"ε = {tightest_epsilon(self.summary)[0]}, f = {self.config.federation.f}"
        attack = "" if self.summary.attack == "none" else f", attack: {self.summary.attack}"
        title = f"{self.title}\n{facts}{attack}"
        return plot_results([(self.summary.rule, self)], self.baseline, target, title, quantity)

    def __rich__(self) -> Any:
        return self.table()

    def __str__(self) -> str:
        return str(self.table())

    def _repr_markdown_(self) -> str:
        return self.markdown()


def plot_results(
    results: Sequence[tuple[str, Result]],
    reference: Result | None,
    path: Path,
    title: str = "",
    quantity: str | None = None,
) -> Path:
    """Draw a score of several runs over rounds; `reference`, the run without liars, is dashed."""
    quantity = quantity or results[0][1].summary.score
    curves = [result.curve(label, quantity) for label, result in results]
    if reference is not None:
        curves.append(reference.curve("without liars", quantity, dashed=True))
    return plot_curves(curves, path, title, f"test {quantity}")
