"""`trilemma privacy` and `trilemma bounds`: calculators over `trilemma.privacy`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from trilemma import aggregation, privacy
from trilemma.aggregation.rule import Rule
from trilemma.errors import UserError
from trilemma.privacy import NoiseLaw, Plan, Release, Sampling, Threat, bounds
from trilemma.privacy.accounting import Accountant, applicable
from trilemma.privacy.types import Adjacency, Scheme, ThreatName, Unit

Clients = Annotated[int, typer.Option("-n", "--clients", help="number of clients")]
Byzantine = Annotated[int, typer.Option("-f", "--byzantine", help="how many may be Byzantine")]
SigmaInd = Annotated[float | None, typer.Option(help="std of a client's own noise")]
SigmaCor = Annotated[float | None, typer.Option(help="std of the noise each pair shares")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]


def privacy_command(
    clients: Clients,
    rounds: Annotated[int, typer.Option(help="number of releases of each client")],
    threat: Annotated[str, typer.Option(help="cdp, secldp, byzldp or ldp")] = "secldp",
    byzantine: Byzantine = 0,
    collusion: Annotated[int | None, typer.Option("-q", "--collusion", help="how many also collude")] = None,
    clip: Annotated[float, typer.Option(help="bound on what a unit contributes")] = 1.0,
    sigma_ind: SigmaInd = None,
    sigma_cor: SigmaCor = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="instead of sigmas: own noise over a replacement's move")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="instead of sigmas: find the least noise")] = None,
    delta: Annotated[float | None, typer.Option(help="left out with sigmas and --epsilon: find it")] = None,
    unit: Annotated[str, typer.Option(help="who is protected: user or example")] = "user",
    batch: Annotated[int, typer.Option(help="examples averaged in a message")] = 1,
    examples: Annotated[
        int | None, typer.Option(help="examples a client holds, for the sampling rate")
    ] = None,
    sampling: Annotated[str, typer.Option(help="none, poisson or without_replacement")] = "none",
    adjacency: Annotated[str, typer.Option(help="replace, add_remove or published")] = "replace",
    accountant: Annotated[str | None, typer.Option(help="calibrate by: exact, rdp, pld or c1")] = None,
    objective: Annotated[str, typer.Option(help="what to minimise: honest_mean or theorem")] = "honest_mean",
    dim: Annotated[int, typer.Option("-d", "--dim", help="parameters, to scale the predicted error")] = 1,
    plot: Annotated[Path | None, typer.Option(help="also draw a picture into this file")] = None,
    as_json: AsJson = False,
) -> None:
    """Tell what noise guarantees, or which noise a guarantee needs.

    Of ε, δ and the noise, any two give the third:

    trilemma privacy --threat secldp -n 100 -f 10 --clip 2.25 --rounds 30 --sigma-cor 0.6 --delta 1e-4
    """
    model = _threat(threat, clients, byzantine, collusion)
    law = _law(sigma_ind, sigma_cor)
    rate = _sampling(sampling, batch, examples)
    shape = Release(clip, NoiseLaw(), cast(Unit, unit), batch, rate, cast(Adjacency, adjacency))
    if noise_multiplier is not None:
        if law is not None:
            raise UserError("give --noise-multiplier or sigmas, not both")
        law = NoiseLaw(sigma_ind=noise_multiplier * shape.sensitivity)
    if law is not None and epsilon is not None and delta is None:
        answer = _deltas(replace(shape, law=law), model, rounds, epsilon)
    elif delta is None:
        raise UserError("give --delta, or the noise and --epsilon to find it")
    elif law is not None and epsilon is None:
        shape = replace(shape, law=law)
        answer = _spending(shape, model, delta, rounds)
    elif law is None and epsilon is not None:
        threats = [model, *_collusions(model), *_models(model)]
        chosen = cast(Accountant, accountant or privacy.default_accountant(shape))
        aim = cast(privacy.Objective, objective)
        plans = privacy.plan(shape, threats, epsilon, delta, rounds, chosen, aim)
        shape = replace(shape, law=plans[0].law)
        answer = _spending(shape, model, delta, rounds) | _calibration(plans, dim)
        answer["calibrated"]["accountant"] = chosen
    else:
        raise UserError("give either the noise (--sigma-ind, --sigma-cor, --noise-multiplier) or --epsilon")
    if plot is not None:
        if delta is None:
            raise UserError("--plot draws epsilon over the rounds: give --delta")
        answer["plot"] = str(_plot(shape, model, delta, rounds, plot))
    _print(answer, as_json)


def bounds_command(
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
    as_json: AsJson = False,
) -> None:
    """Tell what the papers' theorems promise, constants included, and where they promise nothing.

    trilemma bounds -n 7 -f 2 -d 69 -m 2764 -b 25 --rounds 400 --convexity 0.01 --sigma-ind 0.08
    """
    far = bounds.Heterogeneity(g, g_cov) if gradients is None else _measure(gradients)
    problem = bounds.Problem(dim, far, smoothness, convexity, gap, variance, batch, examples)
    law = _law(sigma_ind, sigma_cor) or NoiseLaw()
    answer: dict[str, Any] = {
        "heterogeneity": asdict(far),
        "mean_noise": bounds.mean_noise(law, clients, byzantine),
        "rules": [
            _rule_bounds(aggregation.parse(text, byzantine), problem, law, clients, byzantine, rounds)
            for text in rule or _defined_rules(clients, byzantine)
        ],
    }
    if epsilon is not None:
        lower = bounds.lower_bound(epsilon, delta, clients, byzantine, examples, dim, far.g)
        answer["lower_bound"] = asdict(lower) | {"total": lower.total}
    _print(answer, as_json)


def _threat(name: str, clients: int, byzantine: int, collusion: int | None) -> Threat:
    threat = Threat(cast(ThreatName, name), clients, byzantine)
    return threat if collusion is None else replace(threat, collusion=collusion)


def _law(sigma_ind: float | None, sigma_cor: float | None) -> NoiseLaw | None:
    if sigma_ind is None and sigma_cor is None:
        return None
    return NoiseLaw(sigma_ind or 0.0, sigma_cor or 0.0)


def _sampling(scheme: str, batch: int, examples: int | None) -> Sampling:
    if scheme == "none":
        return Sampling()
    if examples is None or examples < batch:
        raise UserError("a sampling rate needs --examples, at least as many as --batch")
    return Sampling(cast(Scheme, scheme), batch / examples)


def _collusions(threat: Threat) -> list[Threat]:
    """Return SecLDP for a handful of q between none and all of the Byzantine clients."""
    chosen = sorted({round(share * threat.byzantine) for share in (0, 0.25, 0.5, 0.75, 1)})
    return [Threat("secldp", threat.clients, threat.byzantine, q) for q in chosen]


def _models(threat: Threat) -> list[Threat]:
    """Return the four threat models of the same federation."""
    return [
        Threat(name, threat.clients, threat.byzantine)
        for name in cast(tuple[ThreatName, ...], get_args(ThreatName))
    ]


def _spending(release: Release, threat: Threat, delta: float, rounds: int) -> dict[str, Any]:
    cost = privacy.spent(release, threat, rounds, delta)
    return {
        "threat": asdict(threat),
        "release": asdict(release),
        "multiplier": privacy.multiplier(release, threat),
        "rounds": rounds,
        "delta": delta,
        "epsilon": cost.epsilon,
        "notes": list(cost.notes),
    }


def _deltas(release: Release, threat: Threat, rounds: int, epsilon: float) -> dict[str, Any]:
    one = privacy.mechanism(release, threat)
    able = [name for name in applicable(((one, rounds),)) if name != "c1"]
    return {
        "threat": asdict(threat),
        "release": asdict(release),
        "multiplier": one.z,
        "rounds": rounds,
        "epsilon": epsilon,
        "delta": {name: privacy.spent_delta(release, threat, rounds, epsilon, name) for name in able},
        "notes": list(threat.notes()),
    }


def _calibration(plans: Sequence[Plan], dim: int) -> dict[str, Any]:
    """Lay out the asked-for plan, then those of other q, then those of the four models."""
    rows = [
        {
            "threat": plan.threat.name,
            "collusion": plan.threat.collusion,
            "sigma_ind": plan.law.sigma_ind,
            "sigma_cor": plan.law.sigma_cor,
            "predicted_error": dim * plan.variance,
        }
        for plan in plans
    ]
    return {"dim": dim, "calibrated": rows[0], "collusion": rows[1:-4], "models": rows[-4:]}


def _plot(release: Release, threat: Threat, delta: float, rounds: int, path: Path) -> Path:
    from trilemma.report.privacy import plot_privacy

    able = applicable(((privacy.mechanism(release, threat), rounds),))
    if "exact" in able:
        able = ("exact", "rdp")  # where the exact figure is known, a loss distribution adds nothing
    curves = {str(name): privacy.epsilon_curve(release, threat, rounds, delta, name) for name in able}
    spent = min(float(curve[-1]) for curve in curves.values())
    plans = privacy.plan(release, _models(threat), spent, delta, rounds)
    title = (
        f"{threat.name}, n = {threat.clients}, f = {threat.byzantine}, q = {threat.collusion}, δ = {delta:g}"
    )
    return plot_privacy(curves, plans, path, title, f"ε = {spent:.3g} after {rounds} rounds")


def _measure(path: Path) -> bounds.Heterogeneity:
    try:
        return bounds.Heterogeneity.measure(np.load(path, allow_pickle=False))
    except (OSError, ValueError) as error:
        raise UserError(f"no gradients in {path}: {error}") from error


def _defined_rules(clients: int, byzantine: int) -> list[str]:
    """Return the rules that are defined for so many clients."""

    def defined(name: str) -> bool:
        try:
            aggregation.parse(name, byzantine).check(clients)
        except UserError:
            return False
        return True

    return [name for name in sorted(aggregation.rules) if defined(name)]


def _rule_bounds(
    rule: Rule, problem: bounds.Problem, law: NoiseLaw, clients: int, byzantine: int, rounds: int
) -> dict[str, Any]:
    kappa, criterion = rule.kappa(clients), rule.criterion
    row: dict[str, Any] = {"rule": rule.name, "kappa": kappa, "criterion": criterion}
    if kappa is None:
        return row
    error = bounds.error_term(problem, law, clients, byzantine, kappa, criterion)
    row["error_term"] = error
    found = {"non_convex": bounds.non_convex_bound(problem, error, kappa, rounds, criterion)}
    if problem.convexity > 0:
        found["strongly_convex"] = bounds.strongly_convex_bound(problem, error, kappa, rounds, criterion)
    for kind, bound in found.items():
        row[kind] = asdict(bound) | {"total": bound.total, "vacuous": bound.vacuous}
    return row


def _print(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(_plain(answer), allow_nan=False))
        return
    console = Console()
    for table in _tables(answer):
        console.print(table, end="\n\n")
    for note in answer.get("notes", ()):
        console.print(f"note: {note}", highlight=False, markup=False)
    if "plot" in answer:
        console.print(f"picture: {answer['plot']}", highlight=False, markup=False)


def _plain(value: Any) -> Any:
    """Write infinities as null: JSON has none."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tables(answer: dict[str, Any]) -> Iterator[Table]:
    if "calibrated" in answer:
        by = answer["calibrated"]["accountant"]
        yield _plan_table(f"least noise, calibrated by {by}", [answer["calibrated"]])
    if isinstance(answer.get("epsilon"), dict):
        yield _figures(f"ε at δ = {answer['delta']:g} after {answer['rounds']} rounds", answer["epsilon"])
    if isinstance(answer.get("delta"), dict):
        yield _figures(f"δ at ε = {answer['epsilon']:g} after {answer['rounds']} rounds", answer["delta"])
    if answer.get("collusion"):
        yield _plan_table("what each number q of colluders would cost", answer["collusion"])
    if "models" in answer:
        yield _plan_table("the four threat models", answer["models"])
    if "rules" in answer:
        yield _rule_table(answer["rules"])
    if "lower_bound" in answer:
        yield _lower_table(answer["lower_bound"])


def _figures(title: str, figures: dict[str, float]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("accountant")
    table.add_column("value", justify="right")
    table.add_column("against rdp", justify="right")
    for name, value in figures.items():
        reference = figures.get("rdp")
        saving = f"{value / reference - 1:+.1%}" if reference and math.isfinite(reference) else ""
        table.add_row(name, f"{value:.4g}", saving if name != "rdp" else "")
    return table


def _plan_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("threat", "q", "σ_ind", "σ_cor", "predicted error"):
        table.add_column(heading, justify="left" if heading == "threat" else "right")
    for row in rows:
        numbers = (f"{row[key]:.4g}" for key in ("sigma_ind", "sigma_cor", "predicted_error"))
        table.add_row(row["threat"], str(row["collusion"]), *numbers)
    table.caption = (
        "predicted error: squared norm of the noise in the honest clients' mean, over --dim parameters"
    )
    return table


def _rule_table(rows: Sequence[dict[str, Any]]) -> Table:
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


def _bound_text(bound: dict[str, Any] | None) -> str:
    if bound is None:
        return "needs --convexity"
    return f"{bound['total']:.3g}" + (" vacuous" if bound["vacuous"] else "")


def _lower_table(bound: dict[str, Any]) -> Table:
    table = Table(title="lower bound, without constants and logarithms", title_justify="left")
    for heading in ("d/(ε²nm²)", "(f/n)/(ε²m²)", "(f/n)G²", "total"):
        table.add_column(heading, justify="right")
    table.add_row(*(f"{bound[key]:.3g}" for key in ("privacy", "coupling", "heterogeneity", "total")))
    if bound["unmet"]:
        table.caption = "proves nothing here, its assumptions fail: " + "; ".join(bound["unmet"])
    return table
