"""An audit as a table."""

from __future__ import annotations

import math

from rich.table import Table

from trilemma.audit.outcomes import Audit, AuditOutcome
from trilemma.privacy import Guarantee


def audit_table(audit: Audit) -> Table:
    """Lay out one audit: what is certified, what was found, and whether that is a contradiction."""
    verdict = audit.verdict
    if isinstance(verdict, Guarantee):
        by = f"({verdict.unit}, {verdict.accountant})"
        said = f"certified ε = {verdict.epsilon:.4g} at δ = {audit.delta:g} {by}"
    else:
        said = "nothing is certified"
    title = f"{audit.subject}, {audit.rounds} round{'s' if audit.rounds > 1 else ''}: {said}"
    table = Table(title=title, title_justify="left")
    for heading in ("test", "of", "certified", "found", "ratio", ""):
        table.add_column(heading, justify="left" if heading in ("test", "of", "") else "right")
    for outcome in audit.outcomes:
        table.add_row(*row(outcome))
    assumed = {outcome.assumes: outcome.test for outcome in audit.outcomes if outcome.assumes}
    table.caption = f"ε found: lower bounds that all hold with confidence {audit.confidence:g}" + "".join(
        f"; {test}: assuming that {what}" for what, test in assumed.items()
    )
    return table


def row(outcome: AuditOutcome) -> tuple[str, ...]:
    """Return one outcome's cells.

    >>> row(AuditOutcome("bits", "ε", math.inf, 2.0))
    ('bits', 'ε', '2', '∞', '∞', 'EXCEEDED')
    """
    ratio = outcome.ratio
    said = "" if outcome.certified is None else "EXCEEDED" if outcome.exceeds else "holds"
    return (
        outcome.test,
        outcome.measures,
        "none" if outcome.certified is None else f"{outcome.certified:.4g}",
        _number(outcome.found, ".4g"),
        "" if ratio is None else _number(ratio, ".0%"),
        said,
    )


def _number(value: float, form: str) -> str:
    return "∞" if math.isinf(value) else f"{value:{form}}"
