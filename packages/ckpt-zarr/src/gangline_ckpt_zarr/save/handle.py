"""The handle of one save: the near tiers first, then a copy from there to the durable one."""

from __future__ import annotations

from typing import final

from gangline.checkpoint.base import Handle, SaveFailed
from gangline.checkpoint.id import CheckpointId
from gangline_ckpt_zarr.save.durable import DurableCopy
from gangline_ckpt_zarr.save.staged import StagedDelivery


@final
class ZarrHandle(Handle):
    """Once the near tiers have it the checkpoint is whole, the staging memory free, and the next save may begin.

    A copy to the durable tier goes on by itself. `poll` says that all is over, the copy too; `wait` returns when the
    near tiers have it, but after the last save of a run, `last`, when the durable tier has it as well. After a `wait`
    that did not wait for the copy `poll` does not either; if the copy then fails, the next save reports it.
    """

    def __init__(self, near: StagedDelivery, last: bool, blocked_seconds: float = 0.0) -> None:
        self.id, self.blocked_seconds, self.last = near.id, blocked_seconds, last
        self._near = near
        self._failures: list[tuple[str, str]] = []  # (id, why): raised by every `poll` and `wait` from then on
        self._reported = False  # every copy is over, and none of them failed
        self._let_go = False  # a `wait` returned while a copy went on

    @property
    def progress(self) -> float:
        """Of this rank's bytes, all tiers together."""
        near, copy = self._near, self._near.copy
        return (near.progress + copy.progress) / 2 if near.goes_far else near.progress

    @property
    def over(self) -> bool:
        """Whether the next save may begin: the near tiers have it, or it has failed; the last one, all tiers."""
        return self._near.over and not (self.last and any(not copy.over for copy in self._copies))

    @property
    def whole(self) -> bool:
        """Whether the near tiers have it."""
        return self._near.over and not self._near.why

    def join(self) -> None:
        """Wait until the staging memory is free."""
        self._near.join()

    def poll(self) -> bool:
        if not self._near.over:
            return False
        if not self._failures and not self._reported:
            own = [(str(self.id), self._near.why)] if self._near.why else []
            self._failures = own + self._near.earlier_failures
            if not self._failures and not self._let_go and all(copy.over for copy in self._copies):
                self._failures, self._reported = self._near.copies.report(self._copies), True
        if self._failures:
            self._raise()
        return self._reported or self._let_go

    def wait(self) -> None:
        self._near.join()
        if self.last:
            for copy in self._copies:
                copy.join()
            self._let_go = False
        if not self.poll():
            self._let_go = True

    @property
    def _copies(self) -> list[DurableCopy]:
        """Those whose ends this save reports, while it is not let go of."""
        own = [self._near.copy] if self._near.goes_far and not self._near.why else []
        return [*self._near.earlier, *own]

    def _raise(self) -> None:
        (first, why), *others = self._failures
        id = CheckpointId.parse(first)
        assert id is not None
        more = (f"checkpoint {other} could not be saved: {cause}" for other, cause in others)
        raise SaveFailed(id, "; ".join([why, *more]))
