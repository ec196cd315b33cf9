"""What honest noise must look like is known: a server's evidence about clients, kept over rounds.

    trace        how what clients release reaches the model: coefficients, the law of a client's sum
    conviction   whom the evidence proves to lie: lengths of sums, of pairs, and who must be among the liars
    correction   what cannot be proved but seen: the model along the directions that stand out of the noise
    file         what the server has on its clients
    schedule     in which rounds sums are looked at, and what that leaves of the probability of a false alarm
    court        what the server judges by: looks, convictions, what is undone and set right
    guard        an algorithm's server with all of it before its rule
    many         conviction and correction for many rounds at once, where their Gram matrices lie
    outlook      what becomes of lies before they are sent, for liars who know the server's state

`rule = "evidence+mean"` (or any rule after the +) turns it on. The derivations are in docs/frontier.md.
"""

from trilemma.learning.evidence.conviction import Expulsion, convict, lengths
from trilemma.learning.evidence.correction import correct, edge
from trilemma.learning.evidence.guard import evidence_of, guarded
from trilemma.learning.evidence.hidden import Hidden, hidden_shift
from trilemma.learning.trace import Law, Trace

__all__ = [
    "Expulsion",
    "Hidden",
    "Law",
    "Trace",
    "convict",
    "correct",
    "edge",
    "evidence_of",
    "guarded",
    "hidden_shift",
    "lengths",
]
