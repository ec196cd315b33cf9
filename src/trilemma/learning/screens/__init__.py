"""Rivals of evidence: published defences that look at messages before the rule does.

    screen            what they have in common: a factor for every message, 0 leaves it out
    noise_test        each message against the law of its noise (Xiang and others 2023, their first stage)
    noise_test_rank   the same, then a ranking by the server's own message (both stages)
    safeguard         sums of messages that drift away from the majority's (Allen-Zhu and others 2021)
    fltrust           the server's own message, made on public examples, as the measure (Cao and others 2021)
    root_client       the server's own message, which the two with a root set need

Each rival is one file with one class, entered in `screens` under the name of its stage (`aggregation.stage`).
"""

from trilemma.learning.screens.screen import Heard, Screen, Seen, screened, screens
from trilemma.registry import discover

__all__ = ["Heard", "Screen", "Seen", "screened", "screens"]

discover(__name__)
