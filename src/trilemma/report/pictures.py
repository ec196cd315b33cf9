"""The pictures of runs as files: `trilemma plot`. The page draws the same figures for the screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from trilemma.base.errors import UserError
from trilemma.base.registry import Registry
from trilemma.report.curves import PALETTE, Curve, plot_curves
from trilemma.report.picture_files import picture_file, save_picture
from trilemma.report.privacy import verdict_of
from trilemma.report.result import Result, plot_results
from trilemma.report.tables import tightest_epsilon
from trilemma.report.trust import plot_shares, shares

Drawer = Callable[[Sequence[Result], Path, str | None], Path]
"""(runs, path, quantity) -> the file that was drawn; `quantity` None: the score that counts."""

pictures: Registry[Drawer] = Registry("picture")
"""Every picture of runs by the name users type."""


def draw(results: Sequence[Result], kind: str, path: Path, quantity: str | None = None) -> Path:
    """Draw a picture of runs into a file; several runs over each other, or, of a map or a cost, one run."""
    return pictures[kind](results, picture_file(path), quantity)


def _only(results: Sequence[Result], kind: str) -> Result:
    if len(results) > 1:
        raise UserError(f"a picture of {kind} is of one run; allowed of several: curves, privacy")
    return results[0]


@pictures.register("curves", "a score over rounds")
def _curves(results: Sequence[Result], path: Path, quantity: str | None) -> Path:
    """Draw a score over rounds, of a single run beside the run without liars, dashed."""
    if len(results) > 1:
        named = [(label(one), one) for one in results]
        return plot_results(named, None, path, "Several runs over each other", quantity)
    [one] = results
    return plot_results([(one.summary.rule, one)], one.baseline, path, one.heading, quantity)


@pictures.register("suspects", "whom the rule trusted")
def _suspects(results: Sequence[Result], path: Path, _: str | None) -> Path:
    """Draw each client's share, clients × rounds; of the first seed alone where others lie in each."""
    one = _only(results, "suspects")
    count, first = one.summary.clients, next(iter(one.seeds))
    last = one.config.federation.placement == "last"
    liars = range(count - (one.summary.byzantine or 0), count) if last else ()
    chosen = one.seeds if one.liars_stay else {first: one.seeds[first]}
    whose = f"rule: {one.summary.rule}" + ("" if one.liars_stay else f", seed {first}")
    return plot_shares(shares(count, chosen), path, f"{one.heading}, {whose}", liars)


def label(result: Result) -> str:
    """Name a run among others: its rule, who lies, ε."""
    summary = result.summary
    attack = "nobody lies" if summary.attack == "none" else f"under {summary.attack}"
    return f"{summary.rule} {attack}, ε = {tightest_epsilon(summary)[0]}"


@pictures.register("privacy", "ε spent over rounds")
def _privacy(results: Sequence[Result], path: Path, _: str | None) -> Path:
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


@pictures.register("cost", "seconds of each stage of a round")
def _cost(results: Sequence[Result], path: Path, _: str | None) -> Path:
    """Draw the seconds of each stage of a round, upon each other, the mean over seeds."""
    from matplotlib.figure import Figure  # without pyplot: no global state, no display needed

    result = _only(results, "cost")
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
