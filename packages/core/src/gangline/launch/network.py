"""The interface of this machine at which other nodes reach it. Torch-free.

gloo takes the address that the machine's own name stands for; where that is a loopback address, as in Debian's
/etc/hosts, or none, it listens where no other machine can reach it. The route to another node says better.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux
_ANY_PORT = 9  # nothing is sent
_ASKED = 3  # hosts: a name that no name service knows may take seconds


def interface_towards(hosts: Sequence[str]) -> str | None:
    """The interface by which this machine sends to the first of `hosts` that it has a way to; None: unknown.

    Of many hosts the first few are asked.
    """
    for host in hosts[:_ASKED]:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _ANY_PORT))
            if found := _with_address(probe.getsockname()[0]):
                return found
    return None


def _with_address(address: str) -> str | None:
    if address.startswith("127."):
        return "lo"
    import fcntl

    for _, name in socket.if_nameindex():
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
