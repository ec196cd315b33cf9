"""What the search of `adaptive` liars adds to a round of CafCor on MNIST, beside the rest of that round.

    python benchmarks/search_cost.py                               # all cases, with CUDA where there is one
    python benchmarks/search_cost.py --beside OTHER/src            # in turns with the code of another folder
    python benchmarks/search_cost.py --stages --cases "evidence+mean rotated gradient"
    python benchmarks/search_cost.py --profile --cases "evidence+caf rotated gradient"

A case is a rule, what liars do with their noise, and a direction. Times are medians over rounds, the first
few left out. `strengths` and `model` say whether two folders' liars do the same: the sum of what was sent and
the length of the model at the end. `--stages` waits for the device around every stage of the search, which
takes longer in all. Each folder's code runs in one process that waits while the other works.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from tables import table
from trilemma import attacks
from trilemma.attacks import adaptive, tryout
from trilemma.base.stopwatch import Stopwatch
from trilemma.experiment import load
from trilemma.learning.defences.evidence import outlook
from trilemma.simulate import ahead, engine, liars
from trilemma.simulate.experiment import Experiment, assemble

CASES = [
    f"{rule} {noise} gradient"
    for rule in ("evidence+mean", "evidence+caf", "caf")
    for noise in ("protocol", "rotated")
] + ["evidence+mean protocol loss", "evidence+mean protocol errors"]

STAGES = [
    (adaptive, "finite_rows"),
    (adaptive.Adaptive, "_directions"),
    (liars, "_truth"),
    (outlook.Outlook, "of"),
    (outlook.Outlook, "led"),
    (outlook.Outlook, "gram"),
    (outlook.Outlook, "outcomes"),
    (tryout.Tryout, "lies"),
    (tryout.Tryout, "furthest"),
    (tryout.Tryout, "judged"),
    (tryout.Tryout, "sent"),
    (ahead.Ahead, "uphill"),
    (ahead.Ahead, "_rehearsed"),
    (ahead.Ahead, "_slope"),
    (ahead.Ahead, "_climbed"),
    (ahead.Ahead, "mistaken"),
]
"""What is timed on its own; a stage inside another counts for itself only."""

WARM = 4
"""Rounds that do not count: in them kernels are compiled and recorded."""


def prepared(case: str, rounds: int, device: str | None) -> Experiment:
    """Return the experiment of a case."""
    rule, noise, direction = case.split()
    asked = [f"aggregation.rule={rule}", "federation.byzantine=10", f"run.rounds={max(rounds, 30)}"]
    attack = f"attack={{name='adaptive', noise='{noise}', direction='{direction}'}}"
    settings = load("cafcor-mnist", [*asked, attack])
    return assemble(settings, 1, device=None if device is None else torch.device(device))


def measured(experiment: Experiment, rounds: int, stages: bool) -> dict[str, Any]:
    """Return what rounds of an experiment took: milliseconds by stage, and what came of it."""
    progress, strengths = engine.start(experiment), []
    taken: dict[str, list[float]] = defaultdict(list)
    watch = Stopwatch(experiment.device)
    unwrap = [_watched(owner, name, watch) for owner, name in STAGES if stages and hasattr(owner, name)]
    for round_ in range(rounds):
        progress, record = engine.step(experiment, progress)
        inside = watch.take()
        strengths.append(record.attack_strength or 0.0)
        if round_ >= WARM:
            rest = sum(record.seconds.values()) - record.seconds["attack"]
            for name, spent in {"rest": rest, "attack": record.seconds["attack"], **inside}.items():
                taken[name].append(1e3 * spent)
    for undo in unwrap:
        undo()
    found: dict[str, Any] = {name: statistics.median(spent) for name, spent in taken.items()}
    return found | {"strengths": sum(strengths), "model": float(torch.linalg.vector_norm(progress.chosen))}


def _watched(owner: Any, name: str, watch: Stopwatch) -> Callable[[], None]:
    """Time a function wherever it is called; return what puts it back."""
    kept = owner.__dict__[name]
    plain = kept.__func__ if isinstance(kept, classmethod) else kept

    @wraps(plain)
    def timed(*given: Any, **named: Any) -> Any:
        with watch.stage(name):
            return plain(*given, **named)

    setattr(owner, name, classmethod(timed) if isinstance(kept, classmethod) else timed)
    return lambda: setattr(owner, name, kept)


def profiled(case: str, device: str | None) -> None:
    """Print what one round of a case launches and waits for."""
    experiment = prepared(case, 30, device)
    progress = engine.start(experiment)
    for _ in range(WARM + 2):
        progress, _ = engine.step(experiment, progress)
    doing = [torch.profiler.ProfilerActivity.CPU]
    if experiment.device.type == "cuda":
        doing.append(torch.profiler.ProfilerActivity.CUDA)
    craft = experiment.attack.craft
    assert craft is not None
    with torch.profiler.profile(activities=doing) as profile:

        def alone(view: attacks.View) -> attacks.Crafted:
            with torch.profiler.record_function("the search"):
                return craft(view)

        object.__setattr__(experiment.attack, "craft", alone)
        engine.step(experiment, progress)
    key = "self_cuda_time_total" if experiment.device.type == "cuda" else "self_cpu_time_total"
    print(profile.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=70))
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))


def serve(device: str | None) -> None:
    """Measure what is asked for, one line after the other."""
    for line in sys.stdin:
        asked = json.loads(line)
        experiment = prepared(asked["case"], asked["rounds"], device)
        print(json.dumps(measured(experiment, asked["rounds"], asked["stages"])), flush=True)


class Folder:
    """The code in a folder, in a process of its own."""

    def __init__(self, source: str, device: str | None) -> None:
        here = Path(__file__)
        path = os.pathsep.join([source, str(here.parent), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, str(here), "--serve", *([] if device is None else ["--device", device])]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, case: str, rounds: int, stages: bool) -> dict[str, float]:
        """Return what it takes."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"case": case, "rounds": rounds, "stages": stages}) + "\n")
        self.process.stdin.flush()
        found: dict[str, float] = json.loads(self.process.stdout.readline())
        return found

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def compare(cases: list[str], sources: list[str], chosen: argparse.Namespace) -> None:
    """Print a table: every case by the code of every folder, the median of its turns."""
    folders = {source: Folder(source, chosen.device) for source in sources}
    rows = []
    for case in cases:
        rounds = min(chosen.rounds, WARM + 4) if case.endswith("errors") else chosen.rounds
        turns: dict[str, list[dict[str, float]]] = {source: [] for source in sources}
        for _ in range(chosen.turns):
            for source, folder in folders.items():
                turns[source].append(folder.measure(case, rounds, chosen.stages))
        for source, found in turns.items():
            middle = {name: statistics.median([one[name] for one in found]) for name in found[0]}
            rounds_ = middle["attack"] / middle["rest"]
            columns = [("case", case), ("code", source), *((n, f"{v:.5g}") for n, v in middle.items())]
            if chosen.stages:
                told = ", ".join(f"{name} {spent:.2f}" for name, spent in middle.items())
                columns = [*columns[:2], ("milliseconds", told)]
            rows.append((*columns, ("rounds", f"{rounds_:.2f}")))
            print(*(f"{value}" for _, value in rows[-1]), sep=" | ", flush=True)
    for folder in folders.values():
        folder.close()
    print("", *table(rows), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--beside", action="append", default=[], help="a folder with another version's code")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device")
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    cases = [case.strip() for case in chosen.cases.split(",")]
    if chosen.serve:
        serve(chosen.device)
    elif chosen.profile:
        for case in cases:
            profiled(case, chosen.device)
    else:
        own = str(Path(attacks.__file__).parents[2])
        compare(cases, [*chosen.beside, own], chosen)


if __name__ == "__main__":
    main()
