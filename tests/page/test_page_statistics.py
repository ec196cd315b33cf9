"""Private statistics on the page: of the server's folder alone, as they were told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from federation_harness import Direct, coordinator
from page_harness import HOST, HOSTILE, TOKEN
from statistics_harness import made
from trilemma.report import deployed_statistics

pytest.importorskip("fastapi")
from starlette.testclient import TestClient

from trilemma.page.app import make_app
from trilemma.page.guard import hosts_of
from trilemma.page.index import Index


@pytest.fixture(scope="module")
def surveyed(tmp_path_factory) -> Path:
    """A federation's folder after its statistics."""
    found = made(tmp_path_factory.mktemp("page"))
    coordinator(found, Direct(found), "statistics")[0].go()
    deployed_statistics(found[0], "statistics")
    return found[0].folder.parent


def runs_of(root: Path) -> list[dict]:
    app = make_app(Index([root]), TOKEN, hosts_of("127.0.0.1", 8765))
    client = TestClient(app, base_url=f"http://{HOST}", headers={"Authorization": f"Bearer {TOKEN}"})
    views = [client.get(f"/api/parties/{line['id']}").json() for line in client.get("/api/parties").json()]
    return [run for view in views for run in view["runs"]]


def test_the_servers_run_shows_its_statistics(surveyed: Path) -> None:
    (run,) = runs_of(surveyed)
    told = run["statistics"]
    assert told["lines"][0].startswith("ε = 4 at δ = 0.001")
    assert [column["name"] for column in told["columns"]] == ["age", "ill"]
    kept = json.loads((surveyed / "server/state/runs/statistics/statistics.json").read_text())
    cells = [cell["count"] and cell["count"]["value"] for cell in kept["columns"][0]["cells"]]
    assert [cell["count"] for cell in told["columns"][0]["cells"]] == cells


@pytest.mark.parametrize(
    ("change", "shows"),
    [
        (lambda text: text.replace('"age"', json.dumps(HOSTILE)), HOSTILE),
        (lambda text: text.replace("0.95", "NaN", 1), "holds no statistics"),
        (lambda text: text[:100], "holds no statistics"),
        (lambda text: "[" * 100_000, "holds no statistics"),
    ],
)
def test_a_file_that_was_changed_is_text_or_said_to_be_none(
    surveyed: Path, tmp_path: Path, change, shows
) -> None:
    shutil.copytree(surveyed / "server", tmp_path / "server", symlinks=True)
    file = tmp_path / "server/state/runs/statistics/statistics.json"
    file.write_text(change(file.read_text()))
    (run,) = runs_of(tmp_path / "server")
    assert any(shows in line for line in run["statistics"]["lines"])
