"""A client's side of a run: it answers blocks with blocks, or refuses with a reason, whoever carries them.

What a client believes is on its own disk: its configuration, its roster, its identity, its budget. The
server proposes a run, relays keys and sends numbers; it cannot change how much is clipped and noised, with
whom noise is shared, or how much privacy is spent.

One answer at a time leaves a folder, however many processes work in it: each holds the folder's lock from
reading the journal to writing it. What a client draws for a release (its batch, its dropout, its own noise)
comes from the operating system, once: the release is replayed from the journal and never drawn again. A
process that dies between drawing and journal has let nothing out; in that epoch the round is over for it.

Longer than most modules, so that all that a server may ask of a client is answered in one place.
"""

from __future__ import annotations

import contextlib
import math
import secrets as system
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from trilemma.base import files
from trilemma.base.errors import UserError
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
from trilemma.federation.client.paid import tell_owner, uninterrupted
from trilemma.federation.client.proposals import check_allowed, check_reach
from trilemma.federation.client.sessions import Session, WentBack
from trilemma.federation.client.spending import least_members, ledger_position, pay, pay_score
from trilemma.federation.client.timed_noise import TimedNoise
from trilemma.federation.party.adoption import adopt, counted_on
from trilemma.federation.party.bundles import finish
from trilemma.federation.party.layout import Party
from trilemma.federation.party.task import OneClient, PartyTask, load_task
from trilemma.federation.protocol import events, kinds, wire
from trilemma.federation.protocol.admission import HEADROOM, Described, check_broadcast, described, length_of
from trilemma.federation.protocol.events import figures
from trilemma.federation.protocol.expulsions import AnnouncedExpulsion, check_announced
from trilemma.federation.protocol.reasons import Reason, Refused, note_down, reason_for, write_down
from trilemma.federation.protocol.wire import Whole
from trilemma.federation.server.scoring import SHARE
from trilemma.learning.protocol import ClientStep, Start, State
from trilemma.learning.steps import total
from trilemma.privacy.secrets import SecretNoise
from trilemma.privacy.types import NoiseSource

ROOM_PER_CLIENT = 1024
"""Bytes a header may take for each client of the federation: a key, a signature, a round."""

SHORT = 1 << 20
"""Bytes up to which an answer is one piece of memory; the tensors of a longer one stay where they lie."""

SECOND_QUESTION = 2
"""How many times as long as a broadcast a second question may be: places, of 8 bytes each, and values."""

MOST_SHOWN = 16
"""Clients with older ledgers whom a client names at a time: each costs those who agree another epoch."""


@dataclass(frozen=True)
class Node:
    """One client: everything it knows is in its folder."""

    party: Party
    sessions: dict[str, Session] = field(default_factory=dict)
    journals: dict[str, Journal] = field(default_factory=dict)
    loaded: dict[str, str] = field(default_factory=dict)
    say: events.Say = events.silent

    @property
    def client(self) -> int:
        """Which client this is."""
        assert self.party.client is not None
        return self.party.client

    @cached_property
    def task(self) -> PartyTask:
        """The task, as this client had it when it last agreed to terms, or was first asked something."""
        self.loaded["agreed"] = self._agreed
        with uninterrupted():  # what is raised meanwhile comes from the task's own code
            return load_task(self.party, tell=lambda said: note_down(self.party.log, said))

    @property
    def _agreed(self) -> str:
        """What a task is loaded from: terms, and the code its owner allows or not."""
        return f"{self.party.terms} {self.party.plan}"

    def answer(self, block: wire.Block) -> Whole:
        """Answer a block from the server, or raise `Refused`, whose text may travel back.

        Whatever goes wrong, that text is from a fixed catalogue; the rest is in this client's own log.
        """
        try:
            kind = wire.kind_of(block)
        except wire.WireError:
            kind = "block"
        with self._refusing(kind):
            answer = self._handle(block)
            long = not isinstance(answer, bytes) and sum(map(len, answer)) > SHORT
            return answer if long else wire.together(answer)

    @contextlib.contextmanager
    def _refusing(self, kind: str) -> Iterator[None]:
        """Work alone in this folder, on a question of this kind; whatever goes wrong is a refusal."""
        failure: BaseException
        try:
            with files.locked(self.party.lock):
                yield
            return
        except wire.WireError as error:
            failure, reason = Refused(Reason.BLOCK, str(error)), Reason.BLOCK
        except Refused as error:
            failure, reason = error, error.reason
        except (Exception, SystemExit) as error:  # a task.py may call sys.exit, with a text
            failure, reason = error, reason_for(error)
        write_down(self.party.log, kind, failure)
        asked = kind if kind in self._handlers else "unknown"
        self.say(events.REFUSED(asked=asked, reason=reason.code))
        raise Refused(reason)

    def check_length(self, length: int) -> None:
        """Refuse a question longer than any of this configuration's, before anything of it is stored."""
        with self._refusing("block"):
            if length > HEADROOM + ROOM_PER_CLIENT * self._clients + SECOND_QUESTION * self._broadcast_bytes:
                raise wire.WireError(f"a question of {length} bytes")

    def _handle(self, block: wire.Block) -> Whole:
        finish(self.party)
        return self._handlers.get(wire.kind_of(block), self._unknown)(block)

    @property
    def _handlers(self) -> dict[str, Callable[[wire.Block], Whole]]:
        return {
            kinds.Hello.kind: self._hello,
            kinds.Keys.kind: self._keys,
            kinds.Confirm.kind: self._confirm,
            kinds.Ask.kind: self._ask,
            kinds.Inquire.kind: self._inquire,
            kinds.Evaluate.kind: self._evaluate,
            kinds.Finished.kind: self._finished,
            kinds.Expelled.kind: self._expelled,
        }

    def _unknown(self, block: wire.Block) -> bytes:
        raise Refused(Reason.BLOCK, "a client does not answer this kind")

    def _session(self, run: str) -> Session:
        return self.sessions.setdefault(run, Session(self.party, run))

    def _journal(self, run: str) -> Journal:
        return self.journals.setdefault(run, Journal(self.party.run_folder(run)))

    def _known(self, run: str) -> Session:
        """Return a run's session, where this client joined it and its terms are still those."""
        session = self.sessions.get(run) or Session(self.party, run)
        session.check_terms()
        # Only now is it kept: there is no end of names of runs that nobody joined.
        return self.sessions.setdefault(run, session)

    def _read(
        self, block: wire.Block, expected: type[wire.AnyHeader], message: int = 0
    ) -> tuple[wire.AnyHeader, dict[str, torch.Tensor]]:
        """Read a block; refuse one longer than a header about all clients and `message` bytes."""
        return wire.loads(block, expected, HEADROOM + ROOM_PER_CLIENT * self._clients + message)

    @cached_property
    def _clients(self) -> int:
        return len(self.party.signed_roster.clients)

    @property
    def _broadcast_bytes(self) -> int:
        return length_of(self._expected)

    def _hello(self, block: wire.Block) -> bytes:
        """Join an epoch: on the agreed terms, in a run that its owner allows, with a ledger that is whole."""
        hello, _ = wire.loads(block, kinds.Hello, HEADROOM + wire.LARGEST_HEADER)
        self._adopt(hello)
        if hello.terms != self.party.terms:
            raise Refused(Reason.TERMS, f"the server's are {hello.terms}, this client's {self.party.terms}")
        self._check_folder()
        if self.loaded.get("agreed") != self._agreed:
            for name in ("task", "_expected", "_clients"):  # its owner changed them while this process ran
                self.__dict__.pop(name, None)
        check_allowed(self.party, self.task, hello.run)
        ledger_position(self.party, self.task)  # a ledger that was set back: better now than among others
        check_reach(self.party, self.task, hello.run)
        session = self._session(hello.run)
        announced = self._check_expulsions(session, hello.expelled)
        key = session.open(hello.epoch, hello.expelled)
        for one in announced:
            self.say(
                events.EXPULSION_ANNOUNCED(run=hello.run, epoch=hello.epoch, client=one.client, **one.facts)
            )
        self.say(events.EPOCH_JOINED(run=hello.run, epoch=hello.epoch))
        return wire.dumps(kinds.Joined(client=self.client, run=hello.run, epoch=hello.epoch, key=key))

    def _check_expulsions(
        self, session: Session, announced: list[AnnouncedExpulsion]
    ) -> list[AnnouncedExpulsion]:
        """Refuse what this client cannot have been told so far; return whose expulsion is news."""
        before = () if session.secrets is None else session.secrets.expelled
        expels = self.task.resolved.algorithm.members is not None
        check_announced(announced, before, self._clients, expels)
        return announced[len(before) :]

    def _adopt(self, hello: kinds.Hello) -> None:
        """Take the roster that a hello shows into force, where the authority signed it after this one."""
        if not hello.roster or hello.roster == self.party.roster.read_text():
            return
        before = self.party.signed_roster
        try:
            roster = adopt(self.party, hello.roster)
        except UserError as error:
            raise Refused(Reason.ROSTER, str(error)) from None
        if roster == before:
            return  # the same, otherwise signed or written
        self.say(events.ROSTER_ADOPTED(serial=roster.serial, clients=list(roster.keys.members)))

    def _keys(self, block: wire.Block) -> bytes:
        """Derive keys with the members, if enough of them are there that this client counts on."""
        keys, _ = self._read(block, kinds.Keys)
        session = self._known(keys.run)
        offers = {int(client): key for client, key in keys.keys.items()}
        least = least_members(self.party, self.task)
        if (known := counted_on(self.party, offers)) < least:
            raise Refused(Reason.MEMBERS, f"{known} members it counts on where this client wants {least}")
        ledger = ledger_position(self.party, self.task)
        confirmation = session.agree(keys.epoch, offers, ledger, self.task.config.privacy.neighbours)
        return wire.dumps(
            kinds.Ready(client=self.client, run=keys.run, epoch=keys.epoch, confirmation=confirmation)
        )

    def _confirm(self, block: wire.Block) -> bytes:
        confirm, _ = self._read(block, kinds.Confirm)
        confirmations = {int(client): text for client, text in confirm.confirmations.items()}
        try:
            self._known(confirm.run).confirm(confirm.epoch, confirmations)
        except WentBack as error:
            if not error.shown:
                raise
            return self._doubt(confirm, error)
        self.say(events.EPOCH_CONFIRMED(run=confirm.run, epoch=confirm.epoch))
        return wire.dumps(kinds.Confirmed(client=self.client, run=confirm.run, epoch=confirm.epoch))

    def _doubt(self, confirm: kinds.Confirm, error: WentBack) -> bytes:
        """Refuse an epoch, and show why: a server that has forgotten what it saw can go on without them."""
        write_down(self.party.log, confirm.kind, error)
        self.say(events.REFUSED(asked=confirm.kind, reason=error.reason.code))
        shown = {str(client): one.encode() for client, one in sorted(error.shown.items())[:MOST_SHOWN]}
        return wire.dumps(
            kinds.Doubted(client=self.client, run=confirm.run, epoch=confirm.epoch, shown=shown)
        )

    def _ask(self, block: wire.Block) -> Whole:
        """Answer the question of a round."""
        watch = Stopwatch()
        with watch.stage("serialise"):
            ask, broadcast = self._read(block, kinds.Ask, self._broadcast_bytes)
            asked = wire.digest(block)
        session = self._known(ask.run)
        with watch.stage("journal"):
            journal = self._journal(ask.run)
            todo = what_to_do(journal.last(), self.client, ask, asked)
        header = kinds.Answer(client=self.client, run=ask.run, epoch=ask.epoch, round=ask.round)
        if isinstance(todo, Again):
            self.say(events.ANSWER_REPEATED(run=ask.run, epoch=ask.epoch, round=ask.round + 1))
            return wire.parts_of(header, todo.sent)
        if not 0 <= ask.round < self.task.config.run.rounds:
            raise Refused(Reason.ROUND, f"round {ask.round} of a run of {self.task.config.run.rounds} rounds")
        check_broadcast(broadcast, self._expected, self._bound)
        # Order matters: pay, compute, remember, and only then speak.
        secrets = session.require(ask.epoch)
        before = self._start().clients if todo.state is None else todo.state
        unheard = sorted(set(ask.unused) & set(range(self._clients)))  # a ledger keeps it for ever
        with uninterrupted():
            with watch.stage("ledger"):
                epsilon = pay(self.party, self.task, secrets, ask.run, ask.round, unheard)
            noise = partial(session.noise, secrets)
            sent, after, loss = self._computed(ask, broadcast, before, noise, watch)
            with watch.stage("journal"):
                kept = journal.write(JournalEntry(ask.run, ask.epoch, ask.round, asked, sent, before, after))
        answer, seconds = wire.parts_of(header, kept.sent), watch.take()
        session.note(
            {
                "round": ask.round,
                "epoch": ask.epoch,
                "loss": loss,
                "epsilon": epsilon,
                "unheard": unheard,
                "seconds": seconds,
            }
        )
        self.say(
            events.ROUND_ANSWERED(
                run=ask.run,
                epoch=ask.epoch,
                round=ask.round + 1,
                seconds=figures(seconds),
                bytes=sum(map(len, answer)),
                epsilon=figures(epsilon),
            )
        )
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
            sent = self.task.message.encode(step.messages)  # a second copy of what the step has
        return sent, step.state, _number(step.report.get("loss"))

    def _inquire(self, block: wire.Block) -> bytes:
        """Answer what the server asks after the answer of a round, from the state that answer left."""
        inquiry = self.task.resolved.algorithm.inquiry
        if inquiry is None:
            raise Refused(Reason.BLOCK, f"{self.task.resolved.algorithm.name} has no second exchange")
        inquire, question = self._read(block, kinds.Inquire, SECOND_QUESTION * self._broadcast_bytes)
        self._known(inquire.run)
        journal = self._journal(inquire.run)
        entry = what_to_tell(journal.last(), inquire, wire.digest(block))
        told = inquiry.message(self.task.model).encode(inquiry.answer(question, entry.after))
        journal.write(entry)
        header = kinds.Detail(client=self.client, run=inquire.run, epoch=inquire.epoch, round=inquire.round)
        return wire.dumps(header, told)

    def _evaluate(self, block: wire.Block) -> bytes:
        """Tell how good a model is on this client's own examples, once for each turn, paid for and noised."""
        own = self.task.resolved.own_scores
        if own is None:
            raise Refused(Reason.BLOCK, "clients do not evaluate in this configuration")
        evaluate, model = self._read(block, kinds.Evaluate, self._broadcast_bytes)
        run, epoch, round_, asked = evaluate.run, evaluate.epoch, evaluate.round, wire.digest(block)
        session = self._known(run)
        scores = Scores(self.party.run_folder(run))
        header = kinds.Scored(client=self.client, run=run, epoch=epoch, round=round_)
        if (told := told_before(scores.last(), evaluate, asked)) is not None:
            self.say(events.ANSWER_REPEATED(run=run, epoch=epoch, round=round_ + 1))
            return wire.dumps(header, told)
        if round_ + 1 not in own.turns:
            raise Refused(Reason.ROUND, f"round {round_} is none after which clients evaluate")
        check_broadcast(model, {"params": self._expected["params"]}, self._bound)
        session.require(epoch)
        # The same order: pay, compute, remember, and only then speak.
        with uninterrupted():
            epsilon = pay_score(self.party, self.task, run, epoch, round_)
            me = OneClient(self.client, self.task, session.own_noise(), seed=0)
            share, failures = me.right_answers(model["params"])
            told = {SHARE: own.told(share, me.noise, me.ids, round_)}
            scores.write(ToldScore(run, epoch, round_, asked, told))
        tell_owner(self.party.log, f"the evaluation after round {round_} of run {run!r}", failures)
        self.say(events.SCORE_TOLD(run=run, epoch=epoch, round=round_ + 1, epsilon=figures(epsilon)))
        return wire.dumps(header, told)

    def _step(
        self, ask: kinds.Ask, broadcast: State, state: State, noise: Callable[[], NoiseSource]
    ) -> ClientStep:
        """Take a step of the algorithm, with randomness that nobody else knows and no other step had."""
        reproducible = self.party.reproducible
        seed = system.randbits(256) if reproducible is None else reproducible.batches
        me = OneClient(self.client, self.task, noise(), seed)
        key, algorithm = Key(seed).fold("round", ask.round), self.task.resolved.algorithm
        done, failures = total.step(algorithm, broadcast, state, me, ask.round, key, again=noise)
        tell_owner(self.party.log, f"round {ask.round} of run {ask.run!r}", failures)
        return done

    def _check_folder(self) -> None:
        """Refuse a folder whose noise anybody can draw again, or say loudly that a test wants it so."""
        try:
            known = self.party.reproducible
        except UserError as error:
            raise Refused(Reason.UNSAFE, str(error)) from None
        if known is not None:
            said = f"{self.party.name}: noise and batches are REPRODUCIBLE, NOT SECRET: for tests only"
            print(said, file=sys.stderr, flush=True)

    def _start(self) -> Start:
        """Where the algorithm starts, as this client computes it."""
        task = self.task
        return task.resolved.algorithm.init(task.model, (self.client,), task.key.fold("init"))

    @cached_property
    def _expected(self) -> Described:
        """What a broadcast looks like: as the one the algorithm starts with."""
        return described(self._start().broadcast)

    @property
    def _bound(self) -> float:
        """How large a number of the server's may be: an accountant may count on it."""
        return math.inf if self.task.resolved.release is None else self.task.config.privacy.broadcast_bound

    def _expelled(self, block: wire.Block) -> bytes:
        """Take note that this client was expelled: it takes no further part in the run."""
        told, _ = self._read(block, kinds.Expelled)
        session = self._known(told.run)
        if told.expulsion.client != self.client:
            raise Refused(Reason.EXPULSIONS, f"client {told.expulsion.client} is not this one")
        check_announced([told.expulsion], (), self._clients, self.task.resolved.algorithm.members is not None)
        if session.expelled is None:
            session.leave(told.expulsion)
            self.say(events.EXPELLED(run=told.run, reason=Reason.EXPELLED.code, **told.expulsion.facts))
        return wire.dumps(kinds.Noted(client=self.client, run=told.run))

    def _finished(self, block: wire.Block) -> bytes:
        """Keep the result: the last broadcast or, in its place, the model that is handed out."""
        finished, result = self._read(block, kinds.Finished, self._broadcast_bytes)
        self._known(finished.run)
        if described(result) != self._expected:
            raise Refused(Reason.BROADCAST, "the result does not have the shape of this configuration's")
        result_file = self.party.run_folder(finished.run) / "result"
        files.write_atomically(result_file, *wire.sealed_parts([memoryview(block)]))
        self.say(events.RESULT_RECEIVED(run=finished.run))
        return wire.dumps(kinds.Noted(client=self.client, run=finished.run))


def _number(value: Any) -> float | None:
    number = float(value.reshape(-1)[0]) if isinstance(value, torch.Tensor) and value.numel() else math.nan
    return number if math.isfinite(number) else None
