"""What is learned: a model, and this party's data. Either the configuration's, or the party's own `task.py`.

A `task.py` is two functions, in the party's own folder and run on the party's own machine only:

    def model() -> trilemma.models.Model:      the same for every party
    def data(client: int):                     this client's examples: (x, y), arrays or tensors

It may import files beside it (`taskfile`).

The server needs the model to start from, never the data. How many examples the poorest client holds is public
(`examples` in federation.toml): the amount of noise depends on it, and a client that holds fewer refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from trilemma import data, models
from trilemma.config import Config
from trilemma.config.resolve import Resolved, load_data, resolve
from trilemma.data.types import Batch, Dataset, Holdings
from trilemma.errors import ConfigError, UserError
from trilemma.federation.layout import Party
from trilemma.federation.taskfile import TaskFile
from trilemma.keys import Key
from trilemma.learning import MessageLayout
from trilemma.learning.protocol import global_model
from trilemma.models.types import Model
from trilemma.privacy.types import NoiseSource


@dataclass(frozen=True)
class OneClient:
    """One client of a federation, as an algorithm sees it (`learning.protocol.Clients` with k = 1).

    Which examples are drawn is decided by `seed`, which only this client knows: privacy amplification by
    sampling holds against those who cannot tell which examples were in a batch.
    """

    client: int
    task: Task
    noise: NoiseSource
    seed: int

    @property
    def ids(self) -> tuple[int, ...]:
        """This client alone."""
        return (self.client,)

    @property
    def model(self) -> Model:
        """The model it trains."""
        return self.task.model

    @property
    def _held(self) -> tuple[data.FederatedData, tuple[int, ...]]:
        """The data and this client's place among its holders: the only one where the data are its own."""
        assert self.task.data is not None
        return self.task.data, (0,) if self.task.data.clients == 1 else (self.client,)

    def _own(self, key: Key) -> Key:
        return Key(self.seed, key.path)

    def sample(self, size: int, key: Key) -> Batch:
        """Draw `size` examples without replacement."""
        held, place = self._held
        return held.sample(place, size, self._own(key))

    def poisson(self, rate: float, key: Key) -> Batch:
        """Draw each example independently with probability `rate`."""
        held, place = self._held
        return held.poisson(place, rate, self._own(key))

    def epochs(self, size: int, steps: int, key: Key) -> Iterator[Batch]:
        """Yield `steps` batches of a shuffled loader."""
        held, place = self._held
        return iter(held.epoch_batches(place, size, steps, self._own(key)))

    def everything(self) -> Batch:
        """Return all examples."""
        held, place = self._held
        return held.everything(place)


@dataclass(frozen=True)
class Task:
    """A configuration with its model and, where this party has any, data.

    `data` is indexed by client; with a `task.py` a client has one holder in it, itself, and the server none.
    """

    config: Config
    key: Key
    model: Model
    data: data.FederatedData | None
    resolved: Resolved

    @cached_property
    def message(self) -> MessageLayout:
        """What a client's message looks like, as the algorithm declares it."""
        return self.resolved.algorithm.message(self.model)

    @property
    def counts_on_others(self) -> bool:
        """Whether a client's privacy depends on who else takes part: noise is shared, or hides in the sum."""
        release, threat = self.resolved.release, self.resolved.threat
        if release is None or threat is None or release.law.silent:
            return False
        return release.law.sigma_cor > 0 or threat.name == "cdp"

    @property
    def tolerated(self) -> int:
        """Number f of clients that may fail or lie."""
        return self.config.federation.f


def load_task(party: Party) -> Task:
    """Assemble what `party` knows of the task."""
    from trilemma.config import load

    config = load(party.config)
    _check_config(config, party)
    key = Key(config.run.seeds[0])
    if party.task is None:
        dataset = load_data(config, key)
        holdings = config.partition.options.divide(dataset, config.federation.clients, key.fold("partition"))
        federated = data.FederatedData(dataset, holdings)
        model = models.build(
            config.model.name,
            dataset.x_train.shape[1:],
            dataset.needs_classes(f"model {config.model.name!r}"),
            **config.model.options.model_dump(),
        )
        return Task(config, key, model, federated, _resolve(config, int(federated.sizes.min())))
    own_code = TaskFile(party.task)
    examples = party.federation.examples
    if examples is None:
        raise ConfigError("federation.toml must say `examples`: how many the poorest client holds")
    own = None if party.client is None else _own_data(own_code, party.client, config, examples)
    return Task(config, key, own_code.call("model"), own, _resolve(config, examples))


def _resolve(config: Config, examples: int) -> Resolved:
    resolved = resolve(config, examples)
    _check_resolved(config, resolved)
    return resolved


def _check_config(config: Config, party: Party) -> None:
    clients = party.federation.clients
    if config.federation.clients != clients:
        raise ConfigError(
            f"[federation] clients = {config.federation.clients}: this federation has {clients}"
        )
    if config.attack.name != "none":
        raise ConfigError("[attack] is for simulations: in a federation nobody plays the attacker")


def _check_resolved(config: Config, resolved: Resolved) -> None:
    algorithm, sampled = resolved.algorithm, config.federation.sampled
    if sampled is not None and algorithm.everyone_trains:
        raise ConfigError(
            f"[federation] sampled = {sampled}: in {algorithm.name} clients that are not sampled train too, "
            "which a server that does not ask them cannot make them do; leave it out"
        )
    if sampled is not None and resolved.threat is not None and resolved.threat.name == "cdp":
        raise ConfigError(
            f"[federation] sampled = {sampled}: under cdp a client counts on the noise of all the others, "
            "and here only some add theirs; leave it out or choose another threat model"
        )
    if config.run.returned != "last" and algorithm.evaluated is not global_model:
        raise ConfigError(
            f"[run] returned = {config.run.returned!r}: the models of {algorithm.name} are the clients' own, "
            "the server cannot keep them; allowed: last"
        )


def _own_data(own_code: TaskFile, client: int, config: Config, examples: int) -> data.FederatedData:
    x, y = own_code.call("data", client)
    x, y = torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y, dtype=torch.int64)
    if len(x) != len(y) or len(x) < examples:
        raise UserError(
            f"client {client} holds {len(x)} examples with {len(y)} labels; the federation agreed on at "
            f"least {examples} of both"
        )
    nothing = torch.empty(0, *x.shape[1:]), torch.empty(0, dtype=torch.int64)
    dataset = Dataset("task", x, y, *nothing, classes=int(y.max()) + 1 if len(y) else 1)
    return data.FederatedData(dataset, Holdings([np.arange(len(y))], [], []))
