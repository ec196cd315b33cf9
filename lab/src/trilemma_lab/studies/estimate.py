"""How long studies will take on this machine: a few rounds of some of their runs, and how many there are.

Runs of a study differ: of each of its rows the first and the last are looked at, and the others of that row
are taken to cost what these do on average. Where a round is long, steps of a few and of some more clients
stand for it: what grows with their number, and what does not. What a run costs beside its rounds is looked at
too: to put it together and to score it.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from trilemma.base import files
from trilemma.base.typed import typed
from trilemma.simulate import engine
from trilemma.simulate.engine import Progress
from trilemma.simulate.evaluation import evaluate
from trilemma.simulate.experiment import Experiment, assemble
from trilemma.simulate.rehearsal import verify
from trilemma_lab.studies.grid import Place
from trilemma_lab.studies.measured import device_name
from trilemma_lab.studies.study import Study, tried

FEW, MORE, LONG, LOOK = 2, 10, 5.0, 2
"""Clients whose steps are looked at; seconds above which they stand for a round; rounds looked at else."""


@dataclass(frozen=True)
class Estimate:
    """What a study costs: its runs, counted by seed, and the seconds of one of them in one process."""

    runs: int
    seconds: float

    def minutes(self, jobs: int) -> float:
        """Minutes with so many runs at a time.

        >>> Estimate(runs=8, seconds=30.0).minutes(2)
        2.0
        """
        return self.runs * self.seconds / jobs / 60


def in_figures(time: float, figures: int = 2) -> str:
    """Return a length of time in a few figures, never in powers of ten.

    >>> in_figures(141.2), in_figures(0.0341)
    ('140', '0.034')
    """
    return f"{float(f'{time:.{figures}g}'):.12g}"


KEPT = "estimates-quick.json"
"""Where estimates of quick looks are kept, among the results."""


def keep(found: Mapping[str, Estimate], folder: Path) -> None:
    """Write estimates down beside those of other studies."""
    with files.changing(folder / KEPT):
        before, _ = kept(folder)
        together = {name: asdict(one) for name, one in sorted({**before, **found}.items())}
        said = {"date": datetime.date.today().isoformat(), "device": device_name(), "studies": together}
        files.write_atomically(folder / KEPT, (json.dumps(said, indent=1) + "\n").encode())


def kept(folder: Path) -> tuple[dict[str, Estimate], str]:
    """Return the estimates that were written down, if any were, and when and where that was."""
    if not (folder / KEPT).is_file():
        return {}, ""
    with files.readable(folder / KEPT, "estimates of studies"):
        said = json.loads((folder / KEPT).read_text("utf-8"))
        found = {name: typed(Estimate, one) for name, one in said["studies"].items()}
        return found, f"{said['device']}, {said['date']}"


def estimates(
    studies: Mapping[str, Study], places: Mapping[str, Sequence[Place]], quick: bool
) -> Iterator[tuple[str, Estimate]]:
    """Yield what each study costs; one that has no runs is computed to see."""
    for name, study in studies.items():
        if study.compute is not None:
            begin = time.perf_counter()
            study.compute(quick)
            yield name, Estimate(1, round(time.perf_counter() - begin, 3))
        elif places[name]:
            yield name, estimate(places[name])


def estimate(places: Sequence[Place]) -> Estimate:
    """Look at the first and the last run of each row, which stand for as many runs as the row has."""
    rows: dict[str, list[Place]] = {}
    for place in tried(places):
        rows.setdefault(place.row, []).append(place)
    counts = {row: sum(len(place.config.run.seeds) for place in own) for row, own in rows.items()}
    looked = {row: {place.cell.name: place for place in (own[0], own[-1])} for row, own in rows.items()}
    total = sum(counts[row] * fmean(_seconds(one) for one in ends.values()) for row, ends in looked.items())
    runs = sum(counts.values())
    return Estimate(runs, round(total / runs, 3))


def _seconds(place: Place) -> float:
    """Return about how long one seed of a run takes."""
    run = place.config.run
    experiment = assemble(place.config, run.seeds[0])  # reads the data set, which a worker does once
    progress = engine.start(experiment)
    clock = RoundClock(experiment.device.type == "cpu")
    ready = clock.spent(lambda: verify(assemble(place.config, run.seeds[0])))
    every = run.evaluate_every or max(1, run.rounds // 50)
    statistics = {name: progress.clients[name] for name, _ in experiment.clients.model.buffers}
    scored = clock.spent(lambda: evaluate(experiment, progress.chosen, statistics))
    return ready + scored + run.rounds * (_a_round(experiment, progress, clock) + scored / every)


def _a_round(experiment: Experiment, progress: Progress, clock: RoundClock) -> float:
    """Return what a round takes: told by a step of few clients where that is long, else by whole rounds."""
    everyone, algorithm = experiment.clients, experiment.resolved.algorithm
    heard = [i for i in experiment.sampled(0) if i in everyone.ids]
    training = everyone.ids if algorithm.everyone_trains else tuple(heard)
    key = experiment.key.fold("round", 0)

    def stepped(count: int) -> float:
        """What a step of so many clients takes; what is compiled and read at first does not count."""
        some = training[:count]
        rows = [everyone.ids.index(i) for i in some]
        state = {name: held[rows] for name, held in progress.clients.items()}
        clients = everyone.only(*some)
        algorithm.client(progress.broadcast, state, clients, 0, key)
        return clock.spent(lambda: algorithm.client(progress.broadcast, state, clients, 0, key))

    few, more = min(FEW, len(training)), min(MORE, len(training))
    if few and len(training) / few * (first := stepped(few)) > LONG:
        long = of_all(len(training), {few: first, more: stepped(more)})
        if long > LONG:
            return long

    def rounds() -> None:
        reached = progress
        for _ in range(LOOK):
            reached, _ = engine.step(experiment, reached)

    rounds()
    return clock.spent(rounds) / LOOK


def of_all(count: int, took: Mapping[int, float]) -> float:
    """Return what a step of `count` clients takes, where steps of few and of more of them took so long.

    Clients that are stepped together share what does not grow with their number.

    >>> of_all(100, {2: 1.2, 10: 2.0}), of_all(100, {2: 1.0, 10: 0.9}), of_all(2, {2: 1.5})
    (11.0, 1.0, 1.5)
    """
    (few, first), *rest = sorted(took.items())
    each = (rest[0][1] - first) / (rest[0][0] - few) if rest else 0.0
    return first + max(0.0, each) * (count - few)


@dataclass(frozen=True)
class RoundClock:
    """Seconds of processor time on a CPU, which other programs disturb less; else by the clock."""

    on_cpu: bool

    def spent(self, action: Callable[[], object]) -> float:
        """Run an action; return how long it took."""
        read = time.process_time if self.on_cpu else time.perf_counter
        begin = read()
        action()
        return read() - begin
