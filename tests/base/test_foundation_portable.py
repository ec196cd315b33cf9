"""Nothing needs POSIX where nothing has to: the package is imported, and simulates, without its modules."""

from __future__ import annotations

import subprocess
import sys

import pytest

ABSENT = ("fcntl", "resource", "pwd", "termios")
BLOCK = f"""
import sys
import psutil, torch                        # they have their own ways on every system, chosen by its name
for name in {ABSENT}:
    sys.modules[name] = None                # what Python does where a module is not there: ImportError
"""

IMPORT_EVERYTHING = """
import importlib, pkgutil, trilemma
for module in pkgutil.walk_packages(trilemma.__path__, "trilemma."):
    if not any(part in module.name for part in (".flower", "__main__", ".kernels.cuda_")):
        importlib.import_module(module.name)
"""

SIMULATE = """
from pathlib import Path
from trilemma.cli import app
options = ["federation.clients=4", "federation.tolerate=1", "run.rounds=2", "aggregation.rule=cwmed"]
arguments = [part for option in options for part in ("--set", option)]
app(["run", *arguments, "--out", str(Path(sys.argv[1]) / "out")], standalone_mode=False)
"""


def without_posix(code: str, *arguments: str) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", BLOCK + code, *arguments], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr[-2000:]


@pytest.mark.slow
def test_every_module_is_imported_and_a_simulation_runs(tmp_path):
    without_posix(IMPORT_EVERYTHING + SIMULATE, str(tmp_path))
    assert (tmp_path / "out" / "summary.json").is_file()
