"""The page's server: one process, on this machine, until it is stopped."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from trilemma.base.errors import UserError
from trilemma.page.app import make_app
from trilemma.page.guard import hosts_of
from trilemma.page.index import Index


def _everywhere(address: str) -> bool:
    """Tell whether an address means all of a machine's: a browser cannot call the page by it.

    >>> _everywhere("::"), _everywhere("::ffff:0.0.0.0"), _everywhere("127.0.0.1")
    (True, True, False)
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_unspecified


def serve(folders: Sequence[Path], host: str, port: int, tell: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; `tell` is given its address. Port 0 is a free one."""
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"there is no folder {str(folder)!r}; allowed: folders that hold runs or parties")
    host = host.removeprefix("[").removesuffix("]")  # as an address has it: [::1]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            raise UserError(
                f"cannot listen on {host}, port {port} ({error.strerror}); name another --port; 0: a free one"
            ) from None
        address, port = listening.getsockname()[:2]
        if _everywhere(address):
            raise UserError(
                f"--host {host!r} is every address of this machine; name the one a browser will use"
            )
        token = secrets.token_urlsafe(24)
        app = make_app(Index(folders), token, hosts_of(host, port), f"trilemma-{port}")
        settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        shown = f"[{host}]" if ":" in host else host
        tell(f"http://{shown}:{port}/?token={token}")
        uvicorn.Server(settings).run([listening])
