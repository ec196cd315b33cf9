"""A process's own log is begun anew when it is long; what was printed last is always there."""

from __future__ import annotations

import sys

from flower_harness import wait_for

from trilemma.federation import processes
from trilemma.federation.processes import Command

CHATTER = """
import os, time
from trilemma.flower.short_logs import keep_short
keep_short(largest=10_000, look=0.02)
for times in range(5):
    print(f"{times} " * 6_000, flush=True)
    while os.fstat(1).st_size > 10_000:
        time.sleep(0.01)
print("the last word", flush=True)
time.sleep(600)
"""


def test_a_log_is_put_aside_and_begun_anew(tmp_path):
    command = Command("chatter", (sys.executable, "-c", CHATTER), {"TRILEMMA_BELL": str(tmp_path / "bell")})
    chatter = processes.start(command, tmp_path)
    log = tmp_path / "chatter.log"
    try:
        wait_for(lambda: log.read_bytes() == b"the last word\n", 120.0)
        before = (tmp_path / "chatter.log.1").read_bytes()
        assert before == b"4 " * 6_000 + b"\n", "what was said before, and not all that was ever said"
    finally:
        processes.stop([chatter], tmp_path, grace=1.0)
