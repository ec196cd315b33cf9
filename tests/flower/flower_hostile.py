"""A client that speaks with the server's door itself, with all its keys, and keeps to no protocol."""

from __future__ import annotations

import hashlib
import os
import ssl
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
from cryptography.hazmat.primitives import serialization
from flower_harness import Real
from flwr.app import ConfigRecord
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree, PushObjectRequest, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.recorddict_pb2 import RecordDict
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from trilemma.federation import processes


class Hostile:
    """Client `number` of a real federation, in the place of its SuperNode, which is stopped."""

    def __init__(self, federation: Real, number: int) -> None:
        self.party, self.address = federation.client(number), federation.server.federation.address
        processes.stop(processes.recorded(self.party.running), self.party.running, grace=2.0)
        context = ssl.create_default_context(cafile=federation.server.authority)
        context.load_cert_chain(self.party.certificate, self.party.certificate_key)
        self.door = httpx.Client(verify=context, timeout=60)
        self.key = serialization.load_ssh_private_key(self.party.node_key.read_bytes(), None)
        self.refused: Counter[int] = Counter()
        self.node = Node(node_id=self._activate())

    def _activate(self) -> int:
        """Wait until Flower lets the node in again: it believes for a while that the old one is there."""
        request = ActivateNodeRequest(
            public_key=public_key_to_bytes(self.key.public_key()), heartbeat_interval=10
        )
        deadline = time.monotonic() + 90
        while (answer := self.ask("activate-node", request, ActivateNodeResponse)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        return answer.node_id

    def ask(self, path: str, request, kind):
        """Return the answer; None where the request was refused."""
        asked = httpx.Request("POST", "https://server")
        NodeAuthHttpInterceptor(self.key, self.key.public_key()).intercept(
            type("Context", (), {"request": asked})(), lambda _: None
        )
        heads = {name: value for name, value in asked.headers.items() if name.startswith("flwr")}
        answer = self.door.post(
            f"https://{self.address}/v1/fleet/{path}",
            content=request.SerializeToString(),
            headers={**heads, "content-type": "application/protobuf"},
        )
        if answer.status_code != 200:
            self.refused[answer.status_code] += 1
            return None
        return kind.FromString(answer.content)

    def question(self) -> Metadata:
        """Wait for a message of the server's."""
        deadline = time.monotonic() + 90
        while True:
            assert time.monotonic() < deadline
            pulled = self.ask("pull-messages", PullMessagesRequest(node=self.node), PullMessagesResponse)
            if pulled is not None and pulled.messages_list:
                return pulled.messages_list[0].metadata

    def flood(self, question: Metadata, announcements: int, records: int, size: int, own: bool) -> int:
        """Announce one reply again and again, each time with other records, and upload these.

        Return how many records were stored. Records are announced below the reply, or (not `own`) below a
        message of which nobody has heard.
        """
        reply = hashlib.sha256(os.urandom(32)).hexdigest()
        now = time.time()
        about = Metadata(
            run_id=question.run_id,
            message_id=reply,
            src_node_id=self.node.node_id,
            dst_node_id=question.src_node_id,
            reply_to_message_id=question.message_id,
            ttl=max(1.0, question.created_at + question.ttl - now - 2),
            created_at=now,
            message_type=question.message_type,
        )

        def once(_: int) -> int:
            contents = [ConfigRecord({"x": os.urandom(size)}) for _ in range(records - 1)]
            leaves = {one.object_id: one.deflate() for one in contents}
            root = reply if own else hashlib.sha256(os.urandom(32)).hexdigest()
            tree = ObjectTree(object_id=root, children=[ObjectTree(object_id=one) for one in leaves])
            announced = PushMessagesRequest(
                node=self.node,
                messages_list=[Message(content=RecordDict(), metadata=about)],
                message_object_trees=[tree],
            )
            answer = self.ask("push-messages", announced, PushMessagesResponse)
            wanted = set() if answer is None else leaves.keys() & set(answer.objects_to_push)
            uploads = (
                PushObjectRequest(
                    node=self.node,
                    run_id=question.run_id,
                    session_id=answer.session_id,
                    object_id=one,
                    object_content=leaves[one],
                )
                for one in wanted
            )
            stored = (self.ask("push-object", upload, PushObjectResponse) for upload in uploads)
            return sum(one is not None and one.stored for one in stored)

        with ThreadPoolExecutor(12) as many:
            return sum(many.map(once, range(announcements)))
