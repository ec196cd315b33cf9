"""The names of a table's columns: what headings may be, and one order of columns for everybody."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from trilemma.base.errors import UserError, nearest
from trilemma.data.own.columns import ClientExamples, Column

INDEX = re.compile(r"|Unnamed: \d+|__index_level_\d+__")
"""What pandas calls the index where it is written as a column, and where such a file is read again."""


def checked(headings: Iterable[Any], where: str) -> list[str]:
    """Return a table's headings as text; refuse one that is there twice.

    >>> checked([" age", "age "], "a.csv")
    Traceback (most recent call last):
    trilemma.base.errors.UserError: a.csv: two columns are called 'age'
    """
    names = [str(heading).strip() for heading in headings]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{where}: two columns are called {name!r}")
    return names


def refuse_no_headings(names: Sequence[str], where: str) -> None:
    """Refuse a first line of numbers: a record that would be lost. 0, 1, 2, … is a heading of pandas."""
    try:
        numbers = [float(name) for name in names]
    except ValueError:
        return
    if numbers and numbers != [*range(len(names))]:
        raise UserError(
            f"{where}: the first line holds numbers, not the names of columns; write the names there, or "
            "say them with names = […] (from_table, from_folder)"
        )


def refuse_index(features: Iterable[str], where: str) -> None:
    """Refuse to learn from the numbers of rows, which tell much of a table that was sorted."""
    for name in features:
        if INDEX.fullmatch(name):
            raise UserError(
                f"{where}: the column {name!r} has no name of its own: pandas writes its index so. Write the "
                "table with to_csv(index=False), or leave the column out"
            )


def in_order(given: ClientExamples, names: Sequence[str], whose: str) -> ClientExamples:
    """Return examples with their columns in the order of `names`, those of `whose`; refuse other columns.

    Examples without names, as arrays are, stay as they are.
    """
    own = given.place.names or tuple(given.x)
    if own == tuple(names) or (not given.place.names and "" in given.x):
        return given
    who = given.place.who
    lacking = [name for name in names if name not in own]
    more = [name for name in own if name not in names]
    if lacking:
        found = nearest(lacking[0], more or own)
        raise UserError(f"{who}: no column {lacking[0]!r}, which {whose} has: {found}")
    if more:
        raise UserError(f"{who}: column {more[0]!r}, which {whose} has not; leave it out")
    if given.place.names:
        matrix = given.x[""].dense(None, 0)[:, [own.index(name) for name in names]]
    elif all(column.single for column in given.x.values()):
        matrix = torch.stack([given.x[name].dense(None, 0).float() for name in names], dim=1)
    else:
        return given
    return replace(given, place=replace(given.place, names=tuple(names)), x={"": Column(matrix)})


def alike(
    everyone: Sequence[ClientExamples], declared: Sequence[str]
) -> tuple[Sequence[ClientExamples], tuple[str, ...]]:
    """Return everybody's examples with their columns in one order, the declared or else the first's; and it.

    >>> import numpy as np
    >>> from trilemma.data.own.columns import ColumnPlace
    >>> def table(who, *names):
    ...     place, x = ColumnPlace(who, names=names), torch.arange(float(len(names)))[None]
    ...     return ClientExamples(place, {"": Column(x)}, Column(torch.zeros(1)))
    >>> both, names = alike([table("a", "age", "pulse"), table("b", "pulse", "age")], ())
    >>> names, both[1].x[""].values.tolist()
    (('age', 'pulse'), [[1.0, 0.0]])
    >>> alike([table("a", "age", "pulse"), table("b", "Age", "pulse")], ())
    Traceback (most recent call last):
    trilemma.base.errors.UserError: b: no column 'age', which a has: did you mean 'Age'? Allowed: Age
    """
    if declared:
        return [in_order(given, declared, "`expects`") for given in everyone], tuple(declared)
    named = [given for given in everyone if given.place.names]
    if not named:
        return everyone, ()
    bare = next((given for given in everyone if not given.place.names and "" in given.x), None)
    if bare is not None:
        raise UserError(
            f"{bare.place.who}: columns without names, and {named[0].place.who} has a table: nothing says "
            "whether they are in one order. Give tables everywhere, or arrays everywhere"
        )
    first = named[0].place
    return [in_order(given, first.names, first.who) for given in everyone], first.names
