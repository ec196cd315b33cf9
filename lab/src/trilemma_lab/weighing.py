"""Sites of unequal size under attack, weighted and not: the tables of docs/concepts/weights.md.

    HEART=data/heart BRCA=data/tcga_brca python -m trilemma_lab.weighing docs/concepts/weights.md

Four hospitals (accuracy; every patient's gradient clipped and noised, ε below) and six regions (concordance;
no noise) are trained with equal weights and with their sizes, cut down to the usual cap. One site lies: the
heaviest or the lightest. Each cell is the mean over seeds of the score on the test patients of all sites.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import trilemma as tl
from trilemma.aggregation.steps.weights import RATIO, capped, usual_cap

EXAMPLES = Path(__file__).parents[3] / "examples"
BLOCK = re.compile(r"(<!-- weighing -->\n).*?(<!-- end of weighing -->)", re.DOTALL)

RULES = ("mean", "caf", "geomed", "cwtm")
ATTACKS = ("none", "foe", "alie")
SEEDS = 3


@dataclass(frozen=True)
class Sites:
    """Sites, what is learned there, and how: an example of the repository."""

    name: str
    example: str
    metric: str
    settings: dict[str, Any]

    def module(self) -> ModuleType:
        """Import the example's task."""
        path = EXAMPLES / self.example / "task.py"
        spec = importlib.util.spec_from_file_location(f"{self.example}_task", path)
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        return found

    def task(self, order: Sequence[int]) -> tl.Task:
        """Return its task, the sites in this order."""
        found = self.module()
        own = tl.Task.from_file(EXAMPLES / self.example / "task.py")
        taken = (lambda i: found.data(i, found.records(i))) if hasattr(found, "records") else found.data
        return replace(own, clients=[taken(i) for i in order], records=None, count=None)


GROUNDS = (
    Sites(
        "four hospitals, ε = 4 for a record (SecLDP, δ = 1e-3), 20 rounds",
        "hospitals",
        "accuracy",
        {
            "algorithm": {
                "name": "safe-dshb",
                "unit": "example",
                "lr": 0.5,
                "momentum": 0.9,
                "batch_size": 30,
            },
            "privacy": {"threat": "secldp", "clip": 1.0, "epsilon": 4.0, "delta": 1e-3},
            "rounds": 20,
        },
    ),
    Sites(
        "six regions, no noise, 30 rounds",
        "survival",
        "concordance",
        {
            "algorithm": {
                "name": "fedavg",
                "lr": 0.1,
                "local_steps": 5,
                "batch_size": 1000,
                "clip_gradients": 5.0,
            },
            "rounds": 30,
        },
    ),
)


def rows(ground: Sites) -> Iterator[str]:
    """Yield the lines of a ground's table."""
    plain = ground.task(range(ground.module().clients))
    sizes = _sizes(plain)
    n = len(sizes)
    cut = capped(sizes, 1, usual_cap(1, n), RATIO)
    shares = [size / sum(cut) for size in cut]
    yield f"**{ground.name}.** Training records {sizes}, weights {[round(share, 2) for share in shares]}."
    yield ""
    cases = [("none", "")] + [(attack, who) for attack in ATTACKS[1:] for who in ("heaviest", "lightest")]
    yield (
        "| rule | weights | "
        + " | ".join(f"{attack}{', ' + who if who else ''}" for attack, who in cases)
        + " |"
    )
    yield "|---|---|" + "---:|" * len(cases)
    for rule in RULES:
        for weighted in (False, True):
            scores = [score(ground, rule, cut if weighted else [], sizes, case) for case in cases]
            yield f"| `{rule}` | {'sizes' if weighted else 'equal'} | " + " | ".join(scores) + " |"
    yield ""


def score(
    ground: Sites, rule: str, weights: Sequence[int], sizes: Sequence[int], case: tuple[str, str]
) -> str:
    """Return the mean score of a cell; the site that lies is the last."""
    attack, who = case
    order = sorted(range(len(sizes)), key=lambda i: sizes[i], reverse=who == "lightest")
    with tempfile.TemporaryDirectory() as folder:
        result = tl.run(
            ground.task(order),
            **ground.settings,
            rule=rule,
            attack=attack,
            byzantine=0 if attack == "none" else 1,
            tolerate=1,
            weights=[weights[i] for i in order] if weights else (),
            seeds=SEEDS,
            out=Path(folder) / "run",
            progress=False,
        )
    found = result.summary.metrics.get(ground.metric)
    return "diverged" if found is None or found.mean is None else f"{found.mean:.3f}"


def _sizes(task: tl.Task) -> list[int]:
    natural = task.dataset.natural
    assert natural is not None
    return [len(rows) for rows in natural.train]


def main(pages: Sequence[str]) -> None:
    """Write the tables into pages."""
    said = "\n".join(line for ground in GROUNDS for line in rows(ground))
    for page in map(Path, pages):
        text = page.read_text()
        page.write_text(BLOCK.sub(lambda found: f"{found[1]}\n{said}\n{found[2]}", text))
    print(said)


if __name__ == "__main__":
    main(sys.argv[1:])
