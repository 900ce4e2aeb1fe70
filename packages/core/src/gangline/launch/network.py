"""Name and address at which other nodes reach this node. Torch-free.

gloo listens on the address that the machine's own name resolves to. If that is a loopback address, as in Debian's
/etc/hosts, or missing, other machines cannot reach it. The route to another node gives the right address.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from contextlib import suppress

NAME = "GANGLINE_NODE"  # environment variable: name or address at which other nodes reach this node
LOOPBACK = "127.0.0.1"
_ANY_PORT = 9  # port of connect(), which sends no packet
_ASKED = 3  # maximum number of hosts to try: a lookup of an unknown name may take seconds


def name_of_this_node() -> str:
    """Return the name by which other nodes reach this node: GANGLINE_NODE, else the machine's name."""
    return os.environ.get(NAME) or os.uname().nodename


def address_towards(hosts: Sequence[str]) -> str:
    """Return the address from which this machine sends to the first host with a route; "" if there is none."""
    for host in hosts[:_ASKED]:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _ANY_PORT))
            return str(probe.getsockname()[0])
    return ""


def find_listening_address(name: str, others: Sequence[str] = ()) -> str:
    """Return the address to listen on, for clients that connect to `name`; "" means all interfaces.

    A loopback address is returned unchanged. Any other name must resolve to exactly one address, of this machine. If it
    does not (on Debian the machine's own name resolves to 127.0.1.1), the route to the hosts `others` decides.
    """
    if name == "localhost":
        return LOOPBACK
    if _is_loopback(name):
        return name
    with suppress(OSError):
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
        if len(addresses) == 1 and not _is_loopback(address := addresses.pop()) and _is_local(address):
            return address
    address = address_towards(others)
    return "" if _is_loopback(address) else address


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_local(address: str) -> bool:
    """Return whether `address` belongs to an interface of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
