"""Tables of the arena: the worst case of every rule, and what every adversary left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from trilemma.experiment import load
from trilemma.report import Table
from trilemma_lab.arena.arena import EVERY_ADVERSARY, GROUNDS, RULES, THREATS, Row
from trilemma_lab.arena.missing import CellStanding, tally

SHOWN = ("caf", "evidence+caf", "evidence+nnm+caf")
"""Whose worst cases are shown first: the best of rules that look at one round, and what is built here."""


def worst(found: Sequence[Row]) -> list[Table]:
    """Return a table for every ground: rules, and the least accuracy under every threat model and f.

    With a ≤ where not all of the strongest liars were met: it may yet fall. In parentheses how many seeds met
    the adversary that left it, where it is fewer than three. Where every rule was run, smea's row says how
    many subsets it would have to look at, if it cannot.
    """
    tables = []
    for ground in (name for name in GROUNDS if any(row.ground == name for row in found)):
        there = [row for row in found if row.ground == ground]
        columns = [
            (threat, liars)
            for threat in THREATS
            for liars in sorted({row.f for row in there if row.threat == threat})
        ]
        body = []
        for rule in sorted({row.rule for row in there}, key=_rank):
            of_rule = [row for row in there if row.rule == rule]
            cells = ([row for row in of_rule if (row.threat, row.f) == column] for column in columns)
            body.append((rule, *map(_worst, cells)))
        if not GROUNDS[ground].small and any(rule == "mean" for rule, *_ in body):
            body.append(("smea", *(subsets(ground, liars) for _, liars in columns)))
            body.sort(key=lambda row: _rank(row[0]))
        heads = (f"{threat}, f = {liars}" for threat, liars in columns)
        dims = ", ".join(f"{d:,}" for d in sorted({row.d for row in there}))
        spent = sorted({f"{row.epsilon:.1f}" for row in there if row.epsilon is not None})
        title = f"{ground}: d = {dims}, ε = {', '.join(spent) or 'none'}"
        tables.append(Table(title, ("rule", *heads), tuple(body), words=1))
    return tables


def summary(found: Sequence[Row], rules: Sequence[str] = SHOWN) -> Table:
    """Return a row for every ground, and there for every rule: its worst cases by threat, f from low to high.

    >>> row = Row("mnist-drawn", "LDP", 5, "caf", "foe", 1, 0.8, 0, 0, 240, None)
    >>> summary([row], ["caf"]).rows
    (('mnist-drawn', 'caf', '–', '–', '–', '≤0.80 · – · –'),)
    """
    met: dict[tuple[str, str, str, int], list[Row]] = {}
    for row in found:
        met.setdefault((row.ground, row.rule, row.threat, row.f), []).append(row)

    def told(group: list[Row]) -> str:
        return f"{_bound(group)}{min(row.accuracy for row in group):.2f}" if group else "–"

    body = []
    for name, ground in GROUNDS.items():
        for rule in (one for one in rules if any(place[:2] == (name, one) for place in met)):
            cells = []
            for threat in THREATS:
                groups = [met.get((name, rule, threat, liars), []) for liars in ground.liars]
                cells.append(" · ".join(map(told, groups)) if any(groups) else "–")
            body.append((name, rule, *cells))
    return Table("", ("trained", "rule", *THREATS), tuple(body), words=2)


def subsets(ground: str, liars: int) -> str:
    """Say how many subsets of all but `liars` messages there are, which smea would search in every round.

    >>> subsets("phishing-30", 10), subsets("mnist-features", 20)
    ('(3·10⁷ subsets)', '(5·10²⁰ subsets)')
    """
    there = GROUNDS[ground]
    clients = load(there.ready).with_(*there.changes, f"federation.byzantine={liars}").federation.clients
    digit, power = f"{float(math.comb(clients, liars)):.0e}".split("e+")
    return f"({digit}·10{str(int(power)).translate(str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹'))} subsets)"


def _rank(rule: str) -> tuple[int, str]:
    order = list(RULES)
    return order.index(rule) if rule in order else len(order), rule


def _worst(group: Sequence[Row]) -> str:
    if not group:
        return "–"
    by = min(group, key=lambda row: row.accuracy).adversary
    return _bound(group) + _least([row for row in group if row.adversary == by])


def _bound(group: Sequence[Row]) -> str:
    """Return a ≤ for a cell that did not meet all of the strongest, unless liars have no say in it."""
    one = group[0]
    alone = any("alone" in said for said in RULES.get(one.rule, ()))
    return (
        "≤" if not alone and CellStanding(one.ground, one.threat, one.f, one.rule, list(group)).open else ""
    )


def markdown(found: Sequence[Row], part: str) -> str:
    """Return the tables for a page: a `summary`, `worst` cases, by `adversaries`, or what is `missing`."""
    whole = {"adversaries": standings, "summary": summary, "missing": tally}
    if part in whole:
        return whole[part](found).markdown()
    return "\n\n".join(f"{one.title}\n\n{replace(one, title='').markdown()}" for one in worst(found))


def standings(found: Sequence[Row]) -> Table:
    """Return a row for every ground, threat, f and rule: the worst first, then every adversary's least.

    In parentheses how many seeds there are, where it is fewer than three.
    """
    known = [name for name in EVERY_ADVERSARY if any(row.adversary == name for row in found)]
    header = ("trained", "threat", "ε", "d", "f", "rule", "worst", "by", *known, "honest expelled")
    groups: dict[tuple[str, str, int, str], list[Row]] = {}
    for row in found:
        groups.setdefault((row.ground, row.threat, row.f, row.rule), []).append(row)

    def place(key: tuple[str, str, int, str]) -> tuple[int, int, int, int, str]:
        ground, threat, liars, rule = key
        ranks = (list(GROUNDS).index(ground), list(THREATS).index(threat), liars)
        return *ranks, *_rank(rule)

    body = []
    for key in sorted(groups, key=place):
        ground, threat, liars, rule = key
        group = groups[key]
        least = min(group, key=lambda row: row.accuracy)
        epsilon = "–" if least.epsilon is None else f"{least.epsilon:.1f}"
        facts = epsilon, f"{least.d:,}", str(liars), rule, f"{least.accuracy:.2f}"
        by = [_least([row for row in group if row.adversary == name]) for name in known]
        lost = str(sum(row.honest for row in group))
        body.append((ground, threat, *facts, least.adversary, *by, lost))
    return Table("", header, tuple(body), words=2)


def _least(group: Sequence[Row]) -> str:
    if not group:
        return "–"
    seeds = len({row.seed for row in group})
    return f"{min(row.accuracy for row in group):.2f}" + (f" ({seeds})" if seeds < 3 else "")
