"""Every private algorithm under every threat model, and the plain Gaussian settings: the nightly audit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from trilemma.audit.examine import Effort, canary_tests, concluded, notes_on
from trilemma.audit.outcomes import Audit
from trilemma.audit.subject import Subject
from trilemma.audit.tables import row
from trilemma.base.keys import Key
from trilemma.experiment import parse
from trilemma.learning.settings import algorithms, private_algorithms
from trilemma.privacy.threats.catalogue import threat_models
from trilemma.privacy.types import Arithmetic

EXAMPLES = 200
"""Examples that every client holds."""

BAR = 0.8
"""Share of the certified ε that the audit must reach in the plain Gaussian settings."""

FEW = {
    "lp-proj": ("algorithm.dim=4", "algorithm.local_rounds=2", "algorithm.inner_steps=2"),
    "pfedme": ("algorithm.local_rounds=2", "algorithm.inner_steps=2"),
    "rsa": ("algorithm.local_rounds=2", "algorithm.inner_steps=2"),
    "ditto": ("algorithm.inner_steps=2",),
}
"""Fewer coordinates than the canary model has, and local steps that take no longer than needed."""


@dataclass(frozen=True)
class Case:
    """One setting: a name, assignments to the default configuration, and the least ratio asked for."""

    name: str
    assignments: tuple[str, ...]
    bar: float | None = None

    def audit(self, effort: Effort, arithmetic: Arithmetic = "grid") -> Audit:
        """Run all tests on canaries."""
        config = parse({}, self.assignments)
        subject = Subject.of(config, EXAMPLES, arithmetic)
        assert subject is not None
        outcomes = canary_tests(subject, effort, Key(effort.seed).fold("audit"))
        return concluded(self.name, subject, effort, outcomes, notes_on(config, subject))


def setting(algorithm: str, threat: str, rounds: int, epsilon: float, *more: str) -> tuple[str, ...]:
    """Return the assignments of one setting: seven clients, two of whom may lie."""
    return (
        f"algorithm.name={algorithm}",
        "federation.clients=7",
        "federation.tolerate=2",
        f"privacy.threat={threat}",
        "privacy.clip=1.0",
        f"privacy.epsilon={epsilon}",
        *([] if algorithms[algorithm].rounds else [f"run.rounds={rounds}"]),
        *FEW.get(algorithm, ()),
        *more,
    )


def plain(epsilons: tuple[float, ...] = (2.0, 4.0)) -> Iterator[Case]:
    """Yield the plain Gaussian settings, in which the audit must come near the certificate."""
    for threat in ("ldp", "secldp"):
        for rounds in (1, 30):
            for epsilon in epsilons:
                name = f"plain Gaussian, {threat}, T = {rounds}, ε = {epsilon:g}"
                yield Case(name, setting("dsgd", threat, rounds, epsilon, "algorithm.momentum=0"), BAR)


def everything(rounds: int = 5, epsilon: float = 4.0) -> Iterator[Case]:
    """Yield every private algorithm under every threat model; the same with a clip that follows a quantile.

    Poisson samples come with both adjacencies.
    """
    for algorithm in private_algorithms():
        for threat in threat_models:
            yield Case(f"{algorithm}, {threat}", setting(algorithm, threat, rounds, epsilon))
    for algorithm, threat in (("safe-dshb", "ldp"), ("cafcor", "secldp"), ("cafcor", "cdp")):
        more = setting(algorithm, threat, rounds, epsilon, "algorithm.quantile=0.3")
        yield Case(f"{algorithm}, {threat}, adaptive clip", more)
    for adjacency in ("replace", "add-remove"):
        more = ("algorithm.sampling=poisson", f"privacy.adjacency={adjacency}")
        yield Case(
            f"safe-dshb, ldp, poisson, {adjacency}", setting("safe-dshb", "ldp", rounds, epsilon, *more)
        )


def below_bar(case: Case, audit: Audit) -> bool:
    """Tell whether no bound of an audit reaches what the setting asks for."""
    ratios = [outcome.ratio or 0.0 for outcome in audit.outcomes if outcome.measures == "ε"]
    return case.bar is not None and max(ratios) < case.bar


def summary(audits: list[Audit]) -> Table:
    """Lay out many audits, one line each."""
    table = Table(title="found, as a share of what is certified", title_justify="left")
    tests = [outcome.test for outcome in audits[0].outcomes]
    for heading in ("setting", "certified ε", *tests, ""):
        table.add_column(heading, justify="left" if heading in ("setting", "") else "right")
    for audit in audits:
        certified = "none" if audit.certified is None else f"{audit.certified:.3g}"
        ratios = [row(outcome)[4] for outcome in audit.outcomes]
        table.add_row(audit.subject, certified, *ratios, "holds" if audit.passed else "EXCEEDED")
    return table
