"""One text for every JSON value: what is signed or compared is the value, not how somebody wrote it down."""

from __future__ import annotations

import json
from typing import Any


def canonical(plain: Any) -> bytes:
    """Return the one text that stands for a JSON value.

    >>> canonical({"b": [1, 2], "a": None})
    b'{"a":null,"b":[1,2]}'
    """
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
