"""Where a picture may be written, and how: whole, or not at all. A notebook shows what was written."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trilemma.base.errors import UserError
from trilemma.base.files import replaced, room_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg")
"""How a picture's file may end."""


class Picture(type(Path())):  # type: ignore[misc]  # the class of paths is the system's
    """The path of a picture, which a notebook shows as the picture."""

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        if not self.is_file():
            return {"text/plain": repr(self)}
        if self.suffix == ".svg":
            return {"text/plain": str(self), "image/svg+xml": self.read_text("utf-8")}
        return {"text/plain": str(self), "image/png": base64.b64encode(self.read_bytes()).decode()}


def check_picture(path: Path) -> None:
    """Refuse a path that no picture is written to.

    >>> check_picture(Path("picture.txt"))
    Traceback (most recent call last):
    trilemma.base.errors.UserError: 'picture.txt': a picture is written to a file that ends in .png or .svg
    """
    if path.suffix not in ENDINGS or path.is_dir():
        raise UserError(f"{path.name!r}: a picture is written to a file that ends in {' or '.join(ENDINGS)}")


def picture_file(path: Path) -> Path:
    """Return a path that a picture can be written to, its folder made; refuse any other."""
    check_picture(path)
    return room_for(path)


def save_picture(figure: Figure, path: Path) -> Picture:
    """Write a picture to a file."""
    with replaced(picture_file(path).resolve()) as new:
        figure.savefig(new, format=path.suffix.removeprefix("."))
    return Picture(path)
