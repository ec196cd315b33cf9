"""Accountants: what a history of releases has cost, and which noise a cost allows.

One file each; `choice` alone decides which of them is asked. Every figure is an upper bound on the true one,
so the smallest of several is one too. The formulas are apart, in `gaussian`, `rdp` and `pld` of the room.

>>> sorted(accountants)
['c1', 'exact', 'pld', 'rdp']
"""

from trilemma.base.registry import discover
from trilemma.privacy.accounting.accountants.base import Accountant, accountants, applicable
from trilemma.privacy.accounting.accountants.choice import (
    AccountantAnswer,
    ask,
    default,
    everyday,
    worthwhile,
)

discover(__name__)

__all__ = [
    "Accountant",
    "AccountantAnswer",
    "accountants",
    "applicable",
    "ask",
    "default",
    "everyday",
    "worthwhile",
]
