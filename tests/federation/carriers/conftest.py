import pytest
from carrier_harness import Keys


@pytest.fixture
def keys(tmp_path):
    return Keys(tmp_path / "keys", clients=3)
