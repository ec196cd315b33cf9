"""A client's answers in a run: it pays, computes, remembers, and only then speaks.

What a client draws for a release (its batch, its dropout, its own noise) comes from the operating system,
once: the release is replayed from the journal and never drawn again. A process that dies between drawing and
journal has let nothing out; in that epoch the round is over for it.
"""

from __future__ import annotations

import math
import secrets as system
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from trilemma.base.keys import Key
from trilemma.base.stopwatch import Stopwatch
from trilemma.federation.client.journal import (
    Again,
    Journal,
    JournalEntry,
    Scores,
    ToldScore,
    told_before,
    what_to_do,
    what_to_tell,
)
from trilemma.federation.client.sessions import Session
from trilemma.federation.client.spending import pay, pay_score
from trilemma.federation.client.timed_noise import TimedNoise
from trilemma.federation.party.task import OneClient, PartyTask
from trilemma.federation.protocol import events, kinds, wire
from trilemma.federation.protocol.admission import Described, check_broadcast, described, length_of
from trilemma.federation.protocol.events import figures
from trilemma.federation.protocol.reasons import Reason, Refused, note_down
from trilemma.federation.protocol.wire import Whole
from trilemma.federation.server.scoring import SHARE
from trilemma.learning.protocol import ClientStep, Start, State
from trilemma.learning.steps import total
from trilemma.learning.steps.total import Failures
from trilemma.privacy.secrets import SecretNoise
from trilemma.privacy.types import NoiseSource


@dataclass(frozen=True)
class Loaded:
    """A client's task, and of which terms and plan it was loaded."""

    client: int
    agreed: tuple[str, str]
    task: PartyTask

    def start(self) -> Start:
        """Where the algorithm starts, as this client computes it."""
        task = self.task
        return task.resolved.algorithm.init(task.model, (self.client,), task.key.fold("init"))

    @cached_property
    def expected(self) -> Described:
        """What a broadcast looks like: as the one the algorithm starts with."""
        return described(self.start().broadcast)

    @property
    def broadcast_bytes(self) -> int:
        """How long a broadcast is."""
        return length_of(self.expected)

    def check_broadcast(self, broadcast: State, expected: Described | None = None) -> None:
        """Refuse what is none of this configuration's; an accountant may count on how large it is."""
        private = self.task.resolved.release is not None
        bound = self.task.config.privacy.broadcast_bound if private else math.inf
        check_broadcast(broadcast, self.expected if expected is None else expected, bound)


@dataclass(frozen=True)
class RunAnswers:
    """What a client answers in one run, of a roster with so many places (`clients`)."""

    loaded: Loaded
    session: Session
    journal: Journal
    clients: int
    say: events.Say

    @property
    def _task(self) -> PartyTask:
        return self.loaded.task

    def answer(self, ask: kinds.Ask, broadcast: wire.Tensors, asked: str, watch: Stopwatch) -> Whole:
        """Answer the question of a round, which has the digest `asked`."""
        with watch.stage("journal"):
            todo = what_to_do(self.journal.last(), self.loaded.client, ask, asked)
        about: dict[str, Any] = {"run": ask.run, "epoch": ask.epoch}
        header = kinds.Answer(client=self.loaded.client, round=ask.round, **about)
        if isinstance(todo, Again):
            self.say(events.ANSWER_REPEATED(round=ask.round + 1, **about))
            return wire.parts_of(header, todo.sent)
        if not 0 <= ask.round < self._task.config.run.rounds:
            raise Refused(
                Reason.ROUND, f"round {ask.round} of a run of {self._task.config.run.rounds} rounds"
            )
        self.loaded.check_broadcast(broadcast)
        # Order matters: pay, compute, remember, and only then speak.
        secrets = self.session.require(ask.epoch)
        before = self.loaded.start().clients if todo.state is None else todo.state
        unheard = sorted(set(ask.unused) & set(range(self.clients)))  # a ledger keeps it for ever
        with uninterrupted():
            with watch.stage("ledger"):
                epsilon = pay(self.session.party, self._task, secrets, ask.run, ask.round, unheard)
            noise = partial(self.session.noise, secrets, self._task.scale(self.loaded.client))
            sent, after, loss = self._computed(ask, broadcast, before, noise, watch)
            with watch.stage("journal"):
                entry = JournalEntry(ask.run, ask.epoch, ask.round, asked, sent, before, after)
                kept = self.journal.write(entry)
        answer, seconds = wire.parts_of(header, kept.sent), watch.take()
        noted = {"round": ask.round, "epoch": ask.epoch, "loss": loss, "epsilon": epsilon}
        self.session.note({**noted, "unheard": unheard, "seconds": seconds})
        measured = {"seconds": figures(seconds), "bytes": sum(map(len, answer)), "epsilon": figures(epsilon)}
        self.say(events.ROUND_ANSWERED(round=ask.round + 1, **about, **measured))
        return answer

    def _computed(
        self,
        ask: kinds.Ask,
        broadcast: State,
        before: State,
        noise: Callable[[], SecretNoise],
        watch: Stopwatch,
    ) -> tuple[wire.Tensors, State, float | None]:
        """Return what is sent in a round, the state after it, and the loss; the step itself is let go."""
        with watch.stage("compute"):
            step = self._step(ask, broadcast, before, lambda: TimedNoise(noise(), watch))
        with watch.stage("serialise"):
            sent = self._task.message.encode(step.messages)  # a second copy of what the step has
        return sent, step.state, _number(step.report.get("loss"))

    def _step(
        self, ask: kinds.Ask, broadcast: State, state: State, noise: Callable[[], NoiseSource]
    ) -> ClientStep:
        """Take a step of the algorithm, with randomness that nobody else knows and no other step had."""
        party = self.session.party
        reproducible = party.reproducible
        seed = system.randbits(256) if reproducible is None else reproducible.batches
        me = OneClient(self.loaded.client, self._task, noise(), seed)
        key, algorithm = Key(seed).fold("round", ask.round), self._task.resolved.algorithm
        done, failures = total.step(algorithm, broadcast, state, me, ask.round, key, again=noise)
        tell_owner(party.log, f"round {ask.round} of run {ask.run!r}", failures)
        return done

    def detail(self, inquire: kinds.Inquire, question: wire.Tensors, asked: str) -> bytes:
        """Answer what the server asks after the answer of a round, from the state that answer left."""
        inquiry = self._task.resolved.algorithm.inquiry
        assert inquiry is not None
        entry = what_to_tell(self.journal.last(), inquire, asked)
        told = inquiry.message(self._task.model).encode(inquiry.answer(question, entry.after))
        self.journal.write(entry)
        return wire.dumps(kinds.Detail(client=self.loaded.client, **inquire.model_dump()), told)

    def score(self, evaluate: kinds.Evaluate, model: wire.Tensors, asked: str) -> bytes:
        """Tell how good a model is on this client's own examples, once for each turn, paid for and noised."""
        own, party = self._task.resolved.own_scores, self.session.party
        assert own is not None
        run, epoch, round_ = evaluate.run, evaluate.epoch, evaluate.round
        about = {"run": run, "epoch": epoch, "round": round_ + 1}
        scores = Scores(party.run_folder(run))
        header = kinds.Scored(client=self.loaded.client, **evaluate.model_dump())
        if (told := told_before(scores.last(), evaluate, asked)) is not None:
            self.say(events.ANSWER_REPEATED(**about))
            return wire.dumps(header, told)
        if round_ + 1 not in own.turns:
            raise Refused(Reason.ROUND, f"round {round_} is none after which clients evaluate")
        self.loaded.check_broadcast(model, {"params": self.loaded.expected["params"]})
        self.session.require(epoch)
        # The same order: pay, compute, remember, and only then speak.
        with uninterrupted():
            epsilon = pay_score(party, self._task, run, epoch, round_)
            me = OneClient(self.loaded.client, self._task, self.session.own_noise(), seed=0)
            share, failures = me.right_answers(model["params"])
            told = {SHARE: own.told(share, me.noise, me.ids, round_)}
            scores.write(ToldScore(run, epoch, round_, asked, told))
        tell_owner(party.log, f"the evaluation after round {round_} of run {run!r}", failures)
        self.say(events.SCORE_TOLD(**about, epsilon=figures(epsilon)))
        return wire.dumps(header, told)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off signals that this process answers by raising something, until the end.

    What is raised meanwhile then comes from a task's own code, and counts as its failure. Signals reach a
    process's first thread only.
    """
    before: dict[signal.Signals, Callable[[int, FrameType | None], object]] = {}
    came: list[int] = []

    def later(number: int, frame: FrameType | None) -> None:
        came.append(number)

    if threading.current_thread() is threading.main_thread():
        for one in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(one)
            if callable(handler):
                before[one] = handler
                signal.signal(one, later)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    if came:
        signal.raise_signal(came[0])


def tell_owner(log: Path, what: str, failures: Failures) -> None:
    """Write into a client's own log, and nowhere else, how much of its data counted as zero, and why."""
    if failures.why:
        count = int(failures.counts.sum())
        with suppress(Exception):  # nor may this be what others see
            note_down(log, f"{what}: {count} times something counted as zero, first for this: {failures.why}")


def _number(value: Any) -> float | None:
    number = float(value.reshape(-1)[0]) if isinstance(value, torch.Tensor) and value.numel() else math.nan
    return number if math.isfinite(number) else None
