"""Records as JSON text."""

from __future__ import annotations

import json
import math
from typing import Any


def plain_json(record: Any) -> str:
    """Write a record on one line; infinities become null, because JSON has none.

    >>> plain_json({"epsilon": float("inf"), "rounds": (1, 2)})
    '{"epsilon": null, "rounds": [1, 2]}'
    """
    return json.dumps(_plain(record), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
