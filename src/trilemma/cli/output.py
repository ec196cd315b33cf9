"""How commands say a line: as it is, whatever is in it; only a terminal's own width breaks it."""

from __future__ import annotations

from rich.console import Console

from trilemma.base.errors import printable

_SCREEN, _ASIDE = Console(), Console(stderr=True)


def say(text: str = "") -> None:
    """Print a line: brackets are brackets, and nothing in it steers the terminal."""
    _SCREEN.print(printable(text), highlight=False, markup=False, soft_wrap=True)


def doing(text: str) -> None:
    """Say on a terminal what takes a while now: before torch is imported, which takes seconds."""
    if _ASIDE.is_terminal:
        note(text)


def note(text: str) -> None:
    """Print a line on standard error, beside what a command is asked for."""
    _ASIDE.print(printable(text), highlight=False, markup=False, soft_wrap=True)
