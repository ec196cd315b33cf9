"""Several messages of Flower's protocol in one body: each after its length, four bytes.

A reply is three records, and Flower asks for each with a request of its own, then says that it has them. What
belongs together travels together here: `short_way` packs and unpacks at one end, `internals` and
`supernode_internals` at the other. A `Parcel` has the two methods by which Flower's clients know a message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

TAKE = "/v1/trilemma/take"
"""A client's worker asks its SuperNode for a task, and gets the message it is about with it."""

GIVE = "/v1/trilemma/give"
"""It hands over the reply, and says how the task ended."""

_LENGTH = struct.Struct(">I")


class Parcel:
    """Some messages as bytes.

    >>> parcel = Parcel([b"one", b"", b"three"])
    >>> again = Parcel()
    >>> again.ParseFromString(parcel.SerializeToString())
    >>> [bytes(part) for part in again.parts]
    [b'one', b'', b'three']
    >>> again.ParseFromString(parcel.SerializeToString()[:-1])
    Traceback (most recent call last):
    ValueError: a parcel of another length than it says
    """

    def __init__(self, parts: Iterable[bytes] = ()) -> None:
        self.parts: list[bytes] = list(parts)

    def SerializeToString(self, deterministic: bool = True) -> bytes:
        """Return the parcel as it travels."""
        return b"".join(piece for part in self.parts for piece in (_LENGTH.pack(len(part)), part))

    def ParseFromString(self, body: bytes) -> None:
        """Read what `SerializeToString` wrote."""
        self.parts, start = [], 0
        while start < len(body):
            end = start + _LENGTH.size
            length = _LENGTH.unpack(body[start:end])[0] if end <= len(body) else len(body)
            start = end + length
            if start > len(body):
                raise ValueError("a parcel of another length than it says")
            self.parts.append(body[end:start])
