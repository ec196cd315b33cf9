"""A SuperNode that breaks when it first asks for work, as one did whose SuperLink had a busy database.

python flower_deaf.py …      (every option of flower-supernode)
"""

from __future__ import annotations

from flwr.supernode.fleet_http_client import FleetHttpClient

from trilemma.flower.supernode_internals import run_supernode


def breaks(client: object, request: object) -> object:
    """Raise what Flower does not expect: its loop ends, its process does not."""
    raise RuntimeError("the SuperLink said 500")


if __name__ == "__main__":
    FleetHttpClient.PullMessages = breaks
    run_supernode()
