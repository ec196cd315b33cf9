"""Everything here leans on parts of Flower 1.41 that it does not call public; nothing else in this room does.

`control` is the one exception: the operator's connection to the SuperLink, for which there is no public way
at all. Whoever moves to another version of Flower reads these two files; `flwr` is pinned to one minor
version for their sake. What is used, and why:

* **Tasks** (`Tasks`): Flower's process isolation lets a process of ours run the apps, and its protocol is
  spoken by Flower's own executor only. Without it a new Python starts for every message and runs the code
  that the server uploaded.
* **Replies** (`nodes`, `announced`, `content`): the public grid looks every 3 s, waits for the content of
  every reply that was announced, and does not tell by which key a node authenticated.
* **Waiting times** (`run_supernode`, `bound_pulls`): a SuperNode sleeps 3 s between two looks for a message,
  0.5 s between two looks for its app's reply, and 1 s, then 2 s, … when it asks for an object a moment before
  it was uploaded. On a fast network with a small model a round consists of little else. And a SuperNode that
  was killed is taken for alive, and refused when it comes back, for 60 s. The constants are not settable, so
  they are set here, in the processes this package starts and nowhere else; docs/federation.md has the
  measurements.
* **The door** (`present_certificate`): a SuperNode has no option for a certificate of its own.
* **Silence** (`restart_when_silent`): a SuperNode that meets an error it does not expect stops asking for
  work, and its process stays: its other thread has no reason to end.

Longer than most modules: whoever moves to another Flower has one file to read.
"""

from __future__ import annotations

import logging
import os
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import httpx
from flwr.app import Context, Error, Message
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL, ErrorCode, SubStatus
from flwr.common.serde import context_from_proto, context_to_proto, run_from_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
)
from flwr.serverapp import Grid
from flwr.supercore import heartbeat
from flwr.supercore.auth import load_superexec_auth_secret
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, pull_and_inflate_object_from_tree
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode.cli import flower_supernode
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message

from trilemma.flower import CERTIFICATE, CERTIFICATE_KEY, POLL, SILENCE

log = logging.getLogger("flwr")
ACTIVATION = "TRILEMMA_ACTIVATION"
"""Environment variable: seconds for which a SuperNode that is refused tries again."""

BROKEN_OFF = (httpx.HTTPError, RunNotRunningException, ObjectPullError)
"""What a task ends with when its run was stopped, or the Flower process is away."""


# --- tasks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneTask:
    """A task under way: a message to answer (a client's), or a grid to run on (the server's)."""

    client: RuntimeHttpClient
    context: Context
    message: Message | None = None
    grid: Grid | None = None

    def push(self, reply: Message) -> None:
        """Hand over the reply to the message."""
        push_message(self.client, reply, self.context)

    def push_failure(self, reason: str) -> None:
        """Reply that the app failed; the reason travels back."""
        error = Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason)
        self.push(Message(error, reply_to=self.message))

    def finish(self, failure: str = "") -> None:
        """Say how the task ended."""
        status = SubStatus.FAILED if failure else SubStatus.COMPLETED
        context = context_to_proto(self.context)
        self.client.PushTaskOutput(PushTaskOutputRequest(context=context, sub_status=status, details=failure))


class Tasks:
    """The tasks that the Flower process at `address` has for its worker; `secret` is theirs alone."""

    def __init__(
        self, kind: Literal["client", "server"], address: str, certificate: bytes | None, secret: Path
    ) -> None:
        self.kind = TaskType.CLIENT_APP if kind == "client" else TaskType.SERVER_APP
        self.address, self.certificate = address, certificate
        protected = frozenset({"/flwr.proto.Runtime/AcquireTask"})
        master = load_superexec_auth_secret(secret_file=str(secret))
        self._queue = self._connect(
            "SuperExec", SuperExecAuthHttpInterceptor(master_secret=master, protected_methods=protected)
        )

    def _connect(self, component: str, interceptor: ProtobufClientInterceptor) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            self.address,
            insecure=self.certificate is None,
            root_certificates=self.certificate,
            interceptors=[RuntimeVersionHttpInterceptor(component_name=component), interceptor],
        )

    def acquire(self) -> str | None:
        """Return the token of a waiting task; None where there is none, or the Flower process is away."""
        try:
            response = self._queue.AcquireTask(AcquireTaskRequest(supported_task_types=[self.kind]))
        except httpx.HTTPError:
            return None
        return str(response.token) if response.HasField("task") and response.token else None

    @contextmanager
    def message(self, token: str) -> Iterator[OneTask]:
        """Take on a client's task."""
        client = self._connect("flwr-clientapp", RuntimeTokenHttpInterceptor(token))
        with _alive(client):
            try:
                message, context, _, _ = pull_task_input(client)
                yield OneTask(client, context, message=message)
            finally:
                client.close()

    @contextmanager
    def run(self, token: str) -> Iterator[OneTask]:
        """Take on the server's task."""
        grid = HttpGrid(self.address, self.certificate is None, self.certificate, token=token)
        client = grid._runtime_client
        with _alive(client):
            try:
                task = client.PullTaskInput(PullTaskInputRequest())
                # Flower's Message constructor reads these where the process was started for one task only.
                TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
                TaskIdentity.node_id = task.context.node_id
                context, run = context_from_proto(task.context), run_from_proto(task.run)
                context.run_config = dict(run.override_config)
                grid.set_run(run)
                yield OneTask(client, context, grid=grid)
            finally:
                grid.close()


@contextmanager
def _alive(client: RuntimeHttpClient) -> Iterator[None]:
    """Send heartbeats as long as a task lasts."""
    beats = HeartbeatSender(make_task_heartbeat_fn_http(client))
    beats.start()
    try:
        yield
    finally:
        if beats.is_running:
            beats.stop()


# --- replies ----------------------------------------------------------------------------------------------


def nodes(grid: Grid) -> dict[int, bytes]:
    """Return the connected nodes and the keys they authenticated with."""
    return {node.node_id: node.public_key for node in grid.get_nodes()}


def announced(grid: Grid, questions: Sequence[str]) -> Mapping[str, ObjectTree]:
    """Return which of these messages have a reply, and what its content consists of; it does not wait."""
    found = grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=questions))
    heads = zip(found.messages_list, found.message_object_trees, strict=True)
    return {head.metadata.reply_to_message_id: tree for head, tree in heads}


def content(grid: Grid, tree: ObjectTree) -> Message:
    """Fetch a reply, piece by piece; it waits for what was announced and is not there yet."""
    client, node, run = grid._runtime_client, grid.node, grid.run.run_id
    return pull_and_inflate_object_from_tree(
        tree,
        make_pull_object_fn_protobuf(client.PullObject, node, run),
        make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run),
        return_type=Message,
    )


def refused(reply: Message) -> bool:
    """Tell a client app that said no from a client that Flower could not reach."""
    return bool(reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION)


# --- waiting times ----------------------------------------------------------------------------------------


def run_supernode() -> None:
    """Run `flower-supernode`, with the waits below and its command line."""
    bound_pulls()
    beat_faster()
    keep_knocking()
    answer_in_step()
    present_certificate()
    restart_when_silent(float(os.environ.get(SILENCE, "60")))
    start_client_internal.time = bounded_clock(poll_seconds())
    flower_supernode()


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
        return FleetHttpClient(f"https://{address}", interceptors=interceptors, verify=context, **options)

    FleetHttpClient.from_server_address = staticmethod(connect)


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
