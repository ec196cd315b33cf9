"""A run that takes its time in the process that is going to be stopped, and none elsewhere.

Whoever waits for the middle of a run then finds it, however busy the machine is, and however fast.
"""

from __future__ import annotations

from pathlib import Path

SECONDS = "TRILEMMA_TEST_SECONDS"
"""The variable that says how long a round takes."""

PLUGIN = f"""
import os, time
from trilemma.attacks import Attack, AttackSettings, Crafted, attacks

@attacks.register("slow")
class Slow(AttackSettings):
    "Sends zeros, and takes its time where it is told to."

    def build(self):
        return Attack("slow", craft=craft)

def craft(view):
    time.sleep(float(os.environ.get("{SECONDS}", "0")))
    return Crafted(view.honest.new_zeros(view.byzantine, view.honest.shape[1]))
"""


def slow_attack(folder: Path) -> str:
    """Write the plugin that brings the attack `slow`; return where it is."""
    (folder / "slow.py").write_text(PLUGIN)
    return str(folder / "slow.py")
