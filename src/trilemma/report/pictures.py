"""The pictures of runs as files: `trilemma plot`. The page draws the same figures for the screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from trilemma.base.errors import UserError, nearest
from trilemma.report.curves import PALETTE, Curve, plot_curves
from trilemma.report.picture_files import picture_file, save_picture
from trilemma.report.privacy import verdict_of
from trilemma.report.result import Result, plot_results
from trilemma.report.tables import tightest_epsilon

Kind = Literal["curves", "suspects", "privacy", "cost"]
"""What a picture is of: a score, whom the rule trusted, ε spent, seconds per stage."""


def draw(results: Sequence[Result], kind: str, path: Path) -> Path:
    """Draw a picture of runs into a file; several runs over each other, or, of a map or a cost, one run."""
    if kind not in get_args(Kind):
        raise UserError(f"no picture is called {kind!r}: {nearest(kind, get_args(Kind))}")
    if kind in ("suspects", "cost") and len(results) > 1:
        raise UserError(f"a picture of {kind} is of one run; allowed of several: curves, privacy")
    path, first = picture_file(path), results[0]
    if kind == "suspects":
        return first.plot(path, kind="suspects")
    if kind == "cost":
        return _cost(first, path)
    if kind == "privacy":
        return _privacy(results, path)
    if len(results) == 1:
        return first.plot(path)
    return plot_results([(label(one), one) for one in results], None, path, "Several runs over each other")


def label(result: Result) -> str:
    """Name a run among others: its rule, who lies, ε."""
    summary = result.summary
    attack = "nobody lies" if summary.attack == "none" else f"under {summary.attack}"
    return f"{summary.rule} {attack}, ε = {tightest_epsilon(summary)[0]}"


def _privacy(results: Sequence[Result], path: Path) -> Path:
    """Draw ε spent over rounds, and the ε a run was asked to keep to, dashed."""
    curves = [one.curve(label(one), "epsilon") for one in results]
    for one, curve in zip(results, curves, strict=True):
        if not curve.rounds.size:
            verdict = verdict_of(one.summary)
            reason = getattr(verdict, "reason", "its records hold none")
            raise UserError(f"{str(one.directory)!r} has no guaranteed ε to draw: {reason}")
    wanted = {one.config.privacy.epsilon for one in results} - {None}
    ends = np.array([1, max(one.summary.rounds for one in results)])
    curves += [
        Curve(f"asked for: {epsilon:g}", ends, np.full((1, 2), epsilon), dashed=True) for epsilon in wanted
    ]
    title = results[0].heading if len(results) == 1 else "ε spent, several runs"
    return plot_curves(curves, path, title, f"ε spent at δ = {results[0].config.privacy.delta:g}")


def _cost(result: Result, path: Path) -> Path:
    """Draw the seconds of each stage of a round, upon each other, the mean over seeds."""
    from matplotlib.figure import Figure  # without pyplot: no global state, no display needed

    names = dict.fromkeys(stage for record in result.records for stage in record.seconds)
    if not names:
        raise UserError(f"{str(result.directory)!r} has no records of the time its stages took")
    curves = {name: result.curve(name, f"{name} s") for name in names}
    rounds = np.unique(np.concatenate([curve.rounds for curve in curves.values()]))
    heights = np.zeros((len(curves), len(rounds)))
    for row, curve in enumerate(curves.values()):
        heights[row, np.searchsorted(rounds, curve.rounds)] = curve.mean
    figure = Figure(figsize=(7.5, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    colours = [PALETTE[row % len(PALETTE)] for row in range(len(curves))]
    totals = [f"{name}: {total:.3g} s" for name, total in zip(names, heights.sum(axis=1), strict=True)]
    axes.stackplot(rounds, heights, labels=totals, colors=colours)
    axes.set(xlabel="round", ylabel="seconds of a round, mean over seeds")
    axes.set_title(result.heading, fontsize="medium", loc="left")
    axes.legend(loc="upper right", fontsize="small", title="stage: all rounds together")
    axes.grid(alpha=0.3)
    return save_picture(figure, path)
