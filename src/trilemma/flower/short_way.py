"""A short way through Flower 1.41's HTTP interfaces, for the requests that come with every message.

Flower takes each request through nine layers of middleware (a SuperNode through three), of which two or three
have something to do, and then through a router that looks up what a handler needs in threads of its own: most
of what a request costs, and twenty clients make hundreds of them in a round. Here the same checks and the
same handlers, all of them Flower's, are called one after the other, in one thread; where several requests
belong together, all of theirs (`trilemma.flower.parcels`). What is not in the tables below, and everything
that is not as it should be, goes Flower's own way or ends in its own error answers.

`internals` says what else leans on parts of Flower that are not public.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
)
from flwr.supercore.constant import TASK_TOKEN_HEADER
from flwr.supercore.dependencies.runtime import get_runtime_handlers, get_runtime_state
from flwr.supercore.dependencies.superexec import authenticate_superexec_request
from flwr.supercore.dependencies.task import authenticate_task
from flwr.supercore.dependencies.version import VersionDependency
from flwr.supercore.error import FlowerError, http_error_translator
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES, ProtobufTranslationMiddleware
from flwr.supercore.servicer.runtime import runtime_handlers
from google.protobuf.message import Message
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from trilemma.flower.parcels import GIVE, TAKE, Parcel

App = Callable[[Any, Any, Any], Awaitable[None]]
"""What a web server calls with every request (ASGI)."""

Handler = Callable[[Request], Message | Parcel]
"""Checks who asks for what is in `state.protobuf_request`, and answers; it runs in a thread."""

PARCELS = {TAKE: AcquireTaskRequest, GIVE: Parcel}
"""What is in the requests that are not Flower's own."""

RUNTIME = "/v1/runtime/"


class ShortWay:
    """Answers the requests to the paths in `handlers` itself, and leaves all others to Flower's `app`."""

    def __init__(self, app: App, handlers: Mapping[str, Handler]) -> None:
        self._app, self._handlers = app, handlers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        post = scope["type"] == "http" and scope["method"] == "POST"
        handler = self._handlers.get(scope["path"]) if post else None
        if handler is None:
            await self._app(scope, receive, send)
            return

        async def answer(request: Request) -> Response:
            ProtobufTranslationMiddleware._check_request_media_type(request)
            path = scope["path"]
            kind = PARCELS[path] if path in PARCELS else PROTOBUF_REQUEST_TYPES["POST", path]
            body = await request.body()
            request.state.protobuf_request = ProtobufTranslationMiddleware._parse_request(body, kind)
            result = await run_in_threadpool(handler, request)
            return Response(result.SerializeToString(), media_type=PROTOBUF_MEDIA_TYPE)

        scope["app"] = self._app
        response = await http_error_translator(Request(scope, receive), answer)
        await response(scope, receive, send)


def runtime(component: str) -> dict[str, Handler]:
    """Return what a worker asks of its Flower process, which calls itself `component`."""
    versions = VersionDependency(
        component_name=component, connection_name=f"Caller <-> {component} Runtime API"
    )

    def acquired(request: Request) -> tuple[Any, Any, Any]:
        versions(request)
        state, handlers = get_runtime_state(request), get_runtime_handlers(request)
        authenticate_superexec_request(request, state, "/flwr.proto.Runtime/AcquireTask")
        return handlers.acquire_task(request.state.protobuf_request, state), state, handlers

    def acquire(request: Request) -> Message:
        found: Message = acquired(request)[0]
        return found

    def take(request: Request) -> Parcel:
        found, state, handlers = acquired(request)
        with_it = _with_its_message(state, handlers, found.token) if found.token else []
        return Parcel(one.SerializeToString() for one in (found, *with_it))

    def of_a_task(handle: Callable[[Request, Any, Any], Message]) -> Handler:
        def answer(request: Request) -> Message | Parcel:
            versions(request)
            state = get_runtime_state(request)
            task = authenticate_task(request, request.headers.get(TASK_TOKEN_HEADER), state)
            return handle(request, state, task)

        return answer

    def named(name: str) -> Handler:
        return of_a_task(
            lambda request, state, task: getattr(get_runtime_handlers(request), name)(
                request.state.protobuf_request, state, task
            )
        )

    heartbeat = of_a_task(
        lambda request, state, task: runtime_handlers.send_task_heartbeat(
            request.state.protobuf_request, state, task
        )
    )
    paths = {RUNTIME + name.replace("_", "-"): named(name) for name in _OF_A_TASK}
    own = {TAKE: take, GIVE: of_a_task(_give)} if component == "SuperNode" else {}
    return {RUNTIME + "acquire-task": acquire, RUNTIME + "send-task-heartbeat": heartbeat, **paths, **own}


def _with_its_message(state: Any, handlers: Any, token: str) -> list[Message]:
    """Return what the worker would ask for next: as much of it as there is."""
    task, found = state.get_task_by_token(token), []
    with suppress(FlowerError):  # the worker asks for what is missing, and is told why there is nothing
        found.append(handlers.pull_task_input(PullTaskInputRequest(), state, task))
        found.append(messages := handlers.pull_messages(PullAppMessagesRequest(), state, task))
        for tree in messages.message_object_trees:
            wanted = [PullObjectRequest(object_id=one.object_id) for one in iterate_object_tree(tree)]
            objects = [handlers.pull_object(one, state, task) for one in wanted]
            if all(one.object_available for one in objects):
                found += objects
                received = ConfirmMessageReceivedRequest(message_object_id=tree.object_id)
                handlers.confirm_message_received(received, state, task)
    return found


def _give(request: Request, state: Any, task: Any) -> Message:
    """Take a reply, its records, and how the task ended unless that is still to be said."""
    handlers = get_runtime_handlers(request)
    pushed, output, *records = request.state.protobuf_request.parts
    answer: Any = handlers.push_messages(PushAppMessagesRequest.FromString(pushed), state, task)
    for record in map(PushObjectRequest.FromString, records):
        record.session_id = answer.session_id
        if record.object_id in answer.objects_to_push:
            stored = handlers.push_object(record, state, task).stored
            if not stored:
                raise ValueError(f"record {record.object_id} was not stored")
    if output:
        handlers.push_task_output(PushTaskOutputRequest.FromString(output), state, task)
    return answer


_OF_A_TASK = (
    "pull_task_input",
    "push_task_output",
    "push_messages",
    "pull_messages",
    "push_object",
    "pull_object",
    "confirm_message_received",
    "get_nodes",
)


def fleet() -> dict[str, Handler]:
    """Return what SuperNodes ask of a SuperLink."""
    from flwr.superlink.dependencies.linkstate import get_linkstate
    from flwr.superlink.routers.fleet.node_auth import authenticate_node
    from flwr.superlink.servicer.fleet import fleet_handlers

    def handler(handle: Callable[..., Message], with_store: bool = False) -> Handler:
        def answer(request: Request) -> Message:
            authenticate_node(request)
            state = get_linkstate(request)
            store = {"store": state.object_store} if with_store else {}
            return handle(request=request.state.protobuf_request, state=state, **store)

        return answer

    return {
        "/v1/fleet/send-node-heartbeat": handler(fleet_handlers.send_node_heartbeat),
        "/v1/fleet/pull-messages": handler(fleet_handlers.pull_messages, with_store=True),
        "/v1/fleet/push-messages": handler(fleet_handlers.push_messages),
        "/v1/fleet/push-object": handler(fleet_handlers.push_object),
        "/v1/fleet/pull-object": handler(fleet_handlers.pull_object),
        "/v1/fleet/confirm-message-received": handler(
            fleet_handlers.confirm_message_received, with_store=True
        ),
    }
