"""Screens: published defences that test messages before the rule, as rivals of the evidence stage.

    screen            what they share: a factor for every message; 0 leaves it out
    noise_test        tests each message against the law of its noise (Xiang and others 2023, first stage)
    noise_test_rank   the same, then ranks clients by the server's own message (both stages)
    safeguard         leaves out clients whose sums drift away from the majority's (Allen-Zhu and others 2021)
    fltrust           compares messages with the server's own, from public examples (Cao and others 2021)
    root_client       the server's own message, for the two screens with a root set

Each screen is one file with one class, registered in `screens` under the name of its stage
(`aggregation.stage`).
"""

from trilemma.base.registry import discover
from trilemma.learning.defences.screens.screen import Screen, ScreenedRound, Seen, screened, screens

__all__ = ["Screen", "ScreenedRound", "Seen", "screened", "screens"]

discover(__name__)
