"""What tests of privacy share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trilemma.privacy.accounting import pld
from trilemma.privacy.accounting import spending as accounting


@pytest.fixture
def nothing_remembered() -> Iterator[None]:
    """What other tests asked of slow accountants is not known, and what is found here is not to them."""

    def forget() -> None:
        pld._composed.cache_clear()
        accounting._curve.cache_clear()

    forget()
    yield
    forget()
