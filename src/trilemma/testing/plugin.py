"""What pytest is told: `-p trilemma.testing.plugin` brings the options that say what is under test.

An option of its own file, because pytest reads no package's conftest under `--pyargs`; and no entry point,
because that would put the options into everybody's pytest.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from trilemma.base.errors import UserError
from trilemma.testing import chosen


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--plugin`, and an option per kind of thing that has a suite."""
    group = parser.getgroup("trilemma", "suites of trilemma.testing")
    group.addoption(
        "--plugin",
        action="append",
        default=[],
        metavar="FILE",
        help="a .py file or a module; what it registers is tested, unless names are given; repeatable",
    )
    for kind in chosen.KINDS:
        group.addoption(
            f"--{kind}", action="append", default=[], metavar="NAME", help=f"test this {kind}; repeatable"
        )
    group.addoption(
        "--shape", default="", metavar="3,32,32", help="the shape of an example, for a model that needs it"
    )
    group.addoption("--classes", type=int, default=10, help="how many classes go with --shape")


def pytest_configure(config: pytest.Config) -> None:
    """Load the plugins and settle what is under test, before any suite is imported."""
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    config.addinivalue_line("markers", "cuda: needs a CUDA device")
    try:
        named = {kind: config.getoption(f"--{kind}") for kind in chosen.KINDS}
        chosen.choose(named, chosen.load(config.getoption("--plugin")))
        chosen.shape(config.getoption("--shape"), config.getoption("--classes"))
    except UserError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the suites of kinds of which nothing is under test."""
    ours = collection_path.parent == Path(__file__).parent
    return True if ours and collection_path.name in chosen.unneeded() else None
