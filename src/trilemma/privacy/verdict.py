"""The verdict on a run's privacy: a guarantee with everything it rests on, or the reason why there is none.

Nothing else fills a column called ε. A figure that is not a guarantee, a paper's for instance, stands beside
the reason and is called printed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trilemma.base.errors import UserError
from trilemma.base.typed import typed
from trilemma.privacy.accounting.spending import spent
from trilemma.privacy.mechanism import History, leans_on_liars
from trilemma.privacy.threats.catalogue import Threat
from trilemma.privacy.types import Adjacency, Release, Unit

OUTSIDE = (
    "not covered by ε: how long a client takes to answer",
    "not covered by ε: a client that crashes in the middle of a round",
)
"""What a record could show in, and no ε counts (SECURITY.md, what stays outside)."""


@dataclass(frozen=True)
class Guarantee:
    """(ε, δ)-differential privacy of every honest client, or example: in which sense, against whom.

    >>> held = Guarantee(2.5, 1e-5, "user", "replace", "ldp", "exact", ("nobody is trusted",))
    >>> read_verdict(held.plain()) == held
    True
    """

    epsilon: float
    delta: float
    unit: Unit
    adjacency: Adjacency
    threat: str
    accountant: str
    assumptions: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"guarantee": {**asdict(self), "assumptions": list(self.assumptions)}}


@dataclass(frozen=True)
class NoGuarantee:
    """Why nothing is guaranteed. `figure` is the ε that is printed all the same, in a paper or by a formula.

    >>> read_verdict(NoGuarantee("counts on liars", 26.4).plain())
    NoGuarantee(reason='counts on liars', figure=26.4)
    """

    reason: str
    figure: float | None = None

    def plain(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"no_guarantee": asdict(self)}


Verdict = Guarantee | NoGuarantee


def read_verdict(plain: Mapping[str, Any]) -> Verdict:
    """Return the verdict that `plain` was written from.

    >>> read_verdict({})
    Traceback (most recent call last):
    trilemma.base.errors.UserError: not a verdict: {}
    """
    match dict(plain):
        case {"guarantee": dict(fields)}:
            return typed(Guarantee, fields)
        case {"no_guarantee": dict(fields)}:
            return typed(NoGuarantee, fields)
    raise UserError(f"not a verdict: {plain}")


def objections(release: Release, threat: Threat, caveats: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return every reason why a figure of `release` under `threat` is not a guarantee; none: it is one.

    `caveats` are those that are not about noise: a rule that is not the mean, for instance.
    """
    found = list(caveats)
    if release.law.silent:
        found.append("no noise is added")
    if leans_on_liars(release, threat):
        found.append(
            f"as published: the figure holds only if {threat.hidden} liars exist that keep their secrets"
        )
    if release.adjacency == "published":
        found.append("adjacency 'published' is the papers' convention, not a pair of data sets")
    return tuple(found)


def judge(
    release: Release | None,
    threat: Threat | None,
    rounds: int,
    delta: float,
    caveats: tuple[str, ...] = (),
    printed: float | None = None,
    beside: History = (),
) -> Verdict:
    """Return what `rounds` rounds of `release` guarantee every honest client under `threat`.

    What is released `beside` these rounds is in the figure. `printed` is the figure that goes with a refusal,
    where it is not the accountants'; what the noise is really worth then stands in the reason, where that is
    the only objection.

    >>> from trilemma.privacy.types import NoiseLaw
    >>> published = Threat("secldp", clients=100, byzantine=10, assume="published")
    >>> judge(Release(2.25, NoiseLaw(sigma_cor=0.6)), published, 30, 1e-4).reason
    'as published: the figure holds only if 10 liars exist that keep their secrets'
    >>> held = judge(Release(2.25, NoiseLaw(1.19, 0.64)), Threat("secldp", 100, 10), 30, 1e-4)
    >>> round(held.epsilon, 1), held.accountant, held.threat
    (24.5, 'exact', 'secldp')
    """
    if release is None or threat is None:
        return NoGuarantee("; ".join(caveats) or "nothing is clipped and noised")
    reasons = objections(release, threat, caveats)
    if release.law.silent:
        return NoGuarantee("; ".join(reasons), printed)
    cost = spent(release, threat, rounds, delta, beside=beside)
    accountant, epsilon = cost.tightest
    if reasons:
        # What papers print is the Rényi figure.
        figure = cost.epsilon.get("rdp", epsilon) if printed is None else printed
        if printed is not None and len(reasons) == 1 and math.isfinite(epsilon):
            reasons += (f"the noise that is really added certifies ε = {epsilon:.3g} ({accountant})",)
        return NoGuarantee("; ".join(reasons), figure if math.isfinite(figure) else None)
    if not math.isfinite(epsilon):
        return NoGuarantee("no finite ε is certified")
    return Guarantee(
        *(epsilon, delta, release.unit, release.adjacency, threat.name, accountant),
        assumptions=(*cost.notes, *OUTSIDE),
    )
