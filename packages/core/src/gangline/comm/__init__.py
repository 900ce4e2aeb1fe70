"""Ranks talking to ranks: the `Comm` contract and its transports (torch-free until a transport is imported)."""

from gangline.comm.base import Comm, Comms, Pending, Store

__all__ = ["Comm", "Comms", "Pending", "Store"]
