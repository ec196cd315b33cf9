"""A block as the content of a Flower message: one bytes value.

Flower fetches every nested record with a request of its own, so nesting arrays in records would cost more
time than it saves.
"""

from __future__ import annotations

from flwr.app import ConfigRecord, RecordDict

from trilemma.federation.wire import WireError

FIELD = "trilemma"


def to_record(block: bytes) -> RecordDict:
    """Put a block into a Flower message's content."""
    return RecordDict({FIELD: ConfigRecord({FIELD: block})})


def from_record(content: RecordDict) -> bytes:
    """Take the block out of a Flower message's content.

    >>> from_record(to_record(b"block"))
    b'block'
    >>> from_record(RecordDict())
    Traceback (most recent call last):
    trilemma.federation.wire.WireError: the message has no block
    """
    record = content.get(FIELD)
    block = record.get(FIELD) if isinstance(record, ConfigRecord) else None
    if not isinstance(block, bytes):
        raise WireError("the message has no block")
    return block
