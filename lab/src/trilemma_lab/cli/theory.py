"""`trilemma theory`: what the papers' theorems promise, with every constant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from trilemma.base import plugins
from trilemma.base.errors import UserError
from trilemma.cli.options import PluginOption
from trilemma.cli.privacy import AsJson, Byzantine, Clients, SigmaCor, SigmaInd, print_record
from trilemma.privacy import NoiseLaw, mean_noise
from trilemma.report.bounds import defined_rules
from trilemma_lab import theory


def theory_command(
    clients: Clients,
    dim: Annotated[int, typer.Option("-d", "--dim", help="number of parameters")],
    rounds: Annotated[int, typer.Option(help="number of rounds T")],
    byzantine: Byzantine = 0,
    rule: Annotated[
        list[str] | None, typer.Option(help="repeatable; without it, every rule with a κ")
    ] = None,
    sigma_ind: SigmaInd = None,
    sigma_cor: SigmaCor = None,
    examples: Annotated[int, typer.Option("-m", "--examples", help="examples per client")] = 1,
    batch: Annotated[int, typer.Option("-b", "--batch", help="examples in a batch")] = 1,
    smoothness: Annotated[float, typer.Option(help="L")] = 1.0,
    convexity: Annotated[float, typer.Option(help="μ; 0: the loss is not strongly convex")] = 0.0,
    gap: Annotated[float, typer.Option(help="loss of the start above the optimum")] = 1.0,
    variance: Annotated[float, typer.Option(help="variance σ² of one example's gradient")] = 1.0,
    g: Annotated[float, typer.Option(help="heterogeneity G")] = 1.0,
    g_cov: Annotated[float, typer.Option(help="heterogeneity G_cov")] = 1.0,
    gradients: Annotated[
        Path | None, typer.Option(help="measure G and G_cov on this .npy of honest gradients (clients, d)")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="for the lower bound: example-level ε")] = None,
    delta: Annotated[float, typer.Option(help="for the lower bound")] = 1e-5,
    clip: Annotated[
        float | None, typer.Option(help="τ: order of Byz-Clip21's Theorem 5.1, noise --sigma-ind")
    ] = None,
    longest: Annotated[
        float | None, typer.Option(help="longest gradient at the start, beside --clip: Theorem D.1's too")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="γ: Byz-Clip21's Theorem 5.2, no clip and no noise")
    ] = None,
    beta: Annotated[float, typer.Option(help="β of its momentum")] = 0.1,
    plugin: PluginOption = None,
    as_json: AsJson = False,
) -> None:
    """Compute the papers' bounds, with every constant.

    trilemma theory -n 7 -f 2 -d 69 -m 2764 -b 25 --rounds 400 --convexity 0.01 --sigma-ind 0.08
    trilemma theory -n 25 -f 5 -d 7850 --rounds 4500 --rule caf --clip 0.01 --sigma-ind 0.13 --longest 3
    """
    plugins.load(plugin or ())
    if not 0 <= 2 * byzantine < clients:
        raise UserError(f"nothing is promised unless 0 ≤ 2f < n, got n = {clients}, f = {byzantine}")
    far = theory.Heterogeneity(g, g_cov) if gradients is None else theory.Heterogeneity.load(gradients)
    problem = theory.Problem(dim, far, smoothness, convexity, gap, variance, batch, examples)
    law = NoiseLaw(sigma_ind or 0.0, sigma_cor or 0.0)
    promises = [
        theory.rule_bounds(text, problem, law, clients, byzantine, rounds)
        for text in (rule or defined_rules(clients, byzantine))
    ]
    record: dict[str, Any] = {
        "heterogeneity": asdict(far),
        "mean_noise": mean_noise(law, clients, byzantine),
        "rules": [_promise_record(promise) for promise in promises],
    }
    tables = [_rule_table(record["rules"])]
    if epsilon is not None:
        lower = theory.lower_bound(epsilon, delta, clients, byzantine, examples, dim, far.g)
        record["lower_bound"] = _lower_record(lower)
        tables.append(_lower_table(record["lower_bound"]))
    if clip is not None or lr is not None:
        asked = _Clip21(problem, clients, byzantine, rounds, law.sigma_ind, clip, longest, lr, beta)
        record["byz_clip21"] = [
            asked.record(one.rule, one.kappa) for one in promises if one.kappa is not None
        ]
        tables.append(_clip21_table(record["byz_clip21"]))
    elif longest is not None:
        raise UserError("--longest is Theorem D.1's, which is about clipped vectors: give --clip too")
    print_record(record, tables, (), as_json)


@dataclass(frozen=True)
class _Clip21:
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


def _clip21_table(rows: Sequence[Mapping[str, Any]]) -> Table:
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


def _promise_record(promise: theory.Promise) -> dict[str, Any]:
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


def _lower_record(bound: theory.Lower) -> dict[str, Any]:
    """Return a lower bound as plain values."""
    return asdict(bound) | {"total": bound.total}


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
