"""Many short random streams, one per client, without the cost of making many generators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from trilemma.keys import Key


def each_stream(keys: Iterable[Key]) -> Iterator[np.random.Generator]:
    """Yield a generator at the beginning of each key's stream; use it before asking for the next.

    One Philox generator is moved from key to key. Making a generator costs more than drawing a batch from
    it, so this halves the time of a draw for 100 clients. The streams are not those of `Key.numpy`.

    >>> a, b = [stream.random() for stream in each_stream([Key(1), Key(2)])]
    >>> [stream.random() for stream in each_stream([Key(2)])] == [b], a == b
    (True, False)
    """
    bits = np.random.Philox(key=0)
    generator = np.random.Generator(bits)
    beginning = bits.state
    for key in keys:
        beginning["state"]["key"][:] = (key.integer(), 0)
        bits.state = beginning
        yield generator
