"""Whether the guard passes a request on: what its head tells before more is read, and what it announces."""

from __future__ import annotations

import h11

from trilemma.federation.facts import FACTS
from trilemma.flower.announcements import Announcement, announced
from trilemma.flower.limits import Limits, Settings
from trilemma.flower.replies import Replies

PUBLIC_KEY, CLOCK = b"flwr-public-key", b"flwr-timestamp"
UNWANTED = frozenset({b"transfer-encoding", b"content-encoding", b"expect", b"upgrade"})
"""Heads that say that a body is not as long as it seems: no client of ours sends one."""


class Refusal(Exception):
    """A request that is not passed on."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def check_head(name: str, request: h11.Request, settings: Settings) -> tuple[str, int]:
    """Decide by the head alone; return the path and how long the body will be."""
    if name not in settings.peers:
        raise Refusal(403, "no client of this federation any more")
    path = request.target.decode("ascii", "replace")
    largest = settings.limits.largest(path)
    heads = dict(request.headers)
    if request.method != b"POST" or largest is None:
        raise Refusal(404, "there is nothing here")
    if len(heads) < len(request.headers):
        raise Refusal(400, "a head says everything once")  # or two readers may take two different things
    if UNWANTED & heads.keys() or not heads.get(b"content-length", b"").isdigit():
        raise Refusal(411, "a request says how long it is")
    length = int(heads[b"content-length"])
    if length > largest:
        raise Refusal(413, f"{length} bytes where at most {largest} are allowed")
    if path == FACTS:
        return path, length
    if heads.get(PUBLIC_KEY, b"").decode("ascii", "replace") != settings.peers[name]:
        raise Refusal(400, "the node's key is not that of its certificate")
    return path, length


def check_announcement(body: bytes, limits: Limits) -> Announcement:
    """Refuse an announcement of more records than a reply has, or of anything but one reply."""
    try:
        found = announced(body)
    except ValueError as error:
        raise Refusal(400, str(error)) from None
    if found.records > limits.records:
        raise Refusal(413, f"{found.records} records where at most {limits.records} are allowed")
    return found


def check_replies(name: str, announcement: Announcement, replies: Replies) -> None:
    """Refuse a reply that was announced with other records before, and announcements without end."""
    if not replies.may(name):
        raise Refusal(503, "too many announcements for what was asked")
    if not replies.same(name, announcement):
        raise Refusal(409, "this reply was announced with other records")
