"""Tables of results. Accuracy never stands alone: ε, f, the attack and the honest run are beside it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from trilemma.simulate import Spread, Summary


def results_table(rows: Sequence[tuple[str, Summary]], adversary_free: Summary | None, title: str) -> Table:
    """Lay out summaries, one per row; what an ε means stands below the table."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    for heading in ("run", "rule", "liars", "attack"):
        table.add_column(heading)
    for heading in ("ε", "accuracy %", "no liars %"):
        table.add_column(heading, justify="right", no_wrap=True)
    reference = percent(adversary_free.accuracy) if adversary_free else "–"
    for label, summary in rows:
        table.add_row(
            label,
            summary.rule,
            f"{summary.byzantine} of {summary.clients}",
            summary.attack,
            tightest_epsilon(summary)[0],
            percent(summary.accuracy),
            reference if summary.byzantine else "itself",
        )
    remarks = dict.fromkeys(remark for _, summary in rows for remark in _remarks(summary))
    if adversary_free is None and any(summary.byzantine for _, summary in rows):
        remarks["no liars: run with --baseline to see it"] = None
    table.caption = "\n".join(remarks) or None
    return table


def percent(spread: Spread) -> str:
    """Write a spread in per cent; a star where every seed diverged.

    >>> percent(Spread.of({1: 0.80, 2: 0.82}))
    '81.0 ± 1.4'
    """
    if spread.mean is None:
        return "*"
    if len(spread.per_seed) == 1:
        return f"{100 * spread.mean:.1f}"
    return f"{100 * spread.mean:.1f} ± {100 * (spread.std or 0):.1f}"


def tightest_epsilon(summary: Summary) -> tuple[str, str]:
    """Return the smallest ε and what it means; ∞ when nothing is guaranteed."""
    known = {name: value for name, value in summary.epsilon.items() if value is not None}
    if not known:
        return "∞", ""
    best = min(known, key=lambda name: known[name])
    others = "".join(f", {value:.3g} by {name}" for name, value in known.items() if name != best)
    meaning = f"by {best} under {summary.threat} at δ = {summary.delta:g}{others}"
    return f"{known[best]:.3g}", f"ε = {known[best]:.3g} {meaning}"


def _remarks(summary: Summary) -> list[str]:
    meaning = tightest_epsilon(summary)[1]
    stars = [f"* seed {seed} diverged in round {round_}" for seed, round_ in summary.diverged.items()]
    return ([meaning] if meaning else []) + stars
