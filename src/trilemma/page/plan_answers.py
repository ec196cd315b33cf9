"""What the planner is asked and what it answers: plain typed values, as in `answers`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trilemma.page.answers import AccountantLine
from trilemma.report.privacy_question import Question


class PlanQuestion(BaseModel):
    """A question to the planner: options of `trilemma privacy`, within what is answered in a moment."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    clients: int = Field(ge=1, le=100_000)
    rounds: int = Field(ge=1, le=100_000)
    threat: str = Field(default="secldp", max_length=40)
    byzantine: int = Field(default=0, ge=0, le=100_000)
    collusion: int | None = Field(default=None, ge=0, le=100_000)
    neighbours: int | None = Field(default=None, ge=1, le=100_000)
    weights: str = Field(default="", max_length=20_000)
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


class Figure(AccountantLine):
    """ε or δ by one accountant, and what it assumes."""

    accountant: str
    value: float | None
    assumes: str


class PlanAnswer(AccountantLine):
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
    hidden: float | None = Field(
        description="how far f liars can move the mean of all, whatever they send, before one is proven to"
    )
    hidden_problem: str
    up_bytes: int
    down_bytes: int
    command: str
    toml: str
    toml_problem: str
    record: dict[str, Any]


class PlanSeconds(AccountantLine):
    """What a round takes on this machine, training apart; None where it is not timed."""

    rule: float | None = Field(description="the server's pass over all messages")
    noise: float | None = Field(description="one client's noise")


class PlanCurve(AccountantLine):
    """One curve of the planner."""

    name: str
    x: list[float]
    y: list[float | None]


class PlanCurves(AccountantLine):
    """ε over rounds by accountant, ε over the noise, and the noise that the same ε takes over n."""

    over_rounds: list[PlanCurve]
    over_noise: PlanCurve
    over_clients: PlanCurve
    epsilon: float | None


class Choices(AccountantLine):
    """What the planner's controls offer."""

    threats: dict[str, str]
    accountants: dict[str, str]
    rules: list[str]
    units: list[str]
    schemes: list[str]
    adjacencies: list[str]
