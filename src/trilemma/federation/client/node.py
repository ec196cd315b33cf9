"""A client's side of a run: it answers blocks with blocks, or refuses with a reason, whoever carries them.

What a client believes is on its own disk: its configuration, its roster, its identity, its budget. The
server proposes a run, relays keys and sends numbers; it cannot change how much is clipped and noised, with
whom noise is shared, or how much privacy is spent.

One answer at a time leaves a folder, however many processes work in it: each holds the folder's lock from
reading the journal to writing it. For each block what was agreed on is read once, and used throughout.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.base.stopwatch import Stopwatch
from trilemma.federation.client.journal import Journal
from trilemma.federation.client.proposals import check_allowed, check_reach
from trilemma.federation.client.rounds import Loaded, RunAnswers, uninterrupted
from trilemma.federation.client.sessions import Session, WentBack
from trilemma.federation.client.spending import least_members, ledger_position
from trilemma.federation.party.adoption import adopt, counted_on
from trilemma.federation.party.agreed import Agreed
from trilemma.federation.party.bundles import finish
from trilemma.federation.party.layout import Party
from trilemma.federation.party.task import PartyTask, load_task
from trilemma.federation.protocol import events, kinds, wire
from trilemma.federation.protocol.admission import HEADROOM, described
from trilemma.federation.protocol.expulsions import AnnouncedExpulsion, check_announced
from trilemma.federation.protocol.reasons import Reason, Refused, note_down, reason_for, write_down
from trilemma.federation.protocol.wire import Whole

ROOM_PER_CLIENT = 1024
"""Bytes a header may take for each client of the federation: a key, a signature, a round."""

SHORT = 1 << 20
"""Bytes up to which an answer is one piece of memory; the tensors of a longer one stay where they lie."""

SECOND_QUESTION = 2
"""How many times as long as a broadcast a second question may be: places, of 8 bytes each, and values."""

MOST_SHOWN = 16
"""Clients with older ledgers whom a client names at a time: each costs those who agree another epoch."""


class Node:
    """One client: everything it knows is in its folder; what it has in memory saves reading it again."""

    def __init__(self, party: Party, say: events.Say = events.silent) -> None:
        assert party.client is not None
        self.party, self.client, self.say = party, party.client, say
        self.sessions: dict[str, Session] = {}
        self._journals: dict[str, Journal] = {}
        self._loaded: Loaded | None = None
        self._handlers: dict[str, Callable[[wire.Block, Agreed], Whole]] = {
            kinds.Hello.kind: self._hello,
            kinds.Keys.kind: self._keys,
            kinds.Confirm.kind: self._confirm,
            kinds.Ask.kind: self._ask,
            kinds.Inquire.kind: self._inquire,
            kinds.Evaluate.kind: self._evaluate,
            kinds.Finished.kind: self._finished,
            kinds.Expelled.kind: self._expelled,
        }

    def answer(self, block: wire.Block) -> Whole:
        """Answer a block from the server, or raise `Refused`, whose text may travel back.

        Whatever goes wrong, that text is from a fixed catalogue; the rest is in this client's own log.
        """
        try:
            kind = wire.kind_of(block)
        except wire.WireError:
            kind = "block"
        with self._refusing(kind):
            finish(self.party)
            handler = self._handlers.get(wire.kind_of(block))
            if handler is None:
                raise Refused(Reason.BLOCK, "a client does not answer this kind")
            answer = handler(block, self.party.agreed)
            long = not isinstance(answer, bytes) and sum(map(len, answer)) > SHORT
            return answer if long else wire.together(answer)

    def check_length(self, length: int) -> None:
        """Refuse a question longer than any of this configuration's, before anything of it is stored."""
        with self._refusing("block"):
            room = ROOM_PER_CLIENT * len(self.party.signed_roster.clients)
            if length > HEADROOM + room + SECOND_QUESTION * self.loaded.broadcast_bytes:
                raise wire.WireError(f"a question of {length} bytes")

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
        self._say_refused(kind if kind in self._handlers else "unknown", reason)
        raise Refused(reason)

    def _say_refused(self, kind: str, reason: Reason) -> None:
        self.say(events.REFUSED(asked=kind, reason=reason.code))

    # --- what it has at hand ----------------------------------------------------------------------------

    @property
    def task(self) -> PartyTask:
        """The task, as this client had it when it last agreed to terms, or was first asked something."""
        return self.loaded.task

    @property
    def loaded(self) -> Loaded:
        """The task, with what was agreed on when it was loaded."""
        if self._loaded is None:
            agreed = self.party.agreed
            with uninterrupted():  # what is raised meanwhile comes from the task's own code
                found = load_task(self.party, tell=partial(note_down, self.party.log))
            self._loaded = Loaded(self.client, (agreed.terms, agreed.plan), found)
        return self._loaded

    def hold(self, task: PartyTask) -> None:
        """Work on this task, an auditor's, in place of the folder's, as long as nothing else is agreed on."""
        if self._loaded is None:
            agreed = self.party.agreed
            self._loaded = Loaded(self.client, (agreed.terms, agreed.plan), task)
        self._loaded = replace(self._loaded, task=task)

    def _known(self, run: str, agreed: Agreed) -> Session:
        """Return a run's session, where this client joined it and its terms are still those."""
        session = self.sessions.get(run) or Session(self.party, run)
        session.check_terms(agreed)
        # Only now is it kept: there is no end of names of runs that nobody joined.
        return self.sessions.setdefault(run, session)

    def _in_run(self, run: str, agreed: Agreed) -> RunAnswers:
        session = self._known(run, agreed)
        journal = self._journals.setdefault(run, Journal(self.party.run_folder(run)))
        return RunAnswers(self.loaded, session, journal, len(agreed.roster.clients), self.say)

    def _read(
        self, block: wire.Block, expected: type[wire.AnyHeader], agreed: Agreed, broadcasts: int = 0
    ) -> tuple[wire.AnyHeader, wire.Tensors]:
        """Read a block; refuse one longer than a header about all clients and so many `broadcasts`."""
        message = broadcasts * self.loaded.broadcast_bytes if broadcasts else 0
        return wire.loads(block, expected, HEADROOM + ROOM_PER_CLIENT * len(agreed.roster.clients) + message)

    # --- an epoch begins --------------------------------------------------------------------------------

    def _hello(self, block: wire.Block, agreed: Agreed) -> bytes:
        """Join an epoch: on the agreed terms, in a run that its owner allows, with a ledger that is whole."""
        hello, _ = wire.loads(block, kinds.Hello, HEADROOM + wire.LARGEST_HEADER)
        agreed = self._adopted(hello, agreed)
        if hello.terms != agreed.terms:
            raise Refused(Reason.TERMS, f"the server's are {hello.terms}, this client's {agreed.terms}")
        self._check_folder()
        if self._loaded is not None and self._loaded.agreed != (agreed.terms, agreed.plan):
            self._loaded = None  # its owner changed them while this process ran
        check_allowed(self.party, self.task, hello.run)
        ledger_position(self.party, self.task)  # a ledger that was set back: better now than among others
        check_reach(self.party, self.task, hello.run)
        session = self.sessions.setdefault(hello.run, Session(self.party, hello.run))
        before = () if session.secrets is None else session.secrets.expelled
        self._check_expulsions(hello.expelled, before, agreed)
        key = session.open(hello.epoch, agreed, hello.expelled)
        about: dict[str, Any] = {"run": hello.run, "epoch": hello.epoch}
        for one in hello.expelled[len(before) :]:
            self.say(events.EXPULSION_ANNOUNCED(client=one.client, **about, **one.facts))
        self.say(events.EPOCH_JOINED(**about))
        return wire.dumps(kinds.Joined(client=self.client, key=key, **about))

    def _check_expulsions(
        self, announced: list[AnnouncedExpulsion], before: tuple[AnnouncedExpulsion, ...], agreed: Agreed
    ) -> None:
        """Refuse what this client cannot have been told so far."""
        expels = self.task.resolved.algorithm.members is not None
        check_announced(announced, before, len(agreed.roster.clients), expels)

    def _check_folder(self) -> None:
        """Refuse a folder whose noise anybody can draw again, or say loudly that a test wants it so."""
        try:
            known = self.party.reproducible
        except UserError as error:
            raise Refused(Reason.UNSAFE, str(error)) from None
        if known is not None:
            said = f"{self.party.name}: noise and batches are REPRODUCIBLE, NOT SECRET: for tests only"
            print(said, file=sys.stderr, flush=True)

    def _adopted(self, hello: kinds.Hello, agreed: Agreed) -> Agreed:
        """Take the roster that a hello shows into force, where the authority signed it after this one."""
        if not hello.roster or hello.roster == self.party.roster.read_text():
            return agreed
        try:
            roster = adopt(self.party, hello.roster)
        except UserError as error:
            raise Refused(Reason.ROSTER, str(error)) from None
        if roster == agreed.roster:
            return agreed  # the same, otherwise signed or written
        self.say(events.ROSTER_ADOPTED(serial=roster.serial, clients=list(roster.keys.members)))
        return self.party.agreed

    def _keys(self, block: wire.Block, agreed: Agreed) -> bytes:
        """Derive keys with the members, if enough of them are there that this client counts on."""
        keys, _ = self._read(block, kinds.Keys, agreed)
        session = self._known(keys.run, agreed)
        offers = {int(client): key for client, key in keys.keys.items()}
        least = least_members(self.party, self.task)
        if (known := counted_on(self.party, offers)) < least:
            raise Refused(Reason.MEMBERS, f"{known} members it counts on where this client wants {least}")
        ledger, neighbours = ledger_position(self.party, self.task), self.task.config.privacy.neighbours
        confirmation = session.agree(keys.epoch, offers, ledger, agreed.roster.keys, neighbours)
        return wire.dumps(
            kinds.Ready(client=self.client, run=keys.run, epoch=keys.epoch, confirmation=confirmation)
        )

    def _confirm(self, block: wire.Block, agreed: Agreed) -> bytes:
        confirm, _ = self._read(block, kinds.Confirm, agreed)
        confirmations = {int(client): text for client, text in confirm.confirmations.items()}
        about: dict[str, Any] = {"run": confirm.run, "epoch": confirm.epoch}
        try:
            self._known(confirm.run, agreed).confirm(confirm.epoch, confirmations, agreed.roster.keys)
        except WentBack as error:
            if not error.shown:
                raise
            # A server that has forgotten what it saw can go on without them.
            write_down(self.party.log, confirm.kind, error)
            self._say_refused(confirm.kind, error.reason)
            shown = {str(client): one.encode() for client, one in sorted(error.shown.items())[:MOST_SHOWN]}
            return wire.dumps(kinds.Doubted(client=self.client, shown=shown, **about))
        self.say(events.EPOCH_CONFIRMED(**about))
        return wire.dumps(kinds.Confirmed(client=self.client, **about))

    # --- rounds -----------------------------------------------------------------------------------------

    def _ask(self, block: wire.Block, agreed: Agreed) -> Whole:
        watch = Stopwatch()
        with watch.stage("serialise"):
            ask, broadcast = self._read(block, kinds.Ask, agreed, broadcasts=1)
            asked = wire.digest(block)
        return self._in_run(ask.run, agreed).answer(ask, broadcast, asked, watch)

    def _inquire(self, block: wire.Block, agreed: Agreed) -> bytes:
        algorithm = self.task.resolved.algorithm
        if algorithm.inquiry is None:
            raise Refused(Reason.BLOCK, f"{algorithm.name} has no second exchange")
        inquire, question = self._read(block, kinds.Inquire, agreed, SECOND_QUESTION)
        return self._in_run(inquire.run, agreed).detail(inquire, question, wire.digest(block))

    def _evaluate(self, block: wire.Block, agreed: Agreed) -> bytes:
        if self.task.resolved.own_scores is None:
            raise Refused(Reason.BLOCK, "clients do not evaluate in this configuration")
        evaluate, model = self._read(block, kinds.Evaluate, agreed, broadcasts=1)
        return self._in_run(evaluate.run, agreed).score(evaluate, model, wire.digest(block))

    # --- the end ----------------------------------------------------------------------------------------

    def _expelled(self, block: wire.Block, agreed: Agreed) -> bytes:
        """Take note that this client was expelled: it takes no further part in the run."""
        told, _ = self._read(block, kinds.Expelled, agreed)
        session = self._known(told.run, agreed)
        if told.expulsion.client != self.client:
            raise Refused(Reason.EXPULSIONS, f"client {told.expulsion.client} is not this one")
        self._check_expulsions([told.expulsion], (), agreed)
        if session.expelled is None:
            session.leave(told.expulsion)
            self.say(events.EXPELLED(run=told.run, reason=Reason.EXPELLED.code, **told.expulsion.facts))
        return wire.dumps(kinds.Noted(client=self.client, run=told.run))

    def _finished(self, block: wire.Block, agreed: Agreed) -> bytes:
        """Keep the result: the last broadcast or, in its place, the model that is handed out."""
        finished, result = self._read(block, kinds.Finished, agreed, broadcasts=1)
        self._known(finished.run, agreed)
        if described(result) != self.loaded.expected:
            raise Refused(Reason.BROADCAST, "the result does not have the shape of this configuration's")
        result_file = self.party.run_folder(finished.run) / "result"
        files.write_atomically(result_file, *wire.sealed_parts([memoryview(block)]))
        self.say(events.RESULT_RECEIVED(run=finished.run))
        return wire.dumps(kinds.Noted(client=self.client, run=finished.run))
