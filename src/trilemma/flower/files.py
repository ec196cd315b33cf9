"""The files by which Flower knows a federation: an app that names ours, and a connection."""

from __future__ import annotations

from trilemma.federation.layout import Party


def write_flower_files(server: Party) -> None:
    """Write what `flwr run server/app federation` needs: an app and a connection."""
    app = server.folder / "app"
    app.mkdir(exist_ok=True)
    (app / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n\n'
        "[project]\n"
        'name = "trilemma-federation"\nversion = "1.0.0"\n'
        'description = "Private and robust federated learning"\nlicense = "Apache-2.0"\n'
        "dependencies = []\n\n"
        "[tool.flwr.app]\n"
        'publisher = "trilemma"\n\n'
        "[tool.flwr.app.components]\n"
        'serverapp = "apps:server"\n'
        'clientapp = "apps:client"\n\n'
        '[tool.flwr.app.config]\nrun = "default"\n'
    )
    (app / "apps.py").write_text(
        '"""The apps are part of the installed package; this file only names them."""\n\n'
        "from trilemma.flower.client_app import app as client\n"
        "from trilemma.flower.server_app import app as server\n\n"
        '__all__ = ["client", "server"]\n'
    )
    server.flower_home.mkdir(exist_ok=True)
    (server.flower_home / "config.toml").write_text(
        '[superlink]\ndefault = "federation"\n\n'
        "[superlink.federation]\n"
        f'address = "{server.federation.address}"\n'
        f'root-certificates = "{server.authority}"\n'
    )
