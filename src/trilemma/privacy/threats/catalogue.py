"""The four threat models: who may see what.

| name   | who is trusted                                                                |
|--------|-------------------------------------------------------------------------------|
| cdp    | the server: an outsider sees only the mean of the messages                    |
| secldp | nobody, but secrets between clients stay secret, save those of q colluders    |
| byzldp | nobody, and all f Byzantine clients hand their secrets to the server (q = f)  |
| ldp    | nobody, and all secrets are known: only a client's own noise protects it      |

A figure is worth having when it holds whoever turns out to be honest. The adversary learns most when every
liar that exists colludes and everybody else sends an honest message: a liar that keeps its secrets leaves
noise in its partners' messages that nobody can remove. So "guaranteed", the default, counts q liars, all of
them colluding, and holds for every number of them from 0 to f (proof: `covariance.worst_multiplier`).
A liar that leaves its own noise out of its message shows the sum of its secrets: it counts among the q.
CafCor's Lemma A.4 counts on f − q liars that exist and keep quiet: "published" gives its figures.

Reference: Allouah, Guerraoui, Stephan (ICML 2025), "Towards Trustworthy Federated Learning with Untrusted
Participants" (CafCor), Section 2 and Figure 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from trilemma.base.errors import UserError
from trilemma.privacy.types import Assumption, ThreatName, choice


@dataclass(frozen=True)
class Threat:
    """A threat model in a federation of `clients`, up to `byzantine` of them malicious.

    `collusion` is how many of the Byzantine clients also hand their secrets to the curious server. Left out,
    the name decides: none for "cdp" and "secldp", all of them for "byzldp" and "ldp". `assume` says whether
    figures hold for every number of liars, or only if the f − q others exist, as published. `neighbours` is
    with how many others each client shares secrets (`covariance.agreed_graph`); None: with all. If clients
    may be expelled, `clients` is how many are left at least and `most` how many there are at most; 0: they
    are always `clients`. Figures hold for every number between.

    >>> Threat("byzldp", clients=100, byzantine=10).collusion
    10
    >>> Threat("secldp", clients=100, byzantine=10, collusion=11)
    Traceback (most recent call last):
    trilemma.base.errors.UserError: colluders are Byzantine clients: 0 ≤ q ≤ f = 10, got q = 11
    """

    name: ThreatName
    clients: int
    byzantine: int = 0
    collusion: int = -1
    assume: Assumption = "guaranteed"
    neighbours: int | None = None
    most: int = 0

    def __post_init__(self) -> None:
        choice("threat model", self.name, ThreatName)
        choice("assumption", self.assume, Assumption)
        if self.clients < 1:
            raise UserError(f"a federation has at least one client, got n = {self.clients}")
        if not 0 <= self.byzantine < self.clients:
            raise UserError(
                f"at least one client is honest: 0 ≤ f < n = {self.clients}, got f = {self.byzantine}"
            )
        if self.neighbours is not None and self.neighbours < 1:
            raise UserError(f"secrets are shared with at least one other, got k = {self.neighbours}")
        if self.most and self.most < self.clients:
            raise UserError(f"at most {self.most} clients cannot be at least n = {self.clients}")
        everyone = self.name in ("byzldp", "ldp")
        if self.collusion == -1:
            object.__setattr__(self, "collusion", self.byzantine if everyone else 0)
        if not 0 <= self.collusion <= self.byzantine:
            raise UserError(
                f"colluders are Byzantine clients: 0 ≤ q ≤ f = {self.byzantine}, got q = {self.collusion}"
            )
        if everyone and self.collusion != self.byzantine:
            raise UserError(
                f"under {self.name} all f = {self.byzantine} Byzantine clients collude; "
                f"for q = {self.collusion} colluders use 'secldp'"
            )

    @property
    def honest(self) -> int:
        """Number of honest clients, n − f."""
        return self.clients - self.byzantine

    @property
    def hidden(self) -> int:
        """Number of liars that are counted on to exist and to keep their secrets.

        >>> Threat("secldp", 100, 10).hidden, Threat("secldp", 100, 10, assume="published").hidden
        (0, 10)
        """
        return self.byzantine - self.collusion if self.assume == "published" else 0

    def notes(self) -> tuple[str, ...]:
        """Return what has to be said beside every figure computed under this threat model.

        >>> Threat("cdp", clients=10).notes()
        ('cdp: the server is trusted; the figure holds only for the mean, not for another rule',)
        """
        if self.name == "cdp":
            return ("cdp: the server is trusted; the figure holds only for the mean, not for another rule",)
        if self.name == "ldp":
            return ("ldp: all secrets are taken as known; only independent noise counts",)
        who = f"{self.name}: a curious server, and"
        graph = (
            ()
            if self.neighbours is None
            else (
                f"each client shares secrets with {self.neighbours} others: the figure is a bound that holds "
                "whoever of them collude",
            )
        )
        if self.hidden:
            return (
                f"{who} q = {self.collusion} of f = {self.byzantine} collude with it",
                f"as published: holds only if {self.hidden} Byzantine clients exist that keep their secrets "
                "and whose messages reveal none",
                *graph,
            )
        return (
            f"{who} at most q = {self.collusion} clients whose secrets it knows; "
            f"0 to f = {self.byzantine} clients may lie",
            *graph,
        )
