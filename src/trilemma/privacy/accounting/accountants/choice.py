"""Which accountant is asked, and who answers where one fails: the only place that decides it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from trilemma.privacy.accounting.accountants.base import Accountant, accountants, applicable
from trilemma.privacy.mechanism import History
from trilemma.privacy.types import AccountingFailure

Figure = TypeVar("Figure")


def default(rounds: History) -> Accountant:
    """Return the accountant that is asked when none is named: the first in rank that is for `rounds`.

    That is the tightest that applies, whether noise is calibrated or its cost is told: who asks for an ε gets
    as little noise as can be certified, and reads the same figure in every place.

    >>> from trilemma.privacy.mechanism import Mechanism
    >>> from trilemma.privacy.types import Sampling
    >>> default(((Mechanism(1.0), 30),)).name, default(((Mechanism(1.0, Sampling("poisson", 0.1)), 30),)).name
    ('exact', 'pld')
    """
    return applicable(rounds)[0]


def everyday(rounds: History) -> tuple[Accountant, ...]:
    """Return the accountants for `rounds` that are quick enough to be asked in every round of a run."""
    return tuple(able for able in applicable(rounds) if able.quick)


def worthwhile(rounds: History) -> tuple[Accountant, ...]:
    """Return the accountants that add something to a picture: all, or the quick ones where one is tight.

    >>> from trilemma.privacy.mechanism import Mechanism
    >>> [able.name for able in worthwhile(((Mechanism(1.0), 30),))]
    ['exact', 'rdp']
    """
    quick = everyday(rounds)
    return quick if any(able.tight for able in quick) else applicable(rounds)


@dataclass(frozen=True)
class AccountantAnswer(Generic[Figure]):
    """A figure, the name of the accountant it is by, and a note where that is not the one asked."""

    figure: Figure
    by: str
    note: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """The note, if there is one."""
        return (self.note,) if self.note else ()


def ask(name: str, question: Callable[[Accountant], Figure]) -> AccountantAnswer[Figure]:
    """Put a question to an accountant; where it fails, the one it names instead answers.

    >>> ask("exact", lambda accountant: accountant.assumes).figure
    'releases without sampling'
    """
    asked = accountants[name]
    try:
        return AccountantAnswer(question(asked), name)
    except AccountingFailure as failure:
        if not asked.instead:
            raise
        note = f"{name} failed ({failure}); its figure is that of {asked.instead}"
        return AccountantAnswer(question(accountants[asked.instead]), asked.instead, note)
