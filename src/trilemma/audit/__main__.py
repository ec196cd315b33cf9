"""The nightly audit: `python -m trilemma.audit`, or `make audit`.

Exit code 1 if anything exceeds its certificate, or the audit itself is too weak in the plain settings.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from trilemma.audit.examine import Effort
from trilemma.audit.matrix import below_bar, everything, plain, summary
from trilemma.audit.tables import row


def main(
    trials: int = 2000, plain_trials: int = 10_000, confidence: float = 0.999, seed: int = 1, only: str = ""
) -> None:
    """Audit every setting whose name contains `only`, and show all of them in one table."""
    done, failed = [], []
    for cases, count in ((plain(), plain_trials), (everything(), trials)):
        for case in cases:
            if only not in case.name:
                continue
            audit = case.audit(Effort(count, canaries=300, confidence=confidence, seed=seed))
            done.append(audit)
            weak = below_bar(case, audit)
            if weak or not audit.passed:
                failed.append(f"{case.name}: {'the audit is too weak' if weak else 'EXCEEDED'}")
            ratios = ", ".join(row(outcome)[4] for outcome in audit.outcomes)
            print(f"{len(done)}: {case.name}: {ratios}", file=sys.stderr, flush=True)
    screen = Console(width=160)
    if done:
        screen.print(summary(done))
    for line in failed:
        screen.print(line)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
