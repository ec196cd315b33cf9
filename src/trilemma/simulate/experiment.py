"""Everything one seed of one configuration needs, assembled once, before the first round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trilemma import data, models, privacy
from trilemma.attacks.types import Attack
from trilemma.config import Config
from trilemma.config.resolve import Resolved, resolve
from trilemma.data.types import Batch
from trilemma.errors import ConfigError
from trilemma.keys import Key
from trilemma.models.types import Model
from trilemma.privacy.types import NoiseSource


@dataclass(frozen=True)
class SimulatedClients:
    """The clients `ids` of a federation, played by this process (`learning.protocol.Clients`)."""

    ids: tuple[int, ...]
    data: data.FederatedData
    model: Model
    noise: NoiseSource

    def sample(self, size: int, key: Key) -> Batch:
        """Draw `size` examples without replacement for each client."""
        return self.data.sample(self.ids, size, key)

    def poisson(self, expected: int, key: Key) -> Batch:
        """Draw each example independently, `expected` on average, weighted 1/expected."""
        return self.data.poisson(self.ids, expected, key)

    def everything(self) -> Batch:
        """Return all training examples of each client, padded with weight 0."""
        return self.data.everything(self.ids)

    def only(self, *ids: int) -> SimulatedClients:
        """Return the same federation played for `ids` alone."""
        return replace(self, ids=ids)


@dataclass(frozen=True)
class Experiment:
    """One seed of one configuration, ready to run.

    `clients` are the clients that compute: all honest ones, and the Byzantine ones when their attack trains
    on poisoned data. The ids of Byzantine clients are the last ones.
    """

    config: Config
    seed: int
    device: torch.device
    federated: data.FederatedData
    model: Model
    clients: SimulatedClients
    attack: Attack
    resolved: Resolved

    @property
    def key(self) -> Key:
        """The root of every random draw of this run."""
        return Key(self.seed)

    @property
    def honest(self) -> int:
        """Number of honest clients; their ids are 0 … honest−1."""
        return self.config.federation.clients - self.config.federation.byzantine

    @cached_property
    def epsilon_curve(self) -> np.ndarray:
        """ε after each round by the run's accountant; infinite without a guarantee."""
        rounds = self.config.run.rounds
        release, threat = self.resolved.release, self.resolved.threat
        if release is None or threat is None:
            return np.full(rounds, np.inf)
        accountant = "exact" if release.sampling.scheme == "none" else "rdp"
        return privacy.epsilon_curve(release, threat, rounds, self.config.privacy.delta, accountant)

    def test_set(self) -> tuple[Tensor, Tensor]:
        """The examples accuracy is measured on."""
        return self.federated.dataset.x_test, self.federated.dataset.y_test


def assemble(config: Config, seed: int) -> Experiment:
    """Load and divide the data, build the model, resolve privacy, prepare the attack."""
    device = choose_device(config.run.device)
    key = Key(seed)
    federation = config.federation
    honest = federation.clients - federation.byzantine

    holders = honest if config.holding.holders == "honest" else federation.clients
    federated = data.federate(
        config.data.options,
        config.partition.options,
        holders,
        key.fold("data"),
        augment=config.holding.augment,
    )
    attack = config.attack.options.build()
    if holders < federation.clients:
        federated = federated.mirror(federation.clients)
    byzantine = tuple(range(honest, federation.clients))
    poison = attack.poison
    if poison is not None:
        federated = federated.with_labels(byzantine, poison, key.fold("poison"))
    federated = federated.to(device)

    poorest = min(len(federated.holdings.train[i]) for i in range(honest))
    batch = getattr(config.algorithm.options, "batch", None)
    if batch is not None and batch > poorest:
        raise ConfigError(
            f"[algorithm] batch = {batch}: the poorest client holds {poorest} examples; allowed: 1 to {poorest}"
        )
    model = models.build(config.model.options, federated.dataset.x_train.shape[1:], federated.dataset.classes)
    computing = tuple(range(honest)) + (byzantine if attack.poison is not None else ())
    noise = privacy.SimulatedNoise(key.fold("noise"), federation.clients)
    clients = SimulatedClients(computing, federated, model, noise)
    return Experiment(config, seed, device, federated, model, clients, attack, resolve(config, poorest))


def choose_device(wanted: str) -> torch.device:
    """Return the device to compute on: `auto` takes CUDA where there is one."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("[run] device = 'cuda': this machine has no CUDA device; allowed here: auto, cpu")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)
