"""A federation as the page shows it, read from one party's own folder and from nobody else's.

The server's folder has who answered, who did not, whose answer was turned away and why; a client's has its
ledger, its budget and its own log. Folders of secrets are not opened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from trilemma.base.errors import UserError
from trilemma.base.files import readable
from trilemma.federation.party.layout import Party
from trilemma.page.answers import (
    AccountLine,
    CountedColumn,
    CountedLine,
    MemberLine,
    PartyLine,
    PartyView,
    Role,
    ServerRun,
    Spent,
    StatisticsView,
)
from trilemma.page.index import Index, WatchedRun, shown
from trilemma.page.runs import flat, scored
from trilemma.privacy.ledger.lines import Entry
from trilemma.report import federations
from trilemma.report.run_metadata import RunMetadata, plain_config
from trilemma.survey.result import FILE, read_statistics
from trilemma.survey.words import lines

LATEST = 300
"""Releases of a ledger, and lines of a log, that are shown: the newest."""

LOG_TAIL = 1 << 16
"""Bytes at the end of a log that are read."""


def party_line(one: WatchedRun) -> PartyLine:
    """Return a party's line in the list, or what is wrong with its folder."""
    role: Role = "server" if one.folder.name == "server" else "client"
    try:
        with readable(one.folder):
            party = Party.open(one.folder)
            facts, clients = party.federation, len(party.keys.members)
    except UserError as error:
        return PartyLine(id=one.id, name=one.name, role=role, problem=shown(str(error)))
    name = shown(str(facts.name))
    return PartyLine(id=one.id, name=one.name, role=role, federation=name, clients=clients)


def party_view(one: WatchedRun, index: Index) -> PartyView:
    """Return what a party's folder tells its owner."""
    with readable(one.folder):
        party = Party.open(one.folder)
        config = flat(plain_config(party.config))
        line, address = party_line(one), party.federation.address
        if party.client is not None:
            return PartyView(line=line, address=address, config=config, account=_account(party))
        own = [run for run in index.all("deployed") if run.folder.parents[2] == one.folder]
        runs = [view for run in own if (view := _server_run(party, run, index)) is not None]
        return PartyView(line=line, address=address, config=config, runs=runs)


def _server_run(server: Party, run: WatchedRun, index: Index) -> ServerRun | None:
    found = index.metadata(run)
    if isinstance(found, UserError):
        return None
    records = [record for one in index.records(run).values() for record in one]
    summary = found.summary
    return ServerRun(
        id=run.id,
        name=shown(run.folder.name),
        state=found.state,
        round=max(found.done.values(), default=0),
        rounds=summary.rounds,
        epoch=found.newest.epoch if found.newest else None,
        score="" if summary.spread(summary.score).mean is None else _score(found),
        changed=found.changed,
        members=[
            _member(one) for one in federations.members_of(server, run.folder.name, summary.clients, records)
        ],
        statistics=_statistics(run.folder),
    )


def _statistics(folder: Path) -> StatisticsView | None:
    """Return what a run of statistics told; None: it is none, or not looked at yet."""
    if not (folder / FILE).is_file():
        return None
    try:
        found = read_statistics(folder)
    except UserError as error:
        return StatisticsView(lines=[shown(str(error))], columns=[])
    columns = [
        CountedColumn(
            name=shown(one.name),
            cells=[
                CountedLine(
                    name=shown(cell.name),
                    count=None if cell.count is None else cell.count.value,
                    low=None if cell.count is None else cell.count.low,
                    high=None if cell.count is None else cell.count.high,
                )
                for cell in one.cells
            ],
        )
        for one in found.columns
    ]
    return StatisticsView(lines=[shown(line) for line in lines(found)], columns=columns)


def _score(found: RunMetadata) -> str:
    name = found.summary.score
    return f"{name} {scored(name, found.summary)}"


def _member(one: federations.MemberRow) -> MemberLine:
    return MemberLine(
        client=one.client,
        heard=one.heard,
        absent=one.absent,
        unreached=one.unreached,
        rejected=one.rejected,
        late=one.late,
        took=one.took,
        usual=one.usual,
        reason=shown(one.reason),
        weight=one.weight,
        now=one.now,
        heard_at=one.heard_at,
        expelled=shown(one.expelled),
        outside="" if one.joined is not False else shown(one.why),
    )


def _account(party: Party) -> AccountLine:
    """Return a client's ledger, budget and refusals; what cannot be read is said."""
    found = federations.account(party)
    budget, statement = found.budget, found.statement
    return AccountLine(
        budget=None if budget is None else budget.epsilon,
        delta=None if budget is None else budget.delta,
        unit="" if budget is None else budget.unit,
        adjacency="" if budget is None else budget.adjacency,
        spent=found.spent,
        left=found.left,
        accountant=found.accountant,
        rounds={shown(run): count for run, count in found.rounds.items()},
        spending=_spending(statement.entries)[-LATEST:],
        remarks=[shown(f"{one.run}, round {one.round}: {one.text}") for one in statement.remarks][-LATEST:],
        refusals=_tail(party.log),
        problem=shown(found.problem),
    )


def _spending(entries: Sequence[Entry]) -> list[Spent]:
    """Return ε after each release: fewer cost no more than more of them, so that a later figure holds too."""
    told: list[Spent] = []
    least, by = math.inf, ""
    for entry in reversed(entries):
        for name, epsilon in entry.epsilon.items():
            if epsilon < least:
                least, by = epsilon, name
        run, threat = shown(entry.run), shown(entry.threat)
        told.append(Spent(run=run, round=entry.round, epsilon=least, accountant=shown(by), threat=threat))
    return told[::-1]


def _tail(log: Path) -> list[str]:
    """Return the newest lines of a client's own log."""
    if not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL))
        text = file.read().decode("utf-8", "backslashreplace")
    return [shown(line) for line in text.splitlines() if line.strip()][-LATEST:]
