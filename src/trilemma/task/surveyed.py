"""A task whose records' gradients are their vectors in a survey: private statistics in place of a model.

    model    one output, ⟨θ, v⟩, starting from θ = 0            loss    the output itself
    data     v, the vector of one record (`trilemma.survey.layout`); one record, one example

so the gradient of a record is v at every θ, and a client's message is the sum of its records' vectors,
clipped, noised and paid for like any other. Records are those of the task, as they were kept, where it has
`records`; else its training examples, whose numbers are columns x0, x1, … (or the names of its inputs) and
`label`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from trilemma.base.errors import UserError, nearest
from trilemma.data import Declaration, Values
from trilemma.data.types import Dataset, columns_of
from trilemma.survey.layout import Layout
from trilemma.task.task import Task

LABEL = "label"
"""What the targets of a task without `records` are called."""


def surveyed(task: Task, layout: Layout) -> Task:
    """Return the task of a survey of another task's records.

    >>> import torch
    >>> from trilemma.survey.columns import SurveyColumn
    >>> x, y = torch.tensor([[0.5], [2.0]]), torch.tensor([0, 1])
    >>> task = Task(model=lambda: nn.Linear(1, 2), clients=[(x, y), (x, y)])
    >>> columns = {"x0": SurveyColumn(low=0, high=1, bins=2), "label": SurveyColumn(values=(0, 1))}
    >>> survey = surveyed(task, Layout(columns))
    >>> survey.dataset.x_train.shape, survey.learner(survey.dataset).model.dim
    (torch.Size([4, 12]), 12)
    """

    def vectors(client: int, records: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        # A client without a record takes part: with a vector that counts for nothing.
        rows = layout.vectors(records) if len(records) else np.zeros((1, layout.dim), np.float32)
        return rows, np.zeros(len(rows), np.float32)

    def model() -> nn.Module:
        net = nn.Linear(layout.dim, 1, bias=False)
        nn.init.zeros_(net.weight)
        return net

    return Task(
        model=model,
        clients=vectors,
        loss=_output,
        target="values",
        coupled=False,
        count=task.clients_known,
        records=lambda client: records_of(task, client, layout.columns),
        expects=Declaration(Values("numbers", (layout.dim,), low=-1, high=1), Values("numbers", (), 0, 0)),
        name=f"statistics of {task.name}",
        path=task.path,
    )


def _unsaid(said: str) -> None:
    """Say nothing: a simulation says it when it looks for columns, a node when it trains."""


def _output(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.squeeze(-1)


def records_of(task: Task, client: int, wanted: Mapping[str, Any]) -> list[Any]:
    """Return a client's records: those it keeps, or one for each of its training examples."""
    if task.records is not None:
        return [*task.records(client)]
    # What cannot be read costs its own record only, where what a record may be is declared.
    total = callable(task.clients) and task.expects is not None
    dataset = task.fitted(client, _unsaid, 1) if total else task.client_dataset(client)
    known = _columns(dataset)
    left_out = dataset.left_out
    kept = range(len(dataset.y_train)) if left_out is None else (~left_out).nonzero()[:, 0].tolist()
    columns = {name: known[name].tolist() for name in wanted if name in known}
    return [{name: column[row] for name, column in columns.items()} for row in kept]


def refuse_unknown(task: Task, wanted: Mapping[str, Any]) -> None:
    """Refuse columns that no record has; for a simulation, where whose they are need not be hidden."""
    known: dict[str, None] = {}
    for client in range(task.clients_known or 0):
        known |= dict.fromkeys(_names(task, client))
    for name in wanted:
        if name not in known:
            raise UserError(f"no record has a column {name!r}: {nearest(name, known)}")


def _names(task: Task, client: int) -> Iterator[str]:
    if task.records is None:
        yield from _columns(task.client_dataset(client))
        return
    for record in task.records(client):
        if not isinstance(record, Mapping):
            raise UserError(
                f"records(client) returns a list of {type(record).__name__}; statistics are of records with "
                "named columns: mappings, as csv.DictReader reads them"
            )
        yield from map(str, record)


def _columns(dataset: Dataset) -> dict[str, Tensor]:
    """Return the numbers of examples by name: one column for each."""
    found: dict[str, Tensor] = {}
    for name, part in columns_of(dataset.x_train).items():
        flat = part.reshape(len(part), -1)
        single = part.dim() == 1 or flat.shape[1] == 1
        for place in range(flat.shape[1]):
            found[name if single and name else f"{name or 'x'}{place}"] = flat[:, place]
    if dataset.y_train.dim() == 1 or dataset.y_train[0].numel() == 1:
        found[LABEL] = dataset.y_train.reshape(len(dataset.y_train))
    return found
