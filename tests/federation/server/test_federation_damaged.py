"""Whatever became of a file in a party's folder: who looks is told, and sees no traceback."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from damage import called, damage
from federation_harness import PRIVATE, Direct, coordinator, make, small_config
from free_ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

COMMANDS = (
    "federation status here",
    "federation status here --json",
    "federation doctor here",
    "federation roster here",
    "federation proposals here/client-0",
    "federation budget here/client-0",
    "federation replay here run",
    "export here model.pt",
    "export here/client-0 model.pt",
)
"""Those that only look: a damaged list of processes must not make anybody end one."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation of three that has done a run; nothing of it is running."""
    folder = tmp_path_factory.mktemp("whole") / "here"
    made = make(folder, 3, small_config(3, *PRIVATE), budget=1e6, port=free_ports(1))
    coordinator(made, Direct(made))[0].go()
    return folder


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damaged_file_of_a_party_shows_a_traceback(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    files = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.stat().st_size]
    name = data.draw(st.sampled_from([one for one in files if (whole / one).is_file()]))
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(whole, folder / "here")
    damage(folder / "here" / name, data.draw)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        assert called(data.draw(st.sampled_from(COMMANDS)), patched) in (0, 1, 2)
    shutil.rmtree(folder)
