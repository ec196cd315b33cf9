"""The server's side of a run, without Flower: hello, keys, rounds, commits.

The coordinator talks to clients through an `Exchange` (Flower in a deployment, a list in a test) and drives
`algorithm.server`. It trusts no reply further than `admission` does, commits every round before it asks for
the next, and can be killed anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from trilemma import models
from trilemma.errors import UserError
from trilemma.flower import wire
from trilemma.flower.admission import Admitted, Expected, Rejection, Reply, admit
from trilemma.flower.commits import Commit, CommitLog
from trilemma.flower.epochs import Epoch, Policy, check_progress, decide, open_epoch
from trilemma.flower.layout import Party, Timing
from trilemma.flower.sessions import check_offer
from trilemma.flower.stopwatch import Stopwatch
from trilemma.flower.task import Task
from trilemma.learning import Messages
from trilemma.privacy.secrets import Roster


class Exchange(Protocol):
    """How the server reaches its clients."""

    def nodes(self) -> Mapping[int, int]:
        """Return the connected nodes and, by their authenticated keys, the clients they are."""

    def ask(self, blocks: Mapping[int, bytes], patience: Patience) -> list[Reply]:
        """Send each node its block; return what came back in time, in order of arrival."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for replies: `limit` seconds for everybody.

    For the nodes in `doubtful`, once all others have answered, only `grace` seconds more: a client that is
    gone costs the limit once and not in every round, a slow one can still come back.
    """

    limit: float
    doubtful: frozenset[int] = frozenset()
    grace: float = 0.0


@dataclass(frozen=True)
class Progress:
    """What the outside may want to know about a step."""

    text: str
    record: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Coordinator:
    """One run of one federation, on the server."""

    run: str
    party: Party
    task: Task
    exchange: Exchange
    log: CommitLog
    say: Callable[[Progress], None] = lambda _: None
    watch: Stopwatch = field(default_factory=Stopwatch)

    @property
    def policy(self) -> Policy:
        """How absence is dealt with."""
        clients = self.party.federation.clients
        return Policy(clients, self.task.tolerated, self.party.federation.timing.repeats)

    @property
    def timing(self) -> Timing:
        """How long to wait."""
        return self.party.federation.timing

    def start(self) -> Commit:
        """Return the last commit, or make the one before the first round."""
        terms = self.party.terms
        last = self.log.last()
        if last is not None:
            if last.terms != terms:
                raise UserError(
                    f"run {self.run!r} began under another configuration or roster; choose a new name"
                )
            return last
        everyone = tuple(range(self.policy.clients))
        beginning = self.task.resolved.algorithm.init(self.task.model, everyone, self.task.key.fold("init"))
        commit = Commit(self.run, terms, 0, None, beginning.broadcast, beginning.server)
        with self.watch.stage("commit"):
            self.log.append(commit)
        return commit

    def go(self) -> Commit:
        """Run to the end, from wherever the run stands."""
        with self.log.locked():
            commit = self.start()
            rounds = self.task.config.run.rounds
            if commit.rounds < rounds:
                commit, clients = self._join(commit, 0 if commit.epoch is None else commit.epoch.number)
                while commit.rounds < rounds:
                    commit, clients = self._round(commit, clients)
            self._finish(commit)
            return commit

    # --- epochs -----------------------------------------------------------------------------------------

    def _join(self, commit: Commit, number: int) -> tuple[Commit, dict[int, int]]:
        """Open epoch `number`, or reopen it after a restart; return the commit and who sits at which node."""
        self.say(Progress(f"epoch {number}: calling"))
        joined, keys = self._call(number)
        epoch = commit.epoch
        if epoch is None or epoch.number != number:
            epoch = open_epoch(self.policy, number, joined.values())
            self._relay(epoch, joined, keys)
            commit = replace(commit, epoch=epoch)
            self.log.update_epoch(commit)
        clients = {node: client for node, client in joined.items() if client in epoch.members}
        self.say(Progress(f"epoch {number}: clients {sorted(clients.values())} of {self.policy.clients}"))
        return commit, clients

    def _call(self, number: int) -> tuple[dict[int, int], dict[int, str]]:
        """Say hello to every node until everybody answered or time is up.

        In waves: a node that is slow to start is called again (it gives the same answer), and one that is
        gone does not keep the server from calling those that appear meanwhile.
        """
        hello = wire.dumps(wire.Hello(run=self.run, epoch=number, terms=self.party.terms))
        deadline = time.monotonic() + self.timing.join_limit
        joined: dict[int, int] = {}
        keys: dict[int, str] = {}
        refused: set[int] = set()
        while len(joined) + len(refused) < self.policy.clients and time.monotonic() < deadline:
            known = self.exchange.nodes()
            called = {node: hello for node in known if node not in joined and node not in refused}
            if not called:
                time.sleep(self.timing.poll)
                continue
            wave = min(deadline - time.monotonic(), self.timing.join_limit / 4)
            for reply in self.exchange.ask(called, Patience(wave)):
                if reply.block is None and not reply.refused:
                    time.sleep(self.timing.poll)  # Flower did not reach it: perhaps it is just starting
                    continue
                try:
                    client = known[reply.node]
                    keys[client] = self._joined(reply, client, number)
                    joined[reply.node] = client
                except wire.WireError as error:
                    refused.add(reply.node)
                    self._note_rejections([Rejection(reply.node, known.get(reply.node), str(error))])
        return joined, keys

    def _joined(self, reply: Reply, client: int, number: int) -> str:
        if reply.block is None:
            raise wire.WireError(reply.error)
        header, _ = wire.loads(reply.block, wire.Joined, limit=1 << 16)
        if (header.run, header.epoch, header.client) != (self.run, number, client):
            raise wire.WireError(f"the node of client {client} joined as {header!r}")
        check_offer(Roster.load(self.party.roster), self.run, number, client, header.key)
        return header.key

    def _relay(self, epoch: Epoch, joined: Mapping[int, int], keys: Mapping[int, str]) -> None:
        """Pass everybody's signed keys to everybody. Clients check the signatures: the server cannot."""
        members = {str(client): keys[client] for client in epoch.members}
        block = wire.dumps(wire.Keys(run=self.run, epoch=epoch.number, keys=members))
        asked = {node: block for node, client in joined.items() if client in epoch.members}
        ready: set[int] = set()
        for reply in self.exchange.ask(asked, Patience(self.timing.join_limit)):
            try:
                if reply.block is None:
                    raise wire.WireError(reply.error)
                wire.loads(reply.block, wire.Ready, limit=1 << 16)
                ready.add(joined[reply.node])
            except (wire.WireError, KeyError) as error:
                client = joined.get(reply.node)
                self._note_rejections([Rejection(reply.node, client, f"keys refused: {error}")])
        open_epoch(self.policy, epoch.number, ready)  # stops the run where too many refuse

    # --- rounds -----------------------------------------------------------------------------------------

    def _round(self, commit: Commit, clients: dict[int, int]) -> tuple[Commit, dict[int, int]]:
        """Run one round to its commit, through repeats and new epochs where it must."""
        failed = 0
        while True:
            assert commit.epoch is not None
            admitted = self._attempts(commit, commit.epoch, clients)
            if decide(self.policy, commit.epoch, admitted.vectors, self.policy.repeats) == "commit":
                break
            failed += 1
            reasons = [f"client {one.client}: {one.reason}" for one in admitted.rejected]
            check_progress(self.policy, commit.rounds, failed, reasons)
            self.say(Progress(f"round {commit.rounds}: too few answers, new epoch"))
            commit, clients = self._join(commit, commit.epoch.number + 1)
        commit = self._apply(commit, commit.epoch, admitted)
        with self.watch.stage("commit"):
            self.log.append(commit)
        self.say(Progress(f"round {commit.rounds} committed", commit.record))
        return commit, clients

    def _attempts(self, commit: Commit, epoch: Epoch, clients: dict[int, int]) -> Admitted:
        """Ask, and ask those again who did not answer, as often as the policy says."""
        ask = wire.Ask(run=self.run, epoch=epoch.number, round=commit.rounds, unused=sorted(commit.unused))
        with self.watch.stage("admit"):
            block = wire.dumps(ask, commit.broadcast)
        dim = self.task.message_dim
        collected = Admitted({}, ())
        for attempt in range(self.policy.repeats + 1):
            clients |= {
                node: client for node, client in self.exchange.nodes().items() if client in epoch.members
            }
            asked = {node: block for node, client in clients.items() if client not in collected.vectors}
            with self.watch.stage("exchange"):
                replies = self.exchange.ask(asked, self._patience(commit, clients))
            expected = Expected(self.run, epoch.number, commit.rounds, dim, {n: clients[n] for n in asked})
            with self.watch.stage("admit"):
                admitted = admit(expected, replies)
            self._note_rejections(admitted.rejected)
            collected = Admitted(
                {**collected.vectors, **admitted.vectors}, collected.rejected + admitted.rejected
            )
            if decide(self.policy, epoch, collected.vectors, attempt) != "repeat":
                break
            self.say(Progress(f"round {commit.rounds}: asked again"))
        return collected

    def _patience(self, commit: Commit, clients: Mapping[int, int]) -> Patience:
        doubtful = frozenset(node for node, client in clients.items() if client in commit.unused)
        return Patience(self.timing.round_limit, doubtful, self.timing.round_limit / 10)

    def _apply(self, commit: Commit, epoch: Epoch, admitted: Admitted) -> Commit:
        algorithm = self.task.resolved.algorithm
        with self.watch.stage("admit"):
            stack = admitted.stack(epoch.rows, self.task.message_dim)
        self._record_transcript(commit.rounds, epoch, admitted)
        key = self.task.key.fold("round", commit.rounds, "server")
        with self.watch.stage("aggregate"):
            done = algorithm.server(Messages(stack), commit.server, commit.rounds, key)
        finished = commit.rounds + 1
        unused = tuple(client for client in epoch.rows if client not in admitted.vectors)
        weights = {
            str(client): round(float(weight), 6)
            for client, weight in zip(epoch.rows, done.report["weights"].tolist(), strict=True)
        }
        record: dict[str, Any] = {
            "round": finished,
            "epoch": epoch.number,
            "absent": list(unused),
            "rejected": [[one.client, one.reason] for one in admitted.rejected],
            "weights": weights,
        }
        if self._evaluates(finished):
            with self.watch.stage("evaluate"):
                record |= self._scores(done.broadcast)
        # The time of a commit is known when it is done: it stands in the record of the round after.
        record["seconds"] = self.watch.take()
        return replace(
            commit,
            rounds=finished,
            broadcast=done.broadcast,
            server=done.state,
            unused=unused,
            record=record,
        )

    def _evaluates(self, finished: int) -> bool:
        run = self.task.config.run
        every = run.evaluate_every or max(1, run.rounds // 50)
        return finished % every == 0 or finished == run.rounds

    def _scores(self, broadcast: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Score the global model on the server's test set, where there are both."""
        data = self.task.data
        if (
            data is None
            or "params" not in broadcast
            or not len(data.dataset.y_test)
            or self.task.model.buffers
        ):
            return {}
        score = models.evaluate(
            self.task.model, broadcast["params"], data.dataset.x_test, data.dataset.y_test
        )
        return {"loss": float(score.loss), "accuracy": float(score.accuracy)}

    def _record_transcript(self, round_: int, epoch: Epoch, admitted: Admitted) -> None:
        """Write down what was admitted, where the federation agreed to that."""
        if not self.party.federation.transcript:
            return
        folder = self.log.folder / "transcript"
        for client, vector in admitted.vectors.items():
            header = wire.Answer(client=client, run=self.run, epoch=epoch.number, round=round_)
            wire.write_durably(folder / f"{round_}-{client}", wire.dumps(header, {"vector": vector}))

    def _note_rejections(self, rejected: list[Rejection] | tuple[Rejection, ...]) -> None:
        for one in rejected:
            who = "an unknown node" if one.client is None else f"client {one.client}"
            self.say(Progress(f"rejected {who}: {one.reason}"))

    def _finish(self, commit: Commit) -> None:
        """Hand the result to everybody who is there."""
        block = wire.dumps(wire.Finished(run=self.run), commit.broadcast)
        wire.write_durably(self.log.folder / "result", block)
        nodes = self.exchange.nodes()
        self.exchange.ask(dict.fromkeys(nodes, block), self._patience(commit, nodes))
        self.say(Progress(f"run {self.run!r} finished after {commit.rounds} rounds"))
