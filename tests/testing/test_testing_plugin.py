"""The shared suites on things of a user's own, as `pytest --pyargs trilemma.testing` runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trilemma.base import plugins
from trilemma.base.errors import ConfigError
from trilemma.testing import chosen

GOOD = '''
import numpy as np
import torch
from trilemma.aggregation import Coordinate, rules
from trilemma.aggregation.passes.columns import Window
from trilemma.attacks import Attack, AttackSettings, Crafted, attacks
from trilemma.data import Dataset, DatasetOptions, datasets
from trilemma.learning import algorithms
from trilemma.learning.fedavg import FedAvg
from trilemma.models import ModelOptions, from_module, models

@rules.register("inner-half")
class InnerHalf(Coordinate):
    """Mean of the middle half of the values of each coordinate."""

    def window(self, n, f):
        return Window(n - 2 * max(f, n // 4))

    def kappa(self, n):
        return None

@attacks.register("double")
class Double(AttackSettings):
    """Twice the honest mean."""

    def build(self):
        return Attack("double", craft=self.craft)

    def craft(self, view):
        whole = view.honest[view.honest.isfinite().all(dim=1)].double()
        mean = whole.mean(dim=0) if len(whole) else whole.new_zeros(view.honest.shape[1])
        return Crafted((2 * mean).to(view.honest).expand(view.byzantine, -1))

@datasets.register("stripes")
class Stripes(DatasetOptions):
    """Points on two lines."""

    def load(self, key, storage):
        y = torch.arange(60) % 2
        x = y[:, None] + 0.1 * torch.randn(60, 4, generator=key.torch())
        return Dataset("stripes", x[:40], y[:40], x[40:], y[40:], 2, description="Points on two lines.")

@algorithms.register("my-fedavg")
class Mine(FedAvg):
    """FedAvg, again."""

@models.register("my-net")
class Net(ModelOptions):
    """A small net."""

    def build(self, shape, classes):
        layers = torch.nn.Linear(int(np.prod(shape)), 5), torch.nn.Tanh(), torch.nn.Linear(5, classes)
        return from_module(torch.nn.Sequential(torch.nn.Flatten(), *layers), torch.nn.CrossEntropyLoss())
'''

BROKEN = '''
import numpy as np
from trilemma.aggregation import Geometric, Weighing, rules

@rules.register("trusting")
class Trusting(Geometric):
    """The mean, with a coefficient it does not keep, and the first message counted twice."""

    def weigh(self, geometry, f):
        weights = np.ones(geometry.n)
        weights[0] = 2
        return Weighing(weights / weights.sum())

    def kappa(self, n):
        return 0.01
'''


def suite(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--pyargs",
        "trilemma.testing",
        "-p",
        "trilemma.testing.plugin",
    ]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", "-q", "-m", "not slow", *options],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.slow
def test_good_things_of_every_kind_pass(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    done = suite(tmp_path, "--plugin", "mine.py", "-rp")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Unknown" not in done.stdout
    passed = set(re.findall(r"PASSED \S*test_(\w+)\.py::", done.stdout))
    assert passed == {"rules", "attacks", "data", "algorithms", "models"}


@pytest.mark.slow
def test_a_broken_rule_fails_where_it_is_broken_and_only_its_suite_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BROKEN)
    done = suite(tmp_path, "--plugin", "mine.py", "--rule", "trusting", "-rf", "--tb=no")
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    failed = set(re.findall(r"FAILED \S*test_(\w+)\.py::(\w+)", done.stdout))
    assert {suite for suite, _ in failed} == {"rules"}
    assert {"test_permuting_clients_permutes_weights", "test_kappa_bounds_the_error"} <= {
        t for _, t in failed
    }
    assert "test_scaling_the_rows_scales_the_value" not in {t for _, t in failed}


def test_what_cannot_be_tested_is_said() -> None:
    nothing: dict[str, list[str]] = {kind: [] for kind in chosen.KINDS}
    with pytest.raises(ConfigError, match=r"mine.py registers nothing that has a suite: rules, mixing"):
        chosen.choose(nothing, [plugins.Plugin("mine.py", "")])
    with pytest.raises(ConfigError, match="did you mean 'caf'"):
        chosen.choose({**nothing, "rule": ["nnm+cafe"]}, [])
    assert chosen.everything()


def test_names_go_before_what_plugins_bring() -> None:
    mine = plugins.Plugin("mine.py", "", frozenset({("aggregation rule", "krum"), ("attack", "sf")}))
    nothing: dict[str, list[str]] = {kind: [] for kind in chosen.KINDS}
    try:
        chosen.choose(nothing, [mine])
        assert (chosen.names("rule"), chosen.names("attack"), chosen.names("model")) == (["krum"], ["sf"], [])
        assert chosen.unneeded() == {"test_algorithms.py", "test_models.py", "test_data.py"}
        chosen.choose({**nothing, "rule": ["nnm+krum"]}, [mine])
        assert (chosen.names("rule"), chosen.names("attack")) == (["nnm+krum"], [])
        with pytest.raises(ConfigError, match="whole numbers"):
            chosen.shape("3x32", 10)
    finally:
        chosen.choose(nothing, [])
    assert chosen.everything()
    assert chosen.unneeded() == set()
