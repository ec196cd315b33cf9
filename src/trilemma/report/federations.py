"""Where a federation stands, read from one party's own folder and from nobody else's.

The server's folder has who answered, who did not, whose answer was turned away and why; a client's has its
ledger and its budget. Folders of secrets are not opened, nothing is written, and what no process answers is
left out, so it works after a crash too. `trilemma federation status` and the page show it.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trilemma.base.errors import UserError
from trilemma.base.files import readable
from trilemma.base.records import Record
from trilemma.federation.client.account import CAVEAT, own_statement, read_budget, run_of
from trilemma.federation.party.layout import RUNNING, WITHOUT_FACTS, Party, parties, without_facts
from trilemma.federation.party.public_facts import Timing
from trilemma.federation.processes import groups as processes
from trilemma.federation.processes.door import ask
from trilemma.federation.processes.logs import events_file, read_events
from trilemma.federation.protocol.waiting import Waiting
from trilemma.privacy.ledger.lines import Budget
from trilemma.privacy.ledger.statement import Statement
from trilemma.report.client_events import Doings, doings, moment
from trilemma.report.run_metadata import deployed_metadata, deployed_records
from trilemma.report.trust import places, trusted

Now = Literal["heard", "absent", "unreached", "rejected", "late", "not asked", "nothing yet"]
"""What became of a client in the newest round: it was silent, the carrier did not reach it, its answer was
turned away, or it was neither waited for nor there."""

PATIENCE = 5.0
"""Seconds for the server's process to say who is connected."""

LATEST = 300
"""Scores of a run that are told: the newest."""


@dataclass(frozen=True)
class MemberRow:
    """A client as the server's records have it.

    `heard` is the last round in which its answer counted, `reason` why one was last turned away, or did not
    get through; `weight` is its mean share in the aggregate over the rounds it was heard in, `share` that in
    the newest round. `took` is how many seconds its last answer took, `usual` the median of all; `out` tells
    whether it is not waited for.
    `joined` tells whether it joined the newest epoch and `why` why it did not; `heard_at` is when its answer
    last counted, in seconds since 1970. Those are from the log of events, and None where it says nothing.
    """

    client: int
    heard: int | None
    absent: int
    rejected: int
    reason: str
    weight: float
    now: Now
    share: float | None = None
    expelled: str = ""
    joined: bool | None = None
    why: str = ""
    heard_at: float | None = None
    unreached: int = 0
    late: int = 0
    took: float | None = None
    usual: float | None = None
    out: bool = False


@dataclass(frozen=True)
class RunStanding:
    """A run as the server has committed it; `scores` are those of its newest scored rounds, by round."""

    name: str
    state: str
    round: int
    rounds: int
    epoch: int | None
    changed: float
    scores: Mapping[int, Mapping[str, float | None]]
    members: tuple[MemberRow, ...]


@dataclass(frozen=True)
class Account:
    """What a client has spent and may spend; `problem` says what cannot be read, or believed.

    `rounds` counts releases by run and epoch. `weight` is its public weight, if clients have some.
    """

    budget: Budget | None
    statement: Statement = field(repr=False, default=Statement(None))
    problem: str = ""
    weight: float | None = None

    @property
    def spent(self) -> float:
        """ε of all releases."""
        return self.statement.spent[1]

    @property
    def accountant(self) -> str:
        """By whom that was counted."""
        return self.statement.spent[0]

    @property
    def left(self) -> float | None:
        """What the budget leaves; None where there is none."""
        return None if self.budget is None else self.budget.epsilon - self.spent

    @property
    def releases(self) -> dict[str, int]:
        """Releases by run."""
        return dict(Counter(run_of(one) for one in self.statement.entries))

    @property
    def caveats(self) -> tuple[str, ...]:
        """What must be said beside ε."""
        return tuple(dict.fromkeys(one.text for one in self.statement.remarks if CAVEAT in one.text))

    @property
    def rounds(self) -> dict[str, int]:
        """Releases by run and epoch."""
        return dict(Counter(one.run for one in self.statement.entries))

    def plain(self) -> dict[str, Any]:
        """Return the account as JSON values, without the single releases."""
        return {
            "budget": None if self.budget is None else self.budget.epsilon,
            "delta": None if self.budget is None else self.budget.delta,
            "unit": None if self.budget is None else self.budget.unit,
            "spent": None if self.problem else self.spent,
            "left": self.left,
            "accountant": self.accountant or None,
            "rounds": self.rounds,
            "caveats": list(self.caveats),
            "problem": self.problem,
            "weight": self.weight,
        }


@dataclass(frozen=True)
class ProcessStanding:
    """A process that `up` started, and whether it is still there."""

    name: str
    pid: int
    alive: bool


@dataclass(frozen=True)
class PartyStanding:
    """A party: its process; the server's runs and who is connected to it; a client's account and doings.

    `problem`: what cannot be read.
    """

    party: str
    processes: tuple[ProcessStanding, ...] = ()
    runs: tuple[RunStanding, ...] = ()
    door: Mapping[str, Any] | None = None
    account: Account | None = None
    doings: Doings = field(default_factory=Doings)
    problem: str = ""

    def plain(self) -> dict[str, Any]:
        """Return everything as JSON values; what is not a finite number is None."""
        plain: dict[str, Any] = {
            "party": self.party,
            "problem": self.problem,
            "processes": [asdict(one) for one in self.processes],
        }
        if self.account is None:
            plain["runs"] = [asdict(one) for one in self.runs]
            plain["door"] = self.door
        else:
            plain["account"] = self.account.plain()
            plain["doings"] = asdict(self.doings)
        finite: dict[str, Any] = _finite(plain)
        return finite


def standing(folder: Path) -> list[PartyStanding]:
    """Return where each party in `folder` stands; one that cannot be read says so and hides no other."""
    whole = [_party(party) for party in parties(folder)]
    return [*whole, *(_without_facts(name, path) for name, path in without_facts(folder).items())]


def _without_facts(name: str, folder: Path) -> PartyStanding:
    """Return what can be said of a party without its public facts: its processes."""
    try:
        return PartyStanding(name, _known(folder / RUNNING), problem=WITHOUT_FACTS)
    except UserError as error:
        return PartyStanding(name, problem=f"{WITHOUT_FACTS}; {error}")


def _known(running: Path) -> tuple[ProcessStanding, ...]:
    return tuple(
        ProcessStanding(one.name, one.pid, processes.leads(one)) for one in processes.recorded(running)
    )


def _party(party: Party) -> PartyStanding:
    known: tuple[ProcessStanding, ...] = ()
    try:
        with readable(party.folder):
            known = _known(party.running)
            if party.client is not None:
                told = doings(read_events(events_file(party.running)))
                return PartyStanding(party.name, known, account=account(party), doings=told)
            return _server(party, known)
    except UserError as error:
        return PartyStanding(party.name, known, problem=str(error))


def _server(party: Party, known: tuple[ProcessStanding, ...]) -> PartyStanding:
    """Return where the server stands; a run that cannot be read says so and hides no other."""
    runs: list[RunStanding] = []
    problems: list[str] = []
    for run in _runs(party):
        try:
            with readable(run):
                runs.append(run_standing(party, run))
        except UserError as error:
            problems.append(str(error))
    return PartyStanding(party.name, known, tuple(runs), _door(party, known), problem="; ".join(problems))


def _door(server: Party, known: tuple[ProcessStanding, ...]) -> Mapping[str, Any] | None:
    """Return what the server's process says of who is connected; None where there is none."""
    try:
        told = list(ask(server, seconds=PATIENCE, ask="status")) if any(one.alive for one in known) else []
    except (UserError, TimeoutError):
        return None
    return told[0] if told else None


def _runs(server: Party) -> list[Path]:
    return [run for run in sorted((server.state / "runs").glob("*")) if (run / "commits").is_dir()]


def run_standing(server: Party, run: Path) -> RunStanding:
    """Return where a run in the server's folder stands."""
    found = deployed_metadata(server.folder, run)
    records = [record for one in deployed_records(found.config, run).values() for record in one]
    scored = [record for record in records if record.metrics][-LATEST:]
    return RunStanding(
        name=run.name,
        state=found.state,
        round=max(found.done.values(), default=0),
        rounds=found.summary.rounds,
        epoch=found.newest.epoch if found.newest else None,
        changed=found.changed,
        scores={record.round: dict(record.metrics) for record in scored},
        members=tuple(members_of(server, run.name, found.summary.clients, records)),
    )


def members_of(server: Party, run: str, clients: int, records: Sequence[Record]) -> list[MemberRow]:
    """Return the clients as the server's records of a run and its events have them."""
    told = [one for one in read_events(events_file(server.running)) if one.get("run") == run]
    return with_events(members(clients, records, server.federation.timing), told)


def members(clients: int, records: Sequence[Record], timing: Timing | None = None) -> list[MemberRow]:
    """Return the clients as the server's records have them, in their order.

    >>> [one.now for one in members(3, [Record(1, weights={0: 1.0, 1: 0.0}, absent=(1,))])]
    ['heard', 'absent', 'not asked']
    """
    trust = {one.client: one for one in trusted(clients, records)}
    heard: dict[int, int] = {}
    reasons: dict[int, str] = {}
    times: defaultdict[int, list[float]] = defaultdict(list)
    for record in records:
        heard |= {client: record.round for client in record.weights if client not in record.unheard}
        known = (*record.rejected, *record.unreached)
        reasons |= {client: str(reason) for client, reason in known if client is not None}
        for client, seconds in record.times.items():
            times[client].append(seconds)
    timing = timing or Timing()
    out = Waiting.of(timing.slow_times, timing.slow_rounds, records).out
    newest = records[-1] if records else None
    return [
        MemberRow(
            client=client,
            heard=heard.get(client),
            absent=trust[client].absent,
            rejected=trust[client].rejected,
            reason=reasons.get(client, ""),
            weight=trust[client].weight,
            now=_now(client, newest),
            share=None if newest is None else newest.weights.get(client),
            expelled=trust[client].expelled,
            unreached=trust[client].unreached,
            late=trust[client].late,
            took=times[client][-1] if times[client] else None,
            usual=statistics.median(times[client]) if times[client] else None,
            out=client in out,
        )
        for client in range(places(clients, records))
    ]


def with_events(found: Sequence[MemberRow], told: Sequence[Mapping[str, Any]]) -> list[MemberRow]:
    """Return the clients with what the server's events of a run say: who joined, and when who was heard.

    >>> told = [{"event": "epoch-called", "epoch": 0}]
    >>> told += [{"event": "client-refused", "epoch": 0, "client": 1, "reason": "terms: they differ"}]
    >>> told += [{"event": "epoch-opened", "epoch": 0, "clients": [0], "of": 3}]
    >>> [(one.joined, one.why) for one in with_events(members(3, []), told)]
    [(True, ''), (False, 'terms: they differ'), (False, 'did not answer')]
    """
    joined: set[int] | None = None
    why: dict[int, str] = {}
    heard_at: dict[int, float] = {}
    for one in told:
        match one["event"]:
            case "epoch-called":
                joined, why = None, {}
            case "client-refused" if one["client"] is not None:
                why[one["client"]] = str(one["reason"])
            case "epoch-opened":
                joined = set(one["clients"])
            case "round-committed":
                heard_at |= dict.fromkeys(one["heard"], moment(one))
    silent = "" if joined is None else "did not answer"
    return [
        replace(
            one,
            joined=None if joined is None and one.client not in why else one.client in (joined or ()),
            why=""
            if one.client in (joined or ())
            else why.get(one.client, "expelled" if one.expelled else silent),
            heard_at=heard_at.get(one.client),
        )
        for one in found
    ]


def _now(client: int, newest: Record | None) -> Now:
    if newest is None:
        return "nothing yet"
    if any(client == who for who, _ in newest.rejected):
        return "rejected"
    if any(client == who for who, _ in newest.unreached):
        return "unreached"
    if client in newest.absent:
        return "absent"
    if client in newest.late:
        return "late"
    return "heard" if client in newest.weights else "not asked"


def account(party: Party) -> Account:
    """Return a client's ledger and budget; what cannot be read, or is less than it was, is said."""
    try:
        statement = own_statement(party)
        budget = statement.budget or (read_budget(party) if party.budget.is_file() else None)
        member = party.signed_roster.clients[party.client or 0]
    except UserError as error:
        return Account(None, problem=str(error))
    return Account(budget, statement, weight=member.weight)


def _finite(value: Any) -> Any:
    """Return JSON values that every reader takes: numbers are finite or None.

    >>> _finite({"a": [1.0, math.inf], 2: "x"})
    {'a': [1.0, None], '2': 'x'}
    """
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
