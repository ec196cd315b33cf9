"""The short way gives Flower's own answers: to whom it lets in and to whom it does not."""

from __future__ import annotations

import pytest
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.message_pb2 import PullObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
from flwr.supercore.constant import TASK_TOKEN_HEADER, TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.superlink import main as superlink_api
from flwr.supernode import main as supernode_api
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from flwr.supernode.nodestate import NodeStateFactory
from starlette.testclient import TestClient

from trilemma.flower.short_way import ShortWay, fleet, runtime

SECRET = b"a secret of thirty-two bytes ...."


def both_ways(app, handlers):
    """Return a client for Flower's own way and one for the short way, to the same state."""
    return TestClient(app, raise_server_exceptions=False), TestClient(ShortWay(app, handlers))


@pytest.fixture
def supernode():
    state = NodeStateFactory(ObjectStoreFactory())
    app = supernode_api.create_app(state, SECRET)
    state.state().set_node_id(7)
    return state.state(), both_ways(app, runtime("SuperNode"))


@pytest.fixture(scope="module")
def superlink():
    app = superlink_api.create_app()
    app.state.enable_supernode_auth, app.state.superexec_auth_secret = True, SECRET
    return app.state.linkstate_factory.state(), both_ways(app, {**runtime("SuperLink"), **fleet()})


def sent(client, path, message, *interceptors, method="", **heads):
    """Send a request with what Flower's own clients put into its head; return what matters of the answer."""
    heads = {"content-type": PROTOBUF_MEDIA_TYPE, **heads}
    body = message if isinstance(message, bytes) else message.SerializeToString(deterministic=True)
    request = client.build_request("POST", path, content=body, headers=heads)
    context = ProtobufRequestContext(rpc_method=method, message=message, request=request)
    for one in interceptors:
        one.intercept(context, lambda context: type("", (), {"headers": {}, "is_error": False})())
    response = client.send(request)
    return response.status_code, response.headers["content-type"], response.content


@pytest.mark.parametrize(
    "how", ["no head at all", "a stranger's token", "two tokens", "gibberish", "another type of content"]
)
@pytest.mark.parametrize("path", sorted({*runtime("SuperLink"), *fleet()}))
def test_strangers_get_the_same_answers(superlink, path, how):
    version = [] if how == "no head at all" else [RuntimeVersionHttpInterceptor(component_name="SuperNode")]
    heads = {TASK_TOKEN_HEADER: "abc"} if how == "a stranger's token" else {}
    if how == "two tokens":
        heads = {TASK_TOKEN_HEADER: "abc", TASK_TOKEN_HEADER.upper(): "abc"}
    if how == "another type of content":
        heads = {"content-type": "application/json"}
    message = b"\xff" if how == "gibberish" else PROTOBUF_REQUEST_TYPES["POST", path]()
    flowers, ours = (sent(client, path, message, *version, **heads) for client in superlink[1])
    assert ours == flowers
    assert ours[0] >= 400


def test_a_node_is_who_its_key_says(superlink):
    """A registered node is answered, one that claims another's number, or an unknown key, is not."""
    state, ways = superlink
    known, stranger = generate_key_pairs(), generate_key_pairs()
    node = state.create_node("aid", "name", public_key_to_bytes(known[1]), 10)
    for keys, claimed, status in ((known, node, 200), (known, node + 1, 401), (stranger, node, 401)):
        message = PullMessagesRequest(node=Node(node_id=claimed))
        flowers, ours = (
            sent(client, "/v1/fleet/pull-messages", message, NodeAuthHttpInterceptor(*keys))
            for client in ways
        )
        assert ours == flowers
        assert ours[0] == status


def test_a_worker_is_who_knows_the_secret(supernode):
    """A task is given to its own worker, and its content to who has the task's token."""
    _, ways = supernode
    version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
    method, path = "/flwr.proto.Runtime/AcquireTask", "/v1/runtime/acquire-task"
    message = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    for secret, status in ((SECRET, 200), (SECRET[::-1], 401)):
        known = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=frozenset({method}))
        flowers, ours = (sent(client, path, message, version, known, method=method) for client in ways)
        assert ours == flowers
        assert ours[0] == status


def test_a_task_is_its_tokens(supernode):
    state, ways = supernode
    version = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
    task = state.create_task(task_type=TaskType.CLIENT_APP, run_id=3, fab_hash="hash")
    token = state.claim_task(task)
    object_ = PullObjectRequest(node=Node(node_id=7), run_id=3, object_id="none")
    for path, message, status in (
        ("/v1/runtime/pull-object", object_, 200),
        ("/v1/runtime/pull-task-input", PullTaskInputRequest(), 404),
    ):
        flowers, ours = (sent(one, path, message, version, **{TASK_TOKEN_HEADER: token}) for one in ways)
        assert ours == flowers
        assert ours[0] == status


def test_all_else_goes_flowers_own_way(superlink):
    flowers, ours = superlink[1]
    for path in ("/v1/control/stop-run", "/v1/fleet/register-node", "/nowhere"):
        assert sent(ours, path, b"") == sent(flowers, path, b"")
    assert ours.get("/v1/runtime/acquire-task").status_code == 405
