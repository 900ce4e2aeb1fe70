"""The name and the address at which other nodes reach this one. Torch-free.

gloo takes the address that the machine's own name stands for; where that is a loopback address, as in Debian's
/etc/hosts, or none, it listens where no other machine can reach it. The route to another node says better.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from contextlib import suppress

NAME = "GANGLINE_NODE"  # the variable that names this node, by an address at which the others reach it
LOOPBACK = "127.0.0.1"
_ANY_PORT = 9  # nothing is sent
_ASKED = 3  # hosts: a name that no name service knows may take seconds


def name_of_this_node() -> str:
    """How the other nodes of the job reach this one: what GANGLINE_NODE says, else the machine's own name."""
    return os.environ.get(NAME) or os.uname().nodename


def address_towards(hosts: Sequence[str]) -> str:
    """Address from which this machine sends to the first of `hosts` that it has a route to, or ""."""
    for host in hosts[:_ASKED]:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _ANY_PORT))
            return str(probe.getsockname()[0])
    return ""


def find_listening_address(name: str, others: Sequence[str] = ()) -> str:
    """Address of this machine to listen at, for clients that connect to `name`; "" means all interfaces.

    A loopback address stays one. Any other name must stand for exactly one address, and that for this machine. Where
    it does not (on Debian the machine's own name stands for 127.0.1.1), the route to the hosts `others` decides.
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
    """Whether `address` belongs to an interface of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
