"""Trackers of experiments, MLflow and Weights & Biases: every round's figures, and what came of it.

`[run] log = ["mlflow", "wandb"]` asks for them. A tracker has one run per seed. Its number stands in the
tracker's folder, so that a seed that goes on from a checkpoint goes on there too. The tracker decides where
things are sent, by MLFLOW_TRACKING_URI, WANDB_MODE and the like. Without MLFLOW_TRACKING_URI, MLflow writes
to a file in the run's directory. Nothing is sent that the run's directory does not hold.
"""

from __future__ import annotations

import os
import tomllib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.base.records import Record, Summary
from trilemma.experiment import Config
from trilemma.privacy import NoGuarantee, read_verdict
from trilemma.simulate.observers import EventFiles, figures


def flat(plain: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested values by dotted name.

    >>> flat({"run": {"rounds": 3, "seeds": [1]}, "plugins": []})
    {'run.rounds': 3, 'run.seeds': '[1]', 'plugins': '[]'}
    """
    found: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = str(value) if isinstance(value, list) else value
    return found


def remembered(folder: Path, seed: int, new: str) -> tuple[str, bool]:
    """Return the number of a seed's run at a tracker, and whether it is a new one."""
    path = folder / f"seed-{seed}.run"
    if path.is_file():
        return path.read_text("utf-8").strip(), False
    folder.mkdir(parents=True, exist_ok=True)
    files.write_atomically(path, new.encode())
    return new, True


def configuration(folder: Path) -> dict[str, Any]:
    """Return the configuration of the run whose tracker's folder this is."""
    return flat(tomllib.loads((folder.parent / "config.toml").read_text("utf-8")))


class MlflowRuns:
    """An observer that writes to MLflow, one of its runs per seed."""

    def __init__(self, folder: Path) -> None:
        try:
            from mlflow import MlflowClient
        except ImportError:
            raise UserError("[run] log = ['mlflow'] needs MLflow: pip install 'trilemma[mlflow]'") from None
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._id = folder, ""
        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.absolute() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=where)

    def seed_started(self, seed: int, first_round: int, rounds: int) -> None:
        """Begin a run at MLflow, or go on with it."""
        path = self._folder / f"seed-{seed}.run"
        if path.is_file():
            self._id = path.read_text("utf-8").strip()
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "trilemma")
        there = self._client.get_experiment_by_name(name)
        home = None if os.environ.get("MLFLOW_TRACKING_URI") else (self._folder / "files").absolute().as_uri()
        experiment = there.experiment_id if there else self._client.create_experiment(name, home)
        made = self._client.create_run(experiment, run_name=f"{self._folder.parent.name} seed-{seed}")
        self._id, _ = remembered(self._folder, seed, made.info.run_id)
        for key, value in configuration(self._folder).items():
            self._client.log_param(self._id, key, str(value)[:500])

    def round_finished(self, record: Record) -> None:
        """Write a round's figures."""
        for name, value in figures(record).items():
            self._client.log_metric(self._id, name, value, step=record.round)

    def run_finished(self, seed: int, said: Mapping[str, Any], kept: Sequence[Path]) -> None:
        """Write what the run came to, its table and its pictures."""
        self.seed_started(seed, 0, 0)
        for name, value in said.items():
            self._client.set_tag(self._id, name, str(value)[:5000])
        for path in kept:
            self._client.log_artifact(self._id, str(path))
        self._client.set_terminated(self._id)


class WandbRuns:
    """An observer that writes to Weights & Biases, one of its runs per seed."""

    def __init__(self, folder: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError("[run] log = ['wandb'] needs wandb: pip install 'trilemma[wandb]'") from None
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._wandb, self._run = folder, wandb, None

    _run: Any

    def seed_started(self, seed: int, first_round: int, rounds: int) -> None:
        """Begin a run at W&B, or go on with it."""
        if self._run is not None:
            self._run.finish()
        number, _ = remembered(self._folder, seed, uuid.uuid4().hex[:12])
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "trilemma"),
            id=number,
            name=f"{self._folder.parent.name} seed-{seed}",
            config=configuration(self._folder),
            dir=str(self._folder),
            resume="allow",
        )

    def round_finished(self, record: Record) -> None:
        """Write a round's figures."""
        self._run.log(figures(record), step=record.round)

    def run_finished(self, seed: int, said: Mapping[str, Any], kept: Sequence[Path]) -> None:
        """Write what the run came to, its table and its pictures."""
        self.seed_started(seed, 0, 0)
        self._run.summary.update(dict(said))
        for path in kept:
            if path.suffix == ".png":
                self._run.log({path.stem: self._wandb.Image(str(path))})
            else:
                self._run.save(str(path), base_path=str(path.parent), policy="now")
        self._run.finish()
        self._run = None


LOGS: dict[str, Any] = {"tensorboard": EventFiles, "mlflow": MlflowRuns, "wandb": WandbRuns}
"""The logs that `[run] log` may name; each is written to a folder of that name in the run's directory."""


def said(summary: Summary) -> dict[str, Any]:
    """Return what is said of a run in words and numbers; ε only where it is guaranteed."""
    found = read_verdict(summary.verdict) if summary.verdict else NoGuarantee("nothing was certified")
    scores = {name: spread.mean for name, spread in summary.metrics.items()}
    told = {"algorithm": summary.algorithm, "rule": summary.rule, "attack": summary.attack, **scores}
    if isinstance(found, NoGuarantee):
        return {**told, "no guarantee": found.reason}
    return {**told, **{name: value for name, value in asdict(found).items() if name != "assumptions"}}


def track(
    directory: Path, config: Config, summary: Summary, table: str, pictures: Sequence[Path] = ()
) -> None:
    """Tell the trackers of a run what it came to: verdict, ε, scores, table and pictures."""
    wanted = [name for name in config.run.log if hasattr(LOGS[name], "run_finished")]
    if not wanted:
        return
    files.write_atomically(directory / "table.md", table.encode())
    kept = [*(directory / name for name in ("config.toml", "summary.json", "table.md")), *pictures]
    for name in wanted:
        for seed in config.run.seeds:
            tracker = LOGS[name](directory / name)
            tracker.run_finished(seed, said(summary), [path for path in kept if path.is_file()])
