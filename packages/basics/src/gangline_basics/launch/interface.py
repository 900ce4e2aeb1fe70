"""Network interface through which this machine reaches other nodes. Torch-free."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

from gangline.launch.network import address_towards

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux


def find_interface(hosts: Sequence[str]) -> str | None:
    """Return the name of the interface through which this machine sends to the first reachable host, or None.

    Only the first few of many `hosts` are tried.
    """
    address = address_towards(hosts)
    return _find_address(address) if address else None


def _find_address(address: str) -> str | None:
    if address.startswith("127."):
        return "lo"
    import fcntl

    for _, name in socket.if_nameindex():
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
