"""All that one seed of a configuration needs, assembled once before the first round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trilemma import data, privacy
from trilemma.attacks.types import Attack
from trilemma.base.errors import ConfigError
from trilemma.base.keys import Key
from trilemma.data.types import Batch
from trilemma.experiment import Config, auto
from trilemma.experiment.assembly import everybody
from trilemma.experiment.resolve import Resolved, resolve
from trilemma.learning.protocol import State
from trilemma.learning.steps.rounds import sampled_clients
from trilemma.learning.steps.tuning import (
    Tuned,
    check_going_on,
    check_one_model,
    origin_of,
    scales_of,
    tuned,
)
from trilemma.models.engines.precision import products
from trilemma.models.types import Model
from trilemma.privacy.accounting.accountants import AccountantAnswer
from trilemma.privacy.types import NoiseSource
from trilemma.simulate.ranks import Ranks
from trilemma.simulate.state_storage import StateStorage
from trilemma.task import Learner, Task


@dataclass(frozen=True)
class SimulatedClients:
    """The clients `ids` of a federation, run by this process (`learning.protocol.Clients`)."""

    ids: tuple[int, ...]
    data: data.FederatedData
    model: Model
    noise: NoiseSource

    def sample(self, size: int, key: Key) -> Batch:
        """Draw `size` examples without replacement for each client."""
        return self.data.sample(self.ids, size, key)

    def poisson(self, rate: float, size: int, key: Key) -> Batch:
        """Draw each example independently with probability `rate`, with weight 1/`size`."""
        return self.data.poisson(self.ids, rate, size, key)

    def epochs(self, size: int, steps: int, key: Key) -> Iterator[Batch]:
        """Yield `steps` stacked batches of shuffled data."""
        return iter(self.data.epoch_batches(self.ids, size, steps, key))

    def everything(self) -> Batch:
        """Return all training examples of each client, padded with weight 0."""
        return self.data.everything(self.ids)

    def among(self, members: tuple[int, ...]) -> SimulatedClients:
        """Return the same clients, with secrets shared among `members` only.

        Noise that is not simulated comes from a real federation's secrets, which already follow its epochs.
        """
        if not isinstance(self.noise, privacy.SimulatedNoise):
            return self
        return replace(self, noise=self.noise.among(members))

    def only(self, *ids: int) -> SimulatedClients:
        """Return only the clients `ids` of the same federation."""
        return replace(self, ids=ids)


@dataclass(frozen=True)
class Experiment:
    """One seed of one configuration, ready to run.

    `clients` are the clients that compute: all honest ones, and the Byzantine ones too if their attack needs
    the messages of the protocol. `learner` says how a task's model is scored; None: by loss and accuracy.
    """

    config: Config
    seed: int
    device: torch.device
    byzantine: tuple[int, ...]
    clients: SimulatedClients
    attack: Attack
    resolved: Resolved
    learner: Learner | None = None
    ranks: Ranks | None = None
    """The processes that share this run; `clients` are then those of this process. None: only this one."""
    storage: StateStorage = field(default_factory=StateStorage)
    """Where the clients' state and messages are kept: in memory or on disk."""
    root: SimulatedClients | None = None
    """The server's public examples, as a client without noise; None: it has none."""
    scoring: NoiseSource = field(default_factory=privacy.Noiseless)
    """Noise of clients' scores on their own examples."""

    def parts(self, ids: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the groups in which clients are stepped: `[run] at_once` at a time, or all together."""
        size = self.config.run.at_once or max(1, len(ids))
        return [ids[first : first + size] for first in range(0, len(ids), size)] or [()]

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.ranks is None or self.ranks.leads

    @property
    def key(self) -> Key:
        """The root of every random draw of this run."""
        return Key(self.seed)

    @cached_property
    def honest(self) -> tuple[int, ...]:
        """The honest clients."""
        return tuple(i for i in range(self.config.federation.clients) if i not in self.byzantine)

    @cached_property
    def spending(self) -> AccountantAnswer[np.ndarray]:
        """ε after each round (T,) and the accountant's name; infinite and "" without a guarantee."""
        return self._spending(self.resolved)

    def _spending(self, resolved: Resolved) -> AccountantAnswer[np.ndarray]:
        rounds, release, threat = self.config.run.rounds, resolved.release, resolved.threat
        if release is None or threat is None or not resolved.certified:
            return AccountantAnswer(np.full(rounds, np.inf), "")
        beside = None if resolved.own_scores is None else resolved.beside
        return privacy.certified_curve(release, threat, rounds, self.config.privacy.delta, beside=beside)

    def spent(self, round_: int, members: int) -> float:
        """Return ε after a round in which `members` clients shared secrets; no earlier round had fewer."""
        return float(self.spending_among(members).figure[round_])

    def spending_among(self, members: int) -> AccountantAnswer[np.ndarray]:
        """`spending` where at times only so many `members` shared secrets."""
        left = self.resolved.among(members)
        return self.spending if left is self.resolved else self._spending(left)

    def precision(self) -> AbstractContextManager[None]:
        """Return a context in which matrix products have the precision of `[run] precision`.

        It is used for clients' steps only: rules and scores stay in full precision.
        """
        return products(tf32=self.config.run.precision == "tf32" and self.device.type == "cuda")

    @cached_property
    def personal(self) -> bool:
        """Whether clients have models of their own, so that each client's model is scored."""
        alone = self.clients.only(self.clients.ids[0])
        return self.resolved.algorithm.personal(alone, self.key, self.device)

    @property
    def at_home(self) -> bool:
        """Whether every client tunes the model on its own data after the last round."""
        return self.config.aggregation.tune in ("clients", "clients-alone")

    def going_on(self, round_: int) -> tuple[SimulatedClients, ...]:
        """Return the owners that tune the model after this round: none before the last round.

        After the last round they are the root set, or all clients, as `[aggregation] tune` says.
        """
        if self.config.aggregation.tune == "no" or round_ < self.config.run.rounds:
            return ()
        if self.at_home:
            return tuple(self.clients.only(i) for i in self.clients.ids)
        assert self.root is not None
        return (self.root,)

    def tuned(self, owner: SimulatedClients, params: Tensor) -> Tuned:
        """Return the model that an owner gets by tuning `params` (d,)."""
        origin = origin_of(self.resolved.algorithm, self.clients.model, self.key).to(params)
        return tuned(owner, origin, params, scales_of(self.config.aggregation.tune))

    def members(self, server: State) -> tuple[int, ...]:
        """Return the clients that take part: all, unless the server's state says that some are expelled."""
        who = self.resolved.algorithm.members
        return tuple(range(self.config.federation.clients)) if who is None else who(server)

    def sampled(self, round_: int, members: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Return the clients that are sampled in a round, of `members` (None: of all clients)."""
        everyone = range(self.config.federation.clients) if members is None else members
        return sampled_clients(everyone, self.config.federation.sampled, round_, self.key)


def assemble(
    config: Config, seed: int, task: Task | None = None, device: torch.device | None = None
) -> Experiment:
    """Load and divide the data, build the model, resolve privacy, prepare the attack.

    With a `task`, data and model are the task's, and Byzantine clients hold data of their own like the
    others. `device` None: as configured.
    """
    device = device or choose_device(config.run.device)
    key = Key(seed)
    federation = config.federation
    byzantine = _byzantine(config, key)
    honest = [i for i in range(federation.clients) if i not in byzantine]
    attack = config.attack.options.build()

    ground = everybody(config, key, task, len(honest), device)
    federated = _poisoned(config, attack, ground.held, byzantine, key.fold("poison"))
    poorest = federated.poorest(honest)
    config = auto.settled(config, poorest, ground.model.dim)
    if config.aggregation.tune != "no":
        public = config.aggregation.tune in ("model", "alone")
        least = federated.poorest(range(federation.clients))
        check_going_on(ground.model, config.aggregation.root if public else least)
    # If clients are sampled, a round may hear liars only, and their messages must have been computed then.
    computes = (
        attack.reads_own
        or attack.poison is not None
        or attack.craft is None
        or federation.sampled is not None
    )
    computing = tuple(range(federation.clients)) if computes else tuple(honest)
    neighbours, scales = config.privacy.neighbours, federation.scales
    noise = privacy.SimulatedNoise(key.fold("noise"), federation.clients, neighbours, scales=scales)
    clients = SimulatedClients(computing, federated, ground.model, noise)
    root = None if ground.root is None else _root(config, ground.root, ground.model)
    resolved = resolve(config, poorest, ground.model, root=root, held_out=federated.held_out)
    apart = privacy.SimulatedNoise(key.fold("evaluation noise"), federation.clients)
    experiment = Experiment(
        *(config, seed, device, byzantine, clients, attack, resolved, ground.learner),
        root=root,
        scoring=apart,
    )
    if config.aggregation.tune != "no":
        check_one_model(experiment.personal, resolved.algorithm.name)
    return experiment


def settled(config: Config, task: Task | None = None) -> Config:
    """Return the configuration with numbers for what it leaves open, by what its first seed gives clients."""
    if not config.auto:
        return config
    key = Key(config.run.seeds[0])
    honest = config.federation.clients - config.federation.byzantine
    ground = everybody(config, key, task, honest)
    liars = _byzantine(config, key)
    poorest = ground.held.poorest([i for i in range(config.federation.clients) if i not in liars])
    return auto.settled(config, poorest, ground.model.dim)


def _poisoned(
    config: Config, attack: Attack, held: data.FederatedData, byzantine: tuple[int, ...], key: Key
) -> data.FederatedData:
    """Return the clients' data, with the labels of Byzantine clients as the attack changes them."""
    if attack.needs_classes:
        held.dataset.class_labels(f"attack {config.attack.name!r}")
    if attack.poison is None:
        return held
    poison, classes = attack.poison, held.dataset.needs_classes(f"attack {config.attack.name!r}")
    return held.with_labels(byzantine, lambda labels, i: poison(labels, classes, key.fold("client", i)))


def _root(config: Config, held: data.FederatedData, model: Model) -> SimulatedClients:
    """Return the server's public examples as a client without noise; refuse less than a batch of them."""
    needed = config.algorithm.options.least_examples
    if config.aggregation.root < needed:
        raise ConfigError(
            f"[aggregation] root = {config.aggregation.root}: a client's batch takes {needed} examples, "
            f"and so does the server's; allowed: {needed} or more"
        )
    return SimulatedClients((0,), held, model, privacy.Noiseless())


def choose_device(wanted: str) -> torch.device:
    """Return the device to compute on: `auto` is CUDA if there is a GPU, else the CPU."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("[run] device = 'cuda': this machine has no CUDA device; allowed here: auto, cpu")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def _byzantine(config: Config, key: Key) -> tuple[int, ...]:
    federation = config.federation
    if federation.placement == "last":
        return tuple(range(federation.clients - federation.byzantine, federation.clients))
    drawn = key.fold("byzantine").numpy().choice(federation.clients, federation.byzantine, replace=False)
    return tuple(sorted(int(i) for i in drawn))
