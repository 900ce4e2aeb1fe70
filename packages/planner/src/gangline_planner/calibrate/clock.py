"""How long something takes on this rank, with all other ranks at the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean

import torch

from gangline.comm import Comm


def seconds(work: Callable[[], object], comm: Comm, device: torch.device, budget: float = 0.1) -> float:
    """Mean of some calls; all ranks begin each together, so that what they share is shared as in a step.

    The mean, for a step is a sum of many: where other processes take turns with this one, most short calls are not
    interrupted, and a median would not see them.
    """
    work()
    found: list[float] = []
    began = time.perf_counter()
    more = True
    while more:
        comm.barrier()
        _finish(device)
        start = time.perf_counter()
        work()
        _finish(device)
        found.append(time.perf_counter() - start)
        more = len(found) < 3 or (len(found) < 100 and time.perf_counter() - began < budget)
        if comm.size > 1:  # as many calls on every rank: the first decides
            more = bool(comm.broadcast(torch.tensor([float(more)], device=device), 0).item())
    return fmean(found)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
