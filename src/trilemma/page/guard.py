"""Who may ask the page, and what a browser may do with the answer.

Other programs on this machine can reach a loopback port, and so can every web site the user visits: through
the user's browser. So an answer is given only to who knows the token, only under the names the page was
started for (a site that lets its own name point here is turned away), and only to reading methods. The
answers forbid scripts, styles and requests from anywhere else.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PLOTLY = (
    "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='",  # empty, and filled by its own script
    "'sha256-ji27qzEtxXZW+7dun6UwjHXJ18e6WAin1VvNtkzIE/o='",  # for maps, which nobody draws
)
"""The digests of Plotly's own style elements; those of another release a browser may refuse."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        f"style-src-elem 'self' {' '.join(PLOTLY)}",
        "style-src-attr 'unsafe-inline'",  # Plotly sets such; attributes of strangers are never HTML here
        "img-src 'self' data: blob:",  # the charts' pictures, made here
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""What a browser may load for the page: what comes from here, and no script that stands in the text."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""What goes with every answer."""

LOCAL = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine for itself."""


def hosts_of(host: str, port: int) -> frozenset[str]:
    """Return what a browser may call the page: the names of this machine, or the one address it has.

    >>> sorted(hosts_of("127.0.0.1", 8765))
    ['127.0.0.1:8765', '[::1]:8765', 'localhost:8765']
    >>> sorted(hosts_of("192.0.2.7", 80))
    ['192.0.2.7', '192.0.2.7:80']
    """
    shown = f"[{host}]" if ":" in host else host
    names = LOCAL if shown in LOCAL else (shown,)
    return frozenset(f"{one}:{port}" for one in names) | frozenset(names if port == 80 else ())


class Guard:
    """Stands before the page's application and lets only those in who may ask.

    The token comes as `?token=…` once; the browser is then sent on without it and keeps it as a cookie that
    scripts cannot read and other sites cannot send. Programs may send it as `Authorization: Bearer …`.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Iterable[str], cookie: str = "trilemma") -> None:
        self.app, self.token, self.hosts, self.cookie = app, token, frozenset(hosts), cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let the application answer it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # nothing here speaks anything else
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        answer = self._refusal(scope)
        await (self.app if answer is None else answer)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return what to say instead of the page's own answer; None: let the request in."""
        headers = Headers(scope=scope)
        if headers.get("host", "") not in self.hosts:
            return PlainTextResponse("This page goes by another name.\n", 403)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This page only reads.\n", 405, {"Allow": "GET, HEAD"})
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = query.pop("token", [""])[-1]
        if scope["path"] == "/" and self._is_token(given):
            return self._admit(query)
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(bearer) or self._is_token(self._kept(headers.get("cookie", ""))):
            return None
        return PlainTextResponse(
            "The address with its token is in the terminal that started the page.\n", 403
        )

    def _admit(self, query: dict[str, list[str]]) -> Response:
        """Send the browser on to the same place without the token, which it keeps as a cookie."""
        rest = urlencode(query, doseq=True)
        answer = RedirectResponse(f"/?{rest}" if rest else "/", 303)
        answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
        return answer

    def _kept(self, text: str) -> str:
        try:
            found = SimpleCookie(text).get(self.cookie)
        except CookieError:
            return ""
        return "" if found is None else found.value

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self.token.encode())
