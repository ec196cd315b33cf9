"""How a round grows with clients, numbers and processes: in memory, on disk, and shared by ranks.

    trilemma bench scale                        seconds a round and the most memory a process took
    trilemma bench scale --huge 2.0             n·d of twice this machine's memory, on disk
    trilemma bench scale --huge 2.0 --limit 1   the same as if 1 GB were there, beside the program itself

Every line is a fresh process, so that its memory is its own. The model is a perceptron on phishing data,
whose width sets d; the rule is CAF, two clients of n lie (sf).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from trilemma.config import parse

LINES = (
    (50, 1_000, "memory", 1),
    (200, 1_000, "memory", 1),
    (50, 100_000, "memory", 1),
    (200, 100_000, "memory", 1),
    (200, 100_000, "disk", 1),
    (400, 100_000, "memory", 1),
    (400, 100_000, "disk", 1),
    (200, 100_000, "memory", 2),
)
"""Clients, about how many parameters, where state is kept, processes."""

AT_ONCE, NUMBERS_AT_ONCE, ROUNDS = 25, 5_000_000, 3
"""Clients stepped together on disk: so many, or those whose messages are so many numbers; rounds."""


def settings(clients: int, dim: int, state: str) -> str:
    """Return the configuration as TOML; a hidden unit of the perceptron on 68 inputs has 71 parameters."""
    tables = {
        "data": {"name": "phishing"},
        "model": {"name": "mlp", "hidden": [max(1, dim // 71)]},
        "federation": {"clients": clients, "byzantine": 2},
        "algorithm": {"name": "dsgd", "lr": 0.1, "batch_size": 8},
        "aggregation": {"rule": "caf"},
        "attack": {"name": "sf"},
        "run": {"rounds": ROUNDS, "evaluate_every": ROUNDS, "checkpoint_every": 1000, "device": "cpu"},
    }
    at_once = min(AT_ONCE, NUMBERS_AT_ONCE // dim)
    limits = {"at_once": at_once, "state": state} if state == "disk" else {"state": state}
    return parse({**tables, "run": {**tables["run"], **limits}}).toml()  # type: ignore[dict-item]


def measured(
    clients: int, dim: int, state: str, ranks: int, folder: Path, limit: float = 0.0
) -> tuple[float, float] | None:
    """Run a line in processes of its own; return seconds a round and GB of the one that took most.

    With a `limit` in GB, None where that is too little.
    """
    path, out = folder / "run.toml", folder / f"out-{time.monotonic_ns()}"
    path.write_text(settings(clients, dim, state))
    alone = [sys.executable, __file__, "--line", str(path), "--out", str(out), "--limit", str(limit)]
    shared = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = alone if ranks == 1 else [*shared, *alone[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if limit and done.returncode and ("memory" in done.stderr or "MemoryError" in done.stderr):
        return None
    if done.returncode:
        raise SystemExit(done.stderr)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return max(one["seconds"] for one in said), max(one["gigabytes"] for one in said)


def line(path: Path, out: Path, limit: float) -> None:
    """Be the process of one line: run it and say what it took; the first round does not count."""
    from trilemma import simulate
    from trilemma.config import load

    if limit:  # of what is the process's own: a mapped file's pages do not count
        most = int(_status("VmData") + 1e9 * limit)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    before, peak = _own_memory(), [0.0]
    threading.Thread(target=_watch, args=(peak,), daemon=True).start()
    config = load(path)
    simulate.run(config, out, None, None, simulate.joined("cpu"))
    metrics = out / "seed-1" / "metrics.jsonl"
    rounds = [sum(json.loads(text)["seconds"].values()) for text in metrics.read_text().splitlines()]
    seconds = min(rounds[1:] or rounds)
    print(json.dumps({"seconds": seconds, "gigabytes": (peak[0] - before) / 1e9}), flush=True)
    simulate.left()


def _watch(peak: list[float]) -> None:
    while True:
        peak[0] = max(peak[0], _own_memory())
        time.sleep(0.01)


def _own_memory() -> float:
    """Bytes that are this process's alone: a mapped file's pages are the system's to take back."""
    return _status("RssAnon") or float(psutil.Process().memory_info().rss)


def _status(name: str) -> float:
    """Return a line of Linux's account of this process, in bytes; 0 where there is none."""
    account = Path("/proc/self/status")
    lines = account.read_text().splitlines() if account.exists() else []
    return next((float(text.split()[1]) * 1024 for text in lines if text.startswith(name)), 0.0)


def main() -> None:
    """Print the table, or be one of its lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--line", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--huge", type=float, help="state on disk with n·d this many times the memory")
    parser.add_argument("--limit", type=float, default=0.0, help="GB that a line may take (default: any)")
    given = parser.parse_args()
    if given.line is not None:
        line(given.line, given.out, given.limit)
        return
    lines = LINES
    if given.huge is not None:
        memory = 1e9 * given.limit or psutil.virtual_memory().total
        size = int(given.huge * memory / 4e6), 1_000_000
        lines = ((*size, "disk", 1), *([(*size, "memory", 1)] if given.limit else []))
    print("| clients n | parameters d | state | processes | n·d, GB | seconds a round | most memory, GB |")
    print("|---:|---:|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        for clients, dim, state, ranks in lines:
            d = 71 * max(1, dim // 71) + 2
            found = measured(clients, dim, state, ranks, Path(folder), given.limit)
            took = "does not fit | |" if found is None else f"{found[0]:.3g} | {found[1]:.2g} |"
            print(f"| {clients} | {d} | {state} | {ranks} | {clients * d * 4e-9:.2g} | {took}", flush=True)


if __name__ == "__main__":
    main()
