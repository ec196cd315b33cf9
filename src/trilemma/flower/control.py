"""What a federation's operator asks of the SuperLink: register nodes, start a run, look, stop.

Flower has no public interface for this: its own command line prints what it finds. All of this file speaks
the SuperLink's control protocol, which is not public either (`internals` says what else is not).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto, user_config_from_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from trilemma.errors import UserError
from trilemma.federation.layout import Party
from trilemma.federation.node_keys import check_node_key


class SuperLinkAway(UserError):
    """Nobody answers where the SuperLink should be, or it is too busy to."""


@dataclass(frozen=True)
class RegisteredNode:
    """A registered node, as the SuperLink sees it."""

    number: int
    public_key: bytes
    status: str


class Control:
    """A connection to the SuperLink's control interface, over the federation's TLS."""

    def __init__(self, client: ControlHttpClient) -> None:
        self._client = client

    def nodes(self) -> list[RegisteredNode]:
        """Return the registered nodes."""
        listed = self._client.ListNodes(ListNodesRequest()).nodes_info
        return [RegisteredNode(node.node_id, node.public_key, node.status) for node in listed]

    def register(self, public_keys: list[bytes]) -> tuple[int, int]:
        """Let the SuperLink know these node keys and no others; return how many came, and how many went."""
        wanted, known = set(map(node_key_bytes, public_keys)), self.nodes()
        new = wanted - {node.public_key for node in known}
        there = [node for node in known if node.status != "unregistered"]
        gone = [node for node in there if node.public_key not in wanted]
        for key in sorted(new):
            self._client.RegisterNode(RegisterNodeRequest(public_key=key))
        for node in gone:
            self._client.UnregisterNode(UnregisterNodeRequest(node_id=node.number))
        return len(new), len(gone)

    def start(self, app: Path, name: str) -> int:
        """Start the run `name` of the Flower app in folder `app`; return Flower's id of it."""
        content = build_fab_from_disk(app)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        response = self._client.StartRun(
            StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto({"run": name}))
        )
        if not response.HasField("run_id"):
            raise UserError(f"the SuperLink did not start the run: {response.note or 'no reason given'}")
        return int(response.run_id)

    def status(self, run: int) -> str:
        """Return a run's status: `running`, `finished:completed`, `finished:failed`, `finished:stopped`."""
        found: Any = self._client.ListRuns(ListRunsRequest(run_id=run)).run_dict.get(run)
        if found is None:
            return "unknown"
        return ":".join(part for part in (found.status.status, found.status.sub_status) if part)

    def reason(self, run: int) -> str:
        """Return why a run ended as it did, in the words of the server app."""
        found: Any = self._client.ListRuns(ListRunsRequest(run_id=run)).run_dict.get(run)
        return "" if found is None else str(found.status.details)

    def active(self) -> dict[int, str]:
        """Return the names of the runs that are not finished, the newest last."""
        runs: Any = self._client.ListRuns(ListRunsRequest()).run_dict
        lasting = {run: found for run, found in runs.items() if found.status.status != "finished"}
        return {
            run: str(user_config_from_proto(found.override_config).get("run", "default"))
            for run, found in sorted(lasting.items(), key=lambda one: one[1].pending_at)
        }

    def begin(self, app: Path, name: str, replace: bool = False) -> int:
        """Start the run `name`, or return the one that is under way; another one is stopped if told so."""
        active = self.active()
        others = {run: other for run, other in active.items() if other != name}
        if others and not replace:
            other = next(iter(others.values()))
            raise UserError(
                f"run {other!r} is under way and is not stopped unasked: wait for its end, or say --replace"
            )
        for run in others:
            self.stop(run)
        mine = [run for run, one in active.items() if one == name]
        return mine[-1] if mine else self.start(app, name)

    def begin_again(self, app: Path, name: str) -> int:
        """Start the run `name` in place of one whose server app is gone."""
        for run, other in self.active().items():
            if other == name:
                self.stop(run)
        return self.start(app, name)

    def stop(self, run: int) -> None:
        """Stop a run."""
        self._client.StopRun(StopRunRequest(run_id=run))


@contextmanager
def connect(server: Party) -> Iterator[Control]:
    """Connect to the SuperLink of `server`'s federation, on the server's own machine: no other can.

    Raises:
        SuperLinkAway: it does not answer, or fails.
        UserError: it refuses.
    """
    server.check()
    client = ControlHttpClient.from_server_address(
        server.federation.superlink,
        insecure=False,
        root_certificates=server.authority.read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-cli")],
    )
    try:
        yield Control(client)
    except httpx.HTTPStatusError as error:
        if error.response.is_server_error:
            raise SuperLinkAway(f"the SuperLink failed: {error.response.text[:500]}") from None
        raise UserError(f"the SuperLink refused: {error.response.text[:500]}") from None
    except httpx.TransportError as error:
        address = server.federation.superlink
        raise SuperLinkAway(f"no SuperLink answers at {address} ({error}); start it with `up`") from None
    finally:
        client.close()


@lru_cache(maxsize=4096)
def node_key_bytes(public: bytes) -> bytes:
    """Return a node's public key (OpenSSH) in the encoding Flower registers."""
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    return bytes(public_key_to_bytes(check_node_key(public)))
