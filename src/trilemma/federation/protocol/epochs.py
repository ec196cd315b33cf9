"""Who takes part, and what happens when some do not: pure decisions, no clocks and no network.

An epoch is a set of clients with pairwise keys. In a federation of n clients of whom f may fail or lie:

* at most f clients without an admitted answer: the round is committed; they count against f;
* more: the round is asked again, `repeats` times; clients that answered return the same answer;
* still more: a new epoch, with fresh keys, among those who answer its hello. Those who do not answer a hello
  count against f as long as there are at most f of them; else the epoch is a smaller federation of those
  present, which still must outnumber f liars (n' > 2f); else the run stops and says so;
* a client that was away then, or is new on the roster, and is there now: a new epoch, with it.

What a client released in a round that was given up is spent: its ledger keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from trilemma.base.errors import UserError


class EpochsStopped(UserError):
    """The federation cannot go on; the message says what is missing."""


@dataclass(frozen=True)
class Policy:
    """How many clients there have been, the f that are tolerated, how often is tried, and who was removed."""

    clients: int
    tolerated: int
    repeats: int = 1
    epochs_per_round: int = 3
    removed: frozenset[int] = frozenset()
    weights: tuple[float, ...] = ()

    @property
    def everyone(self) -> tuple[int, ...]:
        """The n clients of the federation as it is now."""
        return tuple(client for client in range(self.clients) if client not in self.removed)


@dataclass(frozen=True)
class Epoch:
    """`members` share keys and are asked; `rows` are the clients the rule is told about.

    An epoch without members is one that clients are being called to. After a crash another one is opened in
    its place: some clients may have agreed to keys of which the server knows nothing any more. `terms` are
    those its members agreed on, the roster among them: under others it does not go on.
    """

    number: int
    members: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    terms: str = ""


def open_epoch(policy: Policy, number: int, joined: Iterable[int], terms: str = "") -> Epoch:
    """Open an epoch with those who joined.

    >>> open_epoch(Policy(5, 1), 0, [0, 1, 2, 4])
    Epoch(number=0, members=(0, 1, 2, 4), rows=(0, 1, 2, 3, 4), terms='')
    >>> open_epoch(Policy(5, 1), 1, [0, 1, 2]).rows
    (0, 1, 2)
    >>> open_epoch(Policy(5, 1, removed=frozenset({3})), 1, [0, 1, 2, 3]).rows
    (0, 1, 2, 4)
    >>> open_epoch(Policy(5, 1), 1, [0, 1])
    Traceback (most recent call last):
    trilemma.federation.protocol.epochs.EpochsStopped: 2 of 5 clients joined epoch 1; ...
    >>> open_epoch(Policy(5, 1, weights=(0.4, 0.15, 0.15, 0.15, 0.15)), 1, [0, 1, 2])
    Traceback (most recent call last):
    trilemma.federation.protocol.epochs.EpochsStopped: of the clients that joined epoch 1, the 1 heaviest ...
    """
    members = tuple(sorted(set(joined) & set(policy.everyone)))
    if len(policy.everyone) - len(members) <= policy.tolerated:
        return Epoch(number, members, policy.everyone, terms)
    needed = 2 * policy.tolerated + 1
    if len(members) < needed:
        raise EpochsStopped(
            f"{len(members)} of {len(policy.everyone)} clients joined epoch {number}; with up to "
            f"{policy.tolerated} liars at least {needed} are needed"
        )
    shares = sorted(policy.weights[member] for member in members) if policy.weights else []
    if 2 * sum(shares[len(shares) - policy.tolerated :]) >= sum(shares) > 0:
        raise EpochsStopped(
            f"of the clients that joined epoch {number}, the {policy.tolerated} heaviest weigh half or more: "
            "wait for others"
        )
    return Epoch(number, members, members, terms)


class Attendance:
    """Who was away when an epoch was called: one who comes later is worth another epoch, once.

    Who then does not join it is not called again for its own sake: a client that comes and goes all the time
    would hold up everybody.

    >>> seen = Attendance()
    >>> seen.called(everyone={0, 1, 2, 3}, members={0, 1}, present={0, 1, 2})
    >>> seen.came(present={0, 1, 2}), seen.came(present={0, 1, 2, 3})
    (False, True)
    >>> seen.called(everyone={0, 1, 2, 3}, members={0, 1}, present={0, 1})
    >>> seen.came(present={0, 1, 2, 3})
    True
    >>> seen.called(everyone={0, 1, 2, 3}, members={0, 1}, present={0, 1})
    >>> seen.came(present={0, 1, 2, 3})
    False
    """

    def __init__(self) -> None:
        self._away: set[int] = set()
        self._waited_for: set[int] = set()
        self._in_vain: set[int] = set()

    def called(self, everyone: Iterable[int], members: Iterable[int], present: Iterable[int]) -> None:
        """Note who joined an epoch, and who was there."""
        self._in_vain |= self._waited_for - set(members)
        self._waited_for = set()
        self._away = set(everyone) - set(members) - set(present) - self._in_vain

    def came(self, present: Iterable[int]) -> bool:
        """Tell whether somebody is there now who was not."""
        self._waited_for = self._away & set(present)
        return bool(self._waited_for)


Decision = Literal["commit", "repeat", "rekey"]


def decide(policy: Policy, epoch: Epoch, answered: Iterable[int], attempt: int) -> Decision:
    """Say what follows attempt number `attempt` (from 0) of a round.

    >>> policy, epoch = Policy(5, 1), open_epoch(Policy(5, 1), 0, range(5))
    >>> decide(policy, epoch, {0, 1, 2, 3}, attempt=0)
    'commit'
    >>> decide(policy, epoch, {0, 1, 2}, attempt=0), decide(policy, epoch, {0, 1, 2}, attempt=1)
    ('repeat', 'rekey')
    """
    absent = set(epoch.rows) - set(answered)
    if len(absent) <= policy.tolerated:
        return "commit"
    return "repeat" if attempt < policy.repeats else "rekey"


def check_progress(policy: Policy, round_: int, failed_epochs: int, reasons: Iterable[str] = ()) -> None:
    """Stop a run whose round failed in epoch after epoch: each try costs the clients privacy."""
    if failed_epochs >= policy.epochs_per_round:
        raise EpochsStopped(
            f"round {round_} failed in {failed_epochs} epochs in a row; every try costs the clients privacy, "
            "so the run stops here and will continue here when started again. Reasons given: "
            + ("; ".join(sorted(set(reasons))) or "none, clients were silent")
        )
