"""From a configuration, or a configuration and a task, to a model and what every client holds.

The one place where they come together: the simulator asks for everybody, a party of a federation for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from trilemma import data, models
from trilemma.base.errors import ConfigError, UserError
from trilemma.base.keys import Key
from trilemma.data import Dataset, FederatedData
from trilemma.experiment.model_inputs import features_key
from trilemma.experiment.parsing import Config
from trilemma.learning.statistics import PrivateStatistics
from trilemma.task import Learner, Task
from trilemma.task.surveyed import surveyed

MADE = 16
"""Made-up examples on which a party tries model and loss."""


@dataclass(frozen=True)
class Assembled:
    """What is trained on what. `data` is None where there are no examples, on a federation's server.

    `learner` says how a task's model is scored; None: by its loss and accuracy.
    """

    model: models.Model
    data: FederatedData | None
    learner: Learner | None = None
    tests: Dataset | None = None
    """Test examples alone, where there are no others."""
    root: FederatedData | None = None
    """Public examples at the server, as those of one client."""
    stand_in: Dataset | None = None
    """Made-up examples, where what a record may be is agreed on."""

    @property
    def held(self) -> FederatedData:
        """The data, where there must be some."""
        assert self.data is not None
        return self.data


def everybody(
    config: Config, key: Key, task: Task | None, honest: int, device: torch.device | str = "cpu"
) -> Assembled:
    """Return the model and all clients' data; `honest` of the clients do not lie, and come first."""
    if task is not None:
        if config.aggregation.root:
            raise ConfigError(
                "[aggregation] root: public examples come out of a data set, and a task is none"
            )
        if config.holding.examples is not None:
            raise ConfigError("[data] examples: what clients of a task hold is their own; leave it out")
        task = asked_of(config, task.of(config.federation.clients))
        learner, dataset = _learned(config, key, task, device)
        held = _natural(config, key, dataset, task.dataset, task.examples, device)
        return Assembled(learner.model, held, learner)
    if isinstance(config.algorithm.options, PrivateStatistics) and config.algorithm.options.columns:
        raise ConfigError("[algorithm] statistics of columns are about a task's records: give --task task.py")
    dataset = data.loaded(config.data.options, key.fold("data"), data.Storage.from_environment())
    dataset = _features(config, dataset, key, device)
    dataset = _fewer(dataset, config.holding.examples, key.fold("examples"))
    dataset, public = _rooted(dataset, config.aggregation.root, key.fold("root"))
    holdings = _holdings(config, dataset, honest, key.fold("partition"))
    model = models.build(
        config.model.name,
        dataset.x_train.shape[1:],
        dataset.needs_classes(f"model {config.model.name!r}"),
        **config.model.options.model_dump(),
    )
    chosen = models.choose(model, config.coordinates.train, key)
    root = None if public is None else _held(config, public, _all_of(public), device)
    held = _held(config, dataset, _set_aside(config, key, dataset, holdings), device)
    return Assembled(chosen, held, root=root)


def of_task(
    config: Config, key: Key, task: Task, device: torch.device | str = "cpu"
) -> tuple[Learner, Dataset]:
    """Return a task's learner and all clients' data, as a run with this key has them."""
    return _learned(config, key, asked_of(config, task), device)


def asked_of(config: Config, task: Task) -> Task:
    """Return the task that a configuration is about: the survey of it, where statistics are asked for."""
    options = config.algorithm.options
    if not isinstance(options, PrivateStatistics):
        return task
    if not options.columns:
        raise ConfigError("[algorithm] statistics needs columns, as in columns.age = {low = 0, high = 100}")
    changed = config.features.name != "none" or config.holding.project or config.holding.norm
    goes_on = (
        config.evaluation.clients or config.aggregation.tune != "no" or config.coordinates.train != "all"
    )
    if changed or config.holding.around_own or goes_on:
        raise ConfigError(
            "[algorithm] statistics are of records as they are kept, and no model: leave [data] features, "
            "project, norm, centre and whiten, [model] train, [evaluation] and [aggregation] tune out"
        )
    if config.federation.weights:
        raise ConfigError("[federation] weights: statistics count every site's records alike; leave it out")
    return surveyed(task, options.layout)


def _learned(config: Config, key: Key, task: Task, device: torch.device | str) -> tuple[Learner, Dataset]:
    dataset = _features(config, task.dataset, key, device)
    return learner_of(config, key, task, dataset), dataset


def learner_of(config: Config, key: Key, task: Task, dataset: data.Dataset | None) -> Learner:
    """Return a task's learner, of whose model what `[model] train` says is trained."""
    learner = task.learner(dataset)
    return replace(learner, model=models.choose(learner.model, config.coordinates.train, key))


def one_party(
    config: Config,
    key: Key,
    task: Task,
    client: int | None,
    examples: int,
    tell: Callable[[str], None] | None = None,
) -> Assembled:
    """Return the model and one client's data alone; the server, None, has test examples at most.

    `examples` is how many every client counts as holding. How many it does hold may depend on a record, so
    a client that holds fewer takes part too, with empty places. Where a task says what a record may be, model
    and loss are tried on made-up ones alone; with `tell` no data are refused, their owner is told instead.
    """
    made, task = None, asked_of(config, task)
    if task.expects is not None:
        made = _features(config, data.stand_in(task.expects, MADE, key.fold("made up")), key)
    if client is None:
        tests = task.test_dataset
        if tests is not None:
            tests = _around(config, _features(config, tests, key), data.Holdings([], [], []))
        learner = learner_of(config, key, task, made or tests)
        return Assembled(learner.model, None, learner, tests, stand_in=made)
    if tell is None or made is None:
        given = task.client_dataset(client)
    else:
        given = task.fitted(client, tell, examples)
    if given.names and not task.columns:
        said = data.declaration_of(given).names
        wrong = (
            "the columns of a table may be in another order at another party: say their names in task.py, as "
            f"`trilemma check` proposes: expects = Declaration(x=Values(…, names={said!r}), …)"
        )
        if tell is None or made is None:
            raise UserError(wrong)
        tell(wrong)
    dataset = _features(config, given, key)
    learner = learner_of(config, key, task, made or dataset)
    held = _natural(config, key, dataset, given, examples, first=client)
    return Assembled(learner.model, held, learner, stand_in=made)


def _features(config: Config, dataset: Dataset, key: Key, device: torch.device | str = "cpu") -> Dataset:
    """Put features in place of examples, where the configuration asks for it."""
    return data.with_features(
        dataset,
        config.features.options,
        project=config.holding.project,
        norm=config.holding.norm,
        key=features_key(key),
        storage=data.Storage.from_environment(),
        device=device,
    )


def _fewer(dataset: Dataset, size: int | None, key: Key) -> Dataset:
    """Return the data with `size` training examples; None: with all of them."""
    if size is None:
        return dataset
    return _apart(dataset, size, key, f"[data] examples = {size}")[1]


def _rooted(dataset: Dataset, size: int, key: Key) -> tuple[Dataset, Dataset | None]:
    """Return the data without `size` training examples, and these; None where none are wanted."""
    if not size:
        return dataset, None
    return _apart(dataset, size, key, f"[aggregation] root = {size}")


def _apart(dataset: Dataset, size: int, key: Key, said: str) -> tuple[Dataset, Dataset]:
    """Return the data without `size` training examples, drawn at random, and with these alone."""
    total = len(dataset.y_train)
    if dataset.natural is not None:
        raise ConfigError(f"{said}: examples of {dataset.name} are their clients' own")
    if size >= total:
        raise ConfigError(f"{said} of {total} examples; allowed: fewer, or leave it out")
    order = torch.from_numpy(key.numpy().permutation(total))

    def part(rows: torch.Tensor) -> Dataset:
        x = data.each(dataset.x_train, lambda column: column[rows])
        return replace(dataset, x_train=x, y_train=dataset.y_train[rows])

    return part(order[size:]), part(order[:size])


def _all_of(dataset: Dataset) -> data.Holdings:
    """Return the holdings of one client who has all training examples."""
    return data.Holdings([np.arange(len(dataset.y_train))], [], [])


def _natural(
    config: Config,
    key: Key,
    dataset: Dataset,
    given: Dataset,
    examples: int | None,
    device: torch.device | str = "cpu",
    first: int = 0,
) -> FederatedData:
    """Return the data of a task's clients, who all count as holding `examples`; None: what they hold.

    What is set aside is chosen among the examples as they were `given`: features are not the same to the last
    bit where another number of examples is computed at once.
    """
    assert given.natural is not None
    holdings = _set_aside(config, key, given, given.natural, examples)
    kept = config.evaluation.held_out(examples) if examples and config.evaluation.clients else 0
    return _held(config, dataset, holdings, device, first, examples and examples - kept)


def _held(
    config: Config,
    dataset: Dataset,
    holdings: data.Holdings,
    device: torch.device | str,
    first: int = 0,
    least: int | None = None,
) -> FederatedData:
    """Return what clients hold, each around its own mean and whitened where the configuration asks for it."""
    return FederatedData(_around(config, dataset, holdings), holdings, device, first, least)


def _around(config: Config, dataset: Dataset, holdings: data.Holdings) -> Dataset:
    """Return the examples as their holders see them. What may be certified then: `resolve`."""
    if not config.holding.around_own:
        return dataset
    return data.centred(dataset, holdings, config.holding.whiten)


def _set_aside(
    config: Config, key: Key, dataset: Dataset, holdings: data.Holdings, examples: int | None = None
) -> data.Holdings:
    """Let clients keep examples to evaluate on, where they evaluate and have none.

    Each keeps a share of the `examples` that all count as holding; None: a share of what it holds.
    """
    if not config.evaluation.clients:
        return holdings
    poorest = examples or min(len(rows) for rows in holdings.train)
    if poorest < 2 and not holdings.valid:
        raise ConfigError(
            f"[evaluation] clients = true: a client holds {poorest} examples, and needs one to learn from "
            "and one to evaluate on"
        )
    if not holdings.valid and _examples_come_and_go(config, poorest):
        raise ConfigError(
            "[evaluation] clients = true: an example that comes or goes would change which others are set "
            "aside, and no ε here covers that; allowed: [privacy] adjacency = 'replace', or data with "
            "validation examples"
        )
    share = config.evaluation.held_out
    return data.set_aside(dataset, holdings, lambda count: share(examples or count), key.fold("evaluation"))


def _examples_come_and_go(config: Config, examples: int) -> bool:
    """Tell whether a guarantee is about one example more or fewer."""
    wanted = config.privacy
    if wanted.clip is None or wanted.threat == "none":
        return False
    shape = config.algorithm.options.exposure(wanted.clip, examples)
    return shape.unit == "example" and (wanted.adjacency or shape.adjacency) == "add-remove"


def _holdings(config: Config, dataset: Dataset, honest: int, key: Key) -> data.Holdings:
    """Divide the data among all clients, or among the honest ones with the Byzantine ones mirroring them."""
    total = config.federation.clients
    if config.holding.holders == "all":
        return config.partition.options.divide(dataset, total, key)
    if config.federation.placement != "last":
        raise ConfigError("[data] holders = 'honest' needs [federation] placement = 'last'; else use 'all'")
    return data.mirror(config.partition.options.divide(dataset, honest, key), total)
