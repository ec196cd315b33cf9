"""A whole audit of a configuration, or of a configuration and a task: every test, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trilemma.audit.bits import bits
from trilemma.audit.canaries import DIMENSIONS, CanaryExamples, Pair, canary_pairs
from trilemma.audit.likelihood import likelihood
from trilemma.audit.one_run import from_one_run
from trilemma.audit.outcomes import Audit, AuditOutcome, Value
from trilemma.audit.own_gradients import faithful
from trilemma.audit.search import of_subject, search
from trilemma.audit.sensitivity import own_pairs, sensitivity, wild_pairs
from trilemma.audit.subject import Subject
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.data import FederatedData
from trilemma.data.own.declared import declaration_of
from trilemma.data.types import each
from trilemma.experiment import Config
from trilemma.models.types import Model
from trilemma.privacy import NoGuarantee
from trilemma.privacy.types import Arithmetic
from trilemma.simulate.experiment import assemble
from trilemma.task import Task
from trilemma.task.neighbours import changes

BOUNDS = 4
"""Bounds on ε in an audit that can be false by chance, at most: each gets that share of the risk."""

WORK = 1 << 26
"""Numbers that trials on a user's own model may draw: what decides how many there are."""


@dataclass(frozen=True)
class Effort:
    """How hard an audit tries, and how sure it wants to be.

    Attributes:
        trials: Runs with each of the two data sets.
        canaries: Canaries in the one-run test.
        confidence: Of all bounds of the audit together.
        seed: Of everything that is drawn.
        rounds: Rounds to play; None: as configured. What is certified is certified for as many.

    >>> round(Effort().risk, 4)
    0.0025
    >>> Effort(confidence=1.0)
    Traceback (most recent call last):
    trilemma.base.errors.UserError: confidence = 1.0: allowed are numbers between 0 and 1, as 0.99
    """

    trials: int = 10_000
    canaries: int = 1000
    confidence: float = 0.99
    seed: int = 1
    rounds: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise UserError(f"confidence = {self.confidence}: allowed are numbers between 0 and 1, as 0.99")
        for name, least in (("trials", 10), ("canaries", 1), ("rounds", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} = {value}: allowed is {least} or more")

    @property
    def risk(self) -> float:
        """The chance that one bound may be false with."""
        return (1 - self.confidence) / BOUNDS


def examine(
    config: Config,
    task: Task | None = None,
    effort: Effort | None = None,
    arithmetic: Arithmetic = "grid",
) -> Audit:
    """Audit what clients of `config` would send, on canaries and on the configuration's own model and data.

    `arithmetic` is that of a real client unless it is said to be a simulation's.
    """
    effort = effort or Effort()
    experiment = assemble(config.with_("run.device='cpu'"), effort.seed, task)
    held = experiment.clients.data
    examples = held.poorest(experiment.honest)
    subject = Subject.of(config, examples, arithmetic, effort.rounds)
    name = f"{config.algorithm.name}, {config.privacy.threat}, {arithmetic}"
    if subject is None:
        verdict = experiment.resolved.verdict(config.run.rounds, config.privacy.delta)
        notes = ("nothing is noised, so there is nothing to test: whoever sees a message sees what is in it",)
        return Audit(name, verdict, config.privacy.delta, config.run.rounds, 0, effort.confidence, (), notes)
    key = Key(effort.seed).fold("audit")
    size = batch_of(config, subject, held)
    own = own_pairs_of(subject, experiment.clients.model, held, size)
    outcomes = [*canary_tests(subject, effort, key)]
    outcomes.append(sensitivity(subject, own, key, experiment.clients.model.name))
    outcomes += searched(subject, experiment.clients.model, held, size, key)
    if task is not None and task.records is not None:
        outcomes.append(neighbours(task))
    if task is not None and not subject.amplified and not subject.absent:
        affordable = WORK // (experiment.clients.model.dim * subject.rounds * subject.threat.clients)
        trials = min(effort.trials, max(50, affordable))
        outcomes += likelihood(subject, own, trials, effort.risk, key.fold("own"), ", own model")
    return concluded(name, subject, effort, outcomes, notes_on(config, subject))


def concluded(
    name: str, subject: Subject, effort: Effort, outcomes: Sequence[AuditOutcome], notes: tuple[str, ...]
) -> Audit:
    """Return all that was found about a subject, beside what is certified for it."""
    return Audit(
        name,
        subject.verdict,
        subject.delta,
        subject.rounds,
        effort.trials,
        effort.confidence,
        tuple(outcomes),
        notes,
    )


def canary_tests(subject: Subject, effort: Effort, key: Key) -> list[AuditOutcome]:
    """Return what all tests on canaries find."""
    pairs = canary_pairs(subject.release, DIMENSIONS, key)
    return [
        *likelihood(subject, pairs, effort.trials, effort.risk, key),
        from_one_run(subject, effort.canaries, effort.risk, key),
        bits(subject, pairs[0], key, effort.risk),
        sensitivity(subject, wild_pairs(subject, DIMENSIONS, key), key, "canaries"),
    ]


def searched(
    subject: Subject, model: Model, held: FederatedData, size: int, key: Key
) -> Iterator[AuditOutcome]:
    """Yield what a directed search finds on the model that is trained, for records like those held."""
    declaration = declaration_of(held.dataset, seen=True)
    yield faithful(model, declaration, key)
    yield from search(of_subject(subject, model, size, key), declaration, key)


def neighbours(task: Task) -> AuditOutcome:
    """Return how many training examples one changed record changes."""
    worst = max(changes(task), key=lambda change: change.examples)
    facts: dict[str, Value] = {"client": worst.client, "what": worst.what}
    return AuditOutcome("neighbours", "examples", float(worst.examples), 1.0, facts=facts)


def notes_on(config: Config, subject: Subject) -> tuple[str, ...]:
    """Return what must be read beside the outcomes."""
    notes = []
    if isinstance(subject.verdict, NoGuarantee):
        notes.append(f"nothing is certified: {subject.verdict.reason}")
    if subject.rounds < config.run.rounds:
        notes.append(
            f"{subject.rounds} of {config.run.rounds} rounds were played; the certificate is that of as many"
        )
    if subject.threat.model.central and config.aggregation.rule != "mean":
        notes.append("the observer sees the mean of the messages, not what the rule makes of them")
    return tuple(notes)


def batch_of(config: Config, subject: Subject, held: FederatedData) -> int:
    """Return how many of its own examples a client holds in these tests: one batch, as small as allowed."""
    options, wanted = config.algorithm.options, subject.release.batch
    if subject.release.unit == "user":
        wanted = max(options.least_examples, min(32, int(getattr(options, "batch_size", 32))))
    return min(wanted, int(held.sizes.min()))


def own_pairs_of(subject: Subject, model: Model, held: FederatedData, size: int) -> list[Pair]:
    """Return pairs of the first two clients' examples, on the model they train."""
    both = held.everything((0, min(1, held.clients - 1)))

    def first(client: int) -> CanaryExamples:
        return CanaryExamples(each(both.x, lambda column: column[client, :size]), both.y[client, :size])

    return own_pairs(subject, model, first(0), first(1))
