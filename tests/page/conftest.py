"""A folder of runs and parties for all tests of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from page_harness import make_watched


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, a broken one, one with a hostile name, and a federation. Nobody may change them."""
    return make_watched(tmp_path_factory.mktemp("page") / "runs")
