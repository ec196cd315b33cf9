"""What is trained on what, stated once: simulated, deployed and checked alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trilemma import data, models
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.data.own.table_files import is_table, whole
from trilemma.data.own.tables import by_client
from trilemma.data.types import Batch, Dataset, columns_of, each
from trilemma.models.types import Model
from trilemma.task.file import TaskFile
from trilemma.task.learner import Learner
from trilemma.task.losses import Loss, default_loss, refuse_missing_outputs
from trilemma.task.metrics import Metric, chosen

PROBED = 128
"""Examples on which model and loss are tried."""


@dataclass(frozen=True)
class Task:
    """A model, its loss and metrics, and the clients' data.

    Attributes:
        model: A `torch.nn.Module`, or a function that makes one (called anew for every seed), or a model of
            `trilemma.models`.
        clients: What each client holds, a list or a mapping of names: see `trilemma.data.own` for what one
            may be. A function of the client's number where only its own party may call it; with `records`, a
            function of the client's number and its records.
        test: Test examples for everyone, or for each client; or a function that returns them.
        loss: A function `(outputs, targets)` or a loss of `torch.nn`. Default: cross entropy where there are
            classes, else the mean squared error.
        metrics: Names, functions `(outputs, targets) -> number` or metrics of scikit-learn, or a mapping of
            names to them. Default: accuracy where there are classes, else the mean squared error.
        classes: Number of classes, or their names in order (public). Default: as many as the data show.
        target: What targets are, where their type does not say it: classes, multi-label, tokens, values.
        label: The label's column, where a client is a table or a mapping of columns.
        client: The column that says whose row it is, where `clients` is one table of all: a data frame of
            pandas or polars, a table of pyarrow, a split of Hugging Face, a CSV or Parquet file's path.
        length: What columns of varying length are padded to (public).
        coupled: Whether the loss looks at several examples of a batch at once. Default: found out by trying.
        count: Number of clients, where `clients` is a function.
        records: A function of the client's number: its records as they were kept, a list. Then one record can
            be changed, to see how many examples change (`trilemma check --neighbours`).
        examples: How many training examples every client counts as holding (public), for where that depends
            on records. Who holds fewer takes part with empty places. Default: as many as the poorest holds.
        expects: What one record may be (public; see `trilemma.Declaration`): one that is otherwise counts as
            zero. A private federation needs it.
        name: What the data are called in reports.

    >>> x, y = torch.randn(8, 3), torch.tensor([0, 1] * 4)
    >>> task = Task(model=lambda: nn.Linear(3, 2), clients=[(x, y), (x, y)], test=(x, y))
    >>> task.clients_known, task.learner(task.dataset).model.dim, [*task.learner(task.dataset).metrics]
    (2, 8, ['accuracy'])
    >>> Task(model=lambda: nn.Linear(3, 2), clients=[(x, y), (x, y + 0.5)])
    Traceback (most recent call last):
    trilemma.base.errors.UserError: client 1...
    """

    model: nn.Module | Model | Callable[[], nn.Module | Model]
    clients: Sequence[Any] | Mapping[Any, Any] | Callable[..., Any]
    test: Any = None
    loss: Loss | None = None
    metrics: Metric | Iterable[str | Metric] | Mapping[str, str | Metric] | None = None
    classes: int | Sequence[Any] | None = None
    target: data.Target | None = None
    label: str | None = None
    client: str | None = None
    length: int | None = None
    coupled: bool | None = None
    count: int | None = None
    records: Callable[[int], Sequence[Any]] | None = None
    examples: int | None = None
    expects: data.Declaration | None = None
    name: str = "own"
    path: Path | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module | Model) and not callable(self.model):
            raise UserError(
                f"model is a {type(self.model).__name__}; allowed: a torch.nn.Module, a function that makes "
                "one, or a model of trilemma.models"
            )
        if isinstance(self.model, type) and not _can_be_made(self.model):
            raise UserError(
                f"model is the class {self.model.__name__}, which needs arguments: give a function that "
                f"makes one, as in model=lambda: {self.model.__name__}(…)"
            )
        if self.loss is not None and not callable(self.loss):
            raise UserError(
                f"loss is a {type(self.loss).__name__}; allowed: a function (outputs, targets) -> mean loss, "
                "or a loss of torch.nn, as in nn.CrossEntropyLoss()"
            )
        if isinstance(self.loss, type):
            raise UserError(
                f"loss is the class {self.loss.__name__}: give an instance, {self.loss.__name__}()"
            )
        if self.examples is not None and (not isinstance(self.examples, int) or self.examples < 1):
            raise UserError(
                f"examples = {self.examples!r}; it is how many training examples every client counts as "
                "holding, a whole number from 1"
            )
        if self.expects is not None and not isinstance(self.expects, data.Declaration):
            raise UserError(
                f"expects is a {type(self.expects).__name__}; allowed: Declaration(x=Values(…), y=Values(…))"
            )
        if self.records is not None and not callable(self.clients):
            raise UserError("records go with clients that is a function of a client's number and its records")
        chosen(self.metrics, 2)
        if self.client is not None:
            if self.label is None:
                raise UserError(f"client = {self.client!r} names a column; say with label which is predicted")
            object.__setattr__(self, "clients", by_client(self.clients, self.client))
        if is_table(self.clients) or not (
            callable(self.clients) or isinstance(self.clients, Sequence | Mapping)
        ):
            raise UserError(
                f"clients is a {type(self.clients).__name__}; allowed: a list with one entry per client, a "
                "mapping of their names to them, a function of the client's number, or one table with client "
                "= the column that says whose row it is"
            )
        if not callable(self.clients):
            try:
                _ = self.dataset  # so that what is wrong with the data is said where they are given
            except UserError as error:
                raise type(error)(str(error)) from None  # a mistake of the user's, in few frames

    def __repr__(self) -> str:
        """Say what is trained on what, and nothing of any record."""
        made = self.model
        model = type(made).__name__ if isinstance(made, nn.Module | Model) else f"{made.__name__}()"
        said = [f"{self.name!r}", f"model {model}", f"{self.clients_known or 'any number of'} clients"]
        known: Dataset | None = self.__dict__.get("dataset")  # what was read before: nothing is read for this
        if known is not None:
            said.append(f"{len(known.y_train)} training and {len(known.y_test)} test examples")
            said.append("numbers to predict" if known.classes is None else f"{known.classes} classes")
        return f"Task({', '.join(said)})"

    @classmethod
    def from_file(cls, path: Path | str, clients: int | None = None) -> Task:
        """Read a `task.py`: `model()`, `data(client)`, and what else it defines of `task.file.NAMES`.

        `clients` is their number; default: what the file says. No data are loaded before they are asked for.
        """
        file = TaskFile(Path(path))
        file.require("model")
        said = file.value("clients")
        if said is not None and not isinstance(said, int):
            raise UserError(f"{file.path.name}: clients = {said!r}; it is the number of clients")
        return cls(
            model=lambda: file.call("model"),
            clients=lambda client, *records: file.call("data", client, *records),
            test=(lambda: file.call("test")) if file.has("test") else None,
            loss=file.value("loss"),
            metrics=file.value("metrics"),
            classes=file.value("classes"),
            target=file.value("target"),
            label=file.value("label"),
            length=file.value("length"),
            coupled=file.value("coupled"),
            count=said if clients is None else clients,
            records=(lambda client: file.call("records", client)) if file.has("records") else None,
            examples=file.value("examples"),
            expects=file.value("expects"),
            path=file.path,
        )

    @property
    def clients_known(self) -> int | None:
        """Number of clients; None where nobody said it."""
        return self.count if callable(self.clients) else len(self.clients)

    def of(self, clients: int) -> Task:
        """Return the task for that many clients; refuse another number than the data are for."""
        known = self.clients_known
        if known is not None and known != clients:
            raise UserError(
                f"the task has {known} clients, [federation] clients says {clients}; leave it out"
            )
        return self if known is not None else replace(self, count=clients)

    @cached_property
    def dataset(self) -> Dataset:
        """Everybody's data, for a simulation: checked, end to end, with who holds what."""
        if not callable(self.clients):
            return self._read(self.clients, self._test)
        if self.count is None:
            raise UserError(
                "how many clients are there? Say it with --clients, [federation] clients, or clients = … in "
                "the task's file"
            )
        return self._read([self._given(client) for client in range(self.count)], self._test)

    def client_dataset(self, client: int) -> Dataset:
        """Return one client's data alone: nobody else's are touched."""
        given = self._given(client) if callable(self.clients) else self._listed[client]
        return self._read({client: given}, None)

    def made_of(self, client: int, records: Sequence[Any]) -> Dataset:
        """Return the data that one client would have if these were its records."""
        if self.records is None or not callable(self.clients):
            raise UserError(
                "where the records come from is not said: define records(client), which returns a list, and "
                "data(client, records), which makes examples of them; see docs/own-task.md"
            )
        return self._read({client: self.clients(client, records)}, None)

    def fitted(self, client: int, tell: Callable[[str], None], least: int) -> Dataset:
        """Return one client's data alone, whatever they are: what is not as declared counts as zero."""
        assert self.expects is not None
        assert callable(self.clients)
        return data.fitted(
            self.expects,
            lambda: self._given(client),
            lambda given: self._as_read({client: given}, None),
            tell,
            least,
            lambda: self._alone(client),
        )

    def _alone(self, client: int) -> list[Callable[[], Any]]:
        """Return how each record of a client is made examples of, as if it were the only one."""
        if self.records is None or not callable(self.clients):
            return []
        return [partial(self.clients, client, [record]) for record in self.records(client)]

    def _given(self, client: int) -> Any:
        assert callable(self.clients)
        return self.clients(client, *(() if self.records is None else (self.records(client),)))

    @cached_property
    def test_dataset(self) -> Dataset | None:
        """The test examples for everyone, as if one client held them too; None where there are none."""
        given = self._test
        if given is None or isinstance(given, list):
            return None
        return self._read([given], given)

    def read(self, given: Any) -> Dataset:
        """Return examples that somebody brings, read as a client's are: checked, with the task's classes."""
        if self.client is not None and is_table(given):
            given = whole(given, self.client)
        return self._as_read({"the examples": given}, None)

    def learner(self, dataset: Dataset | None) -> Learner:
        """Return the model with its loss, and how it is scored; `dataset` decides what is not said."""
        loss = self.loss or default_loss(dataset)
        made = self.model
        if not isinstance(made, nn.Module | Model):
            with torch.random.fork_rng(devices=()):
                made = made()
        if isinstance(made, Model):
            if self.loss is not None:
                raise UserError(
                    f"{made.name!r} is a model of trilemma.models and has its own loss; leave out loss"
                )
            return Learner(made, self._metrics(dataset, loss))
        if not isinstance(made, nn.Module):
            raise UserError(
                f"model() returned a {type(made).__name__}; allowed: a torch.nn.Module or a model of "
                "trilemma.models"
            )
        module: Any = self.model  # a function is called anew for every key
        model, metrics = models.from_module(module, loss), self._metrics(dataset, loss)
        coupled = bool(self.coupled)
        if dataset is not None:
            found = _couples(model, loss, dataset, partial(self._unseen, dataset))
            coupled = found if self.coupled is None else self.coupled
        if coupled:
            return Learner(models.from_module(module, loss, coupled=True), metrics, loss)
        return Learner(model, metrics)

    def _unseen(self, dataset: Dataset, outputs: int) -> str:
        """Say where the first label is for which there is no output; "" where there is none."""
        odd = (dataset.y_train >= outputs).nonzero()
        if not len(odd) or dataset.natural is None:
            return ""
        row = int(odd[0][0])
        names = [*self.clients] if isinstance(self.clients, Mapping) else range(len(dataset.natural.train))
        for name, held in zip(names, dataset.natural.train, strict=False):
            if row in held:
                label = int(dataset.y_train[tuple(odd[0])])
                return f" (client {name!r}, row {int((held == row).nonzero()[0][0])}: label {label})"
        return ""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of a table's columns in the order that the model sees: as declared, or as they were read.

        None where they are not declared and nothing was read, or nothing with names.
        """
        known: Dataset | None = self.__dict__.get("dataset")
        return (self.expects.names if self.expects else ()) or (known.names if known else ())

    @property
    def _listed(self) -> list[Any]:
        assert not callable(self.clients)
        return [*self.clients.values()] if isinstance(self.clients, Mapping) else [*self.clients]

    @cached_property
    def _test(self) -> Any:
        callable_ = callable(self.test) and not isinstance(self.test, torch.utils.data.Dataset)
        return self.test() if callable_ else self.test

    def _read(self, clients: Any, test: Any) -> Dataset:
        read = self._as_read(clients, test)
        return read if self.expects is None else data.within(self.expects, read)

    def _as_read(self, clients: Any, test: Any) -> Dataset:
        said = self.expects
        if self.client is not None and is_table(test):
            test = whole(test, self.client)
        return data.from_clients(
            clients,
            test,
            label=self.label,
            target=self.target or (None if said is None else said.target),
            classes=self.classes or (None if said is None else said.classes),
            length=self.length or (None if said is None else said.length),
            name=self.name,
            columns=self.columns,
        )

    def _metrics(self, dataset: Dataset | None, loss: Loss) -> dict[str, Metric]:
        yes_or_no = isinstance(loss, nn.BCEWithLogitsLoss)
        classes = 2 if dataset is None or yes_or_no else dataset.classes
        return chosen(self.metrics, classes)


def _can_be_made(kind: type) -> bool:
    """Tell whether a class makes an instance without arguments."""
    try:
        inspect.signature(kind).bind()
    except (TypeError, ValueError):
        return False
    return True


def _couples(model: Model, loss: Loss, dataset: Dataset, first: Callable[[int], str]) -> bool:
    """Try model and loss on the first examples; tell whether they couple the examples of a batch."""
    x, y = each(dataset.x_train, lambda part: part[:PROBED]), dataset.y_train[:PROBED]
    shapes = ", ".join(f"{name} {tuple(part.shape)}".strip() for name, part in columns_of(x).items())
    params = model.init(Key(0))
    made = dataset.description.partition("; ")[2]  # what [data] does to examples, as "projected to 8"
    with _blamed(f"{model.name} cannot be called on examples {shapes}{f', {made} ([data])' if made else ''}"):
        outputs = models.outputs(model, params, x, buffers=model.initial_buffers(1))
    refuse_missing_outputs(loss, outputs, dataset.classes, model.name, first)
    compare = f"the loss cannot compare outputs {tuple(outputs.shape)} with targets {tuple(y.shape)}"
    with torch.enable_grad(), _blamed(compare):
        found: Any = loss(outputs.detach().requires_grad_(), y)
    if not isinstance(found, Tensor) or not found.requires_grad:
        kind = "tensor that no output was used for" if isinstance(found, Tensor) else type(found).__name__
        raise UserError(f"the loss returned a {kind}; it must be a tensor computed from the outputs")
    return not model.buffers and bool(models.couples(model, params, Batch(each(x, _stacked), y[None])))


def _stacked(part: Tensor) -> Tensor:
    return part[None]


@contextmanager
def _blamed(what: str) -> Iterator[None]:
    """Turn what a user's own code raises into a message that says where."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what}: {type(error).__name__}: {error}") from error
