"""One checkpoint on its way to some tiers, one after another: each rank puts its file there, all agree, and one object
is put last.

So it becomes visible in one act, after every rank's file is durable, and a kill at any moment leaves nothing that looks
whole. What a dead one has left is cleared by the next to the same tier.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from gangline.checkpoint.base import CheckpointId
from gangline_ckpt_zarr.agreement import Agreement, Failed
from gangline_ckpt_zarr.errors import describe_error
from gangline_ckpt_zarr.format.metadata import NAME, data_path
from gangline_ckpt_zarr.save.transfer import Report
from gangline_ckpt_zarr.tiers.base import Tier

Put = Callable[[Tier, str, Report], None]  # (tier, write id, report): puts this rank's file there


class DeliveryPlan(NamedTuple):
    """What rank 0 decides: the write id, the names of the tiers it goes to, and what else all should know."""

    write_id: str
    tiers: list[str]
    more: Any = None


class Owner(Protocol):
    """What is asked of the checkpointer."""

    tiers: Sequence[Tier]

    @property
    def run_dir(self) -> str: ...

    def note(self, text: str) -> None: ...

    def held(self) -> Collection[CheckpointId]: ...


class Delivery:
    """Followed by a thread, which does little: a writer process has the work, the job's store the words.

    `plan` is called on rank 0 alone, `content` (the bytes of zarr.json, from the write id) where a commit is made.
    `planned` and `delivered` are called on every rank, by the thread: with the plan, and once all tiers have it.
    """

    def __init__(
        self,
        owner: Owner,
        id: CheckpointId,
        agreement: Agreement,
        plan: Callable[[], DeliveryPlan],
        put: Put,
        content: Callable[[str], bytes],
        planned: Callable[[DeliveryPlan], None] = lambda plan: None,
        delivered: Callable[[], None] = lambda: None,
    ) -> None:
        self.id, self.why = id, ""
        self.progress = 0.0  # of this rank's bytes, all tiers together
        self._owner, self._agreement, self._plan, self._put, self._content = owner, agreement, plan, put, content
        self._planned, self._delivered = planned, delivered
        self._tiers: Sequence[Tier] = ()
        self._thread = threading.Thread(target=self._follow, name=f"save {id}", daemon=True)

    def start(self, failed: str | None = None) -> None:
        """Let it go on by itself; `failed`: why this rank has nothing to give."""
        if failed is not None:
            self._agreement.fail(failed)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether it has ended; where that was not well, `why` says so."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def join(self, seconds: float | None = None) -> bool:
        """Wait for its end, whatever that is, or so long; whether it has ended."""
        self._thread.join(seconds)
        return self.over

    def _follow(self) -> None:
        write_id, late = "", False
        try:
            if self._agreement.rank == 0:
                self._agreement.publish("plan", self._plan())
            plan = DeliveryPlan(*self._agreement.wait_for("plan"))
            write_id = plan.write_id
            self._tiers = [tier for tier in self._owner.tiers if tier.name in plan.tiers]
            self._planned(plan)
            for number, tier in enumerate(self._tiers):
                self._to(tier, write_id, number)
            self.progress = 1.0
            self._delivered()
        except Failed as failed:
            self.why, late = str(failed.what), failed.late
        except Exception as error:
            self.why = describe_error(error)
            with contextlib.suppress(Exception):  # without the job's store there is nobody to tell
                self._agreement.fail(self.why)
        if self.why and write_id and not late:
            self._abandon(write_id)

    def _to(self, tier: Tier, write_id: str, number: int) -> None:
        def report(share: float) -> None:
            self.progress = (number + share) / len(self._tiers)
            self._agreement.heartbeat()

        self._put(tier, write_id, report)
        self._agreement.done(f"{tier.name} written")
        self._agreement.all_done(f"{tier.name} written")
        whole, who = f"{tier.name} whole {tier.scope}", f"the first rank of machine {tier.scope}"
        if tier.commits(self._agreement.rank):
            self._agreement.check()  # whoever was tired of waiting has told people that it failed
            tier.store.commit(f"{self.id}/{NAME}", self._content(write_id))
            self._agreement.publish(whole, True)
            self._prune(tier)
        self._agreement.wait_for(whole, who if tier.scope else "rank 0")
        tier.saved(self.id)

    def _prune(self, tier: Tier) -> None:
        """What was saved is safe: that something old cannot be deleted is no reason to end a run."""
        try:
            tier.prune(self._owner.run_dir, {self.id, *self._owner.held()})
        except OSError as error:
            self._owner.note(f"an old checkpoint could not be deleted: {describe_error(error)}")

    def _abandon(self, write_id: str) -> None:
        """A full disk should not stay full: this rank's file goes. What is whole already stays.

        Not where a rank was silent for too long: it may be about to commit what the others have written, and what looks
        whole must be. What is left then goes with the next.
        """
        for tier in self._tiers:
            try:
                if not tier.has(self.id):
                    tier.abandon(self.id, f"{self.id}/{data_path(write_id, self._agreement.rank)}")
            except OSError as error:
                self._owner.note(f"what is left of checkpoint {self.id} could not be deleted: {describe_error(error)}")
