"""What the page's tests share: a few small runs and a federation in one folder."""

from __future__ import annotations

from pathlib import Path

from federation_harness import PRIVATE, Direct, coordinator, make, small_config
from trilemma import config, simulate
from trilemma.federation.server.commits import Commit

TOKEN = "the-token"
HOST = "127.0.0.1:8765"

BASE = {
    "federation": {"clients": 7, "byzantine": 2},
    "algorithm": {"name": "dsgd", "lr": 1.0, "batch_size": 25},
    "aggregation": {"rule": "caf"},
    "attack": {"name": "ipm", "strength": 10.0},
    "run": {"rounds": 6, "seeds": [1, 2], "evaluate_every": 3},
}
HOSTILE = "<img src=x onerror=document.title='stolen'><b>bold"
"""The name of a folder that somebody else chose."""

PRIVACY = ("privacy={threat='ldp', clip=1.0, noise_multiplier=1.0, delta=1e-4}",)


def make_run(folder: Path, *assignments: str) -> Path:
    simulate.run(config.parse(BASE, assignments), folder)
    return folder


def make_watched(root: Path) -> Path:
    """Three runs, one of them with a hostile name, a broken one, and a federation."""
    make_run(root / "study" / "caf")
    simulate.run(simulate.without_liars(config.parse(BASE)), root / "study" / "caf" / "baseline")
    make_run(root / "study" / "mean", "aggregation.rule=mean")
    make_run(root / HOSTILE, "algorithm.name=safe-dshb", *PRIVACY, "run.seeds=[1]")
    (root / "broken").mkdir()
    (root / "broken" / "config.toml").write_text("not [ toml")
    parties = make(root / "federation", 4, small_config(4, *PRIVATE))
    exchange = Direct(parties)
    runner, _ = coordinator(parties, exchange, "pilot")
    committed = runner.log.append

    def append(commit: Commit) -> None:
        committed(commit)
        exchange.gone = {2} if commit.rounds else set()

    runner.log.append = append
    runner.go()
    return root
