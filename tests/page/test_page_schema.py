"""The page's own description of its addresses, tried out: whatever is asked, the answer is as described."""

from __future__ import annotations

from pathlib import Path

import pytest

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis: pip install schemathesis")
pytest.importorskip("fastapi")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from schemathesis.specs.openapi.checks import positive_data_acceptance as IMPOSSIBLE  # noqa: E402

from trilemma.page.app import make_inner  # noqa: E402
from trilemma.page.index import Index  # noqa: E402

# A well-formed question may still be impossible (more liars than clients): 400 and why, as described.
ADDRESSES = sorted(make_inner(Index([])).openapi()["paths"])


@pytest.mark.slow
@pytest.mark.parametrize("address", ADDRESSES)
def test_answers_are_as_described(address: str, watched: Path) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", make_inner(Index([watched])))

    @given(case=schema[address]["GET"].as_strategy())
    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def ask(case) -> None:
        case.call_and_validate(excluded_checks=[IMPOSSIBLE])

    ask()
