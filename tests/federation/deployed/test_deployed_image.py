"""`deploy/Dockerfile` without a Docker engine: what it copies is there, and what it runs runs.

Packages from the index are not installed a second time: the environment of its own sees those of this one.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OFFLINE = ("--no-deps", "--no-build-isolation", "--no-index")


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions and what follows them, lines that are continued joined."""
    text = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_is_made_of_instructions_that_are_tested():
    assert [word for word, _ in instructions()] == ["FROM", "COPY", "COPY", "RUN", "ENTRYPOINT", "CMD"]


@pytest.mark.slow
def test_the_image_installs_and_starts(tmp_path):
    said = instructions()
    image = tmp_path / "image"
    for _, rest in (one for one in said if one[0] == "COPY"):
        *sources, target = shlex.split(rest)
        for source in sources:
            place = image / target.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(
                    ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
                )
            else:
                place.mkdir(exist_ok=True)
                shutil.copy(ROOT / source, place)
    home = tmp_path / "environment"
    venv.create(home, symlinks=True)
    (seen,) = home.glob("lib/python*/site-packages")
    (seen / "others.pth").write_text(sysconfig.get_path("purelib"))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    (run,) = (rest for word, rest in said if word == "RUN")
    program, command, *rest = (part.replace("/src", str(image / "src")) for part in shlex.split(run))
    assert (program, command) == ("pip", "install")
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", *OFFLINE, *rest]
    done = subprocess.run(pip, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (seen / "trilemma" / "__init__.py").is_file(), "installed, and not the working tree's"

    start = [json.loads(rest) for word, rest in said if word in ("ENTRYPOINT", "CMD")]
    party = tmp_path / "party"
    party.mkdir()
    first, *arguments = [str(party) if part == "/party" else part for part in chain(*start)]
    done = subprocess.run(
        [str(home / "bin" / first), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "there is no federation in" in done.stdout + done.stderr
