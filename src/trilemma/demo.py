"""The trilemma on one screen, on data that ships with the package: `trilemma demo`."""

from __future__ import annotations

import shutil
from pathlib import Path

from trilemma import experiment as config
from trilemma import simulate
from trilemma.base.errors import UserError
from trilemma.report import Result, Table, load, plot_results, results_table
from trilemma.simulate.observers import Watch

SETTING = {
    "data": {"name": "phishing"},
    "model": {"name": "logistic"},
    "federation": {"clients": 7, "byzantine": 3},
    "algorithm": {"name": "dsgd", "lr": 2.0, "momentum": 0.9, "batch_size": 50},
    "run": {"rounds": 100, "seeds": "1-3"},
}

PRIVATE = (
    "algorithm={name='safe-dshb'}",
    "privacy={threat='ldp', epsilon=1.0, delta=1e-4}",
)

ROWS = (
    ("nobody lies", ("federation.byzantine=0",)),
    ("trusting", ("aggregation.rule=mean", "attack={name='ipm', strength=10.0}")),
    ("robust", ("aggregation.rule=caf", "attack={name='ipm', strength=10.0}")),
    ("trusting", ("aggregation.rule=mean", "attack={name='sf'}")),
    ("robust", ("aggregation.rule=caf", "attack={name='sf'}")),
    ("robust, private", ("aggregation.rule=caf", "attack={name='sf'}", *PRIVATE)),
)
"""What is run, and what differs from `SETTING`."""


PICTURE = "demo.png"
"""What the picture is called, in the demo's folder."""

TITLE = "3 of 7 clients lie: the plain mean breaks, a robust rule follows the run where nobody does"
"""What the picture shows: the attack that breaks the mean, and the private run."""


def demonstrate(out: Path, watch: Watch) -> tuple[Table, Path]:
    """Run all rows below `out`, in place of an earlier demo; return the table and the picture."""
    _clear(out)
    results: list[tuple[str, Result]] = []
    for index, (label, changes) in enumerate(ROWS):
        settings = config.parse(SETTING, changes)
        with watch(f"{label} ({settings.attack.name})") as observer:
            simulate.run(settings, out / str(index), observer)
        results.append((label, load(out / str(index))))
    (_, free), *lied_to = results
    told = [
        (label, result) for label, result in lied_to if result.summary.attack == "ipm" or "private" in label
    ]
    shown = [(f"{label} ({r.summary.rule}, {r.summary.attack})", r) for label, r in told]
    picture = plot_results(shown, free, out / PICTURE, TITLE)
    rows = [(label, result.summary) for label, result in results]
    return results_table(rows, free.summary, "phishing, logistic regression, 100 rounds, seeds 1–3"), picture


def default_folder() -> Path:
    """Return runs/demo, or the next free number where that holds something that is not a demo."""
    usual = Path("runs") / "demo"
    return usual if _replaceable(usual) else simulate.fresh_directory(usual.parent, usual.name)


def _replaceable(out: Path) -> bool:
    """Whether there is nothing at `out`, or an earlier demo."""
    if not out.exists():
        return True
    return out.is_dir() and (not any(out.iterdir()) or (out / "0" / "config.toml").exists())


def _clear(out: Path) -> None:
    """Remove an earlier demo, and nothing that is not one."""
    if not _replaceable(out):
        raise UserError(f"{str(out)!r} holds something that is not a demo; name another --out")
    if out.exists():
        shutil.rmtree(out)
