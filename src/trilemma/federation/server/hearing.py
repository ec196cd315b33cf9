"""A round's questions to the clients whose turn it is, and what of their answers counts.

Most algorithms ask once. Where one has a second exchange (`learning.Inquiry`), those who were heard are asked
again, and whoever does not answer both counts as absent: its row is not finite, which is how a rule is told.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from trilemma.base.stopwatch import Stopwatch
from trilemma.federation.party.task import PartyTask
from trilemma.federation.protocol import events, kinds, wire
from trilemma.federation.protocol.admission import Admitted, Expected, Rejection, admit
from trilemma.federation.protocol.disk_backed import DiskBacked
from trilemma.federation.protocol.epochs import Epoch, Policy, decide
from trilemma.federation.protocol.events import without_quotes
from trilemma.federation.protocol.waiting import Took, Waiting, longest_prompt
from trilemma.federation.server.commits import Commit
from trilemma.federation.server.exchange import Correspondence, Patience
from trilemma.learning import MessageLayout, Messages
from trilemma.learning.messages import Length


@dataclass(frozen=True)
class Heard:
    """What a round came to.

    `turn` has the rows that the rule is told about; `answers` and, where there was a second exchange,
    `details` are what was admitted in each; `messages` is what the server's step is given; `length` is how
    much the admitted messages of both were together. `late` are those who were not waited for and not heard;
    `took` is how long clients took to answer the first question.
    """

    turn: Epoch
    answers: Admitted
    messages: Messages
    length: Length
    details: Admitted | None = None
    late: tuple[int, ...] = ()
    took: Mapping[int, Took] = field(default_factory=dict)

    @property
    def last(self) -> Admitted:
        """What was admitted last: whoever is in it was heard in the whole round."""
        return self.answers if self.details is None else self.details

    @property
    def rejected(self) -> tuple[tuple[int | None, str], ...]:
        """Whose reply was turned away, and why; not of those who were heard all the same."""
        return tuple(
            (one.client, one.reason)
            for one in self._rejections
            if one.client not in self.last.vectors and not one.unreached
        )

    @property
    def unreached(self) -> tuple[tuple[int, str], ...]:
        """Whom the carrier did not reach, of those from whom nothing else came, and its word for why."""
        said = {client for client, _ in self.rejected} | self.last.vectors.keys()
        whys = {one.client: one.reason for one in self._rejections if one.unreached}
        return tuple(
            (client, why) for client, why in whys.items() if client is not None and client not in said
        )

    @property
    def absent(self) -> tuple[int, ...]:
        """Of those the rule is told about, who was silent."""
        said = {client for client, _ in (*self.rejected, *self.unreached)} | self.last.vectors.keys()
        return tuple(client for client in self.turn.rows if client not in said)

    @property
    def _rejections(self) -> tuple[Rejection, ...]:
        exchanges = [self.answers] if self.details is None else [self.answers, self.details]
        return tuple(one for admitted in exchanges for one in admitted.rejected)

    @property
    def remembered(self) -> dict[int, wire.Tensors]:
        """What is needed to understand the next message of those who were heard."""
        return {client: self.answers.remembered[client] for client in self.last.vectors}


@dataclass(frozen=True)
class Hearing:
    """Asks for one round: of the run `run`, with the server's patience (`round_limit` seconds).

    `waiting` says who is waited for. What is too long for memory lies in files, `disk_backed`.
    """

    run: str
    task: PartyTask
    policy: Policy
    round_limit: float
    exchange: Correspondence
    disk_backed: DiskBacked
    watch: Stopwatch
    say: events.Say
    waiting: Waiting

    def hear(self, commit: Commit, turn: Epoch, clients: dict[int, int]) -> Heard:
        """Ask everybody in `turn`; `clients` says who sits at which node, and is kept up to date.

        At most f of the turn's rows are not heard, waited for or not, in whatever is committed: noise and ε
        are worked out for that. The rule is not told about those who were not waited for and are not there.
        """
        expected = Expected(
            self.run,
            turn.number,
            commit.rounds,
            self.task.message,
            remembered=commit.remembered,
            broadcast=commit.broadcast,
            disk_backed=self._disk_backed(turn, self.task.message),
        )
        here = {client for client in self._present(commit, clients).values() if client in turn.members}
        left_out = self.left_out(turn, here)
        question = self._question(commit, turn)
        not_waited = dict.fromkeys(left_out, 0.0)
        answers, late = self._attempts(commit, turn, clients, question, expected, not_waited)
        took = self._took(clients, turn)
        told = replace(turn, rows=tuple(client for client in turn.rows if client not in late))
        heard = replace(self._heard(answers, told, expected, commit), late=tuple(sorted(late)), took=took)
        inquiry = self.task.resolved.algorithm.inquiry
        if inquiry is None or not self.enough(turn, heard):
            return heard
        key = self.task.key.fold("round", commit.rounds, "server")
        with self.watch.stage("aggregate"):
            asked = inquiry.question(heard.messages, commit.server, commit.rounds, key)
        inquire = kinds.Inquire(run=self.run, epoch=turn.number, round=commit.rounds)
        layout = inquiry.message(self.task.model)
        disk_backed = self._disk_backed(turn, layout)
        expected = replace(
            expected, layout=layout, answer=kinds.Detail, remembered={}, disk_backed=disk_backed
        )
        those = replace(told, members=tuple(client for client in turn.members if client in answers.vectors))
        # Whoever answered once is in the question, and counts against f where nothing more is heard of it: it
        # is waited for, if it is out as long as if it was not slow.
        prompt = dict.fromkeys(left_out, longest_prompt(took, self.policy.tolerated, self.waiting.times))
        details, _ = self._attempts(commit, those, clients, wire.dumps(inquire, asked), expected, prompt)
        second = self._heard(details, told, expected, commit)
        messages = replace(second.messages, question=asked)
        return replace(heard, messages=messages, length=heard.length + second.length, details=details)

    def _disk_backed(self, turn: Epoch, layout: MessageLayout) -> DiskBacked | None:
        """Return where messages lie that are too long for memory: all at once, or remembered of everybody."""
        clients = self.policy.everyone if layout.remembered else turn.rows
        return self.disk_backed.needed(len(clients), layout.dim)

    def left_out(self, turn: Epoch, here: Collection[int]) -> frozenset[int]:
        """Return who of those whose turn it is, and who are `here`, is not waited for."""
        return frozenset(self.waiting.not_awaited(here, len(set(turn.rows) - set(here))))

    def enough(self, turn: Epoch, heard: Heard) -> bool:
        """Tell whether a round can be committed with what was heard."""
        return decide(self.policy, turn, heard.last.vectors, self.policy.repeats) == "commit"

    def patience(
        self,
        commit: Commit,
        clients: Mapping[int, int],
        attempts: int = 1,
        left_out: Mapping[int, float] = MappingProxyType({}),
    ) -> Patience:
        """Wait for the limit, `attempts` times.

        Less long for those who did not answer last time, and only so many seconds for those who are
        `left_out`. Who is out and waited for all the same, because it is its turn or there are too few
        others, is waited for as they are.
        """
        limit, out = self.round_limit, frozenset(self.waiting.out)
        doubtful = {node: limit / 10 for node, client in clients.items() if client in commit.unused}
        doubtful |= {node: limit for node, client in clients.items() if client in out}
        doubtful |= {node: left_out[client] for node, client in clients.items() if client in left_out}
        return Patience(limit, doubtful, welcome=limit * attempts)

    def _took(self, clients: Mapping[int, int], turn: Epoch) -> dict[int, Took]:
        """Return how long those who were asked took."""
        times = self.exchange.times().items()
        return {clients[node]: one for node, one in times if clients.get(node) in turn.members}

    def _present(self, commit: Commit, clients: dict[int, int]) -> dict[int, int]:
        """Return who of the epoch sits at which node now; `clients` is brought up to date."""
        assert commit.epoch is not None
        members, present = commit.epoch.members, self.exchange.nodes()
        clients |= {node: client for node, client in present.items() if client in members}
        return clients

    def _question(self, commit: Commit, turn: Epoch) -> bytes:
        ask = kinds.Ask(
            run=self.run,
            epoch=turn.number,
            round=commit.rounds,
            heard={str(client): round_ for client, round_ in sorted(commit.heard.items())},
            unused=sorted(commit.unused),
        )
        with self.watch.stage("admit"):
            return wire.dumps(ask, commit.broadcast)

    def _heard(self, admitted: Admitted, turn: Epoch, expected: Expected, commit: Commit) -> Heard:
        """Return what was admitted as the server's step is given it.

        A rule is told about absence by rows that are not finite. A server that remembers is told who sent,
        and who shares secrets: who is absent is no liar.
        """
        assert commit.epoch is not None
        rows, senders, sharing = turn.rows, turn.rows, turn.rows[:0]
        if self.task.resolved.algorithm.members is not None:
            rows = senders = tuple(client for client in turn.rows if client in admitted.messages)
            sharing = commit.epoch.members
        with self.watch.stage("admit"):
            stack = admitted.stack(rows, expected.layout.dim, expected.disk_backed)
        lengths = [expected.layout.lengths(message).total for message in admitted.messages.values()]
        messages = Messages(stack, senders=senders, sharing=sharing)
        return Heard(turn, admitted, messages, sum(lengths, start=Length(0, 0)))

    def _attempts(
        self,
        commit: Commit,
        turn: Epoch,
        clients: dict[int, int],
        block: bytes,
        expected: Expected,
        left_out: Mapping[int, float],
    ) -> tuple[Admitted, frozenset[int]]:
        """Ask, and ask those again who did not answer, as often as the policy says.

        Return what was admitted, and of those who are `left_out` who was neither heard nor waited for: where
        too few answered everybody is waited for, before it counts as an attempt.
        """
        collected, late, attempt = Admitted(), left_out, 0
        while True:
            called = {
                node: client
                for node, client in self._present(commit, clients).items()
                if client in turn.members and client not in collected.heard
            }
            patience = self.patience(commit, clients, self.policy.repeats + 1 - attempt, late)
            with self.watch.stage("exchange"):
                replies = self.exchange.ask(dict.fromkeys(called, block), patience, timed=True)
            expected = replace(expected, clients={**expected.clients, **called})
            noted = len(collected.rejected)
            with self.watch.stage("admit"):
                collected = admit(expected, replies, collected)
            for one in collected.rejected[noted:]:
                self.say(told_of(commit.rounds + 1, one))
            decision = decide(self.policy, turn, collected.vectors, attempt)
            if late and decision != "commit":
                late = {}
                continue
            if decision != "repeat":
                return collected, frozenset(late) - collected.vectors.keys()
            attempt += 1
            self.say(events.ROUND_REPEATED(round=commit.rounds + 1))


def told_of(round_: int, one: Rejection) -> events.Event:
    """Return what is said about a reply that did not count."""
    said = events.CLIENT_UNREACHED if one.unreached else events.REPLY_REJECTED
    return said(round=round_, client=one.client, reason=without_quotes(one.reason))
