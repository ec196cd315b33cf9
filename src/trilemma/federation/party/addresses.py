"""Where a server is: a host, which is a name or an address, and a port, which is said by itself."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket

from trilemma.base.errors import UserError

HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
ALLOWED = (
    "an IP address, or a name as in fl.example.org (one with other letters as the domain name system spells "
    "it, xn--…)"
)
APART = "an IPv6 address has no brackets here, as in ::1, and the port is said by itself (`port`)"


def address_of(host: str, port: int) -> str:
    """Return host and port in one text, from which both can be read again.

    >>> address_of("fl.example.org", 9190), address_of("::1", 9190)
    ('fl.example.org:9190', '[::1]:9190')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_port(host: str, first: int = 9190) -> int:
    """Return the first port from `first` on that is free at `host`; `first` where that is another machine.

    >>> import socket
    >>> with socket.create_server(("127.0.0.1", 0)) as taken:
    ...     port = taken.getsockname()[1]
    ...     free_port("127.0.0.1", port) > port
    True
    """
    for port in range(first, min(first + 1000, 65536)):
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            socket.create_server((host, port), family=family).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            return first
        return port
    return first


def check_host(fact: str, host: str) -> None:
    """Refuse what is neither an address that somebody can connect to, nor a name.

    >>> check_host("host", "[::1]:9190")
    Traceback (most recent call last):
    trilemma.base.errors.UserError: host = '[::1]:9190': an IPv6 address has no brackets here, as in ::1, and
    ...
    """
    try:
        found = ipaddress.ip_address(str(host))  # a number in a damaged file would be taken for an address
    except ValueError:
        if not HOST_NAME.fullmatch(host):
            raise UserError(
                f"{fact} = {host!r}: {APART if ':' in host else f'allowed is {ALLOWED}'}"
            ) from None
        return
    if isinstance(found, ipaddress.IPv6Address) and not _can_be_reached(found):
        raise UserError(f"{fact} = {host!r} is no address that clients elsewhere can connect to; {APART}")
    if str(found) != host:
        raise UserError(f"{fact} = {host!r}: write it as everybody else does, {str(found)!r}")


def _can_be_reached(address: ipaddress.IPv6Address) -> bool:
    """Tell an address from one that only means something on one cable, or from a port written behind one."""
    if address.is_loopback or address.is_unspecified:
        return True
    return not (address.is_link_local or address.is_multicast or address.is_reserved)
