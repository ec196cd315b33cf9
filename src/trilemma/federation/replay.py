"""A run once more, from what was admitted: the same model to the bit, and the same expulsions.

For federations that keep a transcript (`transcript` in federation.toml). Whoever doubts an expulsion, or a
model, has the server's step, the messages and the records; nothing else went into either. `differences` says
where a run on disk is not what follows from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from trilemma.errors import UserError
from trilemma.federation import kinds, wire
from trilemma.federation.admission import Admitted
from trilemma.federation.commits import CommitLog
from trilemma.federation.expulsions import Expulsion, clients_of
from trilemma.federation.layout import Party
from trilemma.federation.task import PartyTask, load_task
from trilemma.federation.transcript import Transcript
from trilemma.learning import Messages
from trilemma.learning.protocol import State
from trilemma.learning.rounds import returned_model
from trilemma.records import Record


@dataclass(frozen=True)
class Replayed:
    """What follows from a run's messages: the last broadcast, and who is expelled.

    `chosen` is the model that the run returns after so many `rounds`, where that is not the latest.
    """

    broadcast: State
    expelled: tuple[Expulsion, ...] = ()
    chosen: State = field(default_factory=dict)
    rounds: int = 0


def replay(server: Party, run: str) -> Replayed:
    """Take every step of the server again, under the roster that is in force now."""
    task, log = load_task(server), CommitLog(server.run_folder(run))
    algorithm, places = task.resolved.algorithm, server.keys.members
    start = algorithm.init(task.model, tuple(places), task.key.fold("init"))
    broadcast, state = start.broadcast, start.server
    expelled: list[Expulsion] = []
    how = task.config.run
    chosen = None if how.returned == "last" else broadcast["params"]
    records = [Record.read(one) for one in log.records()]
    if [one.round for one in records] != list(range(1, len(records) + 1)):
        raise UserError(
            f"the records of {log.folder} are not complete: what follows from the rest is no replay"
        )
    for record in records:
        key = task.key.fold("round", record.round - 1, "server")
        messages = _heard(task, Transcript(log.folder), record, state)
        done = algorithm.server(messages, state, record.round - 1, key)
        broadcast, state = done.broadcast, done.state
        expelled += [Expulsion.of(one, record.round) for one in done.report.get("expelled", ())]
        if chosen is not None:
            latest = broadcast["params"]
            chosen = returned_model(how.returned, chosen, latest, record.round, how.rounds, task.key)
    kept = {} if chosen is None else {"params": chosen}
    return Replayed(broadcast, tuple(expelled), kept, len(records))


def differences(server: Party, run: str) -> tuple[Replayed, list[str]]:
    """Replay a run, and say where its last commit, or the result it handed out, is something else."""
    log = CommitLog(server.run_folder(run))
    last = log.last()
    if last is None:
        raise UserError(f"there is no run {run!r} in {server.folder}")
    replayed = replay(server, run)
    if last.rounds != replayed.rounds:
        return replayed, [
            f"the last commit is of round {last.rounds}, the last record of round {replayed.rounds}: "
            "where the run is under way, ask again"
        ]
    found = list(_compared(f"the commit of round {last.rounds}", last.broadcast, replayed.broadcast))
    found += _compared("the model that is returned", last.chosen, replayed.chosen)
    if log.result.is_file():
        _, result = wire.loads(log.result.read_bytes(), kinds.Finished)
        found += _compared("the result", result, {**replayed.broadcast, **replayed.chosen})
    if last.expelled != replayed.expelled:
        said, follows = sorted(clients_of(last.expelled)), sorted(clients_of(replayed.expelled))
        found.append(f"expelled are clients {said}, from the messages follow {follows}, or other statistics")
    return replayed, found


def _compared(what: str, kept: wire.Tensors, follows: State) -> Iterator[str]:
    """Say which tensors of a file are not what follows from the messages."""
    for name in sorted({*kept, *follows}):
        one, other = kept.get(name), follows.get(name)
        if one is None or other is None or one.shape != other.shape:
            yield f"{what}: {name} is there on one side only, or has another shape"
        elif not torch.equal(one, other):
            apart = (one.double() - other.double()).abs()
            yield (
                f"{what}: {name} differs in {int((apart != 0).sum())} of {apart.numel()} numbers, by up to "
                f"{float(apart.max()):.3g}"
            )


def _heard(task: PartyTask, transcript: Transcript, record: Record, state: State) -> Messages:
    """Return the messages of a round as the server's step was given them."""
    algorithm, round_, rows = task.resolved.algorithm, record.round - 1, tuple(record.weights)
    present = tuple(client for client in rows if client not in record.absent)
    # Who is absent in the end may have answered the first of two exchanges.
    answers = _admitted(transcript, record, present if algorithm.inquiry is None else rows)
    if algorithm.members is not None:
        stack = answers.stack(present, task.message.dim)
        return Messages(stack, senders=present, sharing=int(record.facts["members"]))
    messages = Messages(answers.stack(rows, task.message.dim))
    if algorithm.inquiry is None:
        return messages
    key = task.key.fold("round", round_, "server")
    question = algorithm.inquiry.question(messages, state, round_, key)
    details = _admitted(transcript, record, present, detail=True)
    return Messages(details.stack(rows, algorithm.inquiry.message(task.model).dim), question=question)


def _admitted(
    transcript: Transcript, record: Record, clients: tuple[int, ...], *, detail: bool = False
) -> Admitted:
    """Read what a transcript has of these clients in a round's exchange."""
    vectors = transcript.read(record.round - 1, record.epoch, clients, detail=detail)
    if not vectors:
        raise UserError(
            f"there is no transcript of round {record.round} in {transcript.folder}: only a federation made "
            "with `init --transcript` keeps one"
        )
    return Admitted({client: Messages(vector[None]) for client, vector in vectors.items()})
