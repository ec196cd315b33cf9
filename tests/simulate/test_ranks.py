"""One run over several processes: the same model as one process, checkpoints that any number continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from trilemma import config, simulate
from trilemma.attacks import View, attacks
from trilemma.base.errors import ConfigError
from trilemma.base.keys import Key
from trilemma.simulate.shards import refuse_what_cannot_be_cut

BASE = {
    "data": {"name": "phishing"},
    "model": {"name": "logistic"},
    "federation": {"clients": 7, "byzantine": 2},
    "aggregation": {"rule": "caf"},
    "attack": {"name": "sf"},
    "run": {"rounds": 6, "checkpoint_every": 2, "evaluate_every": 3, "device": "cpu"},
}
CPU = simulate.Ranks(0, 2, torch.device("cpu"))


def torchrun(count: int, *arguments: str, **more) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    there = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "-m", "trilemma", "run", "--json", *arguments],
        capture_output=True, text=True, timeout=240, check=False, env=there, **more,
    )  # fmt: skip


def model(path: Path) -> np.ndarray:
    return np.load(path / "seed-1/model.npy")


@pytest.mark.slow
def test_ranks_train_the_model_of_one_process(tmp_path: Path) -> None:
    """Two of them, correlated noise and a geometric rule: model and records are those of one process."""
    private = "privacy={threat='secldp', clip=1.0, epsilon=8.0, assume='published'}"
    settings = config.parse(BASE, [private, "algorithm.name=cafcor"])
    simulate.run(settings, tmp_path / "alone")
    (tmp_path / "run.toml").write_text(settings.toml())
    done = torchrun(2, str(tmp_path / "run.toml"), "--out", str(tmp_path / "shared"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert abs(model(tmp_path / "shared") - model(tmp_path / "alone")).max() < 1e-6
    records = [(tmp_path / name / "seed-1/metrics.jsonl").read_text() for name in ("alone", "shared")]
    ours, theirs = ([json.loads(line) for line in text.splitlines()] for text in records)
    assert [one["round"] for one in ours] == [one["round"] for one in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-5)
        assert one["weights"] == pytest.approx(other["weights"], abs=1e-5)
    assert json.loads(done.stdout.splitlines()[-1])["accuracy"]["mean"] is not None


FALTERS = """
import os
from trilemma.attacks import Attack, AttackSettings, Crafted, attacks

@attacks.register("falters")
class Falters(AttackSettings):
    "Sends zeros, and ends its process in the fifth round where it is told to."

    def build(self):
        return Attack("falters", craft=craft, columnwise=True)

def craft(view):
    if view.round == 4 and os.environ.get("FALTER"):
        raise SystemExit(3)
    return Crafted(view.honest.new_zeros(view.byzantine, view.honest.shape[1]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("plugins_forgotten")
def test_a_checkpoint_is_continued_by_any_number_of_processes(tmp_path: Path, monkeypatch) -> None:
    """Two processes fall over in the fifth round, three go on, and one sums up what is finished."""
    (tmp_path / "falters.py").write_text(FALTERS)
    changes = ["attack={name='falters'}"]
    tables = {**BASE, "aggregation": {"rule": "nnm+cwmed"}}
    settings = config.load(_written(tmp_path, tables), changes, plugins=[str(tmp_path / "falters.py")])
    simulate.run(settings, tmp_path / "whole")
    arguments = [str(tmp_path / "run.toml"), "--set", changes[0], "--plugin", str(tmp_path / "falters.py")]
    monkeypatch.setenv("FALTER", "1")
    assert torchrun(2, *arguments, "--out", str(tmp_path / "cut")).returncode != 0
    held = simulate.RunDirectory.open(tmp_path / "cut").seed(1).checkpoint(torch.device("cpu"))
    assert held.round == 4
    assert held.clients["momentum"].shape == (5, 69), "the first rank gathered what all five hold"
    monkeypatch.delenv("FALTER")
    done = torchrun(3, "--resume", str(tmp_path / "cut"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert abs(model(tmp_path / "cut") - model(tmp_path / "whole")).max() < 1e-6
    summed = simulate.resume(tmp_path / "cut")
    assert summed.accuracy.mean == pytest.approx(json.loads(done.stdout.splitlines()[-1])["accuracy"]["mean"])


def _written(folder: Path, tables: dict) -> Path:
    path = folder / "run.toml"
    path.write_text(config.parse(tables).toml())
    return path


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["attack={name='alie', strength='search'}"], "looks at whole messages"),
        (["attack={name='mimic'}"], "looks at whole messages"),
        (["federation.sampled=3", "federation.byzantine=0", "attack={name='none'}"], "hold none"),
        (["algorithm={name='qsgd'}", "attack={name='none'}"], "travels encoded"),
        (["algorithm={name='pfedme'}"], "models of their own"),
        (["federation.clients=1", "federation.byzantine=0", "attack={name='none'}", "aggregation.rule=mean"],
         "2 processes for 1 clients"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_with_the_reason(changes: list[str], reason: str) -> None:
    experiment = simulate.assemble(config.parse(BASE, changes), 1)
    with pytest.raises(ConfigError, match=reason):
        refuse_what_cannot_be_cut(experiment, CPU)


def test_what_can_be_cut_is_not_refused() -> None:
    for attack in (
        "{name='sf'}",
        "{name='lf'}",
        "{name='foe', strength=2.0}",
        "{name='alie', strength='zmax'}",
    ):
        experiment = simulate.assemble(config.parse(BASE, [f"attack={attack}"]), 1)
        refuse_what_cannot_be_cut(experiment, CPU)


@pytest.mark.parametrize("name", attacks)
def test_an_attack_that_says_so_is_decided_column_by_column(name: str) -> None:
    """Crafted apart for two parts of the columns, the messages are those crafted for all at once."""
    attack = attacks[name]().build()
    for given in (1.5, 2.0):
        strength = attacks[name].model_fields.get("strength")
        if strength is not None and strength.default == "search":
            attack = attacks[name](strength=given).build()
        if not attack.columnwise or attack.craft is None:
            pytest.skip("looks at whole messages")
        honest = torch.randn(5, 9, generator=torch.Generator().manual_seed(1))

        def crafted(columns: torch.Tensor, attack=attack) -> torch.Tensor:
            view = View(columns, None, 2, lambda x, key=None: x, 0, Key(0))
            return attack.craft(view).messages

        parts = torch.cat([crafted(honest[:, :4]), crafted(honest[:, 4:])], dim=1)
        assert torch.allclose(parts, crafted(honest), rtol=0, atol=1e-6)
