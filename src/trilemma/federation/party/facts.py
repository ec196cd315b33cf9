"""What parties must have in common, as fingerprints that can be compared: configuration, roster, versions.

Parties tell each other these when they connect (`trilemma federation doctor`). They are believed for
finding mistakes only: what protects a client is what it finds in its own folder (`Agreed.terms`).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trilemma.base.errors import UserError
from trilemma.base.files import ends
from trilemma.federation.identity.signed_files import canonical

if TYPE_CHECKING:
    from trilemma.federation.party.layout import Party

SHOWN = 12
"""Characters of a fingerprint that are kept: enough to tell two apart, and to be read aloud."""


@dataclass(frozen=True)
class Facts:
    """Fingerprints of the files that must be the same everywhere, and the versions that are used.

    >>> ours = Facts("ab12", "cd34", "80", "0.1.0", "3.11")
    >>> Facts.read(ours.plain()) == ours, ours.differences(Facts.read({**ours.plain(), "roster": "ef56"}))
    (True, {'roster': ('cd34', 'ef56')})
    """

    config: str
    roster: str
    examples: str
    trilemma: str
    python: str

    @classmethod
    def of(cls, party: Party) -> Facts:
        """Return the facts of a party's folder and of the program that looks."""
        return cls.in_folder(party.folder)

    @classmethod
    def in_folder(cls, folder: Path) -> Facts:
        """Return the facts as they are in a party's folder now."""
        try:
            examples = tomllib.loads((folder / "federation.toml").read_text()).get("examples")
        except (OSError, ValueError):
            examples = "unreadable"
        return cls(
            config=fingerprint(folder / "config.toml"),
            roster=_roster(folder / "roster.json"),
            examples=str(examples)[:40],
            trilemma=installed("trilemma"),
            python=".".join(platform.python_version_tuple()[:2]),
        )

    def plain(self) -> dict[str, str]:
        """Return JSON values."""
        return asdict(self)

    @property
    def text(self) -> str:
        """The facts as one line of ASCII."""
        return json.dumps(self.plain())

    @classmethod
    def read(cls, plain: object) -> Facts:
        """Read what somebody else says its facts are: short words, and no others."""
        names = [one.name for one in fields(cls)]
        if not isinstance(plain, Mapping) or set(plain) != set(names):
            raise UserError(f"facts are {', '.join(names)}")
        if not all(isinstance(one, str) and len(one) <= 40 and one.isprintable() for one in plain.values()):
            raise UserError("facts are short words")
        known: dict[str, Any] = dict(plain)
        return cls(**known)

    def differences(self, other: Facts) -> dict[str, tuple[str, str]]:
        """Return what differs, ours first; Python's versions may."""
        theirs = other.plain()
        return {
            name: (own, theirs[name])
            for name, own in self.plain().items()
            if own != theirs[name] and name != "python"
        }


def fingerprint(path: Path) -> str:
    """Return the first letters of a file's SHA-256; "missing" where there is none."""
    if not ends(path):
        return "no file"
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:SHOWN]
    except OSError:
        return "missing"


def _roster(path: Path) -> str:
    """Return a fingerprint of what a roster says: its signature may be another one that holds as well."""
    if not ends(path):
        return fingerprint(path)
    try:
        said = canonical(json.loads(path.read_bytes())["roster"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return fingerprint(path)
    return hashlib.sha256(said).hexdigest()[:SHOWN]


def installed(package: str) -> str:
    """Return the version of a package that is installed; "none" where there is none.

    >>> installed("no-such-package")
    'none'
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
