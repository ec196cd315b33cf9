"""A run once more, from what was admitted: the same model to the bit, and the same expulsions.

For federations that keep a transcript (`transcript` in federation.toml). Whoever doubts an expulsion, or a
model, has the server's step, the messages and the records; nothing else went into either. `differences` says
where a run on disk is not what follows from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.base.records import Record
from trilemma.federation.party.layout import Party
from trilemma.federation.party.task import PartyTask, load_task
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.admission import Admitted
from trilemma.federation.protocol.expulsions import AnnouncedExpulsion, clients_of
from trilemma.federation.server.commits import CommitLog
from trilemma.federation.server.transcript import Transcript
from trilemma.learning import Messages
from trilemma.learning.protocol import State
from trilemma.learning.steps.rounds import returned_model


@dataclass(frozen=True)
class Replayed:
    """What follows from a run's messages: the last broadcast, and who is expelled.

    `chosen` is the model that the run returns after so many `rounds`, where that is not the latest.
    """

    broadcast: State
    expelled: tuple[AnnouncedExpulsion, ...] = ()
    chosen: State = field(default_factory=dict)
    rounds: int = 0


def replay(server: Party, run: str) -> Replayed:
    """Take every step of the server again, under the roster that is in force now."""
    task, log = load_task(server), CommitLog(server.run_folder(run))
    algorithm, places = task.resolved.algorithm, server.keys.members
    start = algorithm.init(task.model, tuple(places), task.key.fold("init"))
    broadcast, state = start.broadcast, start.server
    expelled: list[AnnouncedExpulsion] = []
    how = task.config.run
    chosen = None if how.returned == "last" else broadcast["params"]
    records = [Record.read(one) for one in log.records()]
    if [one.round for one in records] != list(range(1, len(records) + 1)):
        raise UserError(
            f"the records of {log.folder} are not complete: what follows from the rest is no replay"
        )
    for record in records:
        key = task.key.fold("round", record.round - 1, "server")
        if algorithm.members is not None:
            _check_sharing(record, places)
        messages = _heard(task, Transcript(log.folder), record, state)
        done = algorithm.server(messages, state, record.round - 1, key)
        broadcast, state = done.broadcast, done.state
        expelled += [AnnouncedExpulsion.of(one, record.round) for one in done.report.get("expelled", ())]
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
    log.check_began_with(server)  # from anything else something else follows, and nobody did wrong
    replayed = replay(server, run)
    if last.rounds != replayed.rounds:
        return replayed, [
            f"the last commit is of round {last.rounds}, the last record of round {replayed.rounds}: "
            "where the run is under way, ask again"
        ]
    found = list(compared(f"the commit of round {last.rounds}", last.broadcast, replayed.broadcast))
    found += compared("the model that is returned", last.chosen, replayed.chosen)
    if log.result.is_file():
        _, result = wire.read_file(log.result, kinds.Finished)
        found += compared("the result", result, {**replayed.broadcast, **replayed.chosen})
    if last.expelled != replayed.expelled:
        said, follows = sorted(clients_of(last.expelled)), sorted(clients_of(replayed.expelled))
        found.append(f"expelled are clients {said}, from the messages follow {follows}, or other statistics")
    return replayed, found


def compared(what: str, kept: wire.Tensors, follows: State) -> Iterator[str]:
    """Say which tensors of a file are not, to the bit, what follows from the messages."""
    for name in sorted({*kept, *follows}):
        one, other = kept.get(name), follows.get(name)
        if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
            yield f"{what}: {name} is there on one side only, or has another shape or type"
        elif wire.raw(one) != wire.raw(other):
            differ = (_bytes(one) != _bytes(other)).any(1)
            apart = (one.double() - other.double()).abs().reshape(-1)[differ]
            yield (
                f"{what}: {name} differs in {int(differ.sum())} of {one.numel()} numbers, by up to "
                f"{float(apart.max()):.3g}"
            )


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of each number, one row each."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


def _check_sharing(record: Record, places: Sequence[int]) -> None:
    """Refuse a record that does not say who shared secrets: all who answered, and as many as were members.

    With sampled clients these are more than the round asked; one of them may have left the roster since.
    """
    sharing, present = set(record.sharing), set(record.weights) - record.unheard
    known = max((*places, *record.weights), default=0) + len(sharing)
    counted = len(sharing) == len(record.sharing) == record.facts.get("members")
    if not (counted and present <= sharing and max(sharing, default=0) <= known):
        raise UserError(
            f"the record of round {record.round} does not say who shared secrets: another version wrote it, "
            "or it was changed"
        )


def _heard(task: PartyTask, transcript: Transcript, record: Record, state: State) -> Messages:
    """Return the messages of a round as the server's step was given them."""
    algorithm, round_, rows = task.resolved.algorithm, record.round - 1, tuple(record.weights)
    present, dim = tuple(client for client in rows if client not in record.unheard), task.message.dim
    if algorithm.inquiry is None:
        answers = _complete(transcript.read(round_, record.epoch, present, dim), transcript, record, present)
        if algorithm.members is None:
            return Messages(answers.stack(rows, dim), senders=rows)
        return Messages(answers.stack(present, dim), senders=present, sharing=record.sharing)
    # Who is absent in the end may have answered the first of two exchanges.
    answers = _complete(transcript.read(round_, record.epoch, rows, dim), transcript, record, present)
    key = task.key.fold("round", round_, "server")
    question = algorithm.inquiry.question(Messages(answers.stack(rows, dim)), state, round_, key)
    dim = algorithm.inquiry.message(task.model).dim
    told = transcript.read(round_, record.epoch, present, dim, detail=True)
    return Messages(
        _complete(told, transcript, record, present).stack(rows, dim), question=question, senders=rows
    )


def _complete(
    vectors: Mapping[int, Tensor], transcript: Transcript, record: Record, clients: Sequence[int]
) -> Admitted:
    """Return what a transcript has of a round's exchange; refuse it where one of `clients` is missing."""
    if not vectors:
        raise UserError(
            f"there is no transcript of round {record.round} in {transcript.folder}: only a federation made "
            "with `init --transcript` keeps one"
        )
    if missing := [client for client in clients if client not in vectors]:
        raise UserError(
            f"{transcript.folder} lacks what was heard of client {missing[0]} in round {record.round}: what "
            "follows from the rest is no replay"
        )
    return Admitted({client: Messages(vector[None]) for client, vector in vectors.items()})
