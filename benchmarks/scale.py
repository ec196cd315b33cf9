"""How a round grows with clients, numbers and processes: in memory, on disk, and shared by ranks.

    python benchmarks/scale.py                     seconds a round and the most memory a process took
    python benchmarks/scale.py --huge 2            n·d of twice this machine's memory, on disk, one round
    python benchmarks/scale.py --huge 2 --limit 1  the same where the system gives a process 1 GB, files apart

Every line is a fresh process, so that its memory is its own. The model is a perceptron on phishing data,
whose width sets d; the rule is CAF, two clients of n lie (sf).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from trilemma.experiment import parse

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

AT_ONCE, ROUNDS = 25, 3
HUGE_AT_ONCE, HUGE_DIM = 5, 1_000_000
"""Clients together, and their parameters, where memory is short."""


def settings(clients: int, dim: int, state: str, at_once: int = AT_ONCE, rounds: int = ROUNDS) -> str:
    """Return the configuration as TOML; a hidden unit of the perceptron on 68 inputs has 71 parameters."""
    tables = {
        "data": {"name": "phishing"},
        "model": {"name": "mlp", "hidden": [max(1, dim // 71)]},
        "federation": {"clients": clients, "byzantine": 2},
        "algorithm": {"name": "dsgd", "lr": 0.1, "batch_size": 8},
        "aggregation": {"rule": "caf"},
        "attack": {"name": "sf"},
        "run": {"rounds": rounds, "evaluate_every": rounds, "checkpoint_every": 1000, "device": "cpu"},
    }
    limits = {"at_once": at_once, "state": state} if state == "disk" else {"state": state}
    return parse({**tables, "run": {**tables["run"], **limits}}).toml()  # type: ignore[dict-item]


def measured(toml: str, ranks: int, folder: Path, limit: float | None = None) -> tuple[float, float]:
    """Run a line in processes of its own; return seconds a round and GB of the one that took most."""
    path, out = folder / "run.toml", folder / f"out-{time.monotonic_ns()}"
    path.write_text(toml)
    alone = [sys.executable, __file__, "--line", str(path), "--out", str(out)]
    alone += [] if limit is None else ["--limit", str(limit)]
    shared = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = alone if ranks == 1 else [*shared, *alone[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return max(one["seconds"] for one in said), max(one["gigabytes"] for one in said)


def line(path: Path, out: Path, limit: float | None) -> None:
    """Be the process of one line: run it and say what it took; the first of several rounds does not count."""
    from trilemma import simulate
    from trilemma.experiment import load

    if limit is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (int(limit * 1e9), int(limit * 1e9)))
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
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith("RssAnon"):
            return float(text.split()[1]) * 1024
    return float(psutil.Process().memory_info().rss)


def main() -> None:
    """Print the table, or be one of its lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--line", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--huge", type=float, help="one round on disk with n·d this many times the memory")
    parser.add_argument("--limit", type=float, help="GB of memory, files' pages apart, that a process gets")
    given = parser.parse_args()
    if given.line is not None:
        line(given.line, given.out, given.limit)
        return
    lines, at_once, rounds = LINES, AT_ONCE, ROUNDS
    if given.huge is not None:
        memory = psutil.virtual_memory().total if given.limit is None else given.limit * 1e9
        lines = ((int(given.huge * memory / (4 * HUGE_DIM)), HUGE_DIM, "disk", 1),)
        at_once, rounds = HUGE_AT_ONCE, 1
    print("| clients n | parameters d | state | processes | n·d, GB | seconds a round | most memory, GB |")
    print("|---:|---:|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        for clients, dim, state, ranks in lines:
            d = 71 * max(1, dim // 71) + 2
            toml = settings(clients, dim, state, at_once, rounds)
            seconds, memory = measured(toml, ranks, Path(folder), given.limit)
            print(
                f"| {clients} | {d} | {state} | {ranks} | {clients * d * 4e-9:.2g} | {seconds:.3g} | "
                f"{memory:.2g} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
