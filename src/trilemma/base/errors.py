"""Errors a user can do something about.

Everything the user may have got wrong raises a `UserError`: its message says what is wrong and what is
allowed. The command line prints the message, without a traceback, and exits with code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input. The message says what is wrong and what is allowed."""


class ConfigError(UserError):
    """A configuration that cannot be run."""


class DataUnavailable(UserError):
    """A data set that is neither on disk nor reachable."""


class PrivacyError(UserError):
    """A privacy guarantee was asked for that does not hold."""


def printable(text: str) -> str:
    r"""Return `text` with characters that would steer a terminal written out; ends of lines stay.

    >>> print(printable("red \x1b[31m and a bell \a"))
    red \x1b[31m and a bell \x07
    """
    return "".join(
        c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def nearest(name: str, allowed: Iterable[str], listed_by: str = "") -> str:
    """Say which allowed name `name` was probably meant to be, and list all of them.

    Where the names would fill a screen, `listed_by` is the command that lists them.

    >>> nearest("cwmde", ["cwmed", "krum", "krum"])
    "did you mean 'cwmed'? Allowed: cwmed, krum"
    >>> nearest("zeno", ["cwmed", "krum"])
    'allowed: cwmed, krum'
    >>> nearest("cwmde", ["cwmed", "krum"], listed_by="trilemma list rules")
    "did you mean 'cwmed'? All names: trilemma list rules"
    """
    names = sorted(set(allowed))
    meant = hint(name, names)
    if listed_by:
        return f"{meant}{'A' if meant else 'a'}ll names: {listed_by}"
    return f"{meant}{'A' if meant else 'a'}llowed: {', '.join(names) or '(none)'}"


def hint(name: str, allowed: Iterable[str], likeness: float = 0.5) -> str:
    """Ask whether the nearest allowed name was meant; "" where none is as alike as `likeness` (1: equal).

    >>> hint("cwmde", ["cwmed", "krum"])
    "did you mean 'cwmed'? "
    """
    close = difflib.get_close_matches(name, sorted(allowed), n=1, cutoff=likeness)
    return f"did you mean {close[0]!r}? " if close else ""
