"""Where a picture may be written."""

from __future__ import annotations

from pathlib import Path

from trilemma.errors import UserError
from trilemma.files import room_for

ENDINGS = (".png", ".svg")
"""How a picture's file may end."""


def check_picture(path: Path) -> None:
    """Refuse a path that no picture is written to.

    >>> check_picture(Path("picture.txt"))
    Traceback (most recent call last):
    trilemma.errors.UserError: 'picture.txt': a picture is written to a file that ends in .png or .svg
    """
    if path.suffix not in ENDINGS or path.is_dir():
        raise UserError(f"{path.name!r}: a picture is written to a file that ends in {' or '.join(ENDINGS)}")


def picture_file(path: Path) -> Path:
    """Return a path that a picture can be written to, its folder made; refuse any other."""
    check_picture(path)
    return room_for(path)
