"""What is not public in Flower is used in five files only, and does there what we believe it does."""

from __future__ import annotations

import ast
import itertools
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import anyio
import anyio.to_thread
import httpx
import pytest
from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata as ProtoMetadata
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest, PushObjectResponse
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from trilemma import flower
from trilemma.federation.reasons import Reason
from trilemma.flower import superlink_internals, supernode_internals, worker
from trilemma.flower.bell import Bell
from trilemma.flower.bounded import Bounded
from trilemma.flower.worker import Worker

PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}
PRIVATE = {"internals.py", "supernode_internals.py", "superlink_internals.py", "short_way.py", "control.py"}
ROOM = Path(flower.__file__).parent


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def test_the_rest_of_the_room_uses_what_flower_calls_public():
    for path in ROOM.glob("*.py"):
        used = {name for name in imported(path) if name.split(".")[0] == "flwr"}
        assert used <= PUBLIC or path.name in PRIVATE, f"{path.name}: {used - PUBLIC}"


@pytest.mark.parametrize("process", ["supernode", "worker"])
def test_a_client_waits_without_torch(process):
    """Both processes of a client, until a block comes: neither the numbers nor what calculates with them."""
    heavy = "torch", "scipy", "numba", "trilemma.federation.node", "trilemma.federation.wire"
    program = f"import sys, trilemma.flower.{process}; print([one for one in {heavy} if one in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


class SuperNode:
    """Flower's own memory of a SuperNode, and the replies that it sent."""

    def __init__(self) -> None:
        self.store = ObjectStoreFactory().store()
        self.state = InMemoryNodeState(self.store)
        self.sent: list[str] = []

    def received(self, text: str) -> Message:
        """A message from the server has come in."""
        metadata = Metadata(1, "", 1, 7, "", "", time.time(), 600.0, "query")
        return self.keep(Message(metadata=metadata, content=content(text)))

    def answered(self, message: Message, text: str) -> None:
        """The worker, or the SuperNode itself, has a reply."""
        self.keep(Message(content(text), reply_to=message))

    def keep(self, message: Message) -> Message:
        start_client_internal._insert_message(message, self.state, self.store)
        return message

    def push(self) -> None:
        """Do what a SuperNode does between receiving a message and asking for the next."""
        start_client_internal._push_messages(
            state=self.state, object_store=self.store, send=self.send, push_object=lambda *_: None
        )

    def send(self, message, tree, seconds):
        self.sent.append(message.content["text"]["text"])
        return set(), ""


def content(text: str) -> RecordDict:
    return RecordDict({"text": ConfigRecord({"text": text})})


@pytest.fixture
def supernode(monkeypatch):
    monkeypatch.setattr(start_client_internal, "_push_messages", start_client_internal._push_messages)
    return SuperNode()


def meanwhile(monkeypatch, *events):
    """Let one event happen each time Flower sleeps."""
    coming = list(events)
    monkeypatch.setattr(start_client_internal, "time", SimpleNamespace(sleep=lambda _: coming.pop(0)()))


def test_a_late_reply_to_an_old_message_does_not_stand_for_the_new_one(supernode, monkeypatch):
    """Flower sends the old one and goes on to receive; ours waits for the reply that is due."""
    old, new = supernode.received("old"), supernode.received("new")
    supernode.answered(old, "an error")
    meanwhile(monkeypatch, lambda: supernode.answered(new, "the answer"))
    supernode.push()
    assert supernode.sent == ["an error"], "as Flower has it: the answer would leave one message late"
    supernode_internals.answer_in_step()
    another = supernode.received("another")
    supernode.answered(new, "the answer")
    meanwhile(monkeypatch, lambda: supernode.answered(another, "another answer"))
    supernode.push()
    assert supernode.sent == ["an error", "the answer", "another answer"]


def test_one_message_has_one_reply(supernode, monkeypatch):
    supernode_internals.answer_in_step()
    message = supernode.received("question")
    meanwhile(monkeypatch, lambda: supernode.answered(message, "the answer"))
    supernode.push()
    assert supernode.sent == ["the answer"]


def test_a_worker_starts_anew_when_it_rests_and_not_while_it_works():
    events, asked, finish = [], itertools.count(), threading.Event()

    class Tasks:
        def acquire(self):
            if "rests" in events:
                raise SystemExit
            number = next(asked)
            if number == 20:  # it has asked for longer than it would rest
                finish.set()
            return "first" if number == 1 else None

    waiting = Worker(Tasks(), poll=0.01, rest=0.05, at_rest=lambda: events.append("rests"))

    def run(token):
        assert finish.wait(240)
        events.append(token)

    with pytest.raises(SystemExit):
        waiting.serve(lambda token: waiting.in_background(run, token))
    assert events == ["first", "rests"]


def test_a_worker_asks_when_the_bell_has_rung_also_while_it_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "LONGEST_WAIT", 60.0)
    bell, asked = Bell(tmp_path / "bell"), []

    class Tasks:
        def acquire(self):
            asked.append(len(asked))
            if len(asked) == 3:
                raise SystemExit
            bell.ring()  # a message comes while it asks

    started = time.monotonic()
    with pytest.raises(SystemExit):
        Worker(Tasks(), poll=600.0, bell=bell).serve(print)
    assert time.monotonic() - started < worker.LONGEST_WAIT, "it did not wait for what was there"


def test_a_supernode_rings_when_it_has_received_something(tmp_path, monkeypatch):
    bell, messages = Bell(tmp_path / "bell"), [None, 7, None]
    monkeypatch.setattr(
        supernode_internals.start_client_internal, "_pull_and_store_message", lambda **_: messages.pop(0)
    )
    supernode_internals.ring_the_worker(bell)
    pull = supernode_internals.start_client_internal._pull_and_store_message
    heard = []
    while messages:
        pull()
        heard.append(bell.heard)
    assert heard == [0, 1, 1]


def test_a_superlink_tidies_up_now_and_then(monkeypatch):
    tidied = []
    monkeypatch.setattr(
        superlink_internals.SqlCoreState, "_cleanup_expired_task_tokens", lambda state: tidied.append(state)
    )
    clock = itertools.count()  # a second whenever somebody looks
    monkeypatch.setattr(superlink_internals, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    superlink_internals.tidy_now_and_then(50)
    tidy = superlink_internals.SqlCoreState._cleanup_expired_task_tokens
    tidy("state")
    assert tidied == ["state"], "the first time at once"
    tidied.clear()
    for _ in range(200):
        tidy("state")
    assert len(tidied) == 4


def test_a_superlink_has_few_threads(monkeypatch):
    """As many requests as there may be are handled at the same time, and one more waits."""
    most, now, seen, counting = superlink_internals.THREADS, 0, [], threading.Lock()

    def handle():
        nonlocal now
        with counting:
            now += 1
            seen.append(now)
        time.sleep(0.02)
        with counting:
            now -= 1

    async def app(scope, receive, send):
        async with anyio.create_task_group() as group:
            for _ in range(4 * most):
                group.start_soon(anyio.to_thread.run_sync, handle)

    monkeypatch.setattr(superlink_internals.uvicorn, "run", lambda app, **_: anyio.run(app, None, None, None))
    superlink_internals.few_threads(most)
    superlink_internals.uvicorn.run(app=app, host="127.0.0.1")
    assert len(seen) == 4 * most
    assert max(seen) <= most


def test_what_is_not_on_the_short_way_reaches_flowers_own_app(monkeypatch):
    """And what is on it finds that app's state, whatever else is wrapped around it."""
    served, passed = [], []

    async def flowers(scope, receive, send):
        passed.append(scope["path"])

    async def asked(path):
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        await served[0](scope, None, lambda message: anyio.sleep(0))
        return scope

    tidy = superlink_internals.SqlCoreState._cleanup_expired_task_tokens
    monkeypatch.setattr(superlink_internals.SqlCoreState, "_cleanup_expired_task_tokens", tidy)
    monkeypatch.setattr(superlink_internals.gc, "freeze", lambda: None)
    monkeypatch.setattr(superlink_internals.uvicorn, "run", lambda app, **_: served.append(app))
    start = lambda: superlink_internals.uvicorn.run(app=flowers)  # noqa: E731
    monkeypatch.setattr(superlink_internals, "flower_superlink", start)
    superlink_internals.run_superlink()
    anyio.run(asked, "/v1/control/start-run")
    assert passed == ["/v1/control/start-run"]
    assert anyio.run(asked, "/v1/fleet/pull-messages")["app"] is flowers
    assert passed == ["/v1/control/start-run"]


def test_what_a_client_app_raises_does_not_travel():
    """Whatever breaks, Flower's error path carries one entry of the catalogue and no private number."""
    pushed: list[str] = []

    class Task(SimpleNamespace):
        message = context = None

        def push_failure(self, reason):
            pushed.append(reason)

        finish = push_failure

    tasks = SimpleNamespace(message=lambda token: nullcontext(Task()))

    def breaks(message, context):
        raise ValueError("patient 4711 has a loss of 3.5")

    Worker(tasks, poll=0.1).client_task(breaks, "token")
    assert pushed == [Reason.FAILED.told] * 2


@pytest.mark.parametrize(
    ("length", "heads", "taken"), [(90, {}, True), (110, {}, False), (5, {"content-encoding": "gzip"}, False)]
)
def test_a_supernode_takes_no_more_than_a_piece(length, heads, taken):
    """Whatever a server sends: what is too long ends while it comes, what may become longer is not read."""
    read: list[int] = []

    def pieces():
        for _ in range(length // 5):
            read.append(5)
            yield bytes(5)

    server = httpx.MockTransport(lambda request: httpx.Response(200, headers=heads, stream=Stream(pieces())))
    with httpx.Client(transport=Bounded(server, largest=100)) as client:
        if taken:
            assert len(client.post("http://server/").content) == length
            return
        with pytest.raises(httpx.ReadError):
            client.post("http://server/")
        assert sum(read) <= 105


def failed(status):
    """What a SuperNode makes of the guard's answers."""
    request = httpx.Request("POST", "https://server")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))


BROKEN_LINE, DIED, REFUSED = httpx.ReadError("the line broke"), failed(503), failed(403)


@pytest.mark.parametrize("error", [BROKEN_LINE, DIED], ids=["broken line", "the SuperLink died"])
def test_a_reply_whose_announcement_was_heard_is_sent_though_the_answer_was_lost(monkeypatch, error):
    """The SuperLink wants nothing of what is announced again, and has what is pushed again."""
    tree = ObjectTree(object_id="whole", children=[ObjectTree(object_id="part")])
    message = ProtoMessage(metadata=ProtoMetadata(message_id="reply"))
    announcement = PushMessagesRequest(messages_list=[message], message_object_trees=[tree])
    objects = [PushObjectRequest(object_id=name) for name in ("whole", "part")]
    lost = ["announcement", "part"]

    def answer(name, response):
        if name in lost:
            lost.remove(name)
            raise error
        return response

    for name, reply in {
        "PushMessages": lambda _, request: answer("announcement", PushMessagesResponse(session_id="2")),
        "PushObject": lambda _, request: answer(request.object_id, PushObjectResponse(stored=False)),
    }.items():
        monkeypatch.setattr(supernode_internals.FleetHttpClient, name, reply)
    supernode_internals.repeat_safely()
    send = supernode_internals.FleetHttpClient.PushMessages
    push = supernode_internals.FleetHttpClient.PushObject
    with pytest.raises(type(error)):
        send(None, announcement)
    asked = send(None, announcement)
    assert (sorted(asked.objects_to_push), asked.session_id) == (["part", "whole"], "")
    assert list(send(None, announcement).objects_to_push) == [], "nothing was lost this time"
    assert not push(None, objects[0]).stored, "nor here: it was refused"
    with pytest.raises(type(error)):
        push(None, objects[1])
    assert push(None, objects[1]).stored
    lost.append("whole")
    error = REFUSED
    with pytest.raises(httpx.HTTPStatusError):
        push(None, objects[0])
    assert not push(None, objects[0]).stored, "a refusal is no doubt"


PLAIN, ALERT = b"HTTP/1.1 502 Bad Gateway\r\n\r\n", bytes.fromhex("15030300020228")


@pytest.mark.parametrize("words", [b"", PLAIN, ALERT], ids=["none", "a proxy's", "somebody's on the way"])
def test_a_line_that_breaks_in_a_handshake_is_tried_again(words):
    """Flower gives up on what mentions SSL: a connection that ends without a word must not."""

    def hang_up(listener):
        with listener.accept()[0] as line:
            line.recv(1 << 16)
            line.sendall(words)
            line.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=hang_up, args=(listener,), daemon=True).start()
        transport = Bounded(httpx.HTTPTransport())
        with httpx.Client(transport=transport) as client, pytest.raises(httpx.ConnectError) as broken:
            client.post(f"https://localhost:{listener.getsockname()[1]}/")
    assert not any(word in str(broken.value).lower() for word in ("certificate", "ssl", "tls"))


@pytest.mark.parametrize(
    ("said", "again"),
    [("DECRYPTION_FAILED_OR_BAD_RECORD_MAC", True), ("TLSV13_ALERT_CERTIFICATE_REQUIRED", False)],
)
def test_bytes_that_were_changed_on_the_way_end_no_supernode(said, again):
    def pieces():
        yield bytes(5)
        raise httpx.ReadError(f"[SSL: {said}]") from ssl.SSLError(1, f"[SSL: {said}] (_ssl.c:2580)")

    server = httpx.MockTransport(lambda request: httpx.Response(200, stream=Stream(pieces())))
    with httpx.Client(transport=Bounded(server)) as client, pytest.raises(httpx.ReadError) as broken:
        client.post("http://server/")
    assert ("ssl" not in str(broken.value).lower()) == again


class Stream(httpx.SyncByteStream):
    def __init__(self, pieces):
        self.pieces = pieces

    def __iter__(self):
        return iter(self.pieces)
