"""Parts of Flower 1.41 that it does not call public, as far as a party's worker needs them.

What leans on such parts is in five files of this room and nowhere else: here; in `supernode_internals` and
`superlink_internals`, what is changed in a SuperNode and in the SuperLink; in `short_way`, how both answer
requests; and in `control`, the operator's connection to the SuperLink, for which there is no public way at
all. Whoever moves to another version of Flower reads these five; `flwr` is pinned to one minor version for
their sake. What is used here, and why:

* **Parcels** (`TaskClient`): a client's worker asks its SuperNode for each record by itself, and hands each
  over by itself: thirteen requests for every message where two do.
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
from typing import Any, Literal

import httpx
from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import context_from_proto, context_to_proto, run_from_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    AcquireTaskResponse,
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PullTaskInputRequest,
    PullTaskInputResponse,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
    PushTaskOutputRequest,
    PushTaskOutputResponse,
)
from flwr.serverapp import Grid
from flwr.supercore.auth import load_superexec_auth_secret
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
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
from google.protobuf.message import DecodeError

from trilemma.flower import POLL
from trilemma.flower.parcels import GIVE, TAKE, Parcel

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


class TaskClient(RuntimeHttpClient):  # type: ignore[misc]
    """Flower's client of one task, as a client's worker has it: for most of it nothing has to be asked.

    What came with the task is here; a reply and its records are kept until it is said how the task ended.
    """

    @classmethod
    def beside(cls, other: RuntimeHttpClient, interceptors: list[ProtobufClientInterceptor]) -> TaskClient:
        """Return a client that uses the connections of another, which are not its own to close."""
        client = cls.__new__(cls)
        client.__dict__.update(other.__dict__, _interceptors=tuple(interceptors))
        client.taken([])
        return client

    def taken(self, parts: list[bytes]) -> None:
        """Note what came with the task: its input, the message's head, and its records if all are there."""
        head: list[Any] = [*parts[:2], None, None]
        self._input, self._heads, self._contents = head[0], head[1], parts[2:]
        self._records: dict[str, bytes] = {}
        self._held: PushAppMessagesRequest | None = None
        self._kept: list[PushObjectRequest] = []

    def PullTaskInput(self, request: PullTaskInputRequest) -> Any:
        """Return the task's input."""
        if self._input is None:
            return super().PullTaskInput(request)
        return PullTaskInputResponse.FromString(self._input)

    def PullMessages(self, request: PullAppMessagesRequest) -> Any:
        """Return the head of the message."""
        if self._heads is None:
            return super().PullMessages(request)
        heads = PullAppMessagesResponse.FromString(self._heads)
        ids = [one.object_id for tree in heads.message_object_trees for one in iterate_object_tree(tree)]
        if self._contents:
            self._records = dict(zip(ids, self._contents, strict=True))
        return heads

    def PullObject(self, request: PullObjectRequest) -> Any:
        """Return a record."""
        if request.object_id not in self._records:
            return super().PullObject(request)
        return PullObjectResponse.FromString(self._records.pop(request.object_id))

    def ConfirmMessageReceived(self, request: ConfirmMessageReceivedRequest) -> Any:
        """Say that the message is here; what came whole with its task is known to be."""
        return ConfirmMessageReceivedResponse() if self._contents else super().ConfirmMessageReceived(request)

    def PushMessages(self, request: PushAppMessagesRequest) -> Any:
        """Keep a reply, until its records are there; one that was kept before it is sent."""
        self._hand_over(b"")
        self._held = request
        wanted = [one.object_id for tree in request.message_object_trees for one in iterate_object_tree(tree)]
        return PushAppMessagesResponse(objects_to_push=wanted)

    def PushObject(self, request: PushObjectRequest) -> Any:
        """Keep a record of the reply."""
        self._kept.append(request)
        return PushObjectResponse(stored=True)

    def PushTaskOutput(self, request: PushTaskOutputRequest) -> Any:
        """Say how the task ended, with the reply where there is one."""
        if self._held is None:
            return super().PushTaskOutput(request)
        self._hand_over(request.SerializeToString())
        return PushTaskOutputResponse()

    def _hand_over(self, output: bytes) -> None:
        if self._held is None:
            return
        records = [one.SerializeToString() for one in self._kept]
        parcel = Parcel([self._held.SerializeToString(), output, *records])
        self._held, self._kept = None, []
        self._unary_unary(path=GIVE, rpc_method=GIVE, request=parcel, response_type=PushAppMessagesResponse)


class Tasks:
    """The tasks that the Flower process at `address` has for its worker; `secret` is theirs alone."""

    def __init__(
        self, kind: Literal["client", "server"], address: str, certificate: bytes | None, secret: Path
    ) -> None:
        self.kind = TaskType.CLIENT_APP if kind == "client" else TaskType.SERVER_APP
        self.address, self.certificate = address, certificate
        protected = frozenset({"/flwr.proto.Runtime/AcquireTask"})
        master = load_superexec_auth_secret(secret_file=str(secret))
        self._queue = RuntimeHttpClient.from_server_address(
            self.address,
            insecure=self.certificate is None,
            root_certificates=self.certificate,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperExec"),
                SuperExecAuthHttpInterceptor(master_secret=master, protected_methods=protected),
            ],
        )
        self._taken: dict[str, list[bytes]] = {}

    def acquire(self) -> str | None:
        """Return the token of a waiting task; None where there is none, or the Flower process is away."""
        request = AcquireTaskRequest(supported_task_types=[self.kind])
        try:
            if self.kind == TaskType.SERVER_APP:
                response = self._queue.AcquireTask(request)
            else:
                parcel = self._ask(request)
                response = AcquireTaskResponse.FromString(parcel.parts[0])
                self._taken[response.token] = parcel.parts[1:]
        except (httpx.HTTPError, ValueError, LookupError, DecodeError):
            return None  # it is away, or somebody else answers in its place
        return str(response.token) if response.HasField("task") and response.token else None

    def _ask(self, request: AcquireTaskRequest) -> Parcel:
        """Ask a SuperNode for a task and what is in it."""
        method = "/flwr.proto.Runtime/AcquireTask"
        found: Parcel = self._queue._unary_unary(
            path=TAKE, rpc_method=method, request=request, response_type=Parcel
        )
        return found

    @contextmanager
    def message(self, token: str) -> Iterator[OneTask]:
        """Take on a client's task."""
        identity = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
        client = TaskClient.beside(self._queue, [identity, RuntimeTokenHttpInterceptor(token)])
        client.taken(self._taken.pop(token, []))
        with _alive(client, beaten=True):
            message, context, _, _ = pull_task_input(client)
            yield OneTask(client, context, message=message)

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
def _alive(client: RuntimeHttpClient, beaten: bool = False) -> Iterator[None]:
    """Send heartbeats as long as a task lasts; the first is not needed where the task was `beaten` for now.

    Who is given a task is taken to be alive for as long as a heartbeat lasts.
    """
    beat = make_task_heartbeat_fn_http(client)

    def once_more() -> bool:
        nonlocal beaten
        if beaten:
            beaten = False
            return True
        return bool(beat())

    beats = HeartbeatSender(once_more)
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
