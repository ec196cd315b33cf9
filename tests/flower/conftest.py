"""Flower is an optional extra: where it is missing, there is nothing to test here."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("flwr") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give real processes time: how long they take to start says more about the machine than about them."""
    for item in items:
        if item.get_closest_marker("federation") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
