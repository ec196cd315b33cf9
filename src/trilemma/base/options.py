"""Options: how everything that has a name says what a user may set, and what mistakes are called.

A rule, an attack, a data set, a model, an algorithm is a frozen class; its fields are its options. What is
allowed is declared once, on the field: validation, error messages, `trilemma list NAME` and the configuration
reference all read that declaration. What an option means is its `description`, or the text below the field.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import json
import math
import re
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from trilemma.base.errors import ConfigError, hint, nearest, printable
from trilemma.base.registry import Registry

LARGEST, LARGEST_WHOLE = 1e38, 2**63 - 1
"""The largest numbers there are in single precision, roughly, and among whole ones; beyond is only inf."""


class Options(BaseModel):
    """Options a user may set: frozen, and nothing else is accepted.

    Numbers are finite; a field of which infinity says something declares it with `allow_inf_nan=True`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where they are not among what is allowed; pydantic takes them for 1 and 0."""
        if any(isinstance(one, bool) for one in _each(value)):
            allowed = allowed_values(cls.model_fields[str(info.field_name)])
            if "number" in allowed and "true" not in allowed:
                raise ValueError(f"allowed: {allowed}")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _within_reach(cls, value: Any) -> Any:
        """Refuse numbers that no tensor holds, and what is no number."""
        for one in _each(value):
            if isinstance(one, float) and math.isnan(one):
                raise ValueError("is not a number")
            if isinstance(one, float) and LARGEST < abs(one) < math.inf:
                raise ValueError(f"numbers go up to {LARGEST:g}")
            if isinstance(one, int) and abs(one) > LARGEST_WHOLE:
                raise ValueError(f"whole numbers go up to {LARGEST_WHOLE:,}")
        return value

    @classmethod
    def parse(cls, **values: Any) -> Self:
        """Return validated options, or raise a `ConfigError` that says what is wrong and what is allowed.

        >>> from trilemma.data import partitions
        >>> partitions["dirichlet"].parse(alpha=-1)
        Traceback (most recent call last):
        trilemma.base.errors.ConfigError: alpha = -1: allowed: more than 0
        """
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(mistakes(error, cls.model_fields, "option"))) from None


def _each(value: Any) -> Iterable[Any]:
    """Return what stands in a list, or a value alone."""
    return value if isinstance(value, list | tuple) else (value,)


WRONG_TYPE = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "finite_number": "a finite number",
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    "string_type": "text",
}
"""What pydantic calls a value of the wrong type, and what it must be."""


BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
"""Pydantic's names of a number's limits: ours, and where the limit is."""


def mistakes(error: ValidationError, allowed: Iterable[str], word: str = "key") -> Iterator[str]:
    """Say what is wrong with each value that was refused, and what is allowed."""
    names = list(allowed)
    for detail in _together(error):
        key = ".".join(str(part) for part in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        if detail["type"] == "extra_forbidden":
            yield f"unknown {word} {key!r}: {nearest(key, names)}"
        elif detail["type"] == "missing":
            yield f"needs {key}"
        elif detail["type"] == "literal_error":
            expected = detail["ctx"]["expected"]
            # Short words in short lists look alike: 'gpu' is no slip of the pen for 'cpu'.
            meant = hint(str(detail["input"]), re.findall(r"'([^']*)'", expected), likeness=0.7)
            yield f"{key} = {detail['input']!r}: {meant}{'A' if meant else 'a'}llowed: {expected}"
        elif detail["type"] == "too_short":
            least = detail["ctx"]["min_length"]
            yield f"{key} = {detail['input']!r}: allowed is a list with at least {least} in it"
        elif detail["type"] in BOUNDS:
            word, end = BOUNDS[detail["type"]]
            yield f"{key} = {detail['input']!r}: allowed: {word} {detail['ctx'][end]:g}"
        elif detail["type"] in WRONG_TYPE:
            yield f"{key} = {detail['input']!r}: must be {WRONG_TYPE[detail['type']]}"
        else:
            yield f"{key} = {detail['input']!r}: {message}" if key else message


ALTERNATIVE = re.compile(r"(bool|int|float|str|literal\[.*\])")
"""What pydantic adds to the place of a value that may be of several types: the one that it was tried as."""


def _together(error: ValidationError) -> Iterator[Mapping[str, Any]]:
    """Yield all that was refused; of a value that is none of several types once, with all of them."""
    for place, tried in itertools.groupby(error.errors(), _place):
        details = [dict(detail) for detail in tried]
        if len(details) == 1 or details[0]["loc"] == place:
            yield from details
            continue
        *others, last = dict.fromkeys(map(_wanted, details))
        expected = (", " if " or " in last else " or ").join([*others, last])
        yield {**details[0], "type": "literal_error", "loc": place, "ctx": {"expected": expected}}


def _place(detail: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return where a value stands, whatever it was tried as."""
    *above, last = detail["loc"] or ("",)
    return tuple(above) if above and ALTERNATIVE.fullmatch(str(last)) else tuple(detail["loc"])


def _wanted(detail: Mapping[str, Any]) -> str:
    if detail["type"] == "literal_error":
        return str(detail["ctx"]["expected"])
    return WRONG_TYPE.get(detail["type"], str(detail["msg"]))


@dataclass(frozen=True)
class Option:
    """One option, in words.

    `default` is None where there is none: the option must be given, if `required`, or may be left out.
    """

    name: str
    allowed: str
    default: str | None
    required: bool
    description: str


def describe(options: type[BaseModel], prefix: str = "") -> list[Option]:
    """Return a thing's options in the order they are declared; those of a table inside as `table.key`.

    >>> from trilemma.data import partitions
    >>> [(option.name, option.allowed, option.required) for option in describe(partitions["dirichlet"])]
    [('alpha', 'number > 0', True), ('minimum', 'whole number ≥ 1', False)]
    """
    found: list[Option] = []
    for key, field in options.model_fields.items():
        name = prefix + key
        inside = _table(field.annotation)
        if inside is not None:
            found += describe(inside, name + ".")
            continue
        given = None if field.is_required() or field.get_default() is None else field.get_default()
        default = None if given is None else json.dumps(given, ensure_ascii=False)
        meaning = description(options, key).removesuffix(".")
        found.append(Option(name, allowed_values(field), default, field.is_required(), meaning))
    return found


def description(options: type[BaseModel], key: str) -> str:
    """Return what an option means: its field's `description`, else the text below the field; "" for none.

    >>> from trilemma.data import partitions
    >>> description(partitions["dirichlet"], "minimum")
    'Examples every client must get; set it to the batch size to make every draw of a batch possible.'
    """
    below = (_below(one).get(key) for one in options.__mro__ if issubclass(one, BaseModel))
    found = options.model_fields[key].description or next(filter(None, below), "")
    return printable(" ".join(found.split()))


@functools.cache
def _below(options: type[BaseModel]) -> dict[str, str]:
    """Return the texts below a class's own fields.

    Its source is read when somebody asks. Pydantic would read that of every class while it is made, which
    takes longer than all the rest of making them.
    """
    try:
        (made,) = ast.parse(textwrap.dedent(inspect.getsource(options))).body
    except (OSError, TypeError, SyntaxError):
        return {}  # made in an interpreter, or its file is not there
    lines = made.body if isinstance(made, ast.ClassDef) else []
    return {
        field.target.id: text.value.value
        for field, text in itertools.pairwise(lines)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }


def allowed_values(field: FieldInfo) -> str:
    """Say which values a field takes.

    >>> class Example(Options):
    ...     share: float = FieldInfo(default=0.5, ge=0, lt=1)
    ...     side: Literal["left", "right"] | None = None
    >>> [allowed_values(field) for field in Example.model_fields.values()]
    ['number ≥ 0 and < 1', '"left" or "right"']
    """
    *first, last = dict.fromkeys(_kinds(field.annotation, field.metadata))
    return f"{', '.join(first)} or {last}" if first else last


def reference(thing: object) -> str:
    """Return what a thing's docstring, or else its file's, gives as its reference at the end; "" for none."""
    module = inspect.getmodule(thing)
    for text in (thing.__doc__, module.__doc__ if module else None):
        last = inspect.cleandoc(text or "").split("\n\n")[-1]
        head, colon, rest = last.partition(":")
        if colon and head in ("Reference", "References"):
            return printable(" ".join(rest.split()))
    return ""


_WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
}
_LIMITS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def _kinds(annotation: Any, metadata: Iterable[Any] = ()) -> Iterator[str]:
    """Say what a type allows, one phrase for each alternative."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _kinds(arguments[0], [*arguments[1:], *metadata])
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            if argument is not type(None):
                yield from _kinds(argument, metadata)
    elif origin is Literal:
        yield from (json.dumps(value, ensure_ascii=False) for value in arguments)
    elif origin in (tuple, list):
        inside = " or ".join(dict.fromkeys(_kinds(arguments[0])))
        yield f"list of {inside.replace('number', 'numbers', 1)}"
    elif origin is dict:
        yield f"tables of {next(_kinds(arguments[1]))} by name"
    elif _table(annotation) is not None:
        yield f"{{{', '.join(annotation.model_fields)}}}"
    elif names := [name for part in metadata for name in _registered(part)]:
        yield from (json.dumps(name) for name in names)
    else:
        numeric = annotation in (int, float)
        yield _WORDS.get(annotation, getattr(annotation, "__name__", "")) + (
            _limits(metadata) if numeric else ""
        )


def _registered(part: Any) -> list[str]:
    """Return the names that `AfterValidator(registry.validate)` lets pass."""
    owner = getattr(part.func, "__self__", None) if isinstance(part, AfterValidator) else None
    return sorted(owner) if isinstance(owner, Registry) else []


def _limits(metadata: Iterable[Any]) -> str:
    parts = [one for part in metadata for one in (part.metadata if isinstance(part, FieldInfo) else [part])]
    limits = [
        f"{sign} {_figure(getattr(part, key))}"
        for part in parts
        for key, sign in _LIMITS.items()
        if getattr(part, key, None) is not None
    ]
    return f" {' and '.join(limits)}" if limits else ""


def _figure(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _table(annotation: Any) -> type[BaseModel] | None:
    inside = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if inside else None
