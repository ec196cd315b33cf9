"""A client's own budget: it pays before it speaks, and refuses what it cannot pay, whatever the server asks.

The budget is in the client's folder (`budget.toml`) and holds over all runs; the ledger
(`trilemma.privacy.ledger`) is beside its other state. Each release is accounted for with the clients that
really share noise in the epoch: a server that opens an epoch of few clients makes the round more expensive,
not less private.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, replace

import tomli_w

from trilemma import privacy
from trilemma.errors import PrivacyError, UserError
from trilemma.federation.journal import Refused
from trilemma.federation.layout import Party
from trilemma.federation.sessions import Secrets, epoch_name
from trilemma.federation.task import PartyTask
from trilemma.privacy.ledger import Budget, Ledger

RESERVE = 0.1
"""Share of rounds a default budget allows to be repeated."""


def planned_epsilon(task: PartyTask) -> float | None:
    """Return ε of the configured run, a tenth of its rounds repeated; None where nothing is promised.

    It is the tightest accountant's: before a ledger refuses a round, it asks that one too.
    """
    release, threat = task.resolved.release, task.resolved.threat
    if release is None or threat is None or release.law.silent:
        return None
    rounds = math.ceil((1 + RESERVE) * task.config.run.rounds)
    return privacy.certified(release, threat, rounds, task.config.privacy.delta).figure


def write_budgets(clients: list[Party], task: PartyTask, epsilon: float | None = None) -> float | None:
    """Give every client a budget: `epsilon`, or what the configured run costs. Return it."""
    planned = planned_epsilon(task)
    if planned is None:
        if epsilon is not None:
            raise PrivacyError("a budget limits noised releases; this configuration adds no noise")
        return None
    limit = planned if epsilon is None else epsilon
    if not math.isfinite(limit):
        raise PrivacyError("this configuration's noise gives no finite ε: no budget can hold it")
    release = task.resolved.release
    assert release is not None
    budget = Budget(limit, task.config.privacy.delta, release.unit, release.adjacency)
    for client in clients:
        client.budget.write_text(
            "# This client's own limit, over all runs: it refuses a round that would exceed it.\n"
            + tomli_w.dumps(asdict(budget))
        )
    return limit


def read_budget(party: Party) -> Budget:
    """Return a client's budget."""
    try:
        return Budget(**tomllib.loads(party.budget.read_text()))
    except (OSError, tomllib.TOMLDecodeError, TypeError) as error:
        raise UserError(f"{party.budget} does not say how much may be spent: {error}") from None


def pay(
    party: Party, task: PartyTask, secrets: Secrets, run: str, round_: int, unheard: Sequence[int] = ()
) -> dict[str, float]:
    """Enter a round into the ledger, or refuse; return ε so far. On disk when this returns.

    `unheard` are the clients whose answers were not used when they were last asked: noise shared with them
    stayed in the sum, which costs accuracy and no privacy; the ledger is told. A round that was
    paid for and then not sent (the process died in between) is paid for again.
    """
    release, threat = task.resolved.release, task.resolved.threat
    if release is None or threat is None or release.law.silent:
        return {}
    clients = len(secrets.members) if task.counts_on_others else threat.clients
    name = epoch_name(run, secrets.epoch)
    try:
        with Ledger(party.state / "ledger", read_budget(party)) as ledger:
            before = sum(
                entry.round == round_ and entry.run.split("~")[0] == name for entry in ledger.entries
            )
            if unheard:
                absent = ", ".join(str(client) for client in unheard)
                ledger.remark(
                    name,
                    round_ - 1,
                    f"not heard last time: clients {absent}; noise shared with them stayed in",
                )
            entry = ledger.authorise(
                release, replace(threat, clients=clients), f"{name}~{before}" if before else name, round_
            )
    except PrivacyError as error:
        raise Refused(str(error)) from None
    return entry.epsilon
