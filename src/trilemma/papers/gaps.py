"""What the arena has not met yet: cells that were never run, or met only some of the strongest liars.

A worst case is as good as the liars that were tried, so a table of worst cases wants this one beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from trilemma.papers.arena import GROUNDS, RULES, THREATS, Row
from trilemma.report import Table

STRONGEST = ("stretched errors", "errors", "rotated slanted", "rotated loss", "foe")
"""Who left the worst case nearly everywhere."""

SEEDS = frozenset({1, 2, 3})

TUNED = frozenset(name for name, said in RULES.items() if any("tune" in one for one in said))
"""What goes on learning afterwards: no rule of its own."""


def chance(ground: str) -> float:
    """Return the accuracy below which a cell is lost, whoever comes next: two classes, or ten."""
    return 0.5 if ground.startswith("phishing") else 0.15


def missing(found: Sequence[Row]) -> Table:
    """Return the cells that are not lost and did not meet all of the strongest with seeds 1 to 3.

    A cell that was never run is among them; smea is not where its search has no end.

    >>> missing([]).rows[0]
    ('mnist-features', 'guaranteed SecLDP', '5', 'mean', '–', 'anybody')
    """
    met: dict[tuple[str, str, int, str], list[Row]] = {}
    for row in found:
        met.setdefault((row.ground, row.threat, row.f, row.rule), []).append(row)
    body = []
    for name, ground in GROUNDS.items():
        rules = [rule for rule in RULES if rule not in TUNED and (rule != "smea" or ground.small)]
        for threat in (one for one in THREATS if one in ground.threats):
            for liars in ground.liars:
                for rule in rules:
                    there = met.get((name, threat, liars, rule), [])
                    worst = min((row.accuracy for row in there), default=None)
                    lacking = _lacking(there)
                    if lacking and (worst is None or worst > chance(name)):
                        so_far = "–" if worst is None else f"{worst:.2f}"
                        body.append((name, threat, str(liars), rule, so_far, lacking))
    return Table("", ("trained", "threat", "f", "rule", "worst so far", "not met"), tuple(body), words=6)


def _lacking(there: Sequence[Row]) -> str:
    """Say whom a cell did not meet, and with how many seeds those whom it met with fewer than three."""
    if not there:
        return "anybody"
    seeds = {name: SEEDS & {row.seed for row in there if row.adversary == name} for name in STRONGEST}
    return ", ".join(
        name + (f" ({len(seeds[name])} of 3)" if seeds[name] else "")
        for name in STRONGEST
        if seeds[name] != SEEDS
    )
