"""What a client takes home from a run: the model of all, or where that goes on its own examples.

A client's folder keeps what the server handed out when the run ended, and its owner has the examples: nobody
else is asked, nothing is sent, and no ε is spent (`trilemma.learning.steps.tuning`, the same that a
simulation with `[aggregation] tune = "clients"` does for every client). A model that went on has learnt from
these examples without noise: it is its owner's alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from trilemma.base.errors import UserError, nearest
from trilemma.federation.client.sessions import Session
from trilemma.federation.party.layout import Party, is_partys
from trilemma.federation.party.public_facts import PUBLIC
from trilemma.federation.party.task import OneClient, PartyTask, load_task
from trilemma.federation.protocol.admission import described
from trilemma.federation.server.commits import result_of
from trilemma.learning.steps import tuning
from trilemma.privacy import Noiseless
from trilemma.task import Learner

Scores = Mapping[str, float]

SMALL = 10_000_000
"""Examples times parameters below which a step is too short to be shared among threads."""


@dataclass(frozen=True)
class AtHome:
    """Where a client went from the model of all, and what its own examples say of both.

    `before` and `after` are scores on examples that were held out: each by a model that went on without it.
    `tested` are both models' on test examples, where the client has some.
    """

    found: tuning.Tuned
    examples: int
    before: Scores
    after: Scores
    tested: tuple[Scores, Scores]


@dataclass(frozen=True)
class Received:
    """What one client has of a run that has ended."""

    party: Party
    run: str

    @cached_property
    def task(self) -> PartyTask:
        """The client's model and examples."""
        return load_task(self.party)

    @cached_property
    def params(self) -> Tensor:
        """The model of all (d,), as it was handed out."""
        path = self.party.run_folder(self.run) / "result"
        if not path.is_file():
            raise UserError(f"run {self.run!r} has handed out no model to {self.party.name} yet")
        self._check_plan()
        tensors = result_of(path, self.run)
        algorithm = self.task.resolved.algorithm
        begin = algorithm.init(self.task.model, (self._client,), self.task.key.fold("init"))
        if described(tensors) != described(begin.broadcast):
            raise UserError(
                f"{path}: what was handed out is no model of this folder's configuration and task; were they "
                "changed since?"
            )
        if "params" not in tensors:
            raise UserError(f"{algorithm.name} has no common model; its clients keep their own")
        return tensors["params"]

    def _check_plan(self) -> None:
        """Refuse a configuration or a task that is not the one this client joined the run with.

        A model of the same shape would be taken for another one: a seed decides which features were drawn.
        """
        secrets = Session(self.party, self.run).secrets
        if secrets is not None and secrets.plan == self.party.agreed.plan:
            return
        lost = f"{self.party.run_folder(self.run) / 'session'} does not say with which any more"
        raise UserError(
            f"this folder's config.toml, `examples` in {PUBLIC} or task.py are not those with which "
            f"{self.party.name} joined run {self.run!r}: put them back as they were"
            if secrets is not None
            else f"{self.party.name} joined run {self.run!r} with some config.toml and task.py; {lost}"
        )

    @property
    def _client(self) -> int:
        assert self.party.client is not None
        return self.party.client

    def at_home(self) -> AtHome:
        """Go on from the model of all on this client's own examples."""
        task, params, key = self.task, self.params, self.task.key
        algorithm, tune = task.resolved.algorithm, task.config.aggregation.tune
        owner = OneClient(self._client, task, Noiseless(), seed=0)
        tuning.check_one_model(algorithm.personal(owner, key), algorithm.name)
        origin = tuning.origin_of(algorithm, task.model, key)
        with _one_thread_if(owner.everything().y.shape[1] * len(params) < SMALL):
            found = tuning.tuned(owner, origin, params, tuning.scales_of(tune))
            start = tuning.start_of(origin, params, found.scale)
            before, after = (
                self._judged(*tuning.held_out(owner, *by)) for by in ((params, None), (start, found.pull))
            )
        tested = task.score(params), task.score(found.params)
        return AtHome(found, owner.everything().y.shape[1], before, after, tested)

    def _judged(self, outputs: Tensor, labels: Tensor) -> Scores:
        """Return loss and metrics of outputs for this client's examples."""
        model = self.task.model

        def accuracy(outputs: Tensor, labels: Tensor) -> float:
            return float((model.predict(outputs) == labels).double().mean())

        learner = self.task.assembled.learner or Learner(model, {"accuracy": accuracy})
        return learner.judged(outputs, labels)


@contextmanager
def _one_thread_if(small: bool) -> Iterator[None]:
    """Compute in one thread where steps are short: threads would wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def client_in(folder: Path) -> Party | None:
    """Return the client whose own folder this is; None: it is something else."""
    if not is_partys(folder):
        return None
    party = Party.open(folder)
    return None if party.client is None else party


def received(party: Party, run: str | None = None) -> Received:
    """Return what a client has of a run: of the only one that has ended, where none is named."""
    ended = {path.parent.name for path in (party.state / "runs").glob("*/result")}
    if run is not None and run not in ended:
        raise UserError(f"{party.name} has no model of a run {run!r}: {nearest(run, sorted(ended))}")
    if run is None and len(ended) != 1:
        several = f"models of several runs; name one with --run: {', '.join(sorted(ended))}"
        raise UserError(f"{party.folder} holds {several if ended else 'no model yet: no run has ended'}")
    return Received(party, run or ended.pop())
