"""Ranks talking to ranks: the `Comm` contract, its transports, and collectives that autograd knows.

Torch is loaded with the first name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline.plugin.lazy import lazily

if TYPE_CHECKING:
    from gangline.comm.autograd import all_gather as all_gather, all_reduce as all_reduce, all_to_all as all_to_all
    from gangline.comm.base import (
        Comm as Comm,
        Comms as Comms,
        Pending as Pending,
        Reduction as Reduction,
        Store as Store,
    )
    from gangline.comm.fake import FakeComm as FakeComm, FakeComms as FakeComms
    from gangline.comm.objects import gather_json as gather_json
    from gangline.comm.ordered import Later as Later, sum_rows as sum_rows
    from gangline.comm.solo import Done as Done, Solo as Solo
    from gangline.comm.transport import connect as connect
    from gangline.comm.wrap import Wrapped as Wrapped, WrappedComms as WrappedComms

__getattr__, __all__ = lazily(
    __name__,
    {
        "gangline.comm.base": "Comm Comms Pending Reduction Store",
        "gangline.comm.autograd": "all_gather all_reduce all_to_all",
        "gangline.comm.fake": "FakeComm FakeComms",
        "gangline.comm.objects": "gather_json",
        "gangline.comm.ordered": "Later sum_rows",
        "gangline.comm.solo": "Done Solo",
        "gangline.comm.transport": "connect",
        "gangline.comm.wrap": "Wrapped WrappedComms",
    },
)
