"""The JSON schema of a line of `run/events.jsonl`: what a SIEM has to understand, made from the catalogue."""

from __future__ import annotations

import json
from typing import Any

from trilemma.federation.protocol.events import CATALOGUE, Sort

SORTS: dict[Sort, dict[str, Any]] = {
    Sort.NUMBER: {"type": "number"},
    Sort.CLIENT: {"type": ["integer", "null"]},
    Sort.CLIENTS: {"type": "array", "items": {"type": "integer"}},
    Sort.WORD: {"type": "string", "maxLength": 262},
    Sort.SENTENCE: {"type": "string", "maxLength": 200},
    Sort.FIGURES: {"type": "object", "additionalProperties": {"type": "number"}},
}
"""What a field of each sort is in JSON."""


def schema() -> dict[str, Any]:
    """Return the schema (JSON Schema, draft 2020-12): one entry for each event, and nothing else is allowed.

    >>> len(schema()["oneOf"]) == len(CATALOGUE)
    True
    """
    always = {
        "time": {"type": "string", "format": "date-time"},
        "party": {"type": "string", "pattern": "^(server|client-[0-9]+)$"},
        "run": {"type": "string"},
        "text": {"type": "string"},
    }
    kinds = [
        {
            "title": kind.code,
            "type": "object",
            "properties": {
                **always,
                "event": {"const": kind.code},
                "level": {"const": kind.level},
                **{name: SORTS[sort] for name, sort in kind.fields.items()},
            },
            "required": [*dict.fromkeys(("time", "level", "event", "party", "text", *kind.fields))],
            "additionalProperties": False,
        }
        for kind in CATALOGUE.values()
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "An event of a party of a Trilemma federation",
        "oneOf": kinds,
    }


def text() -> str:
    """Return the schema as it is published: a line for each event."""
    whole = schema()
    kinds = ",\n".join(json.dumps(kind) for kind in whole.pop("oneOf"))
    return f'{json.dumps(whole)[:-1]}, "oneOf": [\n{kinds}\n]}}\n'


if __name__ == "__main__":
    print(text(), end="")
