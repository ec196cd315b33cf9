"""The door of a real federation, attacked from outside and by its own clients; memory is what counts.

Three clients, f = 1, on loopback. Every attack is bounded in time, and afterwards everybody still works.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

import httpx
import psutil
import pytest
from cryptography.hazmat.primitives import serialization
from flower_harness import real, wait_for
from flower_hostile import Hostile
from flwr.proto.control_pb2 import ListNodesRequest
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from flwr.supercore.control import ControlHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from federation_harness import PRIVATE, small_config
from trilemma.flower import short_logs
from trilemma.flower.deployment import guard_settings

pytestmark = [pytest.mark.federation, pytest.mark.slow]

CLIENTS = 3
MEGABYTE = 1 << 20
CONTROL = [f"/v1/control/{what}" for what in ("start-run", "stop-run", "list-nodes", "unregister-node")]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    config = small_config(CLIENTS, *PRIVATE, rounds=2)
    folder = tmp_path_factory.mktemp("door") / "federation"
    with real(folder, CLIENTS, config, budget=1e6) as running:
        running.go("warm-up")
        yield running


def memory(federation) -> dict[str, int]:
    """Bytes that the server's processes hold."""
    return {
        name: psutil.Process(federation.process(federation.server, name).pid).memory_info().rss
        for name in ("superlink", "guard")
    }


@contextlib.contextmanager
def no_memory_is_lost(federation, bound: int = 30 * MEGABYTE):
    """Neither SuperLink nor guard may have grown by more than `bound`; what they take they do not return."""
    before = memory(federation)
    yield
    grown = {name: now - before[name] for name, now in memory(federation).items()}
    assert max(grown.values()) < bound, grown


def context(federation, client: int | None) -> ssl.SSLContext:
    """What a stranger has, the public certificate of the authority; or what a client has."""
    found = ssl.create_default_context(cafile=federation.server.authority)
    if client is not None:
        party = federation.client(client)
        found.load_cert_chain(party.certificate, party.certificate_key)
    return found


def node_heads(federation, client: int) -> dict[str, str]:
    """The heads by which Flower knows a node: its key and a signed moment."""
    private = serialization.load_ssh_private_key(federation.client(client).node_key.read_bytes(), None)
    asked = httpx.Request("POST", "https://server")
    node = NodeAuthHttpInterceptor(private, private.public_key())
    node.intercept(type("Context", (), {"request": asked})(), lambda _: None)
    return {name: value for name, value in asked.headers.items() if name.startswith("flwr")}


def pour(federation, client: int | None, path: str, size: int, heads: dict[str, str]) -> bytes:
    """Send `size` bytes as a body, as long as anybody takes them; return the answer."""
    facts = federation.server.federation
    lines = [f"POST {path} HTTP/1.1", "host: server", f"content-length: {size}"]
    head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in heads.items())]) + "\r\n\r\n"
    deadline = time.monotonic() + 30
    with contextlib.suppress(OSError), contextlib.ExitStack() as held:
        raw = held.enter_context(socket.create_connection((facts.host, facts.port), timeout=60))
        outside = context(federation, client).wrap_socket(raw, server_hostname=facts.host)
        door = held.enter_context(outside)
        with contextlib.suppress(OSError):
            door.sendall(head.encode())
            for _ in range(size // MEGABYTE):
                assert time.monotonic() < deadline
                door.sendall(bytes(MEGABYTE))
        return door.recv(1000)
    return b""


def test_a_stranger_with_the_public_certificate_can_do_nothing(federation):
    """Start a run, stop one, unregister nodes, fill a disk: it does not get past the handshake."""
    facts, heads = federation.server.federation, node_heads(federation, 0)
    with no_memory_is_lost(federation):
        for path in [*CONTROL, "/v1/fleet/push-object", "/v1/fleet/pull-messages"]:
            with httpx.Client(verify=context(federation, None)) as door, pytest.raises(httpx.TransportError):
                door.post(f"https://{facts.address}{path}", content=b"", headers=heads)
        client = ControlHttpClient.from_server_address(
            facts.address, False, federation.server.authority.read_bytes(), interceptors=[]
        )
        with client, pytest.raises(httpx.TransportError):
            client.ListNodes(ListNodesRequest())
        assert pour(federation, None, "/v1/fleet/push-object", 200 * MEGABYTE, heads) == b""


def test_a_client_reaches_what_clients_need_and_no_more(federation):
    facts = federation.server.federation
    with httpx.Client(verify=context(federation, 0)) as door:
        for path in [*CONTROL, "/v1/fleet/unregister-node", "/v1/runtime/acquire-task", "/docs"]:
            heads = node_heads(federation, 0)
            answer = door.post(f"https://{facts.address}{path}", content=b"", headers=heads)
            assert answer.status_code == 404
        pull, stolen = f"https://{facts.address}/v1/fleet/pull-messages", node_heads(federation, 1)
        assert door.post(pull, content=b"", headers=stolen).status_code == 400


def test_the_superlink_listens_on_loopback_only(federation):
    process = psutil.Process(federation.process(federation.server, "superlink").pid)
    listening = {
        (one.laddr.ip, one.laddr.port)
        for each in (process, *process.children(recursive=True))
        for one in each.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    }
    assert listening == {("127.0.0.1", federation.server.federation.superlink_port)}


def test_an_upload_of_200_megabytes_is_refused_by_its_head(federation):
    """It comes from a client with all its keys; what its message needs is a few kilobytes."""
    assert guard_settings(federation.server).limits.largest("/v1/fleet/push-object") < 10_000
    with no_memory_is_lost(federation):
        heads = node_heads(federation, 1)
        answer = pour(federation, 1, "/v1/fleet/push-object", 200 * MEGABYTE, heads)
        assert answer[9:12] in (b"413", b""), answer


@pytest.mark.nightly  # and every day in `test_nan_oversized_and_replayed_replies`, with less of it
def test_a_reply_that_is_too_large_costs_its_sender_and_nobody_else(federation):
    """Through the client's own SuperNode: 50 MB where 4 KB are declared."""
    federation.set_timing(round_limit=10.0)
    with no_memory_is_lost(federation), federation.liar(1, "large"):
        records = federation.go("large")
    assert [record["round"] for record in records] == [1, 2]
    assert all(record["absent"] == [1] for record in records)
    said = (federation.server.running / "guard.log").read_text()
    assert "client-1: /v1/fleet/push-object refused with 413: 5" in said
    federation.set_timing(round_limit=30.0)


@pytest.mark.parametrize(("records", "status"), [(20_000, 413), (100, 413), (3, 401)])
def test_a_reply_of_20_000_records_is_refused_before_it_is_stored(federation, records, status):
    """What Flower's own client announces, by a client with all its keys; three reach the SuperLink.

    (Which does not know the node of nobody that is named in them.)
    """
    leaves = [ObjectTree(object_id=f"{number:064x}") for number in range(records - 1)]
    about = Metadata(message_id="b" * 64, reply_to_message_id="a" * 64)
    announced = PushMessagesRequest(
        messages_list=[Message(metadata=about)],
        message_object_trees=[ObjectTree(object_id="b" * 64, children=leaves)],
    )
    address, heads = federation.server.federation.address, node_heads(federation, 1)
    with httpx.Client(verify=context(federation, 1)) as door, no_memory_is_lost(federation):
        answer = door.post(
            f"https://{address}/v1/fleet/push-messages",
            content=announced.SerializeToString(),
            headers={**heads, "content-type": "application/protobuf"},
        )
    assert answer.status_code == status, answer.text


def test_no_log_grows_for_ever(federation):
    """Most lines are about messages, which come from others: a disk is not theirs to fill."""
    logs = [log for party in federation.parties for log in party.running.glob("*.log")]
    assert {log.name for log in logs} >= {"superlink.log", "guard.log", "supernode.log", "worker.log"}
    written = [log for log in logs if log.name != "node.log"]  # begun anew by who writes it
    for log in written:
        with log.open("ab") as file:
            file.write(b"a line about a message\n" * (short_logs.LARGEST // 20))
    wait_for(lambda: all(log.stat().st_size < MEGABYTE for log in written), 60.0)
    assert all(log.with_name(f"{log.name}.1").stat().st_size > short_logs.LARGEST for log in written)
    assert federation.go("short-logs")[-1]["absent"] == []
    assert "short-logs" in federation.said(), "what is said later is written behind that"


@pytest.mark.nightly  # and every day in `test_a_reply_is_announced_with_its_own_records_and_always_the_same`
def test_one_reply_announced_with_ever_other_records_leaves_one_replys_records(federation):
    """Unjudged, 84 records of every question stayed in the SuperLink until the run's end."""
    hostile = Hostile(federation, 1)
    try:
        federation.start("flood")
        question = hostile.question()
        assert hostile.flood(question, 40, records=8, size=3000, own=False) == 0
        assert hostile.flood(question, 40, records=8, size=3000, own=True) <= 7
        assert hostile.refused.keys() <= {400, 401, 409, 503}
    finally:
        federation.restart(federation.client(1))
    assert federation.go("after-the-flood")[-1]["absent"] == []


def test_a_node_that_fell_silent_starts_itself_anew(federation):
    """Its loop meets an error that Flower does not expect: it is back, in the same process."""
    party = federation.client(2)
    with federation.deaf(2):
        before = federation.process(party, "supernode")
        records = federation.go("silent-node")
        assert records[-1]["absent"] == []
        assert federation.process(party, "supernode") == before
    assert "starting anew" in (party.running / "supernode.log").read_text()
