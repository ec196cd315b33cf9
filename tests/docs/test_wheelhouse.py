"""Installation without an index: what docs/guides/offline.md says, with stand-ins for the large packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from pages import ROOT


def wheel(folder: Path, name: str, needs: str = "", body: str = "") -> Path:
    """Make a wheel of one module."""
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    requires = f"Requires-Dist: {needs}\n" if needs else ""
    with ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", body)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=120)


def install(house: Path, target: Path) -> subprocess.CompletedProcess[str]:
    options = ["--no-index", "--find-links", house, "--require-hashes", "-r", house / "requirements.txt"]
    return run("-m", "pip", "install", "-q", "--target", target, *options)


def test_a_wheelhouse_installs_without_an_index_and_a_changed_wheel_does_not(tmp_path):
    if run("-m", "pip", "--version").returncode:
        pytest.skip("there is no pip here")
    house = tmp_path / "wheelhouse"
    house.mkdir()
    wheel(house, "stand_in", needs="beneath")
    wheel(house, "beneath", body="x = 1\n")
    assert "2 packages" in run(ROOT / "tools" / "wheelhouse.py", house).stdout
    assert install(house, tmp_path / "one").returncode == 0
    assert (tmp_path / "one" / "beneath.py").read_text() == "x = 1\n"
    wheel(house, "beneath", body="x = 2\n")
    refused = install(house, tmp_path / "two")
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert not (tmp_path / "two" / "beneath.py").exists()


def test_what_has_to_be_built_is_named(tmp_path):
    (tmp_path / "old-1.0.tar.gz").write_bytes(b"")
    assert "old-1.0.tar.gz: no wheels" in run(ROOT / "tools" / "wheelhouse.py", tmp_path).stderr
