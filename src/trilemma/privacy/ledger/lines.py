"""A ledger line by line: what each says, how it is sealed to the one before it, and how it is read back.

    DIGEST {"previous": digest of the line before, …}

The first line is the budget; those after it are releases (`Entry`), remarks, and other limits on ε
(`Amendment`).
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trilemma.base.errors import PrivacyError, UserError
from trilemma.privacy.accounting.gaussian import check_delta
from trilemma.privacy.mechanism import Mechanism
from trilemma.privacy.noise.drawing import Drawing
from trilemma.privacy.types import Adjacency, Sampling, Unit, choice

START = "0" * 64
"""What stands for the line before the first."""


class LedgerError(PrivacyError):
    """A ledger that cannot be trusted, or is in use."""


@dataclass(frozen=True)
class Budget:
    """What a client is willing to spend in all, and whom the guarantee is about.

    >>> Budget(epsilon=8.0, delta=1e-5).unit
    'user'
    """

    epsilon: float
    delta: float
    unit: Unit = "user"
    adjacency: Adjacency = "replace"

    def __post_init__(self) -> None:
        check_delta(self.delta)
        choice("privacy unit", self.unit, Unit)
        choice("adjacency", self.adjacency, Adjacency)
        if self.adjacency == "published":
            raise PrivacyError(
                "a budget holds guarantees only, and adjacency 'published' is a convention of papers: "
                "allowed are 'replace' and 'add-remove'"
            )
        if not 0 < self.epsilon < math.inf:
            raise UserError(f"a budget is positive and finite, got epsilon = {self.epsilon}")


@dataclass(frozen=True)
class Entry:
    """One release: in which round of which run, by which mechanism, and ε of all releases so far."""

    run: str
    round: int
    mechanism: Mechanism
    epsilon: dict[str, float]
    threat: str


@dataclass(frozen=True)
class Remark:
    """Something worth knowing about a round that costs nothing: who dropped out of it, for instance."""

    run: str
    round: int
    text: str


@dataclass(frozen=True)
class Amendment:
    """Another limit on ε, from this line on."""

    epsilon: float

    def __post_init__(self) -> None:
        if not isinstance(self.epsilon, float) or not 0 < self.epsilon < math.inf:
            raise UserError(f"a budget is positive and finite, got epsilon = {self.epsilon}")


def read_entries(path: Path) -> list[Entry]:
    """Return the entries of a ledger to somebody who only looks on: nothing is locked or repaired.

    A line that is being written is left out; a ledger of which no line is whole yet has no entries.
    """
    text = path.read_bytes() if path.is_file() else b""
    return [line for line in read_lines(text)[1] if isinstance(line, Entry)] if b"\n" in text else []


def read_lines(text: bytes) -> tuple[Budget, list[Entry | Remark]]:
    """Return the budget of a ledger and what its whole lines say, in order; see `statement`."""
    previous, found = START, []
    for number, line in enumerate(text.split(b"\n")[:-1]):
        record = unsealed(line, previous)
        if record is None:
            raise LedgerError(f"line {number + 1} was changed or is out of place")
        found.append(record)
        previous = digest_of(line)
    if not found:
        raise LedgerError("not a whole line")
    said = [said_in(number, record) for number, record in enumerate(found[1:], 2)]
    try:
        budget = Budget(**found[0]["budget"])
        for one in said:
            if isinstance(one, Amendment):
                budget = replace(budget, epsilon=one.epsilon)
    except (LookupError, TypeError, ValueError):
        raise LedgerError("line 1 does not say what the budget is") from None
    return budget, [one for one in said if not isinstance(one, Amendment)]


def said_in(number: int, record: dict[str, Any] | None) -> Entry | Remark | Amendment:
    """Return what a line after the first says; refuse one that says something else."""
    try:
        assert record is not None
        if "amended" in record:
            return Amendment(**record["amended"])
        said = Remark(**record["remark"]) if "remark" in record else _entry(record)
        hash(said if isinstance(said, Remark) else said.mechanism)  # entries are counted by their mechanisms
        return said
    except (AssertionError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        raise LedgerError(f"line {number} says neither what was released nor a remark") from None


def plain(entry: Entry) -> dict[str, Any]:
    """Return what a line says about a release, as JSON values."""
    return {
        "run": entry.run,
        "round": entry.round,
        "mechanism": asdict(entry.mechanism),
        "epsilon": entry.epsilon,
    }


def _entry(record: dict[str, Any]) -> Entry:
    fields = record["mechanism"]
    sampling, drawing = Sampling(**fields["sampling"]), Drawing(**fields["drawing"])
    one = Mechanism(float(fields["z"]), sampling, fields["adjacency"], drawing)
    costs = {str(name): float(figure) for name, figure in record["epsilon"].items()}
    return Entry(str(record["run"]), int(record["round"]), one, costs, str(record["threat"]["name"]))


def sealed(record: dict[str, Any], previous: str) -> tuple[bytes, str]:
    """Return a line that says this after a line of digest `previous`, and its own digest."""
    body = json.dumps({"previous": previous, **record}, allow_nan=False, separators=(",", ":"))
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f"{digest} {body}\n".encode(), digest


def torn(line: bytes) -> bool:
    """Tell whether a line can be the beginning of one that was being written.

    It has no end, and what it says is not complete: of a JSON object only the whole can be read.
    """
    if line.endswith(b"\n"):
        return False
    try:
        json.JSONDecoder().raw_decode(line[len(START) + 1 :].decode())
    except ValueError:
        return True
    return False


def digest_of(line: bytes) -> str:
    """Return the digest that a line begins with."""
    return line[:64].decode("ascii")


def unsealed(line: bytes, previous: str) -> dict[str, Any] | None:
    """Return what `sealed` sealed after a line of hash `previous`; None if anything is amiss."""
    digest, _, body = line.rstrip(b"\n").partition(b" ")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        return None
    record = _object(body)
    return record if record is not None and record.pop("previous", None) == previous else None


def _object(text: bytes) -> dict[str, Any] | None:
    """Return a JSON object; None where there is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
