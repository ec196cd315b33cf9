"""What privacy costs, as records, tables and a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from trilemma.base.records import Summary
from trilemma.privacy import NoGuarantee, Verdict, multiplier, read_verdict
from trilemma.privacy.accounting.calculator import Calibration, PrivacyCurves, Solution
from trilemma.privacy.accounting.calibration import Plan
from trilemma.privacy.verdict import objections
from trilemma.report.picture_files import save_picture


def verdict_of(summary: Summary) -> Verdict:
    """Return what a run guarantees, or why it guarantees nothing."""
    if not summary.verdict:
        return NoGuarantee("nothing was certified when the run was summed up")
    return read_verdict(summary.verdict)


def finding_record(finding: Solution) -> dict[str, Any]:
    """Return the finding as plain values: ε or δ, whichever was given, before the one that was found.

    A figure that is no guarantee stands under `printed`, with the reasons, and not under its own name.
    """
    figures = {"epsilon": finding.epsilon, "delta": finding.delta}
    given, found = sorted(figures, key=lambda name: isinstance(figures[name], Mapping))
    reasons = objections(finding.release, finding.threat)
    printed = {"printed": figures[found], "no_guarantee": "; ".join(reasons)} if reasons else {}
    return {
        "threat": asdict(finding.threat),
        "release": asdict(finding.release),
        "multiplier": multiplier(finding.release, finding.threat),
        "rounds": finding.rounds,
        given: figures[given],
        found: {} if reasons else figures[found],
        **printed,
        "notes": list(finding.notes),
    }


def calibration_record(calibration: Calibration, dim: int) -> dict[str, Any]:
    """Return the asked-for noise, that for other q, and that of the four models, over `dim` parameters."""
    return {
        "dim": dim,
        "calibrated": _plan_record(calibration.asked, dim) | {"accountant": calibration.accountant},
        "collusion": [_plan_record(plan, dim) for plan in calibration.collusions],
        "models": [_plan_record(plan, dim) for plan in calibration.models],
    }


def _plan_record(plan: Plan, dim: int) -> dict[str, Any]:
    return {
        "threat": plan.threat.name,
        "collusion": plan.threat.collusion,
        "sigma_ind": plan.law.sigma_ind,
        "sigma_cor": plan.law.sigma_cor,
        "predicted_error": dim * plan.variance,
    }


def privacy_tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """Lay out what was found, and a calibration where the record holds one."""
    if "calibrated" in record:
        by = record["calibrated"]["accountant"]
        yield _plan_table(f"least noise, calibrated by {by}", [record["calibrated"]])
    after = f"after {record['rounds']} rounds"
    printed = "printed, no guarantee: " if "printed" in record else ""
    if isinstance(record["epsilon"], Mapping):
        found = record.get("printed", record["epsilon"])
        yield _figures(f"{printed}ε at δ = {record['delta']:g} {after}", found)
    else:
        found = record.get("printed", record["delta"])
        yield _figures(f"{printed}δ at ε = {record['epsilon']:g} {after}", found)
    if record.get("collusion"):
        yield _plan_table("what each number q of colluders would cost", record["collusion"])
    if "models" in record:
        models = _plan_table("the four threat models", record["models"])
        models.caption = (
            "predicted error: squared norm of the noise in the honest clients' mean, over --dim parameters"
        )
        models.caption_justify = "left"
        yield models


def _figures(title: str, figures: Mapping[str, float]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("accountant")
    table.add_column("value", justify="right")
    table.add_column("against rdp", justify="right")
    for name, value in figures.items():
        reference = figures.get("rdp")
        saving = f"{value / reference - 1:+.1%}" if reference and math.isfinite(reference) else ""
        table.add_row(name, f"{value:.4g}", saving if name != "rdp" else "")
    return table


def _plan_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("threat", "q", "σ_ind", "σ_cor", "predicted error"):
        table.add_column(heading, justify="left" if heading == "threat" else "right")
    for row in rows:
        numbers = (f"{row[key]:.4g}" for key in ("sigma_ind", "sigma_cor", "predicted_error"))
        table.add_row(row["threat"], str(row["collusion"]), *numbers)
    return table


def plot_privacy(shown: PrivacyCurves, path: Path) -> Path:
    """Draw ε after each round by accountant, and beside it the noise in the honest mean by threat model."""
    from matplotlib.figure import Figure  # without pyplot: no global state, no display needed

    figure = Figure(figsize=(10, 4.2), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for name, values in shown.curves.items():
        left.plot(shown.rounds, values, label=name, linewidth=1.8)
    who = shown.threat
    title = f"{who.name}, n = {who.clients}, f = {who.byzantine}, q = {who.collusion}, δ = {shown.delta:g}"
    left.set(xlabel="round", ylabel="ε spent" if shown.certified else "printed ε, no guarantee", title=title)
    left.grid(alpha=0.3)
    left.legend(frameon=False, title="accountant")

    names = [plan.threat.name for plan in shown.plans]
    deviations = [math.sqrt(plan.variance) for plan in shown.plans]
    bars = right.bar(names, deviations, color=[f"C{k}" for k in range(len(names))])
    right.bar_label(bars, fmt="%.3g", padding=2)
    right.margins(y=0.12)
    right.set(
        ylabel="noise std in the honest mean, per coordinate",
        title=f"least noise for ε = {shown.spent:.3g} after {shown.rounds[-1]} rounds",
    )
    right.grid(alpha=0.3, axis="y")
    return save_picture(figure, path)
