"""What a client announces before it uploads a reply: a tree of records, counted without knowing its type.

The types are Flower's and not public. Protobuf reads a message without them, field by field; which fields
matter is in one place, here, and a test compares the count with Flower's own.
"""

from __future__ import annotations

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet


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


def only_replies(body: bytes) -> bool:
    """Tell whether all messages of an announcement answer one: what answers none would be a question.

    The SuperLink takes that for the server's own, from any client, as often as it comes. Field 2 of the
    announcement are the messages, field 1 of a message is what it says about itself, once, and field 5 of
    that names the message that is answered, once: of several two readers may take two different ones.

    >>> reply, question = bytes([10, 3, 42, 1, 65]), bytes([10, 2, 42, 0])
    >>> only_replies(bytes([18, 5]) + reply), only_replies(bytes([18, 4]) + question)
    (True, False)
    """
    for message in _within(body, 2):
        about = _within(message, 1)
        answered = _within(about[0], 5) if len(about) == 1 else []
        if len(answered) != 1 or not answered[0]:
            return False
    return True


def _within(message: bytes, number: int) -> list[bytes]:
    """Return the messages in field `number` of a message whose type need not be known."""
    try:
        fields = UnknownFieldSet(Empty.FromString(message))
    except DecodeError:
        raise ValueError("not an announcement") from None
    return [field.data for field in fields if field.field_number == number and field.wire_type == 2]
