"""Flower's waiting times, where it has no option for them.

Flower 1.41 sleeps 3 s between two looks for a message (SuperNode), 0.5 s between two looks for its app's
reply, and 1 s, then 2 s, … when it asks for an object a moment before it was uploaded. On a fast network with
a small model a round consists of little else. And a SuperNode that was killed is taken for alive, and refused
when it comes back, for 60 s. The constants are not settable, so they are set here, in the processes this
package starts and nowhere else; docs/federation.md has the measurements.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL
from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse
from flwr.supercore import heartbeat
from flwr.supercore.inflatable import inflatable_utils
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

POLL = "TRILEMMA_POLL"
"""Environment variable: seconds between two looks."""

ACTIVATION = "TRILEMMA_ACTIVATION"
"""Environment variable: seconds for which a SuperNode that is refused tries again."""


def poll_seconds() -> float:
    """Return the bound on a wait, in seconds.

    >>> os.environ.pop(POLL, None) and None
    >>> poll_seconds()
    0.2
    """
    return float(os.environ.get(POLL, "0.2"))


def bounded_clock(bound: float) -> SimpleNamespace:
    """Return a stand-in for the `time` module whose sleeps last at most `bound` seconds.

    >>> clock = bounded_clock(0.001)
    >>> start = clock.monotonic(); clock.sleep(3); clock.monotonic() - start < 1
    True
    """
    names = {name: getattr(time, name) for name in dir(time) if not name.startswith("_")}
    return SimpleNamespace(**{**names, "sleep": lambda seconds: time.sleep(min(seconds, bound))})


def bound_pulls(limit: float = 600.0) -> None:
    """Ask again for an object that is not there yet after a fraction of a poll, and give up after `limit`.

    Flower waits a second before it asks again, and two hours in all: a client that announces a reply and
    never uploads it would hold up the round, a message that was cut off in its upload the client.
    """
    for pull in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        pull.__kwdefaults__["initial_backoff"] = poll_seconds() / 4
        pull.__kwdefaults__["max_time"] = limit


def beat_faster() -> None:
    """Send heartbeats as often as Flower allows: a dead node is known to be dead after 20 s, not 60."""
    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT_MIN_INTERVAL
    fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT_MIN_INTERVAL


def answer_in_step() -> None:
    """Let a SuperNode send the reply to the message it received last before it receives another.

    Flower's waits for any reply. Where an older message gets one late (a run was stopped while its message
    was on the way: a minute later the SuperNode answers it itself, with an error), it sends that one, goes on
    to receive, and from then on every reply leaves only when the next message has come: a client that seems
    to be silent, for ever.
    """
    honest = start_client_internal._push_messages

    def push(*, state: InMemoryNodeState, **rest: Any) -> None:
        received = _received_last(state)
        honest(state=state, **rest)
        while received in state.msg_store:
            honest(state=state, **rest)

    start_client_internal._push_messages = push


def _received_last(state: InMemoryNodeState) -> str | None:
    """Return the id of the newest message that is not itself a reply."""
    with state.lock_msg_store:
        stored = [(name, entry.message.metadata) for name, entry in state.msg_store.items()]
    return next((name for name, about in reversed(stored) if not about.reply_to_message_id), None)


def keep_knocking() -> None:
    """Let a SuperNode that is refused try again for a while, not exit.

    It may have been killed and still be taken for alive, or its key is just being registered.
    """
    limit = float(os.environ.get(ACTIVATION, "30"))
    honest: Callable[[FleetHttpClient, ActivateNodeRequest], ActivateNodeResponse]
    honest = FleetHttpClient.ActivateNode

    def activate(client: FleetHttpClient, request: ActivateNodeRequest) -> ActivateNodeResponse:
        deadline = time.monotonic() + limit
        while True:
            try:
                return honest(client, request)
            except httpx.HTTPStatusError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)

    FleetHttpClient.ActivateNode = activate
