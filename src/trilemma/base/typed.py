"""JSON values as dataclasses: a value that is not of its field's type is refused, with its place.

A file of a run or of results may have been edited, cut off or written by somebody else. What reads it into a
dataclass believes the types that the fields declare; here they are made true, once, where the file is read.
Whole numbers stay whole (`Number`), so that what is written again is what was read.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

WHOLE = 2**53
"""The largest whole number up to which floats have all of them."""

Number = float | Annotated[int, Field(ge=-WHOLE, le=WHOLE)]
"""A number in a file; a whole one stays an int."""


Finite = Annotated[float, Field(allow_inf_nan=False)] | Annotated[int, Field(ge=-WHOLE, le=WHOLE)]
"""A number in a file of what was measured: what is not finite stands there as null."""


def _no_less_than_0(value: float) -> float:
    if value < 0:
        raise ValueError("Input should be no less than 0")
    return value


Size = Annotated[Finite, AfterValidator(_no_less_than_0)]
"""A number in a file that says how large something is: a deviation, a length."""

Seed = Annotated[str, Field(pattern=r"^-?[0-9]{1,20}$")]
"""A seed as the key of a JSON object."""

Count = Annotated[int, Field(ge=0, le=WHOLE)]
"""A whole number that counts something: rounds, or which client it is."""

Kind = TypeVar("Kind")


def typed(kind: type[Kind], plain: Any) -> Kind:
    """Return JSON values as a `kind`, whose fields' types they have; keys that it does not know are left out.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Shares:
    ...     weights: dict[Count, Number]
    >>> typed(Shares, {"weights": {"3": 1, "4": 0.5}})
    Shares(weights={3: 1, 4: 0.5})
    >>> typed(Shares, {"weights": {"3": []}})
    Traceback (most recent call last):
    ValueError: weights.3: Input should be a valid number
    """
    any_kind: Any = kind  # mypy takes type[Kind] for something that has no hash
    try:
        found: Kind = _adapter(any_kind).validate_python(plain)
        return found
    except ValidationError as error:
        raise ValueError(complaint(error)) from None


def complaint(error: ValidationError) -> str:
    """Return the first thing that is wrong, without what somebody wrote there."""
    first = error.errors(include_input=False, include_url=False)[0]
    named = (str(part) for part in first["loc"] if part != "float")  # as which a `Number` is tried
    where = ".".join(named)
    return f"{where}: {first['msg']}" if where else first["msg"]


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
