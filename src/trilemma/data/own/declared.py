"""What one record may be: dtype, shape, range, vocabulary and longest length, stated without anybody's data.

In a federation a declaration is public and all parties agree on it. A record outside counts as zero, so the
time and memory that a step takes are those of the longest allowed record; and whatever a client has to try
out, it tries on records that are made up from the declaration (`made_up`), never on its own.

A `task.py` may state it:

    expects = Declaration(x=Values("numbers", (13,), low=-10, high=10), y=Values("whole", high=1))

Where records are rows of a table it says the names of the columns too, in the order in which the model sees
them. Another order is put into this one; other columns are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.base.typed import typed
from trilemma.data.types import IGNORED, Dataset, Features, columns_of

Kind = Literal["numbers", "whole", "yes-no"]
"""What a column holds: float32, int64 or bool."""

TYPES: Mapping[Kind, torch.dtype] = {"numbers": torch.float32, "whole": torch.int64, "yes-no": torch.bool}

MOST = 3.0
"""How large made-up numbers are where their range is not declared."""

WAYS = 6
"""How many ways of making a record up take turns."""


@dataclass(frozen=True)
class Values:
    """What one column of one record may be.

    Attributes:
        kind: "numbers", "whole" numbers (classes and tokens among them), or "yes-no".
        shape: The shape of one record's values. Where records differ in length, the first axis is the
            longest.
        low: The least value; None: any finite number.
        high: The largest value: of tokens the size of the vocabulary less one. None: any finite number.
        varies: Whether records may be shorter than `shape`: they are padded, with 0 or as labels with
            `IGNORED`.
        mask: Whether this column says which positions of the others are real.
        names: The names of a table's columns, one for each number of a record.

    >>> Values("whole", (16,), low=0, high=999, varies=True).dtype
    torch.int64
    >>> Values("whole", high=0.5)
    Traceback (most recent call last):
    trilemma.base.errors.UserError: high = 0.5 of whole numbers; allowed: a whole number
    """

    kind: Kind = "numbers"
    shape: tuple[int, ...] = ()
    low: float | None = None
    high: float | None = None
    varies: bool = False
    mask: bool = False
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UserError(f"kind = {self.kind!r}; allowed: {', '.join(get_args(Kind))}")
        object.__setattr__(self, "shape", tuple(self.shape))
        if any(type(size) is not int or size < 1 for size in self.shape):
            raise UserError(f"shape = {self.shape}; allowed: whole numbers, 1 or more")
        object.__setattr__(self, "names", tuple(self.names))
        if self.names and (self.shape != (len(self.names),) or len(set(self.names)) < len(self.names)):
            raise UserError(
                f"{len(set(self.names))} different names for records of shape {self.shape}; allowed: a name "
                "for each number of a record"
            )
        if self.varies and not self.shape:
            raise UserError("varies: single numbers do not differ in length; give the longest as shape")
        for name, end in (("low", self.low), ("high", self.high)):
            if end is not None and not math.isfinite(end):
                raise UserError(f"{name} = {end}; allowed: a finite number, or leave it out")
            if end is not None and self.kind == "whole" and end != int(end):
                raise UserError(f"{name} = {end} of whole numbers; allowed: a whole number")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise UserError(f"low = {self.low} is above high = {self.high}")

    @property
    def dtype(self) -> torch.dtype:
        """The type of its tensors."""
        return TYPES[self.kind]

    def outside(self, values: Tensor) -> Tensor:
        """Tell which records of `values` (n, *shape) hold a number that is not allowed, (n,).

        >>> Values(low=0.0).outside(torch.tensor([0.5, -1.0, torch.nan]))
        tensor([False,  True,  True])
        """
        wrong = torch.zeros(values.shape, dtype=torch.bool)
        if values.is_floating_point():
            wrong |= ~torch.isfinite(values)
        if values.dtype != torch.bool:
            if self.low is not None:
                wrong |= values < self.low
            if self.high is not None:
                wrong |= values > self.high
        return wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong

    def code(self) -> str:
        """Return it as Python.

        >>> print(Values("whole", (16,), low=0, high=999, varies=True).code())
        Values('whole', (16,), low=0, high=999, varies=True)
        """
        named = self.plain()
        first = [repr(named.pop("kind")), *([repr(self.shape)] if named.pop("shape", None) else [])]
        if self.names:
            named["names"] = self.names
        return f"Values({', '.join([*first, *(f'{name}={fact!r}' for name, fact in named.items())])})"

    def plain(self) -> dict[str, Any]:
        """Return it as values of TOML, without what is as usual."""
        usual = Values()
        facts = {one.name: getattr(self, one.name) for one in fields(self)}
        said = {name: fact for name, fact in facts.items() if fact != getattr(usual, name)}
        lists = {name: [*fact] for name, fact in said.items() if isinstance(fact, tuple)}
        return {"kind": self.kind, **said, **lists}


@dataclass(frozen=True)
class Declaration:
    """What one record may be: its features `x`, one column or several by name, and its target `y`.

    `ignored` says whether targets may also be `IGNORED`, as labels of tokens may. Targets that are "yes-no"
    are several labels at once; they become numbers, as a loss takes them.

    >>> flowers = Declaration(Values("numbers", (4,), low=0, high=10), Values("whole", low=0, high=2))
    >>> Declaration.read(flowers.plain()) == flowers, flowers.classes
    (True, 3)
    """

    x: Values | Mapping[str, Values]
    y: Values
    ignored: bool = False

    def __post_init__(self) -> None:
        if not self.columns or not all(isinstance(one, Values) for one in (*self.columns.values(), self.y)):
            raise UserError(
                "a declaration has x = Values(…), or a mapping of names to them, and y = Values(…)"
            )
        if self.y.kind == "whole" and self.y.high is not None and self.y.low is None:
            object.__setattr__(self, "y", replace(self.y, low=0))  # classes

    @property
    def columns(self) -> Mapping[str, Values]:
        """The features by name; a single column has the empty name."""
        return {"": self.x} if isinstance(self.x, Values) else self.x

    @property
    def names(self) -> tuple[str, ...]:
        """The names of a table's columns, in order; none where they are not declared."""
        return self.x.names if isinstance(self.x, Values) else ()

    @property
    def target(self) -> Literal["classes", "multi-label", "tokens", "values"] | None:
        """What targets are, as far as the declaration says it."""
        if self.y.kind == "whole":
            return None if self.y.shape else "classes"
        return "values" if self.y.kind == "numbers" else "multi-label"

    @property
    def classes(self) -> int | None:
        """How many classes there are; None where targets are other numbers."""
        return int(self.y.high) + 1 if self.y.kind == "whole" and self.y.high is not None else None

    @property
    def length(self) -> int | None:
        """The length of the longest record, where they differ in length."""
        return next((one.shape[0] for one in self.columns.values() if one.varies), None)

    def code(self) -> str:
        """Return it as Python."""
        columns = {name: column.code() for name, column in self.columns.items()}
        inside = ", ".join(f"{name!r}: {code}" for name, code in columns.items())
        x = columns[""] if [*columns] == [""] else f"{{{inside}}}"
        return f"Declaration({x}, {self.y.code()}{', ignored=True' if self.ignored else ''})"

    def plain(self) -> dict[str, Any]:
        """Return it as values of TOML."""
        x = {name: column.plain() for name, column in self.columns.items()}
        return {"x": x, "y": self.y.plain(), **({"ignored": True} if self.ignored else {})}

    @staticmethod
    def read(plain: Any) -> Declaration:
        """Read what `plain` returned."""
        try:
            said = typed(_Said, plain)
        except ValueError as error:
            raise UserError(f"what a record may be is not said as it is read: {error}") from None
        x: Values | Mapping[str, Values] = said.x[""] if [*said.x] == [""] else said.x
        return Declaration(x, said.y, said.ignored)


@dataclass(frozen=True)
class _Said:
    x: dict[str, Values]
    y: Values
    ignored: bool = False


def declaration_of(dataset: Dataset, seen: bool = False) -> Declaration:
    """Return a declaration that these data fit: types, shapes and classes as they have them.

    `seen` also reads the range of whole numbers off the data, as the size of a vocabulary: only where nobody
    is to be protected from that, as with public data and in a simulation.

    >>> x, y = torch.zeros(3, 2), torch.tensor([0, 1, 1])
    >>> declaration_of(Dataset("tiny", x, y, x, y, classes=2)).y.code()
    "Values('whole', low=0, high=1)"
    """
    columns = columns_of(dataset.x_train)
    masks = {name for name, part in columns.items() if name.endswith("mask") and part.dim() == 2}
    long = {part.shape[1] for name, part in columns.items() if name in masks}

    def described(name: str, part: Tensor) -> Values:
        kind = next(kind for kind, dtype in TYPES.items() if dtype == part.dtype)
        shape = tuple(part.shape[1:])
        if name in masks:
            return Values(kind, shape, 0, 1, varies=True, mask=True)
        own = dataset.names if shape == (len(dataset.names),) else ()
        found = Values(kind, shape, varies=bool(shape) and shape[0] in long, names=own)
        if kind == "whole" and seen and part.numel():
            found = replace(found, low=min(0, int(part.min())), high=int(part.max()))
        return found

    x = {name: described(name, part) for name, part in columns.items()}
    y, classes = dataset.y_train, dataset.classes
    if classes is None:
        target = Values("yes-no" if dataset.multilabel else "numbers", tuple(y.shape[1:]))
    else:
        tokens = y.dim() == 2 and y.shape[1] in long
        target = Values("whole", tuple(y.shape[1:]), 0, classes - 1, varies=tokens)
    return Declaration(x[""] if [*x] == [""] else x, target, ignored=classes is not None and y.dim() > 1)


def made_up(declaration: Declaration, count: int, key: Key) -> tuple[Features, Tensor]:
    """Return `count` made-up records within a declaration: features (count, …) and targets (count, …).

    The first is of ordinary numbers and full length. Then take turns: the shortest; one number repeated;
    the smallest; the largest; of some length; ordinary numbers again. Where no range is declared, numbers
    are at most `MOST` and whole ones are 0 or 1.

    >>> sentences = Declaration({"ids": Values("whole", (5,), 0, 99, varies=True)}, Values("whole", high=1))
    >>> x, y = made_up(sentences, 4, Key(1))
    >>> [int(row.count_nonzero()) for row in x["ids"]]
    [5, 1, 5, 0]
    """
    drawn = key.numpy()
    longest = declaration.length
    lengths = [longest or 0] * count
    for number in range(count):
        if longest is not None and number % WAYS in (1, 5):
            lengths[number] = 1 if number % WAYS == 1 else int(drawn.integers(1, longest + 1))
    real = torch.arange(longest or 0) < torch.tensor(lengths)[:, None]

    def column(values: Values, filler: int, label: bool = False) -> Tensor:
        low, high = _range(values)
        made = torch.zeros(count, *values.shape, dtype=torch.float64)
        for number in range(count):
            match number % WAYS:
                case 2 if values.shape:
                    made[number] = float(drawn.uniform(low, high))
                case 3 if not label:
                    made[number] = low
                case 4 if not label:
                    made[number] = high
                case _:
                    made[number] = torch.from_numpy(drawn.uniform(low, high, values.shape or (1,))).view(
                        values.shape
                    )
        if values.kind != "numbers":
            made = made.floor().clamp(max=math.floor(high)) if values.kind == "whole" else made.round()
        if values.mask:
            made = torch.ones_like(made)
        if values.varies:
            inside = real[:, : values.shape[0]].view(count, -1, *[1] * (len(values.shape) - 1))
            made = torch.where(inside, made, filler)
        return made.to(values.dtype)

    x = {name: column(values, 0) for name, values in declaration.columns.items()}
    y = column(declaration.y, IGNORED if declaration.ignored else 0, label=True)
    return x[""] if [*x] == [""] else x, y.float() if declaration.y.kind == "yes-no" else y


def _range(values: Values) -> tuple[float, float]:
    """Return between which ends values are made up."""
    if values.kind == "yes-no":
        return 0.0, 1.0
    if values.kind == "whole":
        low = 0.0 if values.low is None else values.low
        high = low + 1.0 if values.high is None else values.high
        return min(low, high), high + 1.0 - 1e-9
    low = -MOST if values.low is None else values.low
    high = MOST if values.high is None else values.high
    return (low, high) if low <= high else (min(low, high), max(low, high))
