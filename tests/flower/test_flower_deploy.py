"""The image and the compose file say what the package does; nobody builds or starts them here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trilemma.cli.federation import federation_app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
yaml = pytest.importorskip("yaml", reason="reads a compose file")


@pytest.fixture(scope="module")
def services():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


def test_every_container_sees_its_own_folder_only(services):
    assert set(services) == {"server", *(f"client-{i}" for i in range(5))}
    for name, service in services.items():
        assert service["volumes"] == [f"./federation/{name}:/party/{name}"]
        assert service["command"] == ["up", f"/party/{name}", "--attach"]
        assert service["restart"] == "unless-stopped"
        assert "ports" not in service, "nothing is open to the outside"


def test_the_image_is_built_from_what_is_there(services):
    build = services["server"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    copied = re.findall(r"^COPY (.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    sources = [name for line in copied for name in line.split()]
    assert sources
    assert all((ROOT / name).exists() for name in sources)


def test_the_commands_in_the_files_exist(services):
    for command in {service["command"][0] for service in services.values()} | {"init", "run"}:
        outcome = CliRunner().invoke(federation_app, [command, "--help"])
        assert outcome.exit_code == 0
    text = (DEPLOY / "compose.yaml").read_text()
    assert "--attach" in CliRunner().invoke(federation_app, ["up", "--help"]).output
    for option in re.findall(r"--(?:clients|host|listen|config)\b", text):
        assert option in CliRunner().invoke(federation_app, ["init", "--help"]).output
