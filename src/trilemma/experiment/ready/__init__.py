"""Configurations that come with the package, most of them a paper's experiment; found by name.

>>> ready["lp-proj-attacked"].summary
'lp-proj-1 while 80 of 100 clients send a random constant (Table 5 of its paper).'
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from trilemma.base.registry import Registry


@dataclass(frozen=True)
class ReadyConfig:
    """One of them, as TOML text whose first lines say what it is."""

    text: str

    @property
    def summary(self) -> str:
        """The comment it begins with, up to the first full stop."""
        lines = self.text.splitlines()
        comment = []
        for line in lines:
            if not line.startswith("#"):
                break
            comment.append(line.removeprefix("#").strip())
        sentence, stop, _ = " ".join(comment).partition(". ")
        return sentence + stop.strip()


ready: Registry[ReadyConfig] = Registry("configuration")
"""Every configuration that comes with the package, by name."""


def enter(package: str) -> None:
    """Enter every TOML file that lies in a package, under its name."""
    for file in sorted(resources.files(package).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            found = ReadyConfig(file.read_text("utf-8"))
            ready.register(file.name.removesuffix(".toml"), found.summary)(found)


enter(__name__)
