"""The one shape of what is signed and carried around: rosters, bundles and requests are files of it.

    {KIND: {…}, "signature": …}

What is signed is the canonical JSON of the content behind a heading of its own: there is one text to sign for
every content, and none that could be taken for another kind's. Whoever carries a file can turn an ECDSA
signature into another that holds as well (s into n − s), and write the same JSON in many ways. So two files
of one content are the same, and what is compared, hashed or remembered is the content (`Content.message`).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trilemma.base.errors import UserError
from trilemma.base.typed import complaint

Ecdsa = Annotated[str, Field(pattern="^([0-9a-f]{2}){8,110}$")]
"""An ECDSA signature (DER), as hexadecimal digits."""


def canonical(plain: Any) -> bytes:
    """Return the one text that stands for a JSON value, however somebody wrote it down.

    >>> canonical({"b": [1, 2], "a": None})
    b'{"a":null,"b":[1,2]}'
    """
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


class Strict(BaseModel):
    """Something that a stranger may have written: unknown fields and wrong types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Content(Strict):
    r"""What is signed.

    >>> class Greeting(Content):
    ...     heading = b"greeting v1"
    ...     word: str
    >>> Greeting(word="hello").message
    b'greeting v1\n{"word":"hello"}'
    """

    heading: ClassVar[bytes]

    @property
    def message(self) -> bytes:
        """The one text that stands for this content."""
        return self.heading + b"\n" + canonical(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        """The SHA-256 of that text."""
        return hashlib.sha256(self.message).hexdigest()


AnyFile = TypeVar("AnyFile", bound=Strict)


def text_of(file: Strict) -> str:
    """Return a file of this shape as it is written."""
    return json.dumps(file.model_dump(mode="json"), indent=1) + "\n"


def read(text: str, shape: type[AnyFile]) -> AnyFile:
    """Read a file of this shape; refuse anything else. Whether its signatures hold is checked by who asks."""
    try:
        return shape.model_validate_json(text)
    except ValidationError as error:
        raise UserError(complaint(error)) from None


def text_in(path: Path, largest: int) -> str:
    """Return the text of a file that anybody may have written, of at most `largest` bytes."""
    try:
        if path.stat().st_size > largest:
            raise UserError(f"it has more than {largest} bytes")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"it cannot be read: {error}") from None
