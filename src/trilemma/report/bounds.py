"""What theorems promise, as records and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from trilemma.learning.theory import Lower, Promise, Upper


def promise_record(promise: Promise) -> dict[str, Any]:
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


def _upper_record(bound: Upper | None) -> dict[str, Any] | None:
    return None if bound is None else asdict(bound) | {"total": bound.total, "vacuous": bound.vacuous}


def lower_record(bound: Lower) -> dict[str, Any]:
    """Return a lower bound as plain values."""
    return asdict(bound) | {"total": bound.total}


def bounds_tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """Lay out what the record holds: upper bounds of every rule, the lower bound, what can be hidden."""
    if record["rules"]:
        yield _rule_table(record["rules"])
    if "lower_bound" in record:
        yield _lower_table(record["lower_bound"])
    if "hidden" in record:
        yield _hidden_table(record["hidden"])


def _rule_table(rows: Sequence[Mapping[str, Any]]) -> Table:
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


def _lower_table(bound: Mapping[str, Any]) -> Table:
    table = Table(title="lower bound, without constants and logarithms", title_justify="left")
    for heading in ("d/(ε²nm²)", "(f/n)/(ε²m²)", "(f/n)G²", "total"):
        table.add_column(heading, justify="right")
    table.add_row(*(f"{bound[key]:.3g}" for key in ("privacy", "coupling", "heterogeneity", "total")))
    if bound["unmet"]:
        table.caption = "proves nothing here, its assumptions fail: " + "; ".join(bound["unmet"])
    return table


def _hidden_table(found: Mapping[str, float]) -> Table:
    table = Table(title="what liars can hide after these rounds (docs/frontier.md)", title_justify="left")
    table.add_column("what")
    table.add_column("at most", justify="right")
    words = {
        "length": "liars who keep their noise and shift alike: shift a round that passes the test of lengths",
        "pairs": "… the test of pairs",
        "spectrum": "… below the edge of the noise",
        "mean": "… in the mean of all clients: the largest that passes all three",
        "left": "… in the mean after the correction, however far they shift",
        "most": "whatever liars send, turned noise too: in the mean, without a proof against one of them",
        "seen_after": "rounds until liars who cancel contributions of the clip's length are seen",
    }
    for name, text in words.items():
        table.add_row(text, f"{found[name]:.4g}")
    return table
