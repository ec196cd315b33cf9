"""A round's questions to the clients whose turn it is, and what of their answers counts.

Most algorithms ask once. Where one has a second exchange (`learning.Inquiry`), those who were heard are asked
again, and whoever does not answer both counts as absent: its row is not finite, which is how a rule is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trilemma.federation import events, kinds, wire
from trilemma.federation.admission import Admitted, Expected, admit
from trilemma.federation.commits import Commit
from trilemma.federation.epochs import Epoch, Policy, decide
from trilemma.federation.event_fields import without_quotes
from trilemma.federation.exchange import Correspondence, Patience
from trilemma.federation.shelf import Shelf
from trilemma.federation.task import PartyTask
from trilemma.learning import MessageLayout, Messages
from trilemma.learning.messages import Length
from trilemma.stopwatch import Stopwatch


@dataclass(frozen=True)
class Heard:
    """What a round came to.

    `answers` and, where there was a second exchange, `details` are what was admitted in each; `messages` is
    what the server's step is given; `length` is how much the admitted messages of both were together.
    """

    answers: Admitted
    messages: Messages
    length: Length
    details: Admitted | None = None

    @property
    def last(self) -> Admitted:
        """What was admitted last: whoever is in it was heard in the whole round."""
        return self.answers if self.details is None else self.details

    @property
    def rejected(self) -> tuple[tuple[int | None, str], ...]:
        """Whose reply was turned away, and why."""
        exchanges = [self.answers] if self.details is None else [self.answers, self.details]
        return tuple((one.client, one.reason) for admitted in exchanges for one in admitted.rejected)

    @property
    def remembered(self) -> dict[int, wire.Tensors]:
        """What is needed to understand the next message of those who were heard."""
        return {client: self.answers.remembered[client] for client in self.last.vectors}


@dataclass(frozen=True)
class Hearing:
    """Asks for one round: of the run `run`, with the server's patience (`round_limit` seconds).

    What is too long for memory lies on the `shelf`.
    """

    run: str
    task: PartyTask
    policy: Policy
    round_limit: float
    exchange: Correspondence
    shelf: Shelf
    watch: Stopwatch
    say: events.Say

    def hear(self, commit: Commit, turn: Epoch, clients: dict[int, int]) -> Heard:
        """Ask everybody in `turn`; `clients` says who sits at which node, and is kept up to date."""
        expected = Expected(
            self.run,
            turn.number,
            commit.rounds,
            self.task.message,
            remembered=commit.remembered,
            broadcast=commit.broadcast,
            shelf=self._shelf(turn, self.task.message),
        )
        answers = self._attempts(commit, turn, clients, self._question(commit, turn), expected)
        heard = self._heard(answers, turn, expected, commit)
        inquiry = self.task.resolved.algorithm.inquiry
        if inquiry is None or not self.enough(turn, heard):
            return heard
        key = self.task.key.fold("round", commit.rounds, "server")
        with self.watch.stage("aggregate"):
            question = inquiry.question(heard.messages, commit.server, commit.rounds, key)
        inquire = kinds.Inquire(run=self.run, epoch=turn.number, round=commit.rounds)
        layout = inquiry.message(self.task.model)
        shelf = self._shelf(turn, layout)
        expected = replace(expected, layout=layout, answer=kinds.Detail, remembered={}, shelf=shelf)
        those = replace(turn, members=tuple(client for client in turn.members if client in answers.vectors))
        details = self._attempts(commit, those, clients, wire.dumps(inquire, question), expected)
        second = self._heard(details, turn, expected, commit)
        return Heard(
            answers,
            replace(second.messages, question=question),
            heard.length + second.length,
            details,
        )

    def _shelf(self, turn: Epoch, layout: MessageLayout) -> Shelf | None:
        """Return where messages lie that are too long for memory: all at once, or remembered of everybody."""
        clients = self.policy.everyone if layout.remembered else turn.rows
        return self.shelf.needed(len(clients), layout.dim)

    def enough(self, turn: Epoch, heard: Heard) -> bool:
        """Tell whether a round can be committed with what was heard."""
        return decide(self.policy, turn, heard.last.vectors, self.policy.repeats) == "commit"

    def patience(self, commit: Commit, clients: Mapping[int, int], attempts: int = 1) -> Patience:
        """Wait for the limit, `attempts` times; less long for those who did not answer last time."""
        limit = self.round_limit
        doubtful = frozenset(node for node, client in clients.items() if client in commit.unused)
        return Patience(limit, doubtful, limit / 10, welcome=limit * attempts)

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
        rows, senders, sharing = turn.rows, turn.rows[:0], turn.rows[:0]
        if self.task.resolved.algorithm.members is not None:
            rows = senders = tuple(client for client in turn.rows if client in admitted.messages)
            sharing = commit.epoch.members
        with self.watch.stage("admit"):
            stack = admitted.stack(rows, expected.layout.dim, expected.shelf)
        lengths = [expected.layout.lengths(message).total for message in admitted.messages.values()]
        messages = Messages(stack, senders=senders, sharing=sharing)
        return Heard(admitted, messages, sum(lengths, start=Length(0, 0)))

    def _attempts(
        self, commit: Commit, turn: Epoch, clients: dict[int, int], block: bytes, expected: Expected
    ) -> Admitted:
        """Ask, and ask those again who did not answer, as often as the policy says."""
        assert commit.epoch is not None
        collected = Admitted()
        for attempt in range(self.policy.repeats + 1):
            present = self.exchange.nodes().items()
            clients |= {node: client for node, client in present if client in commit.epoch.members}
            called = {
                node: client
                for node, client in clients.items()
                if client in turn.members and client not in collected.heard
            }
            patience = self.patience(commit, clients, self.policy.repeats + 1 - attempt)
            with self.watch.stage("exchange"):
                replies = self.exchange.ask(dict.fromkeys(called, block), patience)
            expected = replace(expected, clients={**expected.clients, **called})
            noted = len(collected.rejected)
            with self.watch.stage("admit"):
                collected = admit(expected, replies, collected)
            for one in collected.rejected[noted:]:
                reason = without_quotes(one.reason)
                self.say(events.REPLY_REJECTED(round=commit.rounds, client=one.client, reason=reason))
            if decide(self.policy, turn, collected.vectors, attempt) != "repeat":
                break
            self.say(events.ROUND_REPEATED(round=commit.rounds))
        return collected
