"""Check what `make dist` built, and use the wheel as a stranger would: in an environment of its own.

python tools/try_wheel.py dist
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
TASK = """
import numpy as np
from torch import nn

clients, classes = 3, 2

def model():
    return nn.Linear(4, 2)

def data(client):
    x = np.random.default_rng(client).normal(size=(40, 4)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64)

def test():
    return data(9)
"""


def main(folder: Path) -> None:
    """Install the wheel in `folder`; then version, demo, a task of one's own, a pilot."""
    (wheel,) = folder.resolve().glob("*.whl")
    (archive,) = folder.resolve().glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as scratch:
        where = Path(scratch)
        venv.create(where / "env", with_pip=True)
        python = where / "env" / "bin" / "python"
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        say(where, *pip, "-c", ROOT / "constraints.txt", wheel, "twine")
        say(where, python, "-m", "twine", "check", "--strict", wheel, archive)
        say(where, python, "-m", "trilemma", "--version")
        say(where, python, "-m", "trilemma", "demo", "--out", "demo")
        (where / "task.py").write_text(TASK)
        trilemma = (python, "-m", "trilemma")
        say(where, *trilemma, "check", "task.py")
        small = ("--set", "run.rounds=3", "--set", "federation.clients=3")
        say(where, *trilemma, "run", "--task", "task.py", *small, "--out", "own")
        say(where, *trilemma, "export", "own", "own.safetensors")
        pilot(where, trilemma)
    print(f"{wheel.name}: works")


def pilot(where: Path, trilemma: tuple[str | Path, ...]) -> None:
    """Let the four hospitals of the examples train together, from a copy of their folder."""
    shutil.copytree(ROOT / "examples" / "hospitals", where / "hospitals")
    files = ("--task", "hospitals/task.py", "--config", "hospitals/run.toml")
    say(where, *trilemma, "federation", "init", "pilot", *files)
    try:
        say(where, *trilemma, "federation", "up", "pilot")
        say(where, *trilemma, "federation", "run", "pilot")
        say(where, *trilemma, "export", "pilot", "hospitals.safetensors")
    finally:
        say(where, *trilemma, "federation", "down", "pilot")


def say(where: Path, *command: str | Path, status: int = 0) -> None:
    """Run a command in the scratch folder; stop with what it said if it did not end as it should."""
    words = [str(word) for word in command]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRILEMMA_DATA")}
    done = subprocess.run(words, cwd=where, capture_output=True, text=True, env=env)
    if done.returncode != status:
        sys.exit(
            f"{' '.join(words[1:])} ended with {done.returncode}, not {status}:\n{done.stdout}{done.stderr}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
