"""What a client's owner allows, in a file of the owner's own: nothing, unless it says so.

    epsilon = 4.0                 any run whose rounds cost at most this much, in advance
    plans = ["…"]                 any run of these plans: configuration, examples and task
    partly = ["default"]          these runs, also where the budget does not reach to their end
    [runs]
    default = "…"                 this run, of this plan

A plan is named by its digest, so that a configuration or a `task.py` that changes is another plan, and is
allowed again or not.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import tomli_w

from trilemma.base import files
from trilemma.base.errors import UserError

HEADING = """# What this client takes part in: see `trilemma federation proposals` and `allow`. Its budget
# (budget.toml) holds over everything that is allowed here.
"""


@dataclass(frozen=True)
class Permission:
    """What an owner allows.

    >>> nothing = Permission()
    >>> nothing.allows("monday", "plan", lambda: 1.0)
    False
    >>> nothing.with_run("monday", "plan").allows("monday", "plan", lambda: 1.0)
    True
    >>> nothing.with_run("monday", "plan").allows("tuesday", "plan", lambda: 1.0)
    False
    >>> nothing.with_plan("plan").allows("tuesday", "plan", lambda: 1.0)
    True
    >>> up_to_four = replace(nothing, epsilon=4.0)
    >>> [up_to_four.allows("any", "other", lambda cost=cost: cost) for cost in (3.0, 5.0, None)]
    [True, False, False]
    """

    epsilon: float | None = None
    plans: tuple[str, ...] = ()
    runs: Mapping[str, str] = field(default_factory=dict)
    partly: tuple[str, ...] = ()

    def allows(self, run: str, plan: str, cost: Callable[[], float | None]) -> bool:
        """Tell whether a run may be joined; `cost` is asked for its ε (None: no guarantee) where it matters.

        A run without a guarantee is allowed in advance by epsilon = inf only.
        """
        if plan in self.plans or self.runs.get(run) == plan:
            return True
        if self.epsilon is None:
            return False
        epsilon = cost()
        return (math.inf if epsilon is None else epsilon) <= self.epsilon

    def with_run(self, run: str, plan: str) -> Permission:
        """Allow one run too."""
        return replace(self, runs={**self.runs, run: plan})

    def with_part(self, run: str) -> Permission:
        """Allow a run to be begun that the budget does not reach to the end of."""
        return replace(self, partly=tuple(dict.fromkeys((*self.partly, run))))

    def with_plan(self, plan: str) -> Permission:
        """Allow all runs of a plan too."""
        return replace(self, plans=tuple(dict.fromkeys((*self.plans, plan))))

    def save(self, path: Path) -> None:
        """Write it down; on disk when this returns."""
        epsilon = {} if self.epsilon is None else {"epsilon": self.epsilon}
        partly = {"partly": list(self.partly)} if self.partly else {}
        facts = {**epsilon, "plans": list(self.plans), **partly, "runs": dict(self.runs)}
        files.write_atomically(path, (HEADING + tomli_w.dumps(facts)).encode())

    @classmethod
    def load(cls, path: Path) -> Permission:
        """Read what `save` or an owner wrote; without a file nothing is allowed."""
        if not path.is_file():
            return cls()
        try:
            facts = tomllib.loads(path.read_text())
            return cls(
                epsilon=None if "epsilon" not in facts else float(facts["epsilon"]),
                plans=tuple(facts.get("plans", ())),
                runs=dict(facts.get("runs", {})),
                partly=tuple(facts.get("partly", ())),
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"{path} does not say what is allowed: {error}") from None


def amend(path: Path, change: Callable[[Permission], Permission]) -> None:
    """Change what a file allows; nobody else changes it between reading and writing.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "allowed.toml"
    >>> amend(path, lambda allowed: allowed.with_plan("plan")); amend(path, allow_up_to(4.0))
    >>> Permission.load(path)
    Permission(epsilon=4.0, plans=('plan',), runs={}, partly=())
    """
    with files.locked(path.with_name(f"{path.name}.lock")):
        change(Permission.load(path)).save(path)


def allow_up_to(epsilon: float) -> Callable[[Permission], Permission]:
    """Return the decision to allow any run whose rounds cost at most ε, in advance; inf: whatever it costs.

    >>> allow_up_to(-1.0)
    Traceback (most recent call last):
    trilemma.base.errors.UserError: epsilon = -1: allowed is what a run may cost, more than 0
    """
    if not epsilon > 0:  # nor is nan
        raise UserError(f"epsilon = {epsilon:g}: allowed is what a run may cost, more than 0")
    return lambda allowed: replace(allowed, epsilon=epsilon)
