"""The server's side of a run, whatever carries the messages: hello, keys, rounds, commits.

The coordinator talks to clients through a `Correspondence`, over whatever transport, and drives
`algorithm.server`. It trusts no reply further than `admission` does, commits every round before it asks for
the next, and can be killed anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trilemma.base import files
from trilemma.base.records import Record
from trilemma.base.stopwatch import Stopwatch
from trilemma.federation.party.agreed import Agreed
from trilemma.federation.party.layout import Party
from trilemma.federation.party.public_facts import Timing
from trilemma.federation.party.task import PartyTask, load_task
from trilemma.federation.protocol import events, kinds, wire
from trilemma.federation.protocol.disk_backed import DiskBacked
from trilemma.federation.protocol.epochs import Attendance, Epoch, Policy, check_progress
from trilemma.federation.protocol.expulsions import AnnouncedExpulsion, clients_of
from trilemma.federation.protocol.transport import Transport
from trilemma.federation.protocol.waiting import USUAL, Waiting
from trilemma.federation.server.commits import Commit, CommitLog, check_began
from trilemma.federation.server.exchange import Clock, Correspondence
from trilemma.federation.server.hearing import Hearing
from trilemma.federation.server.joining import Joining
from trilemma.federation.server.next_commit import NextCommit, committed
from trilemma.federation.server.scoring import Scoring
from trilemma.federation.server.transcript import Transcript
from trilemma.federation.server.under_way import alone
from trilemma.learning.steps.rounds import sampled_clients


@dataclass(frozen=True)
class Coordinator:
    """One run of one federation, on the server; `expelled` are those it goes on without."""

    run: str
    party: Party
    agreed: Agreed
    task: PartyTask
    exchange: Correspondence
    log: CommitLog
    say: events.Say = events.silent
    watch: Stopwatch = field(default_factory=Stopwatch)
    clock: Clock = field(default_factory=Clock)
    expelled: tuple[AnnouncedExpulsion, ...] = ()
    waiting: Waiting = field(default_factory=Waiting)

    @property
    def policy(self) -> Policy:
        """How absence is dealt with; who was expelled counts against f for good."""
        keys, gone = self.agreed.roster.keys, clients_of(self.expelled)
        return Policy(
            len(keys.keys),
            max(0, self.task.tolerated - len(gone)),
            self.party.federation.timing.repeats,
            removed=keys.removed | gone,
            weights=self.task.config.federation.shares,
        )

    @property
    def timing(self) -> Timing:
        """How long to wait."""
        return self.party.federation.timing

    def start(self) -> Commit:
        """Return the last commit, or make the one before the first round."""
        last = self.log.recover(self.say)
        if last is not None:
            check_began(self.agreed, self.party.folder, self.run, last.terms, last.plan)
            return last
        algorithm, key = self.task.resolved.algorithm, self.task.key.fold("init")
        beginning = algorithm.init(self.task.model, self.policy.everyone, key)
        server = self._disk_backed.kept(beginning.server)
        terms, plan = self.agreed.agreement, self.agreed.plan
        commit = Commit(self.run, terms, 0, None, beginning.broadcast, server, plan=plan)
        if self.task.config.run.returned != "last":
            commit = replace(commit, chosen={"params": beginning.broadcast["params"]})
        with self.watch.stage("commit"):
            self.log.append(commit)
        return commit

    def go(self) -> Commit:
        """Run to the end, from wherever the run stands."""
        with alone(self.party), self.log.locked():
            commit = self.start()
            here, failed, attendance = replace(self, waiting=self._waiting_since()), 0, Attendance()
            clients: dict[int, int] | None = None
            while commit.rounds < self.task.config.run.rounds:
                here = here._renewed(commit)
                late = here._somebody_came(commit.epoch, attendance)
                if clients is None or late or not here._goes_on(commit.epoch):
                    anew = late or failed > 0
                    commit, clients = here._join(commit, here._next_epoch(commit.epoch, anew))
                    present = here.exchange.nodes().values()
                    attendance.called(here.policy.everyone, clients.values(), present)
                done = here._round(commit, clients, failed)
                failed = failed + 1 if done is None else 0
                here = here if done is None else here._judged(Record.read(done.record))
                commit, clients = (commit, None) if done is None else (done, clients)
            replace(here, expelled=commit.expelled)._finish(commit)
            return commit

    def _renewed(self, commit: Commit) -> Coordinator:
        """Return the coordinator of the roster that is in force now, without those who were expelled.

        Looked at between two rounds. A round, and the joining of an epoch, are under one roster.
        """
        here, agreed = replace(self, expelled=commit.expelled), self.party.agreed
        if agreed.roster == self.agreed.roster:
            return here
        check_began(agreed, self.party.folder, self.run, commit.terms, commit.plan)
        clients = list(agreed.roster.keys.members)
        self.say(events.ROSTER_ADOPTED(serial=agreed.roster.serial, clients=clients))
        return replace(here, agreed=agreed, task=load_task(self.party))

    # --- epochs -----------------------------------------------------------------------------------------

    def _goes_on(self, epoch: Epoch | None) -> bool:
        """Tell whether an epoch has members, and their terms are still those."""
        return epoch is not None and bool(epoch.members) and epoch.terms == self.agreed.terms

    def _somebody_came(self, epoch: Epoch | None, attendance: Attendance) -> bool:
        """Tell whether a client is there that was not when the epoch was called; asked where one was not."""
        if epoch is None or set(epoch.members) >= set(self.policy.everyone):
            return False
        return attendance.came(self.exchange.nodes().values())

    def _next_epoch(self, epoch: Epoch | None, anew: bool) -> int:
        """Return the number of the epoch to begin or, after a restart, to continue with."""
        if epoch is None:
            return 0
        return epoch.number if self._goes_on(epoch) and not anew else epoch.number + 1

    def _join(self, commit: Commit, number: int) -> tuple[Commit, dict[int, int]]:
        """Open epoch `number`, or reopen it after a restart; return the commit and who sits at which node."""
        self.say(events.EPOCH_CALLED(epoch=number))
        epoch = commit.epoch
        if epoch is not None and epoch.number == number:
            joined, _ = self._joining.call(number)
        else:
            commit, epoch, joined = self._open(commit, number)
        clients = {node: client for node, client in joined.items() if client in epoch.members}
        there, everyone = sorted(clients.values()), len(self.policy.everyone)
        self.say(events.EPOCH_OPENED(epoch=epoch.number, clients=there, of=everyone))
        return commit, clients

    def _open(self, commit: Commit, number: int) -> tuple[Commit, Epoch, dict[int, int]]:
        """Open a new epoch, `number` or a later one: without those who joined and did not sign."""
        left_out: frozenset[int] = frozenset()
        joining = self._joining
        while True:
            commit = self._in_epoch(commit, Epoch(number))
            joined, keys = joining.call(number, left_out)
            opened = joining.open(number, joined, keys)
            if isinstance(opened, Epoch):
                return self._in_epoch(commit, opened), opened, joined
            left_out |= opened
            number += 1
            joining.opened(number, set(joined.values()) - left_out)  # stops where too few are left
            self.say(events.EPOCH_UNSIGNED(epoch=number, clients=sorted(left_out)))

    @property
    def _joining(self) -> Joining:
        """How epochs begin."""
        return Joining(
            self.run, self.party, self.agreed, self.policy, self.exchange, self.clock, self.say, self.expelled
        )

    def _in_epoch(self, commit: Commit, epoch: Epoch) -> Commit:
        commit = replace(commit, epoch=epoch)
        with self.watch.stage("commit"):
            self.log.update_epoch(commit)
        return commit

    # --- rounds -----------------------------------------------------------------------------------------

    def _round(self, commit: Commit, clients: dict[int, int], failed: int) -> Commit | None:
        """Run one round to its commit, through repeats; None where it takes a new epoch.

        `failed` is in how many epochs before this one it did.
        """
        assert commit.epoch is not None
        turn = self._turn(commit.epoch, commit.rounds)
        heard = self._hearing.hear(commit, turn, clients)
        if not self._hearing.enough(turn, heard):
            reasons = [f"client {client}: {reason}" for client, reason in heard.rejected]
            check_progress(self.policy, commit.rounds + 1, failed + 1, reasons)
            self.say(events.ROUND_FAILED(round=commit.rounds + 1))
            return None
        commit = self._scored(self._next_commit.after(commit, turn, heard), clients)
        with self.watch.stage("commit"):
            self.log.append(commit)
        self.say(committed(Record.read(commit.record)))
        for one in commit.expelled:
            if one.round == commit.rounds:
                self.say(events.CLIENT_EXPELLED(client=one.client, **one.facts))
        return commit

    def _turn(self, epoch: Epoch, round_: int) -> Epoch:
        """Return the epoch as a round sees it: with the clients whose turn it is."""
        sampled = self.task.config.federation.sampled
        rows = sampled_clients(epoch.rows, sampled, round_, self.task.key)
        return Epoch(epoch.number, tuple(client for client in epoch.members if client in rows), rows)

    @property
    def _disk_backed(self) -> DiskBacked:
        """Where what is too long for memory lies."""
        return DiskBacked(self.log.folder / "messages", self.log.memory)

    @property
    def _hearing(self) -> Hearing:
        """How this round's questions are asked."""
        return Hearing(
            self.run,
            self.task,
            self.policy,
            self.timing.round_limit,
            self.exchange,
            self._disk_backed,
            self.watch,
            self.say,
            self._waiting,
        )

    @property
    def _next_commit(self) -> NextCommit:
        """What follows from what is heard in this round."""
        return NextCommit(
            self.run,
            self.task,
            self.party.federation,
            self.policy.tolerated,
            Transcript(self.log.folder),
            self._disk_backed,
            self.watch,
        )

    # --- who is waited for ------------------------------------------------------------------------------

    @property
    def _waiting(self) -> Waiting:
        """Who is waited for, with the f of now; everybody where the noise of the others is counted on."""
        threat = self.task.resolved.threat
        tolerated = 0 if threat is not None and threat.model.central else self.policy.tolerated
        return replace(self.waiting, tolerated=tolerated)

    def _waiting_since(self) -> Waiting:
        """Return where clients stand, as the records of the rounds so far have it."""
        timing, records = self.timing, map(Record.read, self.log.records())
        return Waiting.of(timing.slow_times, timing.slow_rounds, records)

    def _judged(self, record: Record) -> Coordinator:
        """Return the coordinator after a round, and say who is not waited for any more, and who is again."""
        after = self.waiting.after(record)
        for client in sorted(set(after.out) - set(self.waiting.out)):
            seconds, usual = record.times[client], record.facts.get(USUAL, 0.0)
            self.say(events.SLOW(round=record.round, client=client, seconds=seconds, usual=usual))
        for client in sorted(set(self.waiting.out) - set(after.out)):
            self.say(events.SLOW_NO_MORE(round=record.round, client=client))
        return replace(self, waiting=after)

    def _scored(self, commit: Commit, clients: Mapping[int, int]) -> Commit:
        """Let clients evaluate what a round led to, where it is their turn; the record then has it."""
        own = self.task.resolved.own_scores
        if own is None or commit.epoch is None:
            return commit
        with self.watch.stage("own scores"):
            scoring, hearing = Scoring(self.run, own, self.exchange, self.say), self._hearing
            here = set(clients.values()) & set(self.exchange.nodes().values())
            left_out = dict.fromkeys(hearing.left_out(commit.epoch, here), 0.0)
            found = scoring.ask(commit, clients, hearing.patience(commit, clients, left_out=left_out))
        record = Record.read(commit.record)
        record = replace(record, metrics={**record.metrics, **found})
        return replace(commit, record=record.plain())

    def _finish(self, commit: Commit) -> None:
        """Hand the result to everybody who is there."""
        block = wire.dumps(kinds.Finished(run=self.run), {**commit.broadcast, **commit.chosen})
        files.write_atomically(self.log.result, *wire.sealed_parts([block]))
        self._joining.tell_expelled()
        present = self.exchange.nodes()
        nodes = {node: client for node, client in present.items() if client in self.policy.everyone}
        self.exchange.ask(dict.fromkeys(nodes, block), self._hearing.patience(commit, nodes))
        self.say(events.RUN_FINISHED(run=self.run, rounds=commit.rounds))


def open_run(
    server: Party, run: str, transport: Transport, say: events.Say = events.silent, clock: Clock | None = None
) -> Coordinator:
    """Return the coordinator of the run `run`, a new one or one that stands somewhere; `go` runs it."""
    clock = clock or Clock()
    return Coordinator(
        run=run,
        party=server,
        agreed=server.agreed,
        task=load_task(server),
        exchange=Correspondence(transport, server.federation.timing.poll, clock),
        log=CommitLog(server.run_folder(run)),
        say=say,
        clock=clock,
    )
