"""What may be written into a field of an event: numbers, words, sentences without what others wrote."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from trilemma.federation.protocol.reasons import LONGEST, shortened

_WORD = re.compile(r"[][A-Za-z0-9_./~:+%-]{1,262}")  # the longest name of a host, and a port
_QUOTED = re.compile(r"\b(unknown|unreached): .*", re.DOTALL)


class Sort(Enum):
    """What a field may hold."""

    NUMBER = "a finite number"
    CLIENT = "a client's number, or None where nobody knows whose it was"
    CLIENTS = "numbers of clients"
    WORD = "one word of letters, digits and . _ / ~ : + % - [ ]"
    SENTENCE = f"at most {LONGEST} printable characters, nothing of them quoted from somebody else"
    FIGURES = "finite numbers by name"

    def holds(self, value: Any) -> bool:
        """Tell whether a value is of this sort.

        >>> Sort.NUMBER.holds(math.nan), Sort.WORD.holds("two words"), Sort.FIGURES.holds({"commit": 0.1})
        (False, False, True)
        """
        match self:
            case Sort.NUMBER:
                return isinstance(value, int | float) and math.isfinite(value)
            case Sort.CLIENT:
                return value is None or type(value) is int
            case Sort.CLIENTS:
                return isinstance(value, list) and all(type(one) is int for one in value)
            case Sort.WORD:
                return isinstance(value, str) and _WORD.fullmatch(value) is not None
            case Sort.SENTENCE:
                return isinstance(value, str) and value == without_quotes(value)
            case Sort.FIGURES:
                return isinstance(value, Mapping) and all(
                    Sort.WORD.holds(name) and Sort.NUMBER.holds(one) for name, one in value.items()
                )


def without_quotes(reason: str) -> str:
    """Return a reason without what another party's program wrote into it.

    >>> without_quotes("no message but an error: unknown: patient 4711 has no label")
    'no message but an error: unknown'
    """
    return shortened(_QUOTED.sub(r"\1", reason))


def figures(numbers: Mapping[str, float | None]) -> dict[str, float]:
    """Return numbers by name as an event takes them: the finite ones, under names of one word.

    >>> figures({"commit": 0.5, "my score": 1.0, "loss": math.nan, "auc": None})
    {'commit': 0.5, 'my_score': 1.0}
    """
    finite = {name: one for name, one in numbers.items() if one is not None and math.isfinite(one)}
    return {re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:80] or "_": one for name, one in finite.items()}
