"""FLTrust: messages are trusted as far as they point where the server's own does; `"fltrust+mean"`.

What the server does is in `trilemma.learning.defences.screens.fltrust`.
"""

from __future__ import annotations

from trilemma.aggregation.steps.registry import mixings
from trilemma.aggregation.steps.stage import Stage


@mixings.register("fltrust")
class FLTrustStage(Stage):
    """Scale messages to the length of the server's own, and weigh them by their cosine with it.

    The server makes its message on public examples: `[aggregation] root = 100`.

    >>> from trilemma import aggregation as agg
    >>> agg.parse("fltrust+mean", f=1).name
    'fltrust+mean'

    Reference: Cao, Fang, Liu, Gong, "FLTrust: Byzantine-robust federated learning via trust bootstrapping",
    NDSS 2021.
    """
