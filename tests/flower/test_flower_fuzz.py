"""What strangers send to the server's door: it is judged, or refused with the guard's own word."""

from __future__ import annotations

from base64 import b64encode
from contextlib import suppress

import h11
from hypothesis import example, given
from hypothesis import strategies as st

from trilemma.flower.announcements import announced, records_announced
from trilemma.flower.heads import Refusal, check_head
from trilemma.flower.limits import PATHS, Limits, Settings

KEY = b64encode(b"key").decode()


SETTINGS = Settings("127.0.0.1", 1, 2, "", "", "", {"client-0": KEY}, Limits(message=1000))
GOOD = [(b"content-length", b"10"), (b"flwr-public-key", KEY.encode())]


words = st.binary(max_size=12) | st.sampled_from(
    [b"content-length", b"flwr-public-key", b"0", b"9" * 5000, b"POST"]
)


@given(
    st.sampled_from([b"POST", b"GET"]) | words,
    st.sampled_from(sorted(path.encode() for path in PATHS)) | words,
    st.lists(st.tuples(words, words), max_size=4),
)
@example(b"POST", b"/v1/fleet/push-object", GOOD)
@example(b"POST", b"/v1/fleet/push-object", [(b"content-length", b"9" * 5000)])
@example(b"POST", b"/v1/fleet/push-object", [(b"content-length", "²".encode("latin-1"))])
def test_a_head_is_judged_or_refused(method, target, heads):
    """h11 reads it, or says that it is no head; the guard lets it pass, or says why not."""
    raw = (
        b" ".join([method, target, b"HTTP/1.1\r\nhost: server\r\n"])
        + b"".join(b": ".join(one) + b"\r\n" for one in heads)
        + b"\r\n"
    )
    line = h11.Connection(h11.SERVER)
    with suppress(h11.RemoteProtocolError, Refusal):
        line.receive_data(raw)
        request = line.next_event()
        if isinstance(request, h11.Request):
            path, length = check_head("client-0", request, SETTINGS)
            assert path in PATHS
            assert length <= 10_000


@given(
    st.binary(max_size=200)
    | st.lists(st.sampled_from([b"\x1a", b"\x12", b"\x03", b"\x02", b"\x0a\x01A"])).map(b"".join)
)
@example(b"\x1a\x02\x12\x00" * 2000)
def test_an_announcement_is_counted_or_refused(body):
    with suppress(ValueError):
        assert 0 <= records_announced(body) <= len(body)
    with suppress(ValueError):
        assert announced(body).records >= 1
