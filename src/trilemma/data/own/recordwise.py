"""What is decided about a record by that record alone: its side of a split, and what fills its gaps.

An ε for one record counts on it that one record changes one training example. Whoever ranks, scales, fills or
deals records by other records breaks that; `split` and `fill` look at one record and at public constants.
docs/own-task.md has the lemma, `trilemma check --neighbours` tries a task.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from trilemma.base.errors import UserError

Value = TypeVar("Value", bound=float | int | str)

Side = Literal["train", "test"]

GAPS = frozenset({"", "?", "-", "na", "n/a", "nan", "none", "null"})
"""What a missing value is written as, in lower case."""


def split(record: Any, test: float = 0.2, key: str = "") -> Side:
    """Say whether a record is for training or for testing: a share `test` of all records is for testing.

    A keyed hash of the record decides, so that no other record has a say. Equal records are on one side.

    Args:
        record: The record's public id, such as a number that was drawn when it was written; without one, the
            record itself, as it was read: text, numbers, arrays, or lists and mappings of them. A record
            whose content changes may change sides, one whose id is given may not.
        test: The share of records for testing, from 0 to 1.
        key: Another key gives another split. It is public.

    >>> rows = [["63", "1", "145"], ["37", "0", "130"], ["41", "0", "120"], ["56", "1", "118"]]
    >>> [split(row, test=0.5) for row in rows]
    ['train', 'train', 'test', 'train']
    >>> [split(row, test=0.5) for row in [["99", "0", "180"], *rows[1:]]]
    ['test', 'train', 'test', 'train']
    """
    if not 0 <= test <= 1:
        raise UserError(f"test = {test:g}: it is the share of records for testing, from 0 to 1")
    found = hashlib.blake2b(digest_size=8, person=b"trilemma split")
    for part in _encoded((key, record)):
        found.update(part)
    return "test" if int.from_bytes(found.digest(), "big") < test * 2.0**64 else "train"


def fill(record: Mapping[str, Any], constants: Mapping[str, Value]) -> dict[str, Value]:
    """Return the columns named by `constants`; where a record has no such value, the constant stands in.

    A constant is public: what a textbook or the range of an instrument says, never a mean over records. Its
    type says how the column is read: as a number, as a whole number, or as text. A value that cannot be read
    so, or is not finite, is missing too; so no record is ever refused.

    >>> usual = {"age": 55.0, "vessels": 0, "site": "unknown"}
    >>> fill({"age": "63", "vessels": "?", "site": " north ", "chol": "233"}, usual)
    {'age': 63.0, 'vessels': 0, 'site': 'north'}
    >>> fill({"age": "inf", "vessels": 2.0}, usual)
    {'age': 55.0, 'vessels': 2, 'site': 'unknown'}
    """
    return {name: _read(record.get(name), constant) for name, constant in constants.items()}


def _read(value: Any, constant: Value) -> Value:
    """Return a value as the constant's type, or the constant."""
    kind: Any = type(constant)
    if isinstance(constant, str):
        text = "" if value is None else str(value).strip()
        return constant if text.lower() in GAPS else kind(text)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return constant
    readable = math.isfinite(number) and (isinstance(constant, float) or number.is_integer())
    return kind(number) if readable else constant


def _encoded(value: Any) -> Iterator[bytes]:
    """Yield bytes that no other record has: every part with its type and its length."""
    if isinstance(value, torch.Tensor):
        value = value.numpy(force=True)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray) and value.dtype != object:
        yield f"array {value.dtype.str} {value.shape};".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)};".encode()
        for name in sorted(value, key=repr):
            yield from _encoded((name, value[name]))
    elif isinstance(value, list | tuple | np.ndarray):
        yield f"list {len(value)};".encode()
        for part in value:
            yield from _encoded(part)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        content = value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")
        yield f"{type(value).__name__} {len(content)};".encode()
        yield content
    else:
        raise UserError(
            f"a record holds a {type(value).__name__}; allowed: text, numbers, arrays, and lists and "
            "mappings of them; or give the record's public id"
        )
