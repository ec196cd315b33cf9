"""What is changed in a SuperNode of Flower 1.41, by parts of it that are not public.

`internals` says what else leans on such parts. What is used here, and why:

* **Waiting times** (`run_supernode`): a SuperNode sleeps 3 s between two looks for a message, and 0.5 s
  between two looks for its app's reply. On a fast network with a small model a round consists of little else.
  And a SuperNode that was killed is taken for alive, and refused when it comes back, for 60 s. The constants
  are not settable, so they are set here, in the processes this package starts and nowhere else;
  docs/federation.md has the measurements.
* **The door** (`present_certificate`): a SuperNode has no option for a certificate of its own, takes whatever
  the server sends into memory, and ends where a line breaks in the middle of TLS.
* **A second time** (`repeat_safely`): a reply whose announcement was heard, and the answer to it lost, is
  announced again and then never sent.
* **Layers** (`take_the_short_way`): most of what a worker's request costs is what it passes through before
  and after its handler; `short_way` leaves that out.
* **The bell** (`ring_the_worker`): a worker would ask for tasks as often as a SuperNode asks for messages.
* **Silence** (`restart_when_silent`): a SuperNode that meets an error it does not expect stops asking for
  work, and its process stays: its other thread has no reason to end.
"""

from __future__ import annotations

import logging
import os
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
from flwr.common.constant import HEARTBEAT_CALL_TIMEOUT, HEARTBEAT_MIN_INTERVAL
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse
from flwr.supercore import heartbeat
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode import main as supernode_api
from flwr.supernode.cli import flower_supernode
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from trilemma.flower import CERTIFICATE, CERTIFICATE_KEY, SILENCE
from trilemma.flower.bell import Bell
from trilemma.flower.bounded import Bounded
from trilemma.flower.internals import bound_pulls, poll_seconds
from trilemma.flower.short_logs import keep_short
from trilemma.flower.short_way import ShortWay, runtime

log = logging.getLogger("flwr")
ACTIVATION = "TRILEMMA_ACTIVATION"
"""Environment variable: seconds for which a SuperNode that is refused tries again."""


# --- waiting times ----------------------------------------------------------------------------------------


def run_supernode() -> None:
    """Run `flower-supernode`, with the waits below and its command line."""
    keep_short()
    bound_pulls()
    beat_faster()
    keep_knocking()
    repeat_safely()
    answer_in_step()
    ring_the_worker(Bell.of_this_party())
    present_certificate()
    take_the_short_way()
    restart_when_silent(float(os.environ.get(SILENCE, "60")))
    start_client_internal.time = bounded_clock(poll_seconds())
    flower_supernode()


def bounded_clock(bound: float) -> SimpleNamespace:
    """Return a stand-in for the `time` module whose sleeps last at most `bound` seconds.

    >>> clock = bounded_clock(0.001)
    >>> start = clock.monotonic(); clock.sleep(600); clock.monotonic() - start < 300
    True
    """
    names = {name: getattr(time, name) for name in dir(time) if not name.startswith("_")}
    return SimpleNamespace(**{**names, "sleep": lambda seconds: time.sleep(min(seconds, bound))})


def beat_faster() -> None:
    """Promise heartbeats as often as Flower allows: a dead node is known to be dead after 20 s, not 60.

    They are sent every 8 s. Left alone Flower would send them every 4 s, to be on the safe side of 10: with
    many clients that is a good part of all requests.
    """
    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT_MIN_INTERVAL + HEARTBEAT_CALL_TIMEOUT
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


def ring_the_worker(bell: Bell) -> None:
    """Let a SuperNode ring when it has received a message, which is a task for its worker."""
    honest = start_client_internal._pull_and_store_message

    def pull(**everything: Any) -> int | None:
        run: int | None = honest(**everything)
        if run is not None:
            bell.ring()
        return run

    start_client_internal._pull_and_store_message = pull


def take_the_short_way() -> None:
    """Let a SuperNode answer its worker without layers of middleware."""
    honest = supernode_api.create_app

    def create(*everything: Any, **more: Any) -> ShortWay:
        return ShortWay(honest(*everything, **more), runtime("SuperNode"))

    supernode_api.create_app = create


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


def repeat_safely() -> None:
    """Let what is asked a second time, because its answer was lost, count as done where it was done.

    The SuperLink takes an announcement, and an object, once. Asked again it wants nothing, which a SuperNode
    takes for success, and never sends what it announced; or for a failure, and sends nothing of the rest.
    An answer is lost with the line or, behind the guard, with a SuperLink that heard and then died: 503.
    """
    announce, push = FleetHttpClient.PushMessages, FleetHttpClient.PushObject
    in_doubt: set[str] = set()

    def asked(name: str, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except httpx.HTTPError as error:
            if not isinstance(error, httpx.HTTPStatusError) or error.response.is_server_error:
                in_doubt.add(name)
            raise

    def announcing(client: FleetHttpClient, request: PushMessagesRequest) -> PushMessagesResponse:
        name = request.messages_list[0].metadata.message_id
        response: PushMessagesResponse = asked(name, lambda: announce(client, request))
        if name in in_doubt and not response.objects_to_push:
            trees = iterate_object_tree(request.message_object_trees[0])
            response.objects_to_push.extend(one.object_id for one in trees)
            response.session_id = ""  # whichever it was announced in
        in_doubt.discard(name)
        return response

    def pushing(client: FleetHttpClient, request: PushObjectRequest) -> PushObjectResponse:
        response: PushObjectResponse = asked(request.object_id, lambda: push(client, request))
        response.stored |= request.object_id in in_doubt
        in_doubt.discard(request.object_id)
        return response

    FleetHttpClient.PushMessages, FleetHttpClient.PushObject = announcing, pushing


# --- the door, and silence --------------------------------------------------------------------------------


def present_certificate() -> None:
    """Let a SuperNode show this client's certificate, where the environment names one."""
    certificate, key = os.environ.get(CERTIFICATE), os.environ.get(CERTIFICATE_KEY)
    if certificate is None:
        return

    def connect(
        address: str,
        insecure: bool,
        root_certificates: bytes | str | None,
        interceptors: Sequence[ProtobufClientInterceptor],
        **options: Any,
    ) -> FleetHttpClient:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if isinstance(root_certificates, bytes):
            context.load_verify_locations(cadata=root_certificates.decode())
        else:
            context.load_verify_locations(root_certificates)
        context.load_cert_chain(certificate, key)
        client = FleetHttpClient(f"https://{address}", interceptors=interceptors, verify=context, **options)
        timeout = client._client.timeout
        client.close()
        kept = httpx.Limits(keepalive_expiry=KEPT)
        bounded = Bounded(httpx.HTTPTransport(verify=context, limits=kept))
        client._client = httpx.Client(transport=bounded, timeout=timeout)
        return client

    FleetHttpClient.from_server_address = staticmethod(connect)


KEPT = 60.0
"""Seconds for which a silent connection to the server is used again: heartbeats come every 8 s.

By themselves they close after 5 s, and every heartbeat begins with two handshakes. The guard closes later.
"""


class Watch:
    """Since when a SuperNode has asked the SuperLink for nothing, and whether it has a reason not to.

    While its worker computes it does not ask, and need not.

    >>> watch = Watch(lambda: moment[0]); moment = [0.0]
    >>> watch.asked(); moment[0] = 9.0; watch.silent
    9.0
    >>> with watch.working():
    ...     watch.silent
    0.0
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._last, self._working = now, 0.0, False

    def asked(self) -> None:
        """It asks just now."""
        self._last = self._now()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Its worker has something to do for a while."""
        self._working = True
        try:
            yield
        finally:
            self._working = False
            self.asked()

    @property
    def silent(self) -> float:
        """Seconds of silence that nothing explains."""
        return 0.0 if self._working else self._now() - self._last


def restart_when_silent(limit: float, restart: Callable[[], None] | None = None) -> Watch:
    """Start this SuperNode anew, in its own process, when it has not asked for `limit` seconds.

    That is three polls and more: the slowest a SuperNode asks, while the server is away, is every 20 s, and
    a request is given up after 30 s. Heartbeats do not count: they come from another thread.
    """
    watch, limit = Watch(), max(limit, 3 * poll_seconds())
    watch.asked()
    honest, push = FleetHttpClient._unary_unary, start_client_internal._push_messages

    def ask(client: FleetHttpClient, *, path: str, **rest: Any) -> Any:
        if not path.endswith("heartbeat"):
            watch.asked()
        return honest(client, path=path, **rest)

    def working(**everything: Any) -> None:
        with watch.working():
            push(**everything)

    def look() -> None:
        while watch.silent < limit:
            time.sleep(limit / 20)
        log.error("nothing was asked for in %.0f s: starting anew", watch.silent)
        (restart or _start_anew)()

    FleetHttpClient._unary_unary, start_client_internal._push_messages = ask, working
    threading.Thread(target=look, daemon=True).start()
    return watch


def _start_anew() -> None:
    """Replace this process by the same program: whoever watches it sees the same process go on."""
    os.execv(sys.executable, [sys.executable, "-m", "trilemma.flower.supernode", *sys.argv[1:]])
