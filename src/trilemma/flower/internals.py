"""Parts of Flower 1.41 that it does not call public, as far as a party's worker needs them.

What leans on such parts is in five files of this room and nowhere else: here; in `supernode_internals` and
`superlink_internals`, what is changed in a SuperNode and in the SuperLink; in `short_way`, how both answer
requests; and in `control`, the operator's connection to the SuperLink, for which there is no public way at
all. Whoever moves to another version of Flower reads these five; `flwr` is pinned to one minor version for
their sake. What is used here, and why:

* **Tasks** (`Tasks`): Flower's process isolation lets a process of ours run the apps, and its protocol is
  spoken by Flower's own executor only. Without it a new Python starts for every message and runs the code
  that the server uploaded.
* **Replies** (`nodes`, `announced`, `content`): the public grid looks every 3 s, waits for the content of
  every reply that was announced, and does not tell by which key a node authenticated.
* **Waiting times** (`bound_pulls`): who asks for an object a moment before it was uploaded waits 1 s, then
  2 s, … and docs/federation.md has the measurements.

A client's worker waits most of its life: what only a SuperNode or only the server needs is not imported here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import context_from_proto, context_to_proto, run_from_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
)
from flwr.serverapp import Grid
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
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message

from trilemma.flower import POLL

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
        from flwr.superlink.grid.http_grid import HttpGrid

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


def activations(grid: Grid) -> dict[int, str]:
    """Return when each connected node was started, or came back, last."""
    return {node.node_id: node.last_activated_at for node in grid.get_nodes()}


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


def poll_seconds() -> float:
    """Return the bound on a wait, in seconds.

    >>> os.environ.pop(POLL, None) and None
    >>> poll_seconds()
    0.2
    """
    return float(os.environ.get(POLL, "0.2"))


def bound_pulls(limit: float = 600.0) -> None:
    """Ask again for an object that is not there yet after a fraction of a poll, and give up after `limit`.

    Flower waits a second before it asks again, and two hours in all: a client that announces a reply and
    never uploads it would hold up the round, a message that was cut off in its upload the client.
    """
    for pull in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        pull.__kwdefaults__["initial_backoff"] = poll_seconds() / 4
        pull.__kwdefaults__["max_time"] = limit
