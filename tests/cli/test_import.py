"""`import trilemma` shows the rooms and costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import trilemma


def test_rooms_are_imported_when_they_are_used() -> None:
    program = (
        "import sys, trilemma; print('torch' in sys.modules, set(trilemma.__all__) <= set(dir(trilemma)))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False True\n"


def test_every_name_is_there_and_no_other() -> None:
    assert all(getattr(trilemma, name) is not None for name in trilemma.__all__)
    assert trilemma.load is trilemma.api.load
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        trilemma.lod  # noqa: B018
