"""What a client announces before it uploads a reply: the message, and the tree of its records.

The types are Flower's and not public. Protobuf reads a message without them, field by field; which fields
matter is in one place, here, and a test compares the count with Flower's own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet


@dataclass(frozen=True)
class Announcement:
    """A reply that is about to be uploaded: its id, its records by their digest, and how many they are."""

    reply: bytes
    tree: bytes
    records: int


def announced(body: bytes) -> Announcement:
    """Read an announcement of one reply with its own records; refuse everything else.

    The SuperLink takes what answers no message for the server's own, from any client, as often as it comes.
    It stores records that belong to another message than the announced one, and deletes them when that one
    was received: never. Of whatever is there twice two readers may take two different things.

    Field 2 of an announcement is the message and field 3 the tree of its records; field 1 of a message is
    what it says about itself; of that, field 2 is its id and field 5 that of the message it answers. Field 1
    of a tree is the id of its root.

    >>> about, tree = bytes([18, 1, 66, 42, 1, 65]), bytes([10, 1, 66])
    >>> message = bytes([10, len(about)]) + about
    >>> announced(bytes([18, len(message)]) + message + bytes([26, len(tree)]) + tree).reply
    b'B'
    """
    message, tree = only(body, 2), only(body, 3)
    about = only(message, 1)
    reply, answered = only(about, 2), only(about, 5)
    if not answered:
        raise ValueError("a client answers, and asks nothing")
    if only(tree, 1) != reply:
        raise ValueError("these are another message's records")
    return Announcement(reply, hashlib.sha256(tree).digest(), records_announced(body))


def records_announced(body: bytes) -> int:
    """Return how many records an announcement of replies is about; refuse what cannot be one.

    In Flower's protocol field 3 of the announcement is a tree of records for each reply; field 2 of a tree
    are the trees below it.

    >>> leaf = bytes([10, 1, 65])
    >>> tree = bytes([10, 1, 66]) + 2 * (bytes([18, 3]) + leaf)
    >>> records_announced(bytes([26, len(tree)]) + tree)
    3
    """
    trees, count = _within(body, 3), 0
    while trees:
        count += 1
        trees += _within(trees.pop(), 2)
    return count


def only(message: bytes, number: int) -> bytes:
    """Return what is in field `number` of a message, where it is there once.

    >>> only(bytes([10, 1, 65]), 1)
    b'A'
    """
    found = _within(message, number)
    if len(found) != 1:
        raise ValueError("an announcement says everything once")
    return found[0]


def _within(message: bytes, number: int) -> list[bytes]:
    """Return the messages in field `number` of a message whose type need not be known."""
    try:
        fields = UnknownFieldSet(Empty.FromString(message))
    except DecodeError:
        raise ValueError("not an announcement") from None
    return [field.data for field in fields if field.field_number == number and field.wire_type == 2]
