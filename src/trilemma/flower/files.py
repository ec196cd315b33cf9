"""The files by which Flower knows a federation: an app that names ours, and a connection."""

from __future__ import annotations

from typing import Any

import tomli_w

from trilemma.federation.layout import Party

APP: dict[str, Any] = {
    "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
    "project": {
        "name": "trilemma-federation",
        "version": "1.0.0",
        "description": "Private and robust federated learning",
        "license": "Apache-2.0",
        "dependencies": [],
    },
    "tool": {
        "flwr": {
            "app": {
                "publisher": "trilemma",
                "components": {"serverapp": "apps:server", "clientapp": "apps:client"},
                "config": {"run": "default"},
            }
        }
    },
}

APPS = '''"""The apps are part of the installed package; this file only names them."""

from trilemma.flower.client_app import app as client
from trilemma.flower.server_app import app as server

__all__ = ["client", "server"]
'''


def write_flower_files(server: Party) -> None:
    """Write what `flwr run server/app federation` needs: an app and a connection."""
    app = server.folder / "app"
    app.mkdir(exist_ok=True)
    (app / "pyproject.toml").write_text(tomli_w.dumps(APP))
    (app / "apps.py").write_text(APPS)
    connection = {"address": server.federation.superlink, "root-certificates": str(server.authority)}
    known = {"superlink": {"default": "federation", "federation": connection}}
    server.flower_home.mkdir(exist_ok=True)
    (server.flower_home / "config.toml").write_text(tomli_w.dumps(known))
