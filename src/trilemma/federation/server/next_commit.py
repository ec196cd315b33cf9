"""What a round comes to: the server's step on what was heard, the model to hand out, the scores, the record.

A pure function of the commit before it and of what was heard; nothing is on disk before the coordinator
appends it, but for a transcript and what is too long for memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from trilemma.base.records import Record, Scores
from trilemma.base.stopwatch import Stopwatch
from trilemma.federation.party.public_facts import Federation
from trilemma.federation.party.task import PartyTask
from trilemma.federation.protocol import events, wire
from trilemma.federation.protocol.disk_backed import DiskBacked
from trilemma.federation.protocol.epochs import Epoch
from trilemma.federation.protocol.events import figures
from trilemma.federation.protocol.expulsions import AnnouncedExpulsion, clients_of
from trilemma.federation.protocol.waiting import USUAL, slow_ones, usual
from trilemma.federation.server.commits import Commit
from trilemma.federation.server.hearing import Heard
from trilemma.federation.server.transcript import Transcript
from trilemma.learning.defences.evidence import conviction
from trilemma.learning.steps.rounds import returned_model


@dataclass(frozen=True)
class NextCommit:
    """What follows from rounds of the run `run`, of whose clients f = `tolerated` may be unheard."""

    run: str
    task: PartyTask
    federation: Federation
    tolerated: int
    transcript: Transcript
    disk_backed: DiskBacked
    watch: Stopwatch

    def after(self, commit: Commit, turn: Epoch, heard: Heard) -> Commit:
        """Return what stands after a round: the server's step on what was heard, the epoch, the record."""
        algorithm, answered = self.task.resolved.algorithm, heard.last.vectors
        if self.federation.transcript:
            self.transcript.keep(self.run, turn.number, commit.rounds, heard)
        key = self.task.key.fold("round", commit.rounds, "server")
        with self.watch.stage("aggregate"):
            done = algorithm.server(heard.messages, commit.server, commit.rounds, key)
        finished = commit.rounds + 1
        unheard = tuple(client for client in turn.rows if client not in answered)
        unasked = set(commit.unused) & set(commit.epoch.rows if commit.epoch else ()) - set(turn.rows)
        found: tuple[conviction.Expulsion, ...] = done.report.get("expelled", ())
        scores: Scores = {}
        chosen = self._chosen(commit, done.broadcast)
        if self._evaluates(finished):
            # Underway the latest model is scored, in the end the one that is returned.
            returned = chosen if finished == self.task.config.run.rounds else {}
            with self.watch.stage("evaluate"):
                scores = self._scores({**done.broadcast, **returned})
        record = self._record(commit, heard, done.report, scores)
        epoch, expelled = (
            commit.epoch,
            (*commit.expelled, *(AnnouncedExpulsion.of(one, finished) for one in found)),
        )
        if found and epoch is not None:  # the others share secrets anew, whatever happens to this process
            epoch = Epoch(epoch.number)
        remembered = {**commit.remembered, **heard.remembered}
        with self.watch.stage("commit"):
            server = self.disk_backed.kept(done.state)
        return replace(
            commit,
            rounds=finished,
            epoch=epoch,
            broadcast=done.broadcast,
            server=server,
            chosen=chosen,
            heard={**commit.heard, **dict.fromkeys(answered, commit.rounds)},
            remembered={client: remembered[client] for client in remembered.keys() - clients_of(expelled)},
            unused=tuple(sorted((*unheard, *unasked))),
            record=record.plain(),
            expelled=expelled,
        )

    def _record(self, commit: Commit, heard: Heard, report: Mapping[str, Any], scores: Scores) -> Record:
        """Return what is written down about a round; who was not heard has weight 0."""
        rows = heard.turn.rows
        weights = dict.fromkeys(rows, 0.0)
        weights |= zip(heard.messages.whose(rows), report["weights"].tolist(), strict=True)
        tolerated = self.tolerated
        slow = slow_ones(heard.took, tolerated, self.federation.timing.slow_times)
        times = {client: one.seconds for client, one in heard.took.items() if one.answered or client in slow}
        usually = usual(heard.took, tolerated)
        return Record(
            round=commit.rounds + 1,
            metrics=scores,
            weights={client: round(weight, 6) for client, weight in weights.items()},
            epoch=heard.turn.number,
            absent=heard.absent,
            unreached=heard.unreached,
            rejected=heard.rejected,
            late=heard.late,
            slow=slow,
            times={client: round(seconds, 3) for client, seconds in sorted(times.items())},
            sharing=heard.messages.sharing,
            expelled=tuple(one.plain() for one in report.get("expelled", ())),
            facts={
                "up_scalars": heard.length.scalars,
                "up_bytes": heard.length.bytes,
                "members": len(commit.epoch.members if commit.epoch else ()),
                **({USUAL: round(usually, 3)} if math.isfinite(usually) else {}),
            },
            # The time of a commit is known when it is done: it stands in the record of the round after.
            seconds=self.watch.take(),
        )

    def _chosen(self, commit: Commit, broadcast: wire.Tensors) -> wire.Tensors:
        """Return the model to hand out should this round be the last, where that is not the latest."""
        run = self.task.config.run
        if run.returned == "last":
            return {}
        before, latest, finished = commit.chosen["params"], broadcast["params"], commit.rounds + 1
        return {"params": returned_model(run.returned, before, latest, finished, run.rounds, self.task.key)}

    def _evaluates(self, finished: int) -> bool:
        run = self.task.config.run
        every = run.evaluate_every or max(1, run.rounds // 50)
        return finished % every == 0 or finished == run.rounds

    def _scores(self, broadcast: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Score the global model on the server's test set, where there are both."""
        return self.task.score(broadcast["params"]) if "params" in broadcast else {}


def committed(record: Record) -> events.Event:
    """Return what is said about a round that was committed."""
    unheard = record.unheard
    return events.ROUND_COMMITTED(
        round=record.round,
        epoch=-1 if record.epoch is None else record.epoch,
        heard=[client for client in record.weights if client not in unheard],
        absent=list(record.absent),
        unreached=[client for client, _ in record.unreached],
        rejected=[client for client, _ in record.rejected if client is not None],
        late=list(record.late),
        expelled=[int(one["client"]) for one in record.expelled],
        bytes=record.facts.get("up_bytes", 0),
        seconds=figures(record.seconds),
        scores=figures(record.metrics),
    )
