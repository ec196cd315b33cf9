"""The evidence stage: the server compares its clients' messages with the known law of honest noise.

The evidence adds up over rounds: it is a history of every client, part of the server's state.

    trace        how releases move the model: coefficients, and the law of a client's sum
    conviction   which clients are proved to lie: by lengths of sums, of pairs, and by directions
    limits       what honest clients keep to, as numbers on the device where Gram matrices lie
    directions   what stands out of the noise
    correction   what is visible but proves nothing: sets the model right along directions that stand out
    history      what the server has on its clients
    schedule     in which rounds the sums are tested, and the probability of a false alarm that each test gets
    detector     how the server judges: looks, convictions, what is undone and set right
    guard        an algorithm's server with all of this before its rule
    hidden       how much liars can hide from all of it

`rule = "evidence+mean"` (or any rule after the +) turns it on. The derivations are in docs/frontier.md.
"""

from trilemma.learning.defences.evidence.conviction import Expulsion, convict
from trilemma.learning.defences.evidence.correction import correct
from trilemma.learning.defences.evidence.guard import Evidence
from trilemma.learning.defences.evidence.hidden import Hidden, hidden_shift
from trilemma.learning.defences.evidence.limits import edge, lengths
from trilemma.learning.steps.trace import Law, Trace

__all__ = [
    "Evidence",
    "Expulsion",
    "Hidden",
    "Law",
    "Trace",
    "convict",
    "correct",
    "edge",
    "hidden_shift",
    "lengths",
]
