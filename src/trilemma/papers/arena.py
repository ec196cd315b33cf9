"""The arena: every rule against every adversary, and the worst case of each.

A cell is one run of the sweep: what is trained, how many lie, under which threat model, by which rule,
against which adversary; all seeds together. Cells that are finished are not run again, so a stopped arena
continues. What is reported is the least accuracy over adversaries and seeds, never a mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trilemma import report
from trilemma.config import Cell, load
from trilemma.errors import ConfigError
from trilemma.report import Result, Table
from trilemma.simulate.sweep.grid import finished

RULES = ("mean", "cwmed", "nnm+cwmed", "caf", "smea", "evidence+mean", "evidence+caf")
"""smea searches all subsets and is left out where there are too many: beyond 30 clients."""

ADVERSARIES: Mapping[str, tuple[str, ...]] = {
    "gradient": ("attack={name='adaptive'}",),
    "loss": ("attack={name='adaptive', direction='loss'}",),
    "rotated": ("attack={name='adaptive', noise='rotated'}",),
    "rotated loss": ("attack={name='adaptive', direction='loss', noise='rotated'}",),
    "across": ("attack={name='adaptive', direction='across'}",),
    "unseen": ("attack={name='adaptive', direction='loss', greedy=false}",),
    "half": ("attack={name='adaptive', direction='loss', role='half'}",),
    "alie": ("attack={name='alie'}",),
    "foe": ("attack={name='foe'}",),
}
LATER: Mapping[str, tuple[str, ...]] = {
    "sleeper": ("attack={name='adaptive', direction='loss', start=15}",),
    "burst": ("attack={name='adaptive', direction='loss', stop=10}",),
}
"""Those who choose their rounds, where there are many."""

THREATS: Mapping[str, tuple[str, ...]] = {
    "guaranteed SecLDP": ("privacy.threat=secldp", "privacy.assume=guaranteed"),
    "published SecLDP": ("privacy.threat=secldp", "privacy.assume=published"),
    "ByzLDP": ("privacy.threat=byzldp", "privacy.assume=guaranteed"),
    "LDP": ("privacy.threat=ldp", "privacy.assume=guaranteed"),
}


@dataclass(frozen=True)
class Ground:
    """What is trained: a ready configuration, changes to it, how many may lie; `small`: few clients."""

    ready: str
    changes: tuple[str, ...] = ()
    liars: tuple[int, ...] = (5, 10, 20)
    threats: tuple[str, ...] = tuple(THREATS)
    adversaries: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: ADVERSARIES)
    small: bool = False


NETWORK = {**ADVERSARIES, **LATER}
GROUNDS: Mapping[str, Ground] = {
    "MNIST, features": Ground("frontier-mnist"),
    "MNIST, CNN in a subspace": Ground("few-coordinates-mnist-subspace", adversaries=NETWORK),
    "MNIST, CNN, head": Ground("cafcor-mnist", ("model.train=head", "algorithm.lr=0.3"), adversaries=NETWORK),
    "MNIST, CNN": Ground("cafcor-mnist", adversaries=NETWORK),
    "phishing, n = 7": Ground("safe-dshb-phishing", liars=(3,), threats=("LDP",), small=True),
    "phishing, n = 30": Ground("safe-dshb-phishing", ("federation.clients=30",), (10,), ("LDP",), small=True),
}
QUICK = ("phishing, n = 7",)


@dataclass(frozen=True)
class Bout:
    """A cell and where it stands."""

    ground: str
    threat: str
    liars: int
    rule: str
    adversary: str
    cell: Cell


def bouts(
    grounds: Sequence[str] = tuple(GROUNDS),
    rules: Sequence[str] = RULES,
    seeds: str = "1-3",
    changes: Sequence[str] = (),
) -> Iterator[Bout]:
    """Yield all cells of some grounds; what a rule is not defined for is left out.

    >>> len(list(bouts(["phishing, n = 7"], ["mean", "caf"])))
    18
    """
    for name in grounds:
        ground = GROUNDS[name]
        for threat in ground.threats:
            for liars in ground.liars:
                for rule in (one for one in rules if one != "smea" or ground.small):
                    for adversary, attack in ground.adversaries.items():
                        said = [*ground.changes, *THREATS[threat], f"federation.byzantine={liars}"]
                        said += [f"aggregation.rule={rule}", f"run.seeds='{seeds}'", *attack, *changes]
                        try:
                            config = load(ground.ready).with_(*said)
                        except ConfigError:
                            continue
                        place = {"liars": liars, "rule": rule, "adversary": adversary}
                        yield Bout(name, threat, liars, rule, adversary, Cell(place, config))


def standings(bouts: Sequence[Bout], out: Path) -> Table:
    """Return a row for every ground, threat, f and rule with a result: the worst, and every adversary's."""
    rows: dict[tuple[str, str, int, str], dict[str, Result]] = {}
    for bout in bouts:
        if finished(out, bout.cell.name):
            row = rows.setdefault((bout.ground, bout.threat, bout.liars, bout.rule), {})
            row[bout.adversary] = report.load(out / bout.cell.name)
    adversaries = list(dict.fromkeys(name for row in rows.values() for name in row))
    header = ("trained", "threat", "ε", "d", "f", "rule", "worst", *adversaries, "honest expelled")
    body = []
    for (ground, threat, liars, rule), found in rows.items():
        least = {name: min(accuracies(result)) for name, result in found.items()}
        one = next(iter(found.values()))
        last = one.records[-1]
        facts = [f"{last.epsilon:.1f}", f"{last.facts['up_scalars'] / len(last.weights):,.0f}"]
        cells = [f"{least[name]:.2f}" if name in least else "–" for name in adversaries]
        lost = sum(honest_expelled(result) for result in found.values())
        worst = f"{min(least.values()):.2f}"
        body.append((ground, threat, *facts, str(liars), rule, worst, *cells, str(lost)))
    return Table("", header, tuple(body), words=2)


def accuracies(result: Result) -> list[float]:
    """Return the last accuracy of every seed."""
    return [float(records[-1].metrics["accuracy"] or 0.0) for records in result.seeds.values()]


def honest_expelled(result: Result) -> int:
    """Return how many honest clients were expelled, over all seeds; liars are the last ones."""
    honest = result.config.federation.clients - result.config.federation.byzantine
    return sum(int(one["client"]) < honest for record in result.records for one in record.expelled)
