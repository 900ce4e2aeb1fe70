"""Wrappers of communicators and the store that inject faults; without an active fault they forward each call."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gangline.comm.base import Comm, Comms, Pending, Reduction, Store
from gangline.comm.wrap import Wrapped, WrappedComms
from gangline.pulse.layout import PHASES
from gangline.pulse.write import get_current
from gangline_health.chaos import state

if TYPE_CHECKING:
    from torch import Tensor

    from gangline.config import Run
    from gangline_health.chaos.config import ChaosHealth

_STEP = ("forward_backward", "forward", "backward")
LEAST = 64  # minimum number of elements of a tensor to change: smaller tensors are not gradients


def break_comms(config: ChaosHealth, run: Run, comms: Comms) -> Comms:
    """Return `comms` wrapped, with communicators and a store that inject the active faults of this rank."""
    broken_comms = WrappedComms(comms, lambda comm: BrokenComm(comm, config.slow_seconds))
    broken_comms.store = BrokenStore(comms.store)
    return broken_comms


class BrokenComm(Wrapped):
    """Communicator that injects active faults before a collective of the forward or backward pass."""

    def __init__(self, inner: Comm, slow_seconds: float) -> None:
        super().__init__(inner)
        self.slow_seconds = slow_seconds

    def _inject_faults(self, x: Tensor | None = None) -> None:
        phase = PHASES[get_current().number]
        if phase not in _STEP:
            return
        now = state.now
        if now.slow_from < now.step <= now.slow_until:
            now.slow_from = now.step
            time.sleep(self.slow_seconds)
        if now.exception:
            now.exception = False
            raise RuntimeError("health=chaos: injected exception")
        if now.hang:
            now.hang = False
            while True:
                time.sleep(3600.0)
        if x is None or not x.dtype.is_floating_point or x.numel() < LEAST:
            return
        if now.nan:
            now.nan = False
            x.detach().view(-1)[0] = math.nan
        if now.miscompute:
            now.miscompute = False
            x.detach().view(-1)[0] += 1e-3

    def _all_reduce(self, x: Tensor, op: Reduction, background: bool) -> Pending[Tensor]:
        self._inject_faults(x)
        return super()._all_reduce(x, op, background)

    def _all_gather(self, x: Tensor, into: Tensor | None, background: bool) -> Pending[Tensor]:
        self._inject_faults()
        return super()._all_gather(x, into, background)

    def _reduce_scatter(self, x: Tensor, background: bool) -> Pending[Tensor]:
        self._inject_faults(x)
        return super()._reduce_scatter(x, background)

    def _all_to_all(self, x: Tensor, in_splits: Any, out_splits: Any, background: bool) -> Pending[Tensor]:
        self._inject_faults()
        return super()._all_to_all(x, in_splits, out_splits, background)

    def _exchange(self, sends: Any, recvs: Any, background: bool) -> Pending[Sequence[Tensor]]:
        self._inject_faults()
        return super()._exchange(sends, recvs, background)


class BrokenStore:
    """Store of the job. Until `state.now.store_until`, each call raises ConnectionError."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def _get_store(self) -> Store:
        if time.monotonic() < state.now.store_until:
            raise ConnectionError("health=chaos: injected outage of the store")
        return self._inner

    def set(self, key: str, value: str | bytes) -> None:
        self._get_store().set(key, value)

    def get(self, key: str) -> bytes:
        return self._get_store().get(key)

    def add(self, key: str, amount: int) -> int:
        return self._get_store().add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._get_store().check(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._get_store(), name)
