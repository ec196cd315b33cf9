"""Adding a thing is one file: a copy of the package with one file more in each room knows all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trilemma

FILES = {
    "aggregation/first.py": '''
from trilemma.aggregation.passes.gram import Geometry
from trilemma.aggregation.steps.registry import mixings, rules
from trilemma.aggregation.steps.chain import Mixing
from trilemma.aggregation.steps.rule import Geometric
from trilemma.aggregation.steps.types import Weighing
from pydantic import Field
import numpy as np

@rules.register("first")
class First(Geometric):
    """The message of one client, whatever the others say."""
    row: int = Field(default=0, ge=0, description="which client is believed")
    def weigh(self, geometry, f):
        return Weighing(np.eye(geometry.n)[self.row])
    def kappa(self, n):
        return None

@mixings.register("halve")
class Halve(Mixing):
    """Every message divided by two."""
    def matrix(self, geometry, f, key):
        return np.eye(geometry.n) / 2
''',
    "attacks/silence.py": '''
from trilemma.attacks.settings import AttackSettings, attacks
from trilemma.attacks.types import Attack

@attacks.register("silence")
class Silence(AttackSettings):
    """Says nothing."""
    def build(self):
        return Attack("silence")
''',
    "models/bias.py": '''
from trilemma.models.catalogue import ModelOptions, models

@models.register("bias")
class Bias(ModelOptions):
    """A constant."""
    def build(self, shape, classes):
        return models["logistic"]().build(shape, classes)
''',
    "data/halves.py": '''
from trilemma.data.catalogue import PartitionOptions, partitions

@partitions.register("halves")
class Halves(PartitionOptions):
    """One half each."""
    def divide(self, dataset, clients, key):
        raise NotImplementedError
''',
    "learning/standstill.py": '''
from trilemma.learning.settings import AlgorithmSettings, algorithms

@algorithms.register("standstill")
class Standstill(AlgorithmSettings):
    """Learns nothing."""
''',
    "experiment/ready/mine.toml": '# My own.\n[attack]\nname = "silence"\n[model]\nname = "bias"\n',
}

QUESTION = """
import json
import torch
from trilemma import aggregation as agg, config
from trilemma.experiment.rooms import rooms

X = torch.tensor([[2.0], [4.0], [6.0]])
print(json.dumps({
    "known": [name for room in rooms().values() for name in room],
    "parsed": agg.parse("halve+first(1)", f=1)(X).value.tolist(),
    "called": agg.first(f=1)(X).value.tolist(),
    "name": agg.parse("halve+first(1)", f=1).name,
    "attack": config.load("mine", ["algorithm.name=standstill"]).attack.name,
}))
"""


@pytest.mark.slow
def test_one_file_is_enough_in_every_room(tmp_path: Path) -> None:
    _mirror(Path(trilemma.__file__).parent, tmp_path / "trilemma")
    for name, text in FILES.items():
        (tmp_path / "trilemma" / name).write_text(text, "utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", QUESTION], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {"first", "halve", "silence", "bias", "halves", "standstill", "mine"} <= set(answer.pop("known"))
    assert answer == {
        "parsed": [2.0],
        "called": [2.0],
        "name": "halve+first(row=1)",
        "attack": "silence",
    }


def _mirror(source: Path, target: Path) -> None:
    """Lay out the package again, every file a link."""
    target.mkdir()
    for entry in source.iterdir():
        if entry.is_dir() and entry.name != "__pycache__":
            _mirror(entry, target / entry.name)
        elif entry.is_file():
            (target / entry.name).symlink_to(entry)
