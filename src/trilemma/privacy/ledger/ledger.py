"""What a client has released and what it has cost, written before anything leaves.

The ledger is an append-only file of JSON lines. Each carries the hash of the line before it and its own, so
a changed, missing or reordered line is found when the file is opened. An entry is on disk (written and
fsynced) before `authorise` returns: a crash between the two costs budget, but never hides a release. A
crash in the middle of the write leaves a torn last line, the beginning of one and no line end; its release
was never authorised, so opening the ledger cuts it off and says so. A last line that is complete and wrong
was changed, and is refused like any other.

Costs compose over rounds with different noise: precisions 1/z² add up for the exact accountant, divergences
for the Rényi one, loss distributions convolve. Every accountant's ε is an upper bound, so the smallest one
is held against the budget. The same are asked in every round, the quick ones and the tightest, so that what
is spent never falls.

A budget is its owner's, who may change its ε: a line of its own says so, and the newest counts. What lines
say is in `ledger_lines`.
"""

from __future__ import annotations

import bisect
import io
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from trilemma.base import files
from trilemma.base.errors import PrivacyError
from trilemma.privacy.accounting.accountants import accountants as registry
from trilemma.privacy.accounting.accountants import applicable, ask, default, everyday
from trilemma.privacy.ledger.lines import (
    START,
    Amendment,
    Budget,
    Entry,
    LedgerError,
    Remark,
    digest_of,
    plain,
    said_in,
    sealed,
    torn,
    unsealed,
)
from trilemma.privacy.mechanism import History, Mechanism, leans_on_liars, mechanism
from trilemma.privacy.threats.catalogue import Threat
from trilemma.privacy.types import Release
from trilemma.privacy.verdict import OUTSIDE, Guarantee

_VERSION = 1


class BudgetExceeded(PrivacyError):
    """A release that the budget does not allow."""


class Ledger:
    """A client's account of its releases. One process at a time may hold it open.

    `accountants` names those held against the budget; without it, the quick ones and the tightest are.

    >>> import tempfile
    >>> from trilemma.privacy.types import NoiseLaw
    >>> path = Path(tempfile.mkdtemp()) / "ledger"
    >>> release, threat = Release(clip=1.0, law=NoiseLaw(4.0)), Threat("ldp", clients=10)
    >>> with Ledger(path, Budget(epsilon=3.0, delta=1e-5)) as ledger:
    ...     allowed = [ledger.authorise(release, threat, "demo", t).epsilon["exact"] for t in range(2)]
    ...     [round(epsilon, 2) for epsilon in allowed]
    [1.99, 2.94]
    >>> with Ledger(path, Budget(epsilon=3.0, delta=1e-5)) as ledger:
    ...     ledger.authorise(release, threat, "demo", 2)
    Traceback (most recent call last):
    trilemma.privacy.ledger.ledger.BudgetExceeded: round 2 of run 'demo' would bring the cost to epsilon =
    3.71 ...
    """

    def __init__(self, path: Path, budget: Budget, accountants: Sequence[str] = ()) -> None:
        self.path, self.budget, self.accountants = Path(path), budget, tuple(accountants)
        self.entries: list[Entry] = []
        self.remarks: list[Remark] = []
        self.repaired = ""
        self._past: Counter[Mechanism] = Counter()
        self._released: set[tuple[str, int]] = set()
        self._hash = START
        self._fd, self._lock = -1, ExitStack()
        try:
            self._open()
            self._load()
        except BaseException:
            self.close()
            raise

    def authorise(self, release: Release, threat: Threat, run: str, round_: int) -> Entry:
        """Write `release` down and return its entry; the release may leave once this has returned.

        A release over budget, of another kind than the budget is about, or of a round already released is
        refused, and nothing is written.
        """
        if self._fd < 0:
            raise LedgerError(f"the ledger {self.path} is closed: open it again, which also checks it")
        if (release.unit, release.adjacency) != (self.budget.unit, self.budget.adjacency):
            raise PrivacyError(
                f"this ledger is about {self.budget.unit} level, {self.budget.adjacency}; the release is "
                f"about {release.unit} level, {release.adjacency}. Use a ledger of its own"
            )
        if leans_on_liars(release, threat):
            raise PrivacyError(
                "a budget holds guarantees only, and this figure holds only if liars exist that keep their "
                "secrets: assume = 'published' is for reproducing papers; leave it out"
            )
        if (run, round_) in self._released:
            raise PrivacyError(f"round {round_} of run {run!r} was released before; a round is released once")
        one = mechanism(release, threat)
        epsilon = cost(self._past + Counter([one]), self.budget.delta, self.accountants)
        least = min(epsilon.values())
        if not least <= self.budget.epsilon:
            raise BudgetExceeded(
                f"round {round_} of run {run!r} would bring the cost to epsilon = {least:.3g} (delta = "
                f"{self.budget.delta:g}), over the budget of {self.budget.epsilon:g}; nothing was released"
            )
        # An accountant may say nothing (∞) where another says something: what was drawn for many rounds, say.
        said = {name: figure for name, figure in epsilon.items() if math.isfinite(figure)}
        entry = Entry(run, round_, one, said, threat.name)
        self._append({"release": asdict(release), "threat": asdict(threat), **plain(entry)})
        self._enter(entry)
        return entry

    def remark(self, run: str, round_: int, text: str) -> None:
        """Write a remark about a round among the entries, as durably as they are."""
        if self._fd < 0:
            raise LedgerError(f"the ledger {self.path} is closed: open it again, which also checks it")
        remark = Remark(run, round_, text)
        self._append({"remark": asdict(remark)})
        self.remarks.append(remark)

    def amend(self, epsilon: float) -> None:
        """Change the limit, by a line of its own: its owner may, and never to less than is spent."""
        if self._fd < 0:
            raise LedgerError(f"the ledger {self.path} is closed: open it again, which also checks it")
        before, self.budget = self.budget, replace(self.budget, epsilon=float(epsilon))
        spent = min(self.epsilon.values())
        if spent > epsilon:
            self.budget = before
            raise BudgetExceeded(
                f"epsilon = {spent:.3g} is spent (delta = {before.delta:g}) and cannot be taken back: a "
                f"budget of {epsilon:g} would be less than that; allowed: {spent:.3g} and more"
            )
        if self.budget != before:
            self._append({"amended": {"epsilon": self.budget.epsilon}})

    @property
    def epsilon(self) -> dict[str, float]:
        """The cost so far by each accountant, recomputed from the entries."""
        return cost(self._past, self.budget.delta, self.accountants)

    @property
    def verdict(self) -> Guarantee:
        """What this client is guaranteed after all its releases: nothing else is ever entered."""
        costs, budget = self.epsilon, self.budget
        best = min(costs, key=lambda name: costs[name])
        threats = dict.fromkeys(entry.threat for entry in self.entries)
        return Guarantee(
            *(costs[best], budget.delta, budget.unit, budget.adjacency),
            threat=", ".join(threats),
            accountant=best,
            assumptions=(
                f"{len(self.entries)} releases, each with the clients that took part in it",
                *OUTSIDE,
            ),
        )

    def close(self) -> None:
        """Let others open the ledger."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._lock.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _enter(self, entry: Entry) -> None:
        self.entries.append(entry)
        self._past[entry.mechanism] += 1
        self._released.add((entry.run, entry.round))

    def _open(self) -> None:
        refusal = LedgerError(
            f"the ledger {self.path} is open elsewhere: two writers would not see each other's releases"
        )
        there = self.path.resolve()  # whatever name it is opened by, it has one lock
        self._lock.enter_context(files.locked(there.with_name(there.name + ".lock"), refusal))
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | files.BINARY
        self._fd = os.open(there, flags, files.OWNER_ONLY)

    def _append(self, record: dict[str, Any]) -> None:
        """Write one line and wait until it is on disk. After a failure the ledger has to be opened again."""
        line, digest = sealed(record, self._hash)
        try:
            view = memoryview(line)
            while view:
                view = view[os.write(self._fd, view) :]
            os.fsync(self._fd)
        except BaseException:
            self.close()
            raise
        self._hash = digest

    def _load(self) -> None:
        """Read every line and check its seal; mend a last line that a crash tore, refuse any other damage."""
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            text = file.read()
        header = {"version": _VERSION, "budget": asdict(self.budget)}
        opened: dict[str, Any] = header
        limit: dict[str, float] = {}
        good = 0
        for number, line in enumerate(io.BytesIO(text).readlines()):
            record = unsealed(line, self._hash)
            if record is None:
                if good + len(line) < len(text) or not torn(line):
                    raise LedgerError(f"line {number + 1} of {self.path} was changed or is out of place")
                self.repaired = f"cut off a torn last line of {len(line)} bytes"
                os.ftruncate(self._fd, good)
                os.fsync(self._fd)
                break
            if number == 0:
                opened = record
            else:
                match said_in(number + 1, record):
                    case Remark() as remark:
                        self.remarks.append(remark)
                    case Amendment(epsilon):
                        limit = {"epsilon": epsilon}
                    case entry:
                        self._enter(entry)
            self._hash = digest_of(line)
            good += len(line)
            if not line.endswith(b"\n"):
                # Only the end of the line is missing. The entry is whole, and counts.
                self.repaired = "completed the last line"
                os.write(self._fd, b"\n")
                os.fsync(self._fd)
        if limit and isinstance(opened.get("budget"), dict):
            opened = {**opened, "budget": {**opened["budget"], **limit}}
        if opened != header:
            raise LedgerError(
                f"{self.path} was opened for {opened.get('budget')}, not for {header['budget']}: a budget is "
                "not changed on the way (its owner may: `trilemma federation budget`)"
            )
        if good == 0:
            self._append(header)
            files.sync_folder(self.path.parent)
        self._check_costs()

    def _check_costs(self) -> None:
        """Refuse a ledger whose entries cost something else than it says they do."""
        if not self.entries:
            return
        try:
            recorded, computed = self.entries[-1].epsilon, self.epsilon
        except (ArithmeticError, TypeError, ValueError) as error:
            raise LedgerError(f"{self.path} has an entry that cannot be accounted for: {error}") from None
        for name in recorded.keys() & computed.keys():
            if registry[name].repeatable and not math.isclose(recorded[name], computed[name], rel_tol=1e-6):
                raise LedgerError(
                    f"{self.path} says epsilon = {recorded[name]} by {name}, its entries say {computed[name]}"
                )


def cost(past: Mapping[Mechanism, int], delta: float, accountants: Sequence[str] = ()) -> dict[str, float]:
    """Return what releases cost by each accountant that a ledger asks."""
    rounds = tuple(past.items())
    named = [able.name for able in applicable(rounds) if able.name in accountants]
    asked = named or dict.fromkeys([*(able.name for able in everyday(rounds)), default(rounds).name])
    answers = [ask(name, lambda able: able.epsilon(rounds, delta)) for name in asked]
    return {answer.by: answer.figure for answer in answers}


def reach(past: Mapping[Mechanism, int], budget: Budget, plan: Callable[[int], History], most: int) -> int:
    """Return how many rounds of a plan, of `most`, a budget allows after `past`.

    `plan` says what is released in so many rounds.

    >>> one, budget = Mechanism(4.0), Budget(epsilon=3.0, delta=1e-5)
    >>> [reach({one: past}, budget, lambda rounds: ((one, rounds),), most=20) for past in (0, 5, 100)]
    [8, 3, 0]
    """

    def beyond(rounds: int) -> bool:
        return min(cost(Counter(past) + Counter(dict(plan(rounds))), budget.delta).values()) > budget.epsilon

    return most if not beyond(most) else bisect.bisect_left(range(1, most), True, key=beyond)
