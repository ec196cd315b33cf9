"""The result of a run: every round, the summary, the model, and how to look at them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from trilemma.base.errors import UserError
from trilemma.base.records import Record, Summary
from trilemma.experiment import Config, Inputs
from trilemma.privacy import Guarantee
from trilemma.report.curves import Curve, plot_curves
from trilemma.report.privacy import verdict_of
from trilemma.report.tables import Table, results_table, tightest_epsilon
from trilemma.report.trained import Trained
from trilemma.report.trust import Suspects, shares, trusted, verdict


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
    find_caveat: Callable[[], str] = field(default=lambda: "", repr=False, compare=False)
    find_trained: Callable[[int], Trained] | None = field(default=None, repr=False, compare=False)

    @property
    def caveat(self) -> str:
        """What users of the model should know about it; "": nothing."""
        return "; ".join(said for said in (self.find_caveat(), self.config.holding.caveat) if said)

    @property
    def records(self) -> list[Record]:
        """Every round, seed after seed."""
        return [record for records in self.seeds.values() for record in records]

    @property
    def title(self) -> str:
        """Data, algorithm and rounds, for a heading."""
        return f"{self.config.data.name}, {self.summary.algorithm}, {self.summary.rounds} rounds"

    @property
    def heading(self) -> str:
        """The title, and below it ε with its threat model, f and the attack."""
        epsilon, meaning = tightest_epsilon(self.summary)
        shown = "ε = ∞" if epsilon == "∞" else meaning.partition(" at δ")[0]
        attack = "nobody lies" if self.summary.attack == "none" else f"attack: {self.summary.attack}"
        return f"{self.title}\n{shown}, f = {self.config.federation.f}, {attack}"

    @property
    def model(self) -> nn.Module:
        """The first seed's model as one module, in evaluation mode: features and buffers included.

        It takes examples as the run's data have them: `result.model(x)`. See also `predict` and `evaluate`.
        """
        return self.trained().net

    def predict(self, x: Any, seed: int | None = None) -> np.ndarray:
        """Return what a seed's model says of examples: their classes, by name where the task names them.

        `x` is an array, a tensor, a data frame, the path of a table, or a mapping of columns.
        """
        return self.trained(seed).predict(x)

    def evaluate(self, x: Any, y: Any = None, seed: int | None = None) -> dict[str, float]:
        """Return a seed's loss and metrics on examples; a table or a data set brings targets of its own."""
        return self.trained(seed).evaluate(x, y)

    def trained(self, seed: int | None = None) -> Trained:
        """Return a seed's model with what it takes to use it."""
        if self.find_trained is None:
            raise UserError("this result has no model to use; state_dict() has its tensors")
        return self.find_trained(self._seed(seed))

    def params(self, seed: int | None = None) -> Tensor:
        """Return the parameters a seed returned, the first one's by default.

        A flat vector (d,), or (k, d) where the clients that compute keep models of their own.
        """
        return self.read_model(self._seed(seed))

    def state_dict(self, seed: int | None = None, client: int | None = None) -> dict[str, Tensor]:
        """Return a seed's model under its own names: `net.load_state_dict(result.state_dict())`.

        `client` says whose, where clients keep models of their own: its row in `params()`.
        """
        flat = self.params(seed)
        if flat.dim() == 2:
            if client is None or not 0 <= client < len(flat):
                raise UserError(
                    f"{len(flat)} clients keep models of their own; say whose: client = 0 to {len(flat) - 1}"
                )
            flat = flat[client]
        elif client is not None:
            raise UserError(f"all clients have one model: client = {client} has none of its own")
        return self.name_tensors(flat, self._seed(seed))

    def inputs(self, seed: int | None = None) -> Inputs:
        """Return the function from examples to a seed's model's inputs: `net(result.inputs()(examples))`."""
        return Inputs(self.config, self._seed(seed))

    def _seed(self, seed: int | None) -> int:
        """Return the seed that is meant, the first one by default."""
        wanted = next(iter(self.seeds)) if seed is None else seed
        if wanted not in self.seeds:
            raise UserError(f"there is no seed {wanted}; allowed: {', '.join(map(str, self.seeds))}")
        return wanted

    def table(self) -> Table:
        """Return the scores beside ε, f, the attack and the run without liars."""
        free = self.baseline.summary if self.baseline is not None else None
        rows = [(self.summary.algorithm, self.summary)]
        said = self.verdict_on_clients()
        return results_table(rows, free, self.title, [said] if said else [])

    def verdict_on_clients(self) -> str:
        """Say who stands out by a small share in the aggregate, or that nobody does (`report.trust`)."""
        seed = None if self.liars_stay else next(iter(self.seeds))
        records = self.records if seed is None else self.seeds[seed]
        table = self.config.federation
        said = verdict(self.summary.rule, self.summary.clients, records, table.f, table.weights)
        return f"seed {seed}: {said}" if said and seed is not None else said

    @property
    def liars_stay(self) -> bool:
        """Whether the same clients lie in every seed."""
        return len(self.seeds) == 1 or self.config.federation.placement == "last"

    def markdown(self) -> str:
        """Return the table as Markdown."""
        return self.table().markdown()

    def suspects(self, seed: int | None = None) -> Suspects:
        """Return the clients, the least trusted first; over all seeds, or in one of them.

        Liars placed at random are other clients in every seed: ask seed by seed then.
        """
        count, chosen = self.summary.clients, self.seeds if seed is None else {seed: self.seeds[seed]}
        records = [record for records in chosen.values() for record in records]
        return Suspects(trusted(count, records), shares(count, chosen))

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
                "unreached": len(record.unreached),
                "rejected": len(record.rejected),
                "late": len(record.late),
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

    def plot(self, path: Path | str | None = None, quantity: str | None = None, kind: str = "curves") -> Path:
        """Draw a picture: "curves", a score over rounds; by default into the run's own folder.

        `kind` is a picture of `report.pictures`: "suspects", for instance, is each client's share in the
        aggregate, clients × rounds.
        """
        from trilemma.report.pictures import draw

        return draw([self], kind, self.directory / f"{kind}.png" if path is None else Path(path), quantity)

    def __rich__(self) -> Any:
        return self.table()

    def __str__(self) -> str:
        return str(self.table())

    def _repr_markdown_(self) -> str:
        return f"{self.markdown()}\n\n{self._promise}"

    def _repr_html_(self) -> str:
        return f"{self.table()._repr_html_()}<p><b>{escape(self._promise)}</b></p>"

    @property
    def _promise(self) -> str:
        """What the run guarantees, in a line."""
        found = verdict_of(self.summary)
        if isinstance(found, Guarantee):
            return (
                f"Guaranteed: ε = {found.epsilon:.3g} at δ = {found.delta:g} for one {found.unit}, "
                f"under {found.threat}, by {found.accountant}"
            )
        return f"No guarantee of privacy: {found.reason}"


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
