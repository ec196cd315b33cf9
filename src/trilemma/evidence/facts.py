"""Everything that a pack says, as one value: pages are made from it, and `verify` checks it.

**What may be in a pack.** A published pack is read by adversaries, too. So each figure that depends on
somebody's records must be paid for by an ε in it, or is labelled (`Cover`). What parties send under a promise
against the server is paid for, and so is everything that is computed from it: the model, who was expelled and
why, the digest of the transcript. Training losses, the sizes of parties' data, times and
shares in the aggregate are in no field of this value.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import Field

from trilemma.base.typed import typed
from trilemma.federation.identity.signed_files import Strict
from trilemma.privacy import Verdict, judge
from trilemma.privacy.mechanism import History, Mechanism
from trilemma.privacy.threats.catalogue import Threat
from trilemma.privacy.types import Release

Cover = Literal["public", "paid", "not covered"]
"""Why a figure may be shown: no record moves it; an ε in the pack pays for it; nothing does, and it is "
"said."""

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Counted(Strict):
    """A mechanism, and how often it ran."""

    mechanism: dict[str, Any]
    count: Annotated[int, Field(ge=0)]


class Noise(Strict):
    """What one round releases, against whom, and what a whole run of it costs.

    `beside` is released beside the messages. `caveats` say why nothing is guaranteed, where it is not.
    """

    release: dict[str, Any] | None = None
    threat: dict[str, Any] | None = None
    beside: tuple[Counted, ...] = ()
    caveats: tuple[str, ...] = ()
    printed: float | None = None
    delta: float
    rounds: int
    verdict: dict[str, Any]

    def judged(self) -> Verdict:
        """Compute once more what the rounds guarantee."""
        release = None if self.release is None else typed(Release, self.release)
        threat = None if self.threat is None else typed(Threat, self.threat)
        return judge(
            *(release, threat, self.rounds, self.delta, self.caveats, self.printed), history(self.beside)
        )


class ExpelledParty(Strict):
    """A party that was expelled for good, and why in words; the figures of the test are `why`'s."""

    client: int
    why: str


class ScoreCurve(Strict):
    """A score over rounds; `of` says whose records it is about."""

    name: str
    points: tuple[tuple[int, float], ...]
    cover: Cover
    of: str


class Robust(Strict):
    """What liars can do: the rule, f, κ, how far they can move the mean unseen; who was expelled."""

    rule: str
    tolerated: int
    heard: int
    weights: tuple[float, ...] = ()
    kappa: float | None
    hidden: dict[str, float] | None = None
    expelled: tuple[ExpelledParty, ...] = ()
    cover: Cover = "paid"


class PartyFact(Strict):
    """A party: its name on the roster, and whether it was removed."""

    name: str
    removed: bool = False


class LogDigest(Strict):
    """A log as it was when the pack was made: its first bytes, and their digest."""

    name: str
    bytes: int
    sha256: Digest


class PackFacts(Strict):
    """What a pack is about."""

    version: Literal[1] = 1
    kind: Literal["federation", "simulation"]
    name: str
    run: str
    made: str
    made_with: dict[str, str]
    clients: int
    parties: tuple[PartyFact, ...] = ()
    rounds: int
    done: int
    algorithm: str
    rule: str
    data: str
    model: str
    dim: int
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    examples: int | None
    noise: Noise
    robust: Robust
    curves: tuple[ScoreCurve, ...]
    model_digest: Digest | None
    transcript: Digest | None = None
    transcript_why: str = ""
    logs: tuple[LogDigest, ...] = ()
    caveats: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def history(counted: tuple[Counted, ...]) -> History:
    """Return releases as accountants count them; refuse what is no mechanism."""
    found: Counter[Mechanism] = Counter()
    for one in counted:
        found[typed(Mechanism, one.mechanism)] += one.count
    return tuple(found.items())
