"""Fixtures shared by all rooms."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Two test processes share two cores; more threads only get in each other's way."""
    torch.set_num_threads(1)
