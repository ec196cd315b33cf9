"""Tables of results. Accuracy never stands alone: ε, f, the attack and the honest run are beside it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from trilemma.simulate import Spread, Summary


def results_table(rows: Sequence[tuple[str, Summary]], adversary_free: Summary | None, title: str) -> Table:
    """Lay out summaries, one per row."""
    table = Table(title=title, title_justify="left")
    for heading in ("run", "rule", "f of n", "attack", "ε", "accuracy", "without adversary"):
        table.add_column(heading, justify="right" if heading in ("accuracy", "ε") else "left")
    reference = percent(adversary_free.accuracy) if adversary_free else "not run (--baseline)"
    for label, summary in rows:
        table.add_row(
            label,
            summary.rule,
            f"{summary.byzantine} of {summary.clients}",
            summary.attack,
            epsilon_text(summary),
            percent(summary.accuracy) + _stars(summary),
            reference if summary.byzantine else "itself",
        )
    return table


def percent(spread: Spread) -> str:
    """Write a spread as a percentage.

    >>> percent(Spread.of({1: 0.80, 2: 0.82}))
    '81.0 ± 1.4 %'
    """
    if spread.mean is None:
        return "*"
    if len(spread.per_seed) == 1:
        return f"{100 * spread.mean:.1f} %"
    return f"{100 * spread.mean:.1f} ± {100 * (spread.std or 0):.1f} %"


def epsilon_text(summary: Summary) -> str:
    """Write ε with its accountant and threat model; ∞ when nothing is guaranteed."""
    known = {name: value for name, value in summary.epsilon.items() if value is not None}
    if not known:
        return "∞"
    best = min(known, key=lambda name: known[name])
    return f"{known[best]:.3g} ({best}, {summary.threat}, δ {summary.delta:g})"


def _stars(summary: Summary) -> str:
    if not summary.diverged:
        return ""
    return " (* diverged: " + ", ".join(f"seed {s} round {r}" for s, r in summary.diverged.items()) + ")"
