"""The short way gives Flower's own answers: to whom it lets in and to whom it does not."""

from __future__ import annotations

import hashlib
import time

import httpx
import pytest
from flwr.app import Context, Message, Metadata, RecordDict
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.message_pb2 import PullObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
from flwr.supercore.constant import TASK_TOKEN_HEADER, TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supercore.run import Run
from flwr.superlink import main as superlink_api
from flwr.supernode import main as supernode_api
from flwr.supernode import start_client_internal
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from flwr.supernode.nodestate import NodeStateFactory
from starlette.testclient import TestClient

from trilemma.flower import records
from trilemma.flower.internals import Tasks
from trilemma.flower.parcels import GIVE, TAKE
from trilemma.flower.short_way import RUNTIME, ShortWay, fleet, runtime

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


class OneMessage:
    """A SuperNode with one message for its worker, of which `come` of the three records have come."""

    def __init__(self, supernode, tmp_path, come=3):
        self.state, (_, self.connection) = supernode
        self.asked: list[str] = []
        self.connection.event_hooks["request"].append(lambda request: self.asked.append(request.url.path))
        run = Run.create_empty(3)
        run.fab_hash = hashlib.sha256(b"code").hexdigest()
        self.state.store_run(run)
        self.state.store_fab(Fab(run.fab_hash, b"code", {}))
        context = Context(3, 7, node_config={}, state=RecordDict(), run_config={})
        self.state.set_run_series_context(run.series_id, context)
        self.task = self.state.create_task(task_type=TaskType.CLIENT_APP, run_id=3, fab_hash=run.fab_hash)
        metadata = Metadata(3, "", 1, 7, "", "", time.time(), 600.0, "query")
        message = Message(metadata=metadata, content=records.to_record(b"question"))
        start_client_internal._insert_message(message, self.state, self.state.object_store)
        self.missing = list(get_all_nested_objects(message).items())[come:]
        for name, _ in self.missing:
            self.state.object_store.store[name].content = b""
        secret = tmp_path / "secret"
        secret.write_bytes(SECRET)
        self.tasks = Tasks("client", "testserver", None, secret)
        self.tasks._queue._client = self.connection

    def arrives(self):
        """The rest of the message comes."""
        for name, record in self.missing:
            self.state.object_store.store[name].content = record.deflate()

    def work(self, app, *more):
        """Do what a worker does, and return what was in the replies that the SuperNode has then."""
        token = self.tasks.acquire()
        assert token is not None
        with self.tasks.message(token) as task:
            for block in (app(records.from_record(task.message.content)), *more):
                task.push(Message(records.to_record(block), reply_to=task.message))
            task.finish()
        found = []
        for reply in self.state.get_messages_legacy(is_reply=True):
            names = [
                one.object_id
                for one in iterate_object_tree(
                    self.state.object_store.get_object_tree(reply.metadata.message_id)
                )
            ]
            contents = {name: self.state.object_store.get(name) for name in names}
            whole = inflate_object_from_contents(reply.metadata.message_id, contents)
            found.append(records.from_record(whole.content))
        return found


def test_a_message_and_its_reply_are_two_requests(supernode, tmp_path):
    node = OneMessage(supernode, tmp_path)
    assert node.work(lambda block: block + b" and answer") == [b"question and answer"]
    assert node.asked == [TAKE, GIVE]
    (task,) = node.state.get_tasks()
    assert (task.status.status, task.status.sub_status) == ("finished", "completed")
    assert node.tasks.acquire() is None


def test_what_did_not_come_with_a_task_is_asked_for(supernode, tmp_path, monkeypatch):
    """A task is known before the last record of its message is here."""
    node = OneMessage(supernode, tmp_path, come=2)
    honest = inflatable_utils.pull_objects

    def pull(*arguments, **options):
        node.arrives()
        return honest(*arguments, **options)

    monkeypatch.setattr(inflatable_utils, "pull_objects", pull)
    assert node.work(lambda block: block) == [b"question"]
    assert sorted(set(node.asked[1:-1])) == [RUNTIME + "confirm-message-received", RUNTIME + "pull-object"]


def test_two_replies_to_one_message_are_both_handed_over(supernode, tmp_path):
    node = OneMessage(supernode, tmp_path)
    assert sorted(node.work(lambda block: b"one", b"two")) == [b"one", b"two"]
    assert node.asked == [TAKE, GIVE, GIVE]


def test_without_the_secret_there_is_no_task(supernode, tmp_path):
    node = OneMessage(supernode, tmp_path)
    (tmp_path / "secret").write_bytes(SECRET[::-1])
    stranger = Tasks("client", "testserver", None, tmp_path / "secret")
    stranger._queue._client = node.connection
    with pytest.raises(Exception, match="401"):
        stranger.acquire()
    assert node.tasks.acquire() is not None


@pytest.mark.parametrize("answer", [b"", b"\x00\x00\x00\x01\xff", b"\x00\x00\x00\x09", b"\x00"])
def test_whoever_answers_in_a_supernodes_place_ends_no_worker(supernode, tmp_path, answer):
    """While it is away, another program of the machine may have its port."""
    node = OneMessage(supernode, tmp_path)
    node.tasks._queue._client = httpx.Client(
        transport=httpx.MockTransport(lambda request: httpx.Response(200, content=answer))
    )
    assert node.tasks.acquire() is None
