"""What is learned: a model, and this party's data. Either the configuration's, or the party's own `task.py`.

A `task.py` (`trilemma.task`) is in the party's own folder and run on the party's own machine only. A client
calls `data` for itself and nobody else; the server needs the model to start from and, where there is one,
`test()`, never the data. How many examples the poorest client holds is public (`examples` in
federation.toml): the amount of noise depends on it, and a client that holds fewer refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from trilemma import data, models
from trilemma.base.errors import ConfigError, UserError
from trilemma.base.keys import Key
from trilemma.data.batches import federated
from trilemma.data.types import Batch, each
from trilemma.experiment import Config
from trilemma.experiment.assembly import Assembled, everybody, one_party
from trilemma.experiment.resolve import Resolved, resolve
from trilemma.federation.identity.rosters import SignedRoster
from trilemma.federation.party.layout import Party
from trilemma.federation.protocol.admission import HEADROOM
from trilemma.learning import MessageLayout
from trilemma.learning.protocol import global_model
from trilemma.learning.steps.total import Failures, right_shares
from trilemma.learning.steps.tuning import check_going_on, check_one_model
from trilemma.models.types import Model
from trilemma.privacy import Noiseless
from trilemma.privacy.types import NoiseSource
from trilemma.task import Task


@dataclass(frozen=True)
class OneClient:
    """One client of a federation, as an algorithm sees it (`learning.protocol.Clients` with k = 1).

    Which examples are drawn is decided by `seed`, which only this client knows: privacy amplification by
    sampling holds against those who cannot tell which examples were in a batch.
    """

    client: int
    task: PartyTask
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

    def poisson(self, rate: float, size: int, key: Key) -> Batch:
        """Draw each example independently with probability `rate`; each weighs 1/`size`."""
        held, place = self._held
        return held.poisson(place, rate, size, self._own(key))

    def epochs(self, size: int, steps: int, key: Key) -> Iterator[Batch]:
        """Yield `steps` batches of a shuffled loader."""
        held, place = self._held
        return iter(held.epoch_batches(place, size, steps, self._own(key)))

    def everything(self) -> Batch:
        """Return all examples."""
        held, place = self._held
        return held.everything(place)

    def right_answers(self, params: Tensor) -> tuple[Tensor, Failures]:
        """Return its share of right answers (1,) on the examples it does not train on, and what failed."""
        held, place = self._held
        return right_shares(self.model, params, held.everything(place, "valid"))


@dataclass(frozen=True)
class PartyTask:
    """What a party knows of what is learned: a configuration with its model and, where it has any, data."""

    config: Config
    key: Key
    assembled: Assembled
    resolved: Resolved

    @property
    def model(self) -> Model:
        """The model."""
        return self.assembled.model

    @property
    def data(self) -> data.FederatedData | None:
        """The data by client; with a `task.py` a client has one holder in it, itself, and the server none."""
        return self.assembled.data

    def made_up(self) -> PartyTask:
        """Return the task with made-up examples, where there are such, in the place of this party's own."""
        made = self.assembled.stand_in
        if made is None or made.natural is None:
            return self
        return replace(self, assembled=replace(self.assembled, data=data.FederatedData(made, made.natural)))

    def score(self, params: Tensor) -> dict[str, float]:
        """Return loss and metrics of a model on the test examples this party has; nothing without any."""
        learner, tests = self.assembled.learner, self.assembled.tests
        if tests is None and self.data is not None:
            tests = self.data.dataset
        if tests is None or not len(tests.y_test) or self.model.buffers:
            return {}
        if learner is not None:
            return learner.score(params, tests.x_test, tests.y_test)
        score = models.evaluate(self.model, params, tests.x_test, tests.y_test, per_client=False)
        return {"loss": float(score.loss), "accuracy": float(score.accuracy)}

    @cached_property
    def message(self) -> MessageLayout:
        """What a client's message looks like, as the algorithm declares it."""
        return self.resolved.algorithm.message(self.model)

    @property
    def longest_reply(self) -> int:
        """How many bytes the longest block is that a client has to send."""
        inquiry = self.resolved.algorithm.inquiry
        layouts = [self.message] if inquiry is None else [self.message, inquiry.message(self.model)]
        return max(layout.longest.bytes for layout in layouts) + HEADROOM

    @property
    def counts_on_others(self) -> bool:
        """Whether a client's privacy depends on who else takes part: noise is shared, or hides in the sum."""
        release, threat = self.resolved.release, self.resolved.threat
        if release is None or threat is None or release.law.silent:
            return False
        return release.law.sigma_cor > 0 or threat.model.central

    @property
    def may_be_expelled(self) -> int:
        """How many clients may be expelled before the noise is not what was calculated: f, or none are.

        In a run of one round nobody is: whoever is expelled has sent its last message.
        """
        expels = self.resolved.algorithm.members is not None and self.config.run.rounds > 1
        return self.tolerated if expels else 0

    def scale(self, client: int) -> float:
        """Return what a client's message counts in the sum in which noise cancels: n times its weight."""
        scales = self.config.federation.scales
        return scales[client] if scales else 1.0

    @property
    def tolerated(self) -> int:
        """Number f of clients that may fail or lie."""
        return self.config.federation.f


def load_task(party: Party, tell: Callable[[str], None] | None = None) -> PartyTask:
    """Assemble what `party` knows of the task.

    With `tell`, as a node does, nothing is refused for what a client's data are, of which its owner is told;
    and a step is tried, on made-up examples, before anything is paid for.
    """
    from trilemma.experiment import load

    roster = party.keys
    founded = load(party.config)
    _check_config(founded, party)
    config = _with_clients(founded, len(roster.members))
    key = Key(config.run.seeds[0])
    if party.task is None:
        places = len(roster.keys)
        found = everybody(_with_clients(founded, places), key, None, places)
        poorest, kept = int(found.held.sizes.min()), found.held.held_out
        task = PartyTask(config, key, found, _resolve(config, poorest, found.model, kept))
        _check_going_on(task, party, poorest)
        return task
    examples = party.federation.examples
    if examples is None:
        raise ConfigError("federation.toml must say `examples`: how many the poorest client holds")
    own = Task.from_file(party.task)
    _check_declared(own, party)
    found = one_party(config, key, own, party.client, examples, tell)
    kept = config.evaluation.held_out(examples) if config.evaluation.clients else 0
    resolved = _resolve(config, examples - kept, found.model, kept)
    if resolved.release is not None and found.stand_in is None:
        raise ConfigError(
            "task.py must say what one record may be, where privacy is promised: expects = Declaration(…), "
            "the same for all parties; `trilemma check` proposes one"
        )
    task = PartyTask(config, key, found, resolved)
    if tell is not None and resolved.release is not None:
        _try_out(task)
    _check_going_on(task, party, examples - kept)
    return task


def _check_declared(own: Task, party: Party) -> None:
    """Refuse a task that expects other records than were agreed on."""
    said = None if own.expects is None else own.expects.plain()
    if said != party.federation.records:
        raise ConfigError(
            f"task.py expects records {said}; agreed on, in federation.toml, are {party.federation.records}"
        )


def _try_out(task: PartyTask) -> None:
    """Take a step on made-up examples: with gradients that are right, in the time and memory that it takes.

    What is clipped must be the gradients of single examples. No record of a client's has a part in it.
    """
    made, release, model = task.assembled.stand_in, task.resolved.release, task.model
    assert made is not None
    assert release is not None
    size = getattr(task.config.algorithm.options, "batch_size", len(made.y_train))
    size = federated.places(size) if release.sampling.scheme == "poisson" else size
    rows = torch.arange(size) % len(made.y_train)
    batch = Batch(each(made.x_train, lambda column: column[None, rows]), made.y_train[None, rows])
    params, by_example = model.init(task.key), release.unit == "example"
    clip = models.Clip.example(release.clip, careful=True) if by_example else models.Clip.client(release.clip)
    try:
        models.verify(model, params, batch)
        models.gradients(model, params, batch, clip=clip, keys=[task.key])
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(f"a step on made-up records fails: {type(error).__name__}: {error}") from error


def _with_clients(config: Config, clients: int) -> Config:
    """Return a configuration for as many clients as the roster has: they come and go, the file stays."""
    return config if config.federation.clients == clients else config.with_(f"federation.clients={clients}")


def _resolve(config: Config, examples: int, model: Model, held_out: int) -> Resolved:
    # What leaves a real client is integers on a public grid, whatever a simulation of it does.
    resolved = resolve(config, examples, model, arithmetic="grid", held_out=held_out)
    _check_resolved(config, resolved, model)
    return resolved


def _check_config(config: Config, party: Party) -> None:
    clients = party.federation.clients
    if config.federation.clients != clients:
        raise ConfigError(
            f"[federation] clients = {config.federation.clients}: this federation has {clients}"
        )
    _check_weights(config, party.signed_roster)
    if config.attack.name != "none":
        raise ConfigError("[attack] is for simulations: in a federation nobody plays the attacker")


def _check_weights(config: Config, roster: SignedRoster) -> None:
    """Refuse weights that the authority has not signed, and other members than they were agreed for."""
    signed, said = tuple(one.weight for one in roster.clients), config.federation.weights
    if signed != (said or (None,) * len(signed)):
        raise ConfigError(f"[federation] weights = {list(said)}: the signed roster has {list(signed)}")
    if said and any(one.removed for one in roster.clients):
        raise ConfigError(
            "[federation] weights: a client was removed, and noise and cap are for those that weights were "
            "agreed with; found a new federation"
        )


def _check_going_on(task: PartyTask, party: Party, examples: int) -> None:
    """Refuse, before the first round, that clients go on at home where they cannot."""
    if task.config.aggregation.tune == "no":
        return
    check_going_on(task.model, examples)
    if task.data is not None:  # the server of a `task.py` has nobody's, and clients see to it themselves
        alone = OneClient(party.client or 0, task.made_up(), Noiseless(), seed=0)
        algorithm = task.resolved.algorithm
        check_one_model(algorithm.personal(alone, task.key), algorithm.name)


def _check_resolved(config: Config, resolved: Resolved, model: Model) -> None:
    """Refuse what only a simulation can do, with the reason."""
    algorithm, sampled = resolved.algorithm, config.federation.sampled
    if algorithm.filter or config.aggregation.root:
        raise ConfigError(
            f"[aggregation] rule = {config.aggregation.rule!r}, root = {config.aggregation.root}: screens "
            "and root sets are for simulations; allowed: another rule, and root = 0"
        )
    if sampled is not None and algorithm.everyone_trains:
        raise ConfigError(
            f"[federation] sampled = {sampled}: in {algorithm.name} clients that are not sampled train too, "
            "which a server that does not ask them cannot make them do; leave it out"
        )
    central = resolved.threat is not None and resolved.threat.model.central
    if sampled is not None and central:
        raise ConfigError(
            f"[federation] sampled = {sampled}: under cdp a client counts on the noise of all the others, "
            "and here only some add theirs; leave it out or choose another threat model"
        )
    if central and resolved.certified and not config.algorithm.options.fresh_noise:
        raise ConfigError(
            f"under cdp messages of {algorithm.name} carry noise of earlier rounds, and who compares rounds "
            "with different absentees takes it out again; allowed: algorithm.momentum = 0, or another threat "
            "model"
        )
    # in FedAvg too, where clients average the running statistics of a model that has some
    own = algorithm.own_models or (bool(model.buffers) and algorithm.evaluated is not global_model)
    if config.run.returned != "last" and own:
        raise ConfigError(
            f"[run] returned = {config.run.returned!r}: the models of {algorithm.name} are the clients' own, "
            "the server cannot keep them; allowed: last"
        )
