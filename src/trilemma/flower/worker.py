"""The process that does a party's work: it takes tasks from the party's Flower process and runs OUR apps.

    python -m trilemma.flower.worker FOLDER          (a party's folder)

Flower's default starts a new Python for every message and runs the code the server uploaded. Both are wrong
here. A process per message costs seconds of imports per client and round; and a client that runs the
server's code is protected from nothing: that code could read the identity key. This worker stays up, and runs
the apps of the package installed on its own machine, whatever the upload says. Flower knows this arrangement
as process isolation; the worker speaks the same protocol as `flower-superexec` with `flwr-clientapp` and
`flwr-serverapp`, with a secret shared between it and the party's Flower process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from logging import ERROR, INFO
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import context_from_proto, context_to_proto, run_from_proto
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, PushTaskOutputRequest
from flwr.serverapp import ServerApp
from flwr.supercore import log
from flwr.supercore.auth import load_superexec_auth_secret
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
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
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message

from trilemma.federation.layout import Party
from trilemma.flower.client_app import PARTY
from trilemma.flower.client_app import app as client_app
from trilemma.flower.server_app import app as server_app
from trilemma.flower.tuning import bound_pulls


class Worker:
    """Takes tasks from the Flower process at `address` and runs them."""

    def __init__(self, party: Party, task_type: TaskType, address: str, certificate: bytes | None) -> None:
        self.task_type = task_type
        self.address = address
        self.certificate = certificate
        self.poll = min(party.federation.timing.poll, 1.0)  # Flower's own executor looks once a second
        secret = load_superexec_auth_secret(secret_file=str(party.executor_secret))
        self._queue = self._client(
            "SuperExec",
            SuperExecAuthHttpInterceptor(
                master_secret=secret, protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"})
            ),
        )

    def _client(self, component: str, interceptor: ProtobufClientInterceptor) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            self.address,
            insecure=self.certificate is None,
            root_certificates=self.certificate,
            interceptors=[RuntimeVersionHttpInterceptor(component_name=component), interceptor],
        )

    def acquire(self) -> str | None:
        """Return the token of a waiting task, or None."""
        response = self._queue.AcquireTask(AcquireTaskRequest(supported_task_types=[self.task_type]))
        return str(response.token) if response.HasField("task") and response.token else None

    def serve(self, run: Callable[[str], None]) -> None:
        """Run tasks until the process is terminated. A Flower process that is away is waited for.

        A task that breaks must not take the party down. Flower interrupts the process (SIGINT) when a task's
        run was stopped, in the belief that the process has no other: here it means "next task, please".
        """
        while True:
            try:
                token = self._acquire()
                if token is None:
                    time.sleep(self.poll)
                else:
                    run(token)
            except KeyboardInterrupt:
                log(INFO, "the task was stopped")
            except (httpx.HTTPError, RunNotRunningException, ObjectPullError) as error:
                log(INFO, "the task broke off: %s", error)

    def _acquire(self) -> str | None:
        try:
            return self.acquire()
        except httpx.HTTPError:
            return None

    def in_background(self, run: Callable[[str], None], token: str) -> None:
        """Run a task in a thread of its own.

        Flower leaves a task behind when a run ends while its message is on the way; waiting for the rest of
        such a message must not keep the client from the next one.
        """

        def quietly() -> None:
            try:
                run(token)
            except Exception as error:  # the thread ends here; the reason must not be lost with it
                log(INFO, "the task broke off: %s: %s", type(error).__name__, error)

        threading.Thread(target=quietly, daemon=True).start()

    def client_task(self, app: ClientApp, token: str) -> None:
        """Answer one message with `app`."""
        client = self._client("flwr-clientapp", RuntimeTokenHttpInterceptor(token))
        heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
        heartbeat.start()
        context: Context | None = None
        try:
            message, context, _, _ = pull_task_input(client)
            try:
                reply, status, details = app(message=message, context=context), SubStatus.COMPLETED, ""
            except Exception as error:
                log(ERROR, "the client app failed", exc_info=error)
                status, details = SubStatus.FAILED, f"{type(error).__name__}: {error}"
                reason = Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=details)
                reply = Message(reason, reply_to=message)
            push_message(client, reply, context)
            _finish(client, context, status, details)
        finally:
            _stop(heartbeat)
            client.close()

    def server_task(self, app: ServerApp, token: str) -> None:
        """Run `app` to its end."""
        grid = HttpGrid(self.address, self.certificate is None, self.certificate, token=token)
        client: Any = grid._runtime_client
        heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
        heartbeat.start()
        try:
            task = client.PullTaskInput(PullTaskInputRequest())
            # Flower's Message constructor reads these where the process was started for one task only.
            TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
            TaskIdentity.node_id = task.context.node_id
            context = context_from_proto(task.context)
            run = run_from_proto(task.run)
            context.run_config = dict(run.override_config)
            grid.set_run(run)
            try:
                app(grid=grid, context=context)
                status, details = SubStatus.COMPLETED, ""
            except Exception as error:
                log(ERROR, "the server app failed", exc_info=error)
                status, details = SubStatus.FAILED, f"{type(error).__name__}: {error}"
            _finish(client, context, status, details)
        finally:
            _stop(heartbeat)
            grid.close()


def _stop(heartbeat: HeartbeatSender) -> None:
    if heartbeat.is_running:
        heartbeat.stop()


def _finish(client: RuntimeHttpClient, context: Context, status: str, details: str) -> None:
    client.PushTaskOutput(
        PushTaskOutputRequest(context=context_to_proto(context), sub_status=status, details=details)
    )


def work(folder: str, client_app: ClientApp = client_app, server_app: ServerApp = server_app) -> None:
    """Work for the party whose folder is given, with the installed apps, until stopped."""
    party = Party.open(Path(folder))
    bound_pulls(party.federation.timing.round_limit)
    os.environ[PARTY] = str(party.folder)
    federation = party.federation
    log(INFO, "working for %s", party.name)
    if party.client is None:
        certificate = party.authority.read_bytes()
        worker = Worker(party, TaskType.SERVER_APP, federation.address, certificate)
        worker.serve(partial(worker.server_task, server_app))
    else:
        address = f"127.0.0.1:{federation.runtime_port(party.client)}"
        worker = Worker(party, TaskType.CLIENT_APP, address, None)
        worker.serve(partial(worker.in_background, partial(worker.client_task, client_app)))


if __name__ == "__main__":
    work(sys.argv[1])
