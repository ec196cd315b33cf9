"""What few coordinates buy: accuracy at the papers' ε by what is trained, and what travels.

    python lab/benchmarks/few_coordinates.py run [--only mnist] [--way projected] [--seeds 1-3] [--limit 140]
    python lab/benchmarks/few_coordinates.py table

`run` adds to lab/results/few-coordinates.json whatever is not in it yet, seed by seed, and stops after
`limit` seconds; `table` puts the tables into docs/few-coordinates.md. Every run is a configuration that comes
with the package and the assignments listed here, once with all clients honest and once with f of them sending
the negative of what they should (sf).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilemma import config, simulate
from trilemma.base.records import Record
from trilemma.experiment.schema import parse_seeds
from trilemma.report import Table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "results" / "few-coordinates.json"
DOCS = ROOT / "docs" / "few-coordinates.md"

SCATTERING = ("data.features=scattering", "data.flip=false", "model={name='multinomial'}")
NOBODY = "attack={name='none'}"
LYING = "attack={name='sf'}"


@dataclass(frozen=True)
class Way:
    """What is trained, in words and in assignments."""

    what: str
    assignments: tuple[str, ...] = ()


@dataclass(frozen=True)
class CoordinatesStudy:
    """A data set: the configuration everything starts from and the ways to train."""

    title: str
    base: str
    ways: dict[str, Way]
    assignments: tuple[str, ...] = ()


def images(all_: str, subspace: str, head: str, full: str, projected: str) -> dict[str, Way]:
    """Return the five ways of an image set; the arguments are learning rates."""
    return {
        "projected": Way(
            "linear on scattering features, projected to 128",
            (*SCATTERING, "data.project=128", f"algorithm.lr={projected}"),
        ),
        "scattering": Way("linear on scattering features", (*SCATTERING, f"algorithm.lr={full}")),
        "head": Way("CNN, head", ("model.train=head", f"algorithm.lr={head}")),
        "subspace": Way(
            "CNN, subspace of 1,024",
            ("model.train={subspace=1024}", "privacy.clip=0.1", f"algorithm.lr={subspace}"),
        ),
        "all": Way("CNN, all", (f"algorithm.lr={all_}",)),
    }


GUARANTEED = "privacy.assume=guaranteed"
"""An ε that holds whether or not anybody lies; the papers' configurations count on liars."""

STUDIES = {
    "mnist": CoordinatesStudy(
        "MNIST", "cafcor-mnist", images("0.075", "30", "0.3", "0.05", "0.1"), (GUARANTEED,)
    ),
    "fashion": CoordinatesStudy(
        "Fashion-MNIST", "cafcor-fashion", images("0.3", "30", "0.3", "0.1", "0.2"), (GUARANTEED,)
    ),
    "cifar": CoordinatesStudy(
        "CIFAR-10, its first 8,000 images, tested on 2,000",
        "cafcor-mnist",
        images("0.2", "30", "0.3", "0.03", "0.1"),
        (GUARANTEED, "data.name=cifar10", "model.name=cifar-cnn"),
    ),
    "phishing": CoordinatesStudy(
        "phishing",
        "safe-dshb-phishing",
        {
            "all": Way("logistic, all"),
            "projected": Way("logistic on 16 random projections", ("data.project=16", "data.norm=1.0")),
            "subspace": Way("logistic, subspace of 16", ("model.train={subspace=16}", "algorithm.lr=4")),
            "mlp": Way("perceptron (100), all", ("model.name=mlp",)),
            "mlp-head": Way("perceptron (100), head", ("model.name=mlp", "model.train=head")),
            "mlp-lora": Way(
                "perceptron (100), adapters of rank 2", ("model.name=mlp", "model.train={lora=2}")
            ),
        },
    ),
}


def settings(study: CoordinatesStudy, way: Way, lying: bool, *more: str) -> config.Config:
    """Return one run's configuration."""
    assignments = [*study.assignments, *way.assignments, LYING if lying else NOBODY, *more]
    return config.load(study.base, assignments)


def one_run(chosen: config.Config, seed: int) -> dict[str, Any]:
    """Run one seed; return what the tables need."""
    began = time.perf_counter()
    experiment = simulate.assemble(chosen, seed)
    progress, record = simulate.start(experiment), Record(0)
    while progress.round < chosen.run.rounds:
        progress, record = simulate.step(experiment, progress)
    return {
        "dim": experiment.clients.model.dim,
        "accuracy": simulate.evaluate(experiment, progress.chosen).metrics["accuracy"],
        "bytes": record.facts["up_bytes"] / chosen.federation.participants,
        "epsilon": record.epsilon,
        "seconds": round(time.perf_counter() - began, 1),
        "device": str(experiment.device),
    }


def run(names: list[str], ways: list[str], seeds: tuple[int, ...], limit: float, device: str) -> None:
    """Run what is missing, seed by seed, until the time is over."""
    began = time.monotonic()
    found = read()
    for seed in seeds:
        for name in names:
            study = STUDIES[name]
            for key, way in study.ways.items():
                for lying in (False, True):
                    label = f"{name}/{key}/{'lying' if lying else 'nobody'}/{seed}"
                    if label in found or (ways and key not in ways):
                        continue
                    if time.monotonic() - began > limit:
                        return
                    chosen = settings(study, way, lying, f"run.device={device}")
                    try:
                        found[label] = one_run(chosen, seed)
                    except simulate.Diverged as error:
                        found[label] = {"diverged": error.round}
                    print(label, json.dumps(found[label]), flush=True)
                    RESULTS.parent.mkdir(exist_ok=True)
                    RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")


def read() -> dict[str, dict[str, Any]]:
    """Return what was measured so far."""
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}


def tables() -> str:
    """Return the tables as Markdown."""
    found = read()
    parts = []
    for name, study in STUDIES.items():
        rows = []
        for key, way in study.ways.items():
            runs = [
                [run for label, run in found.items() if label.startswith(f"{name}/{key}/{who}/")]
                for who in ("nobody", "lying")
            ]
            done = [run for run in runs[0] + runs[1] if "dim" in run]
            if done:
                scores = (_scores(each) for each in runs)
                rows.append(
                    (way.what, f"{done[0]['dim']:,}", *scores, f"{done[0]['bytes']:,.0f}", said(study, way))
                )
        if rows:
            liars = config.load(study.base).federation.byzantine
            heading = (
                "trained",
                "d",
                "nobody lies",
                f"{liars} lie (sf)",
                "bytes per client and round",
                "assignments",
            )
            epsilon = next(
                run["epsilon"] for label, run in found.items() if label.startswith(name) and "dim" in run
            )
            title = f"**{study.title}**: `{study.base}`, ε = {epsilon:.3g} certified"
            parts.append(f"{title}\n\n{Table('', heading, tuple(rows), words=1).markdown()}")
    return "\n\n".join(parts)


def said(study: CoordinatesStudy, way: Way) -> str:
    """Return the assignments as Markdown."""
    return (
        "`" + " ".join((*study.assignments, *way.assignments)).replace("|", "") + "`"
        if way.assignments
        else "–"
    )


def _scores(runs: list[dict[str, Any]]) -> str:
    """Return the mean accuracy, its deviation and the number of seeds."""
    if not runs:
        return "–"
    values = [100 * run.get("accuracy", float("nan")) for run in runs]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread} ({len(values)})"


def write() -> None:
    """Put the tables between their marks."""
    marks = "<!-- tables -->", "<!-- end of tables -->"
    text = DOCS.read_text("utf-8")
    pattern = re.escape(marks[0]) + ".*" + re.escape(marks[1])
    DOCS.write_text(
        re.sub(pattern, lambda _: f"{marks[0]}\n{tables()}\n\n{marks[1]}", text, flags=re.S), "utf-8"
    )


def main() -> None:
    """Run or print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--only", nargs="*", choices=list(STUDIES), default=list(STUDIES))
    parser.add_argument("--way", nargs="*", default=[])
    parser.add_argument("--seeds", type=parse_seeds, default=(1, 2, 3))
    parser.add_argument("--limit", type=float, default=float("inf"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="another file than lab/results/few-coordinates.json")
    given = parser.parse_args()
    if given.json is not None:
        globals()["RESULTS"] = given.json
    if given.what == "run":
        run(given.only, given.way, given.seeds, given.limit, given.device)
    else:
        write()


if __name__ == "__main__":
    main()
