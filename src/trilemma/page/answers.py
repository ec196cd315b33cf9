"""What the page is told: plain typed values. Text is text, and must be shown as nothing else."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from trilemma.report.federations import Now


class AccountantLine(BaseModel):
    """Something the page is told."""

    model_config = ConfigDict(frozen=True)


class Guaranteed(AccountantLine):
    """What a run guarantees, or why nothing: `epsilon` is None where there is no guarantee.

    `held` is None where others know: the text says who.
    """

    held: bool | None
    text: str
    epsilon: float | None = None
    assumptions: list[str] = []


class RunLine(AccountantLine):
    """A run in the list. Of a folder that cannot be read only `problem` is told."""

    id: str
    name: str = Field(description="the path below the watched folder")
    title: str = Field(description="what to call it: a cell of a sweep by what is its own")
    state: Literal["finished", "diverged", "under way", "quiet", "failed", "broken"]
    problem: str = ""
    deployed: bool = False
    data: str = ""
    algorithm: str = ""
    rule: str = ""
    clients: int = 0
    byzantine: int | None = None
    tolerated: int = 0
    attack: str = ""
    threat: str = ""
    rounds: int = 0
    done: int = 0
    seeds: int = 0
    score: str = ""
    shown: str = ""
    mean: float | None = None
    epsilon: str = ""
    guarantee: Guaranteed | None = None
    changed: float = 0.0


class RunList(AccountantLine):
    """A part of the list of runs, newest first; `total` counts all that match the search."""

    runs: list[RunLine]
    total: int
    watched: list[str]
    version: int


class Series(AccountantLine):
    """A quantity over rounds: mean over seeds, and one standard deviation to either side."""

    name: str
    rounds: list[int]
    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]
    seeds: int


class RunView(AccountantLine):
    """One run: its line, its configuration as `table.key`, its curves and what must be said beside them."""

    line: RunLine
    config: dict[str, str]
    notes: list[str]
    target: float | None = Field(description="the ε the configuration asks for")
    series: list[Series]
    stages: list[Series] = Field(description="seconds of each stage of a round")
    baseline: list[Series] = Field(description="the same run with nobody lying, where it was run")
    seeds: list[int]


class Incident(AccountantLine):
    """A client that was silent or not reached, whose answer was turned away, or who was expelled."""

    client: int | None
    round: int
    kind: Literal["absent", "unreached", "rejected", "expelled"]
    reason: str = ""


class Trusted(AccountantLine):
    """A client, and its mean share in the aggregate over the rounds it was heard in."""

    client: int
    weight: float
    heard: int
    absent: int
    unreached: int
    rejected: int
    late: int
    expelled: str
    lies: bool


class TrustMap(AccountantLine):
    """Clients × rounds: every client's share in the aggregate. None: not heard. A column may be rounds."""

    columns: list[tuple[int, int]]
    shares: list[list[float | None]]
    incidents: list[Incident]
    clients: list[Trusted]
    equal: float = Field(description="an equal share")
    verdict: str = Field(description="who stands out by a small share, or that nobody does")
    seed: int | None
    remark: str = ""


class Difference(AccountantLine):
    """A key that differs between configurations, and its value in each; empty where it is not there."""

    key: str
    values: list[str]


class Differences(AccountantLine):
    """What tells configurations apart."""

    names: list[str]
    rows: list[Difference]
    same: int


class ProblemText(AccountantLine):
    """What is wrong with a question, and what is allowed."""

    detail: str


class StudyLine(AccountantLine):
    """A folder with several runs."""

    id: str
    name: str
    runs: int
    changed: float = Field(description="when a run of it was last written, in seconds since 1970")
    paper: str = ""


class StudySquare(AccountantLine):
    """A cell of a study: the worst of its finished runs, and all of them."""

    value: float | None = Field(description="None where no run has finished: it is compared with nothing")
    shown: str
    printed: str = ""
    verdict: str = ""
    unfinished: int = Field(default=0, description="runs that are under way, or stopped")
    worst: str = Field(description="the id of the worst run")
    runs: list[str]
    differ: list[str] = Field(default=[], description="settings in which the runs differ, three at most")


class StudyView(AccountantLine):
    """A study as a table: rows and columns by choice, the worst run of each cell first."""

    name: str
    score: str
    scores: list[str] = Field(description="by what the runs were scored")
    low_is_good: bool
    keys: list[str] = Field(description="what may be rows or columns: keys in which the runs differ")
    row: str
    column: str
    rows: list[str]
    columns: list[str]
    squares: list[list[StudySquare | None]]
    remark: str = ""


Role = Literal["server", "client"]


class PartyLine(AccountantLine):
    """A party of a federation."""

    id: str
    name: str
    role: Role
    federation: str = ""
    clients: int = 0
    problem: str = ""


class MemberLine(AccountantLine):
    """A client as the server knows it."""

    client: int
    heard: int | None = Field(description="the last round in which its answer counted")
    absent: int = Field(description="rounds in which it was silent")
    unreached: int = Field(description="rounds in which the carrier did not get through")
    rejected: int = Field(description="rounds in which its answer was turned away")
    late: int = Field(description="rounds in which it was neither waited for nor there")
    took: float | None = Field(description="seconds that its last answer took")
    usual: float | None = Field(description="seconds that its answers take, the median")
    reason: str = Field(description="why its answer was last turned away, or did not get through")
    weight: float
    now: Now
    heard_at: float | None = Field(description="when its answer last counted, in seconds since 1970")
    expelled: str
    outside: str = Field(description="why it is not in the epoch, where it is not")


class CountedLine(AccountantLine):
    """A bin or category of a column; None: too few records to be shown."""

    name: str
    count: float | None
    low: float | None
    high: float | None


class CountedColumn(AccountantLine):
    """The histogram of a column."""

    name: str
    cells: list[CountedLine]


class StatisticsView(AccountantLine):
    """Private statistics: in words, and what can be drawn."""

    lines: list[str]
    columns: list[CountedColumn]


class ServerRun(AccountantLine):
    """A run as the server has committed it."""

    id: str
    name: str
    state: str
    round: int
    rounds: int
    epoch: int | None
    score: str
    changed: float
    members: list[MemberLine]
    statistics: StatisticsView | None = Field(default=None, description="of a run of private statistics")


class Spent(AccountantLine):
    """A release in a client's ledger: the round, and ε of all releases up to it."""

    run: str
    round: int
    epsilon: float
    accountant: str
    threat: str


class AccountLine(AccountantLine):
    """A client's own ledger, budget and log."""

    budget: float | None
    delta: float | None
    unit: str
    adjacency: str
    spent: float
    left: float | None
    accountant: str
    rounds: dict[str, int] = Field(description="releases by run and epoch")
    spending: list[Spent]
    remarks: list[str]
    refusals: list[str]
    problem: str = ""


class PartyView(AccountantLine):
    """What a party's own folder tells its owner."""

    line: PartyLine
    address: str
    config: dict[str, str]
    runs: list[ServerRun] = []
    account: AccountLine | None = None


def finite(value: float | None) -> float | None:
    """Return a number JSON can carry, or None.

    >>> finite(1.5), finite(math.inf)
    (1.5, None)
    """
    return None if value is None or not math.isfinite(value) else float(value)
