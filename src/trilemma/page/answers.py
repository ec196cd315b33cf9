"""What the page is told: plain typed values. Text is text, and must be shown as nothing else."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trilemma.report.federations import Now
from trilemma.report.question import Question


class Answer(BaseModel):
    """Something the page is told."""

    model_config = ConfigDict(frozen=True)


class Guaranteed(Answer):
    """What a run guarantees, or why nothing: `epsilon` is None where there is no guarantee."""

    held: bool
    text: str
    epsilon: float | None = None
    assumptions: list[str] = []


class RunLine(Answer):
    """A run in the list. Of a folder that cannot be read only `problem` is told."""

    id: str
    name: str
    state: Literal["finished", "diverged", "under way", "quiet", "broken"]
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


class RunList(Answer):
    """A part of the list of runs, newest first; `total` counts all that match the search."""

    runs: list[RunLine]
    total: int
    watched: list[str]
    version: int


class Series(Answer):
    """A quantity over rounds: mean over seeds, and one standard deviation to either side."""

    name: str
    rounds: list[int]
    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]
    seeds: int


class RunView(Answer):
    """One run: its line, its configuration as `table.key`, its curves and what must be said beside them."""

    line: RunLine
    config: dict[str, str]
    notes: list[str]
    target: float | None = Field(description="the ε the configuration asks for")
    series: list[Series]
    stages: list[Series] = Field(description="seconds of each stage of a round")
    baseline: list[Series] = Field(description="the same run with nobody lying, where it was run")
    seeds: list[int]


class Incident(Answer):
    """A client that did not answer in a round, whose answer was turned away, or who was expelled for good."""

    client: int | None
    round: int
    kind: Literal["absent", "rejected", "expelled"]
    reason: str = ""


class Trusted(Answer):
    """A client, and its mean share in the aggregate over the rounds it was heard in."""

    client: int
    weight: float
    heard: int
    absent: int
    rejected: int
    expelled: str
    lies: bool


class TrustMap(Answer):
    """Clients × rounds: every client's share in the aggregate. None: not heard. A column may be rounds."""

    columns: list[tuple[int, int]]
    shares: list[list[float | None]]
    incidents: list[Incident]
    clients: list[Trusted]
    equal: float = Field(description="an equal share")
    seed: int | None
    remark: str = ""


class Difference(Answer):
    """A key that differs between configurations, and its value in each; empty where it is not there."""

    key: str
    values: list[str]


class Differences(Answer):
    """What tells configurations apart."""

    names: list[str]
    rows: list[Difference]
    same: int


class Asked(BaseModel):
    """A question to the planner: options of `trilemma privacy`, within what is answered in a moment."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    clients: int = Field(ge=1, le=100_000)
    rounds: int = Field(ge=1, le=100_000)
    threat: str = Field(default="secldp", max_length=40)
    byzantine: int = Field(default=0, ge=0, le=100_000)
    collusion: int | None = Field(default=None, ge=0, le=100_000)
    neighbours: int | None = Field(default=None, ge=1, le=100_000)
    clip: float = 1.0
    sigma_ind: float | None = None
    sigma_cor: float | None = None
    noise_multiplier: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    unit: str = Field(default="user", max_length=40)
    batch: int = Field(default=1, ge=1, le=1_000_000)
    examples: int | None = Field(default=None, ge=1, le=1_000_000_000)
    sampling: str = Field(default="none", max_length=40)
    adjacency: str = Field(default="replace", max_length=40)
    assume: str = Field(default="guaranteed", max_length=40)
    accountant: str | None = Field(default=None, max_length=40)
    dim: int = Field(default=1, ge=1, le=1_000_000_000_000)
    rule: str = Field(default="caf", max_length=100, description="whose κ is told")

    def question(self) -> Question:
        """Return it as the command asks it."""
        return Question(**self.model_dump(exclude={"rule"}))


class Figure(Answer):
    """ε or δ by one accountant, and what it assumes."""

    accountant: str
    value: float | None
    assumes: str


class Plan(Answer):
    """The planner's answer. `record` is what `trilemma privacy --json` prints for the same question."""

    asked: Literal["epsilon", "delta"]
    figures: list[Figure]
    held: bool
    reason: str
    notes: list[str]
    sigma_ind: float
    sigma_cor: float
    multiplier: float | None
    deviation: float = Field(description="standard deviation of the noise in the honest mean, per coordinate")
    norm: float = Field(description="norm of the noise in the honest mean, over all parameters")
    kappa: float | None
    criterion: str
    rule_problem: str
    hidden: float | None = Field(description="how far f liars can move the mean of all, unseen, by evidence")
    hidden_problem: str
    up_bytes: int
    down_bytes: int
    command: str
    toml: str
    toml_problem: str
    record: dict[str, Any]


class PlanSeconds(Answer):
    """What a round takes on this machine, training apart; None where it is not timed."""

    rule: float | None = Field(description="the server's pass over all messages")
    noise: float | None = Field(description="one client's noise")


class PlanCurve(Answer):
    """One curve of the planner."""

    name: str
    x: list[float]
    y: list[float | None]


class PlanCurves(Answer):
    """ε over rounds by accountant, ε over the noise, and the noise that the same ε takes over n."""

    over_rounds: list[PlanCurve]
    over_noise: PlanCurve
    over_clients: PlanCurve
    epsilon: float | None


class Problem(Answer):
    """What is wrong with a question, and what is allowed."""

    detail: str


class Choices(Answer):
    """What the planner's controls offer."""

    threats: dict[str, str]
    accountants: dict[str, str]
    rules: list[str]
    units: list[str]
    schemes: list[str]
    adjacencies: list[str]


class StudyLine(Answer):
    """A folder with several runs."""

    id: str
    name: str
    runs: int
    paper: str = ""


class Square(Answer):
    """A cell of a study: the worst of its runs, and all of them."""

    value: float | None
    shown: str
    printed: str = ""
    verdict: str = ""
    worst: str = Field(description="the id of the worst run")
    runs: list[str]


class StudyView(Answer):
    """A study as a table: rows and columns by choice, the worst run of each cell first."""

    name: str
    score: str
    keys: list[str] = Field(description="what may be rows or columns: keys in which the runs differ")
    row: str
    column: str
    rows: list[str]
    columns: list[str]
    squares: list[list[Square | None]]
    remark: str = ""


Role = Literal["server", "client"]


class PartyLine(Answer):
    """A party of a federation."""

    id: str
    name: str
    role: Role
    federation: str = ""
    clients: int = 0
    problem: str = ""


class Member(Answer):
    """A client as the server knows it."""

    client: int
    heard: int | None = Field(description="the last round in which its answer counted")
    absent: int
    rejected: int
    reason: str = Field(description="why its answer was last turned away")
    weight: float
    now: Now
    heard_at: float | None = Field(description="when its answer last counted, in seconds since 1970")
    expelled: str
    outside: str = Field(description="why it is not in the epoch, where it is not")


class ServerRun(Answer):
    """A run as the server has committed it."""

    id: str
    name: str
    state: str
    round: int
    rounds: int
    epoch: int | None
    score: str
    changed: float
    members: list[Member]


class Spent(Answer):
    """A release in a client's ledger: the round, and ε of all releases up to it."""

    run: str
    round: int
    epsilon: float
    accountant: str
    threat: str


class Account(Answer):
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


class PartyView(Answer):
    """What a party's own folder tells its owner."""

    line: PartyLine
    address: str
    config: dict[str, str]
    runs: list[ServerRun] = []
    account: Account | None = None


def finite(value: float | None) -> float | None:
    """Return a number JSON can carry, or None.

    >>> finite(1.5), finite(math.inf)
    (1.5, None)
    """
    return None if value is None or not math.isfinite(value) else float(value)
