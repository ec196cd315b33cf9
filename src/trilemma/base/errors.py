"""Errors a user can do something about.

Everything the user may have got wrong raises a `UserError`: its message says what is wrong and what is
allowed. The command line prints the message, without a traceback, and exits with code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping


class UserError(ValueError):
    """Bad input. The message says what is wrong and what is allowed: a notebook shows it and no traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {printable(str(self))}"]


class Stopped(KeyboardInterrupt):
    """Ctrl-C in a run. The message says where the finished rounds are and how to go on."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


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


ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "cwtm": ("trimmedmean", "trmean", "fedtrimmedavg", "coordinatewisetrimmedmean"),
    "cwmed": ("median", "fedmedian", "coordinatewisemedian"),
    "multikrum": ("fedmultikrum",),
    "geomed": ("geometricmedian", "rfa", "gm"),
    "cc": ("centeredclipping", "centredclipping", "cclip"),
    "mda": ("minimumdiameteraveraging",),
    "caf": ("fedavg", "fedmean", "average", "avg", "dnc"),
    "alie": ("alittleisenough", "littleisenough"),
    "sf": ("signflip", "signflipping", "bitflip"),
    "lf": ("labelflip", "labelflipping"),
    "ipm": ("innerproductmanipulation",),
    "foe": ("fallofempires",),
    "gaussian": ("noise", "gaussiannoise"),
    "lr": ("learningrate", "eta", "stepsize"),
    "batch_size": ("batch", "batchsize", "lotsize"),
    "weight_decay": ("l2", "weightdecay"),
    "clip": ("maxgradnorm", "l2normclip", "clippingnorm"),
    "noise_multiplier": ("sigma",),
    "rounds": ("numrounds", "epochs", "iterations", "nbsteps"),
    "clients": ("numclients", "nworkers", "nbhonest"),
    "byzantine": ("nbyz", "nbbyz", "numbyzantine", "nummalicious", "malicious"),
    "dsgd": ("sgd", "dpsgd", "fedsgd"),
}
"""What other libraries call things that are here: written small, without spaces, hyphens and underscores.

A rule elsewhere that defends nobody points to one that does."""

UNDEFENDED = frozenset({"mean"})
"""What no slip of the pen is taken for: it would leave a run without a defence."""


def hint(name: str, allowed: Iterable[str], likeness: float = 0.5) -> str:
    """Ask whether the nearest allowed name was meant; "" where none is as alike as `likeness` (1: equal).

    >>> hint("cwmde", ["cwmed", "krum"]), hint("trimmed_mean", ["cwtm", "mean"]), hint("ALIE", ["alie"])
    ("did you mean 'cwmed'? ", "did you mean 'cwtm'? ", "did you mean 'alie'? ")
    >>> hint("learnd_mean", ["cwtm", "mean"])
    ''
    """
    names = sorted(allowed)
    close = [*known_as(name, names)] or difflib.get_close_matches(name.lower(), names, n=1, cutoff=likeness)
    close = [one for one in close if one not in UNDEFENDED or _bare(one) == _bare(name)]
    return f"did you mean {close[0]!r}? " if close else ""


def known_as(name: str, allowed: Iterable[str]) -> Iterator[str]:
    """Yield what is called `name` elsewhere, or but for hyphens and capitals.

    >>> [*known_as("learning_rate", ["lr", "momentum"])]
    ['lr']
    """
    bare = _bare(name)
    return (one for one in allowed if _bare(one) == bare or bare in ELSEWHERE.get(one, ()))


def _bare(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
