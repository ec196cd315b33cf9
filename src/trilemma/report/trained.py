"""A trained model in use: one module, features and buffers included, and what it says of examples."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from trilemma import models
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.data.own.clients import LABELS
from trilemma.data.own.columns import ClientExamples, ColumnPlace, read_column
from trilemma.data.own.headings import in_order
from trilemma.data.own.reading import read_features
from trilemma.data.own.table_files import is_table, read_table
from trilemma.data.types import Features, columns_of
from trilemma.experiment import Inputs
from trilemma.models.types import Buffers, Model
from trilemma.task import Learner, Task
from trilemma.task.metrics import chosen

if TYPE_CHECKING:
    from trilemma.report.result import Result


class Network(nn.Module):
    """A model of `trilemma.models` with its parameters, as a module."""

    def __init__(self, model: Model, params: Tensor, statistics: Buffers) -> None:
        super().__init__()
        self.model, self.params = model, nn.Parameter(params.detach().clone())
        self.statistics = tuple(statistics)
        for place, part in enumerate(statistics.values()):
            self.register_buffer(f"statistics_{place}", part.detach().clone())

    def forward(self, x: Any = None, **columns: Tensor) -> Tensor:
        """Return the outputs for examples (n, …), or for columns by name."""
        found = enumerate(self.statistics)
        buffers = {name: self.get_buffer(f"statistics_{place}")[None] for place, name in found}
        return models.outputs(self.model, self.params, columns or x, buffers=buffers)


class WithFeatures(nn.Module):
    """A network that takes examples, and computes the features it was trained on."""

    def __init__(self, net: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.net, self.inputs = net, inputs

    def forward(self, x: Any = None, **columns: Tensor) -> Any:
        """Return the outputs for examples as the run's data have them."""
        return said(self.net, self.inputs(columns or x, next(self.net.parameters()).device))


def said(net: nn.Module, x: Features) -> Any:
    """Return what a module makes of examples: one tensor, or columns as keyword arguments."""
    return net(x) if isinstance(x, Tensor) else net(**x)


def own_network(task: Task, tensors: Mapping[str, Tensor], seed: int) -> nn.Module | None:
    """Return a task's own module with trained tensors; None where its model is one of `trilemma.models`."""
    made = task.model
    if not isinstance(made, nn.Module | Model):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(Key(seed).integer())
            made = made()
    if isinstance(made, Model):
        return None
    net = copy.deepcopy(made)
    net.load_state_dict(dict(tensors))
    return net


@dataclass(frozen=True)
class Trained:
    """A run's model as one module, with the learner that scores it and the task it was trained on."""

    net: nn.Module
    learner: Learner
    task: Task

    @torch.no_grad()
    def outputs(self, x: Any) -> Tensor:
        """Return what the model makes of examples."""
        found: Tensor = said(self.net, self._features(x))
        return found

    def predict(self, x: Any) -> np.ndarray:
        """Return the class of every example, by name where the task names them; or numbers, or labels."""
        predicted = self.learner.model.predict(self.outputs(x)[None])[0].cpu()
        if predicted.dim() > 1 and predicted.shape[-1] == 1:
            predicted = predicted.squeeze(-1)
        names = self.task.classes
        if names is None or isinstance(names, int) or predicted.is_floating_point():
            return np.asarray(predicted)
        return np.asarray(np.asarray([*names])[predicted.numpy()])

    def evaluate(self, x: Any, y: Any = None) -> dict[str, float]:
        """Return loss and metrics on examples; a table and a data set bring their own targets."""
        data = self.task.read(x if y is None else (x, y))
        with torch.no_grad():
            return self.learner.judged(said(self.net, data.x_train), data.y_train)

    def _features(self, x: Any) -> Features:
        """Read examples without targets, columns in the order of training; refuse what is not expected."""
        place, names = ColumnPlace("the examples"), self.task.columns
        if is_table(x) or isinstance(x, Mapping):
            table = read_table(x)
            labels = (self.task.label,) if self.task.label else LABELS if names else ()
            own = [name for name in table if name in names or name not in (*labels, self.task.client)]
            place = replace(place, rows=np.arange(len(next(iter(table.values()), ()))))
            place, read = read_features(table, own, place)
            if isinstance(x, Mapping) and not names:  # as it was given: the model takes columns by name
                read = {name: read_column(table[name], place, name) for name in own}
        else:
            read = {"": read_column(x, place, "")}
        given = ClientExamples(place, read, next(iter(read.values())))
        if names:
            given = in_order(given, names, "the training data")
        found = {name: column.dense(None, 0) for name, column in given.x.items()}
        features: Features = found[""] if [*found] == [""] else found
        return features if self.task.expects is None else self._expected(features)

    def _expected(self, x: Features) -> Features:
        """Return examples that are what `expects` says; refuse others, with the first one's place."""
        declared, given = self.task.expects, columns_of(x)
        assert declared is not None
        cure = "(expects); predict takes what data() returns"
        for name, values in declared.columns.items():
            who = f"{name!r}" if name else "the numbers"
            if name not in given or tuple(given[name].shape[1:]) != values.shape:
                found = tuple(given[name].shape[1:]) if name in given else "missing"
                raise UserError(f"{who} of an example: {found}; allowed: shape {values.shape} {cure}")
            out = values.outside(given[name]).nonzero().flatten().tolist()
            if out:
                low, high = ("any" if end is None else f"{end:g}" for end in (values.low, values.high))
                raise UserError(f"row {out[0]}: {who} outside {low} … {high} {cure}")
        return x


def in_use(
    model: Model,
    result: Result,
    seed: int,
    statistics: Buffers,
    learner: Learner | None = None,
    task: Task | None = None,
) -> Trained:
    """Return a result's model with what it takes to use it: a task's own module, else the model as one."""
    found = result.params(seed)
    if found.dim() == 2:
        raise UserError("clients keep models of their own; state_dict(client=0) has the tensors of one")
    own = None if task is None else own_network(task, result.state_dict(seed), seed)
    net, inputs = own or Network(model, found, statistics), result.inputs(seed)
    whole = WithFeatures(net, inputs) if inputs.computed else net
    scored = learner or Learner(model, chosen(("accuracy",), 2))
    return Trained(whole.eval(), scored, task or Task(model=model, clients=lambda client: None))
