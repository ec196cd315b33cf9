"""What is imported when: every command, worker and node starts with it, so nothing is that is not needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "numba", "scipy.linalg", "scipy.optimize", "scipy.special", "scipy.stats", "dp_accounting",
    "cryptography", "matplotlib", "pandas", "pyarrow", "sklearn", "transformers", "flwr", "fastapi",
)  # fmt: skip
"""What only some runs need: compilers, calibration, secrets, pictures, files of others."""

PROGRAM = f"""
import sys
import trilemma as tl
dir(tl)
assert "torch" not in sys.modules
for name in {HEAVY}:
    sys.modules[name] = None                # what Python does where a module is not there: ImportError
import trilemma.experiment
tl.Task, tl.Privacy, tl.run(rounds=1, rule="nnm+cwmed", model="mlp", clients=5, tolerate=1)
assert not {{"sympy", "torch._dynamo"}} & set(sys.modules), "torch imports its compiler"
"""

CHECKED = """
import sys
from types import SimpleNamespace
import torch
from torch import nn
from trilemma import models
examples = SimpleNamespace(x=torch.randn(4, 5, 3), y=torch.zeros(4, 5).long(), weight=None)
own = models.from_module(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), nn.CrossEntropyLoss())
models.verify(own, torch.zeros(26), examples)
assert not {"sympy", "torch._dynamo"} & set(sys.modules), "torch imports its compiler"
"""
"""What every client of a federation does before it joins: 60 MB of each, and a second."""

OPERATED = """
import sys
from pathlib import Path
from trilemma.cli import app, federation
from trilemma.federation.operations import deployment
from trilemma.federation.processes import door
from trilemma.report import federations, run_metadata
assert not {"torch", "scipy.special", "scipy.stats", "numba", "grpc"} & set(sys.modules)
"""
"""What `trilemma federation up`, `down`, `run` and `status` begin with."""


@pytest.mark.slow
@pytest.mark.parametrize("program", [PROGRAM, CHECKED, OPERATED])
def test_the_package_does_without_what_only_some_runs_need(program):
    """Nor does it need torch for its names, nor numba to aggregate: there plain operations serve."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
