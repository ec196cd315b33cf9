"""What is imported when: every command, worker and node starts with it, so nothing is that is not needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "numba", "scipy.linalg", "scipy.optimize", "scipy.special", "scipy.stats", "dp_accounting",
    "cryptography", "matplotlib", "pandas", "pyarrow", "sklearn", "transformers", "flwr", "fastapi", "ray",
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


@pytest.mark.slow
def test_the_package_does_without_what_only_some_runs_need():
    """Nor does it need torch for its names, nor numba to aggregate: there plain operations serve."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
