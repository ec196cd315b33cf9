"""A client's budget and ledger, as its owner reads them; what they mean for a round is `spending`'s."""

from __future__ import annotations

import json
import tomllib
from typing import Any

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.base.typed import typed
from trilemma.federation.party.layout import Party
from trilemma.federation.protocol.confirmation import Position
from trilemma.federation.protocol.reasons import Reason, Refused
from trilemma.privacy.ledger.lines import Budget, Entry, LedgerError
from trilemma.privacy.ledger.statement import Statement, read_statement

CAVEAT = "no guarantee against a malicious server"
"""What a remark says where ε holds against others than the server alone."""


def run_of(entry: Entry) -> str:
    """Return the run that an entry's epoch is of."""
    return entry.run.removesuffix("/evaluation").rpartition("/")[0]


def read_budget(party: Party) -> Budget:
    """Return a client's budget."""
    facts = budget_file(party)
    facts.pop("least_members", None)
    try:
        return Budget(**facts)
    except TypeError as error:
        raise UserError(f"{party.budget} does not say how much may be spent: {error}") from None


def budget_file(party: Party) -> dict[str, Any]:
    """Return what `budget.toml` says."""
    try:
        return tomllib.loads(budget_text(party))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{party.budget} does not say how much may be spent: {error}") from None


def budget_text(party: Party) -> str:
    """Return `budget.toml` as it stands there."""
    try:
        return party.budget.read_text()
    except FileNotFoundError:
        raise UserError(
            f"{party.name} has no {party.budget.name}: where a configuration adds no noise there is no ε to "
            "limit; where it does, bring the file back"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{party.budget} does not say how much may be spent: {error}") from None


def own_statement(party: Party) -> Statement:
    """Return what a client's ledger says, to its owner; refuse one that says less than it did before."""
    statement = read_statement(party.ledger)
    try:
        check_remembered(party)
    except Refused as error:
        raise LedgerError(error.detail) from None
    return statement


def check_remembered(party: Party) -> None:
    """Refuse a ledger that does not continue the one remembered outside `state/`.

    It may be longer: the process died between the two writes.
    """
    if not party.ledger_head.is_file():
        return
    with files.readable(party.ledger_head, "what is remembered of a ledger"):
        before = typed(Position, json.loads(party.ledger_head.read_text("utf-8")))
    lines = _lines(party)[: before.length]
    if len(lines) < before.length or (lines and lines[-1][:64].decode() != before.digest):
        raise Refused(
            Reason.ROLLBACK,
            f"{party.ledger} does not continue the ledger of {before.length} lines that {party.ledger_head} "
            "remembers: it was deleted or set back. Bring the newest copy back; without it this client "
            "cannot know what it has released, and needs a new identity and a new roster",
        )


def _lines(party: Party) -> list[bytes]:
    return party.ledger.read_bytes().split(b"\n")[:-1] if party.ledger.is_file() else []


def position(party: Party) -> Position:
    """Return where the ledger on disk is; each of its lines begins with its digest."""
    lines = _lines(party)
    return Position(len(lines), lines[-1][:64].decode() if lines else "")
