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

import math
from dataclasses import dataclass
from typing import ClassVar

from trilemma.base.errors import UserError
from trilemma.base.registry import Registry
from trilemma.privacy.threats.covariance import agreed_multiplier, complete_multiplier, weighed_multiplier
from trilemma.privacy.types import Assumption, NoiseLaw, choice


class ThreatModel:
    """Who may see what, and how much noise is left for whom they look at: one registered class each.

    * `central`: whether the adversary sees the mean of the messages only;
    * `shares`: whether noise that pairs of clients share protects anybody;
    * `colluding`: whether all Byzantine clients hand their secrets to the adversary.
    """

    central: ClassVar[bool] = False
    shares: ClassVar[bool] = True
    colluding: ClassVar[bool] = False

    def multiplier(self, law: NoiseLaw, move: float, threat: Threat) -> float:
        """Return the noise on what is seen of the worst honest client, over its largest `move`.

        Exact where secrets are shared among all, a proven bound where each shares with some neighbours.

        >>> law, among_all = NoiseLaw(0.5, 1.0), Threat("secldp", 50, byzantine=3, collusion=3)
        >>> few = Threat("secldp", 50, byzantine=3, collusion=3, neighbours=8)
        >>> 0.5 < few.model.multiplier(law, 1.0, few) < few.model.multiplier(law, 1.0, among_all)
        True
        """
        n, q, liars = threat.clients, threat.collusion, threat.collusion + threat.hidden
        if threat.scales:
            return weighed_multiplier(law, move, threat.scales, len(threat.scales) - n + q, threat.own)
        if threat.neighbours is None or threat.neighbours >= max(n, threat.most) - 1:
            return complete_multiplier(law, move, n, liars, q)  # more members only help
        return agreed_multiplier(law, move, range(n, max(n, threat.most) + 1), threat.neighbours, liars, q)

    def notes(self, threat: Threat) -> tuple[str, ...]:
        """Return what has to be said beside every figure computed under this threat model."""
        who = f"{threat.name}: a curious server, and"
        if threat.scales:
            graph: tuple[str, ...] = (
                "clients have public weights, and ε of their own: the figure is "
                + ("that of one of them" if threat.own else "the largest"),
            )
            return (f"{who} at most q = {threat.collusion} clients whose secrets it knows", *graph)
        graph = (
            ()
            if threat.neighbours is None
            else (
                f"each client shares secrets with {threat.neighbours} others: the figure is a bound that "
                "holds whoever of them collude",
            )
        )
        if threat.hidden:
            return (
                f"{who} q = {threat.collusion} of f = {threat.byzantine} collude with it",
                f"as published: holds only if {threat.hidden} Byzantine clients exist that keep their "
                "secrets and whose messages reveal none",
                *graph,
            )
        return (
            f"{who} at most q = {threat.collusion} clients whose secrets it knows; "
            f"0 to f = {threat.byzantine} clients may lie",
            *graph,
        )


threat_models: Registry[type[ThreatModel]] = Registry("threat model")
"""Threat models by the names configurations use."""


@threat_models.register("cdp", "the server is trusted: an outsider sees the mean only")
class CentralModel(ThreatModel):
    """The honest messages' sum has noise 1ᵀΣ1: pairwise noise among honest clients cancels in it.

    So does that shared with a liar if the liar adds it and leaves its own noise out.
    """

    central = True

    def multiplier(self, law: NoiseLaw, move: float, threat: Threat) -> float:
        """See `ThreatModel.multiplier`: that of the mean; with weights the heaviest hides least."""
        if threat.scales:
            own = threat.own or max(threat.scales)
            others = sorted(threat.scales)
            others.remove(own)
            kept = [own, *others[: threat.honest - 1]]  # the heaviest lie
            return math.hypot(*kept) * law.sigma_ind / (own * move)
        return math.sqrt(threat.honest * (law.sigma_ind**2 + threat.hidden * law.sigma_cor**2)) / move

    def notes(self, threat: Threat) -> tuple[str, ...]:
        """See `ThreatModel.notes`."""
        return ("cdp: the server is trusted; the figure holds only for the mean, not for another rule",)


@threat_models.register(
    "secldp", "nobody is trusted; secrets between clients stay secret, save those of q colluders"
)
class SecretsModel(ThreatModel):
    """What `ThreatModel` says."""


@threat_models.register("byzldp", "nobody is trusted; all Byzantine clients hand their secrets to the server")
class ByzantineSecretsModel(ThreatModel):
    """The same with q = f."""

    colluding = True


@threat_models.register("ldp", "nobody is trusted; no secrets at all")
class LocalModel(ThreatModel):
    """All secrets are known: only a client's own noise protects it."""

    shares = False
    colluding = True

    def multiplier(self, law: NoiseLaw, move: float, threat: Threat) -> float:
        """See `ThreatModel.multiplier`: that of independent noise."""
        return law.sigma_ind / move

    def notes(self, threat: Threat) -> tuple[str, ...]:
        """See `ThreatModel.notes`."""
        return ("ldp: nobody is trusted; only each client's own noise protects it",)


def sharing() -> list[str]:
    """Return the names of the threat models under which noise shared with chosen neighbours protects.

    >>> sharing()
    ['secldp', 'byzldp']
    """
    return [name for name, model in threat_models.items() if model.shares and not model.central]


@dataclass(frozen=True)
class Threat:
    """A threat model in a federation of `clients`, up to `byzantine` of them malicious.

    `collusion` is how many of the Byzantine clients also hand their secrets to the curious server. Left out,
    the name decides: none for "cdp" and "secldp", all of them for "byzldp" and "ldp". `assume` says whether
    figures hold for every number of liars, or only if the f − q others exist, as published. `neighbours` is
    with how many others each client shares secrets (`covariance.agreed_graph`); None: with all. If clients
    may be expelled, `clients` is how many are left at least and `most` how many there are at most; 0: they
    are always `clients`. Figures hold for every number between.

    Where clients have public weights, `scales` are weights times their number, one for each client there is
    at most, and `own` is the scale of the client whose figure is asked for; 0: the worst client's.

    >>> Threat("byzldp", clients=100, byzantine=10).collusion
    10
    >>> Threat("secldp", clients=100, byzantine=10, collusion=11)
    Traceback (most recent call last):
    trilemma.base.errors.UserError: colluders are Byzantine clients: 0 ≤ q ≤ f = 10, got q = 11
    """

    name: str
    clients: int
    byzantine: int = 0
    collusion: int = -1
    assume: Assumption = "guaranteed"
    neighbours: int | None = None
    most: int = 0
    scales: tuple[float, ...] = ()
    own: float = 0.0

    def __post_init__(self) -> None:
        everyone = threat_models[self.name].colluding
        choice("assumption", self.assume, Assumption)
        if self.clients < 1:
            raise UserError(f"a federation has at least one client, got n = {self.clients}")
        if not 0 <= self.byzantine < self.clients:
            raise UserError(
                f"at least one client is honest: 0 ≤ f < n = {self.clients}, got f = {self.byzantine}"
            )
        if self.neighbours is not None and self.name not in sharing():
            raise UserError(f"only {' and '.join(sharing())} share secrets: leave k = {self.neighbours} out")
        if self.neighbours is not None and self.neighbours < 1:
            raise UserError(f"secrets are shared with at least one other, got k = {self.neighbours}")
        if self.most and self.most < self.clients:
            raise UserError(f"at most {self.most} clients cannot be at least n = {self.clients}")
        if self.scales and len(self.scales) != max(self.clients, self.most):
            raise UserError(f"{len(self.scales)} weights for {max(self.clients, self.most)} clients")
        if self.own and self.own not in self.scales:
            raise UserError(f"no client has the scale {self.own:g}")
        if self.scales and (self.neighbours is not None or self.assume == "published"):
            raise UserError(
                "with weights, secrets are shared with all, and figures count on no liars: leave neighbours "
                "and assume = 'published' out"
            )
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
    def model(self) -> ThreatModel:
        """What is registered under the name."""
        return threat_models[self.name]()

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
        return self.model.notes(self)
