"""What the papers' theorems promise, as plain values and as tables: `trilemma theory` prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from trilemma_lab import theory


@dataclass(frozen=True)
class Clip21Question:
    """What is asked of Byz-Clip21's theorems, whatever the rule."""

    problem: theory.Problem
    clients: int
    byzantine: int
    rounds: int
    sigma: float
    clip: float | None
    longest: float | None
    lr: float | None
    beta: float

    def record(self, rule: str, kappa: float) -> dict[str, Any]:
        """Return what they say of a rule."""
        found: dict[str, Any] = {"rule": rule}
        known = (self.problem, self.clients, self.byzantine, kappa, self.rounds)
        if self.clip is not None:
            found["5.1"] = _order_record(theory.clipped_order(*known, self.clip, self.sigma))
            if self.longest is not None:
                full = theory.clipped_order(*known, self.clip, self.sigma, self.longest)
                found["D.1"] = _order_record(full)
        if self.lr is not None:
            found["5.2"] = _upper_record(theory.momentum_bound(*known, self.lr, self.beta))
        return found


def _order_record(order: theory.Neighbourhood) -> dict[str, Any]:
    return asdict(order) | {"total": order.total}


def clip21_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Lay out what Byz-Clip21's theorems say of each rule."""
    table = Table(title="Byz-Clip21: squared gradient, with high probability", title_justify="left")
    for heading in ("rule", "privacy", "liars in it", "liars alone", "5.1, order", "D.1, order", "5.2"):
        table.add_column(heading, justify="left" if heading == "rule" else "right")
    for row in rows:
        order, full = row.get("5.1"), row.get("D.1")
        terms = ("privacy", "coupling", "liars", "total")
        found = [f"{order[term]:.3g}" if order else "needs --clip" for term in terms]
        found.append(f"{full['total']:.3g}" if full else "needs --clip, --longest")
        table.add_row(row["rule"], *found, _bound_text(row["5.2"]) if "5.2" in row else "needs --lr")
    table.caption = "an order has neither constants nor logarithms, nor what falls with T; 5.2 has all"
    return table


def promise_record(promise: theory.Promise) -> dict[str, Any]:
    """Return what the theorems say about a rule as plain values, without what they do not say."""
    record: dict[str, Any] = {
        "rule": promise.rule,
        "kappa": promise.kappa,
        "criterion": promise.criterion,
        "error_term": promise.error,
        "non_convex": _upper_record(promise.non_convex),
        "strongly_convex": _upper_record(promise.strongly_convex),
    }
    return {key: value for key, value in record.items() if value is not None or key == "kappa"}


def _upper_record(bound: theory.Upper | None) -> dict[str, Any] | None:
    return None if bound is None else asdict(bound) | {"total": bound.total, "vacuous": bound.vacuous}


def lower_record(bound: theory.Lower) -> dict[str, Any]:
    """Return a lower bound as plain values."""
    return asdict(bound) | {"total": bound.total}


def rule_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Lay out the upper bounds of each rule."""
    table = Table(title="upper bounds, with all constants", title_justify="left")
    for heading in ("rule", "κ", "criterion", "σ̄²", "expected loss gap", "squared gradient"):
        table.add_column(heading, justify="left" if heading in ("rule", "criterion") else "right")
    for row in rows:
        if row["kappa"] is None:
            table.add_row(row["rule"], "none proven", row["criterion"])
            continue
        found = [_bound_text(row.get(kind)) for kind in ("strongly_convex", "non_convex")]
        table.add_row(
            row["rule"], f"{row['kappa']:.4g}", row["criterion"], f"{row['error_term']:.3g}", *found
        )
    table.caption = "vacuous: no better than not training at all; proofs have large constants"
    return table


def _bound_text(bound: Mapping[str, Any] | None) -> str:
    if bound is None:
        return "needs --convexity"
    return f"{bound['total']:.3g}" + (" vacuous" if bound["vacuous"] else "")


def lower_table(bound: Mapping[str, Any]) -> Table:
    """Lay out a lower bound."""
    table = Table(title="lower bound, without constants and logarithms", title_justify="left")
    for heading in ("d/(ε²nm²)", "(f/n)/(ε²m²)", "(f/n)G²", "total"):
        table.add_column(heading, justify="right")
    table.add_row(*(f"{bound[key]:.3g}" for key in ("privacy", "coupling", "heterogeneity", "total")))
    if bound["unmet"]:
        table.caption = "proves nothing here, its assumptions fail: " + "; ".join(bound["unmet"])
    return table
