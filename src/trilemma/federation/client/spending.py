"""A client's own budget: it pays before it speaks, and refuses what it cannot pay, whatever the server asks.

The budget is in the client's folder (`budget.toml`) and holds over all runs; the ledger
(`trilemma.privacy.ledger`) is beside its other state. Each release is accounted for with the clients that
really share noise in the epoch, all of whom confirmed it to each other: a server that opens an epoch of few
clients makes the round more expensive, not less private. Of these, only those count whom the client's owner
knows (`adoption`). Below `least_members` a client does not join.

What the ledger says is what was released, so it must not be forgotten. Its position is written down a second
time, outside `state/`, after every release: a ledger that is shorter than that, or another one, is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import tomli_w

from trilemma.base import files
from trilemma.base.errors import PrivacyError, UserError
from trilemma.federation.client.account import (
    CAVEAT,
    budget_file,
    budget_text,
    check_remembered,
    own_statement,
    position,
    read_budget,
    run_of,
)
from trilemma.federation.client.sessions import Secrets, epoch_name, score_name
from trilemma.federation.party.adoption import counted_on
from trilemma.federation.party.layout import Party
from trilemma.federation.party.task import PartyTask
from trilemma.federation.protocol.confirmation import Position
from trilemma.federation.protocol.reasons import Reason, Refused
from trilemma.privacy.accounting.spending import certified
from trilemma.privacy.ledger import ledger as ledgers
from trilemma.privacy.ledger.ledger import BudgetExceeded, Ledger
from trilemma.privacy.ledger.lines import Budget, LedgerError, read_lines
from trilemma.privacy.mechanism import mechanism
from trilemma.privacy.threats.catalogue import Threat, threat_models

RESERVE = 0.1
"""Share of rounds that may be repeated: a default budget has room for it, and noise for an ε asked for."""


def planned_epsilon(task: PartyTask, party: Party | None = None) -> float | None:
    """Return ε of the configured run, a tenth of its rounds repeated; None where nothing is promised.

    Where an ε was asked for, `[privacy] repeated` says what it has room for. It is the tightest accountant's,
    as a ledger's. A client (`party`) counts only on those of the roster whom it knows, and where clients are
    expelled on n − f members.
    """
    release, threat, wanted = task.resolved.release, task.resolved.threat, task.config.privacy
    if release is None or threat is None or not task.resolved.certified:
        return None
    again = wanted.repeated if wanted.aims else RESERVE
    rounds = math.ceil((1 + again) * task.config.run.rounds)
    beside = task.resolved.beside(task.config.run.rounds, again)
    try:
        faced = threat if party is None else _faced(party, task, party.keys.members, task.may_be_expelled)
        return certified(release, faced, rounds, task.config.privacy.delta, beside).figure
    except UserError:
        if party is None:
            raise
        return None  # among so many strangers there is no guarantee


def write_budgets(clients: list[Party], task: PartyTask, epsilon: float | None = None) -> float | None:
    """Give every client a budget: `epsilon`, or what was asked for or the run costs. Return it."""
    planned = planned_epsilon(task)
    if planned is None:
        if epsilon is not None:
            raise PrivacyError("a budget limits guarantees; this configuration adds no noise, or gives none")
        return None
    asked = task.config.privacy.epsilon if task.config.privacy.aims else None
    limit = epsilon or max(planned, asked or 0.0)
    if not math.isfinite(limit):
        raise PrivacyError("this configuration's noise gives no finite ε: no budget can hold it")
    release = task.resolved.release
    assert release is not None
    budget = Budget(limit, task.config.privacy.delta, release.unit, release.adjacency)
    for client in clients:
        client.budget.write_text(
            "# This client's own limit, over all runs: it refuses a round that would exceed it. It does not\n"
            "# join an epoch of fewer than least_members either; without that line it takes what the\n"
            f"# configuration demands, here {_demanded(task)}.\n" + tomli_w.dumps(asdict(budget))
        )
    return limit


def change_budget(party: Party, epsilon: float) -> tuple[float, float]:
    """Set a client's limit on ε; return what it was, and what is spent of it. Its owner's decision.

    The ledger has it before `budget.toml`: should the process end in between, the same command again brings
    the two together.
    """
    with files.locked(party.lock):
        text, budget, spent = replace_epsilon(budget_text(party), epsilon), read_budget(party), 0.0
        own_statement(party)  # without the whole ledger nobody knows what is spent
        if party.ledger.is_file():
            with Ledger(party.ledger, read_lines(party.ledger.read_bytes())[0]) as ledger:
                ledger.amend(epsilon)
                spent = min(ledger.epsilon.values())
                _remember(party)
        files.write_atomically(party.budget, text.encode())
        return budget.epsilon, spent


def replace_epsilon(text: str, epsilon: float) -> str:
    r"""Return a budget's file with another ε, and everything else in it as it was.

    >>> replace_epsilon("# mine\nepsilon = 3.0\ndelta = 1e-5\n", 4)
    '# mine\nepsilon = 4.0\ndelta = 1e-5\n'
    """
    if not 0 < epsilon < math.inf:
        raise UserError(f"a budget is positive and finite, got epsilon = {epsilon}")
    return re.sub(r"(?m)^[ \t]*epsilon[ \t]*=.*$", f"epsilon = {float(epsilon)!r}", text, count=1)


@dataclass(frozen=True)
class Reach:
    """How many `rounds` of a run, of all `wanted`, a client's budget still allows; ε after them is at most.

    >>> Reach(4, 40, 8.0, 7.3).said
    'the budget reaches 4 of 40 rounds: of ε = 8, 7.3 is spent'
    """

    rounds: int
    wanted: int
    epsilon: float
    spent: float

    @property
    def ends(self) -> bool:
        """Whether the run can end."""
        return self.rounds >= self.wanted

    @property
    def said(self) -> str:
        """What is said about it."""
        how_far = "the run's end" if self.ends else f"{self.rounds} of {self.wanted} rounds"
        spent = f"{self.spent:.3g} is spent" if self.spent else "nothing is spent"
        return f"the budget reaches {how_far}: of ε = {self.epsilon:g}, {spent}"


def reach(party: Party, task: PartyTask, run: str) -> Reach | None:
    """Return how far a client's budget reaches in a run that it has not begun.

    None where nothing is paid for, or it has begun: rounds may have been repeated since.
    """
    if not _is_paid_for(task) or not party.budget.is_file():
        return None
    statement, budget, release = own_statement(party), read_budget(party), task.resolved.release
    if release is None or any(run_of(entry) == run for entry in statement.entries):
        return None
    rounds = task.config.run.rounds
    try:
        one = mechanism(release, _faced(party, task, party.keys.members, task.may_be_expelled))
    except UserError:  # among so many strangers there is no guarantee
        return Reach(0, rounds, budget.epsilon, statement.spent[1])
    past = Counter(entry.mechanism for entry in statement.entries)
    allowed = ledgers.reach(past, budget, lambda many: ((one, many), *task.resolved.beside(many)), rounds)
    return Reach(allowed, rounds, budget.epsilon, statement.spent[1])


def least_members(party: Party, task: PartyTask) -> int:
    """Return how many members an epoch must have for this client to join it."""
    if not _is_paid_for(task):
        return 1
    own = budget_file(party).get("least_members", _demanded(task))
    if type(own) is not int or own < 1:
        raise UserError(f"least_members = {own!r} in {party.budget}: allowed is a number, 1 or more")
    return own


def _demanded(task: PartyTask) -> int:
    """Return how many members n and f demand.

    More honest ones than liars; and where noise is shared, a partner that does not hand its secrets over.
    Where clients may be expelled, f are left out from the beginning: what was allowed is worked out for the
    n − f others.
    """
    threat, clients = task.resolved.threat, task.config.federation.clients
    assert threat is not None
    majority, left = 2 * task.tolerated + 1, clients - task.may_be_expelled
    if not task.counts_on_others:
        return min(majority, left)
    return min(max(left if task.may_be_expelled else majority, threat.collusion + 2), clients)


def _is_paid_for(task: PartyTask) -> bool:
    """Tell whether releases have a price: there is a guarantee, and so a budget and a ledger."""
    return task.resolved.certified


def ledger_position(party: Party, task: PartyTask) -> Position:
    """Return how far a client's ledger has come; refuse one that has been further before.

    Where nothing is paid for it stays where earlier runs have left it: the others remember that.
    """
    check_remembered(party)
    if not _is_paid_for(task) or not party.ledger.is_file():
        return position(party)
    with _opened(party):
        return position(party)


def pay(
    party: Party, task: PartyTask, secrets: Secrets, run: str, round_: int, unheard: Sequence[int] = ()
) -> dict[str, float]:
    """Enter a round into the ledger, or refuse; return ε so far. On disk when this returns.

    `unheard` are the clients whose answers were not used when they were last asked: noise shared with them
    stayed in the sum, which costs accuracy and no privacy; the ledger is told.

    A round is paid for once in an epoch. One that was paid for and is not in the journal may have left (the
    journal was lost) or not (the process died in between); its shared noise may be known, so only another
    epoch can have the round.
    """
    if not _has_a_price(party, task):
        return {}
    release = task.resolved.release
    assert release is not None
    name = epoch_name(run, secrets.epoch)
    with _opened(party) as ledger:
        _check_new(ledger, name, round_)
        entry = ledger.authorise(release, _faced(party, task, secrets.members), name, round_)
        if unheard:  # after the entry: a round that is refused leaves nothing, however often it is asked for
            absent = ", ".join(str(client) for client in unheard)
            ledger.remark(
                name, round_ - 1, f"not heard last time: clients {absent}; noise shared with them stayed in"
            )
        _remember(party)
    return entry.epsilon


def trusts_server(party: Party, why: str) -> None:
    """Say once in the ledger that a run's server is trusted, where ε would else hold against it too."""
    with files.locked(party.lock):
        statement, text = own_statement(party), f"{CAVEAT}: {why}"
        if not statement.entries or threat_models[statement.entries[-1].threat].central:
            return
        run = run_of(statement.entries[-1])
        if not any((one.run, one.text) == (run, text) for one in statement.remarks):
            with _opened(party) as ledger:
                ledger.remark(run, 0, text)
                _remember(party)


def pay_score(party: Party, task: PartyTask, run: str, epoch: int, round_: int) -> dict[str, float]:
    """Enter the evaluation after a round into the ledger, or refuse; return ε so far, as `pay` does."""
    own = task.resolved.own_scores
    if not _has_a_price(party, task) or own is None or own.release is None:
        return {}
    name = score_name(run, epoch)
    with _opened(party) as ledger:
        _check_new(ledger, name, round_)
        entry = ledger.authorise(own.release, own.threat, name, round_)
        _remember(party)
    return entry.epsilon


def _has_a_price(party: Party, task: PartyTask) -> bool:
    if _is_paid_for(task):
        return True
    # Noise that guarantees nothing, or none at all: a ledger would show neither to whoever has a budget.
    if party.budget.exists():
        raise Refused(Reason.BUDGET, "this configuration gives no guarantee to hold against it")
    return False


def _check_new(ledger: Ledger, name: str, round_: int) -> None:
    if any(entry.round >= round_ and entry.run.split("~")[0] == name for entry in ledger.entries):
        raise Refused(Reason.LOST, f"round {round_} of {name} is in the ledger and not in the journal")


def _faced(party: Party, task: PartyTask, members: Sequence[int], fewer: int = 0) -> Threat:
    """Return the threat in an epoch of these members: whom nobody vouched for is a liar that colludes.

    `fewer` of them may be gone, anybody.
    """
    threat = task.resolved.threat
    assert threat is not None
    scales = threat.scales
    if scales:
        assert party.client is not None
        threat = replace(threat, own=scales[party.client])
    if not task.counts_on_others:
        return threat
    unknown = len(members) - counted_on(party, members)
    return replace(
        threat,
        clients=len(members) - fewer,
        most=len(members),
        byzantine=threat.byzantine + unknown,
        collusion=threat.collusion + unknown,
        scales=tuple(scales[client] for client in members) if scales else (),
    )


@contextmanager
def _opened(party: Party) -> Iterator[Ledger]:
    """Open a client's ledger, the one it had before; what is wrong with it, or over budget, is a refusal."""
    check_remembered(party)
    try:
        with Ledger(party.ledger, read_budget(party)) as ledger:
            yield ledger
    except BudgetExceeded as error:
        raise Refused(Reason.BUDGET, str(error)) from None
    except LedgerError as error:
        raise Refused(Reason.LEDGER, str(error)) from None
    except PrivacyError as error:
        raise Refused(Reason.BUDGET, str(error)) from None


def _remember(party: Party) -> None:
    content = json.dumps(asdict(position(party))).encode()
    files.write_atomically(party.ledger_head, content, secret=True)
