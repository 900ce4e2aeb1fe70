"""Rendezvous of a job's only agent, without a server and without serialization."""

from __future__ import annotations

import socket

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from gangline.launch.network import LOOPBACK


class SoloRendezvous(RendezvousHandler):
    """Rendezvous that is complete at once: one node, a store in this process, a free port for rank 0's store."""

    def get_backend(self) -> str:
        return "solo"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, _free_port()))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "solo"

    def shutdown(self) -> bool:
        return True


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as probe:
        return int(probe.getsockname()[1])
