"""Monitor of silent data corruption, which compares checksums of values that must be bitwise equal:

- The weights of replicas, which are ranks that hold the same boxes of the weights, and their gradients after the sum
  over ranks. Replicas apply the same updates, so a flipped bit in one replica, in memory or in a matmul, stays in its
  weights. Replicas that differ between synchronisations (`Runtime.differs`) are not compared with each other.
  A rank outside the majority of its replicas is to blame; without a majority, all replicas that differ are reported.
  A rank whose boxes no other rank holds exactly is not compared; a verdict reports such ranks.
- The weights of a checkpoint, at the save and after they are read.
- Two computations of the same step (`gangline_health.monitors.recompute`), which need no replica.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gangline.health import Action, Verdict
from gangline_health.config import CorruptionOptions
from gangline_health.monitors.base import Monitor
from gangline_health.monitors.bits import compute_fingerprint, hash_boxes, list_gradients, list_weights, sum_arrays
from gangline_health.monitors.recompute import RepeatedSteps

if TYPE_CHECKING:
    from gangline.comm.base import Comm, Comms, Store
    from gangline.record import StepRecord
    from gangline.runtime import Runtime

NO_GRADIENT = (0, 0, 0)


class Odd(NamedTuple):
    """Comparison of the bits of one rank with the bits of all replicas of its boxes."""

    replicas: int
    alike: int  # number of replicas with the same bits, this rank included
    outvoted: bool  # True if more than half of the replicas have the same bits, and this rank has other bits


class CorruptionMonitor(Monitor):
    """Monitor that compares checksums, and remembers the last step at which the weights of all replicas agreed."""

    name = "corruption"

    def __init__(self, options: CorruptionOptions, save_every: int | None = None) -> None:
        self.options, self.save_every = options, save_every
        self.agreed: int | None = None  # last step at which replicas had equal weights; None: not compared yet
        self.odd: dict[int, dict[str, Odd]] = {}  # odd rank -> "weights" or "gradients" -> its comparison
        self.alone: list[int] | None = None  # ranks without a replica to compare with; None: not determined yet
        self.untold = False  # True until `alone` is reported
        self.rank, self.ranks, self.device = 0, 1, torch.device("cpu")
        self.apart = 0  # this rank's index along the axes `Runtime.differs`
        self.gradient = NO_GRADIENT  # fingerprint of the gradients of this step, if they are compared
        self.saved: dict[str, Any] = {}  # {step, sums: {array: [dtype, checksum]}} of the newest saved step
        self.stored: dict[str, Any] = {}  # as `saved`, read from the checkpoint that the run continues from
        self.read: tuple[list[str], torch.Tensor] | None = None  # array names, contribution to checksums after the read
        self.damaged: list[str] = []  # names of arrays whose checksum after the read differs from that of the save
        self.begun: int | None = None  # in the first step after a checkpoint was read: its step; else None
        self.recompute = RepeatedSteps(options.recompute_every)

    def describe(self) -> str:
        each = f"every {self.options.every} steps"
        what = "weights and gradients" if self.options.gradients else "weights"
        checks = [f"{what} of replicas compared {each}" if self.ranks > 1 else "no replicas"]
        if self.options.checkpoints and self.save_every:
            checks.append("weights read from a checkpoint compared with the saved weights")
        if self.recompute.every:
            checks.append(f"one step computed twice every {self.recompute.every} steps")
        return ", ".join(checks)

    def explain_unknown(self) -> str:
        if not self.options.recompute_every or self.recompute.every:
            return ""
        return "recomputed steps (compressed gradients depend on the step before, so steps are not computed twice)"

    def attach(self, runtime: Runtime, comms: Comms, store: Store | None, device: torch.device) -> None:
        self.runtime, self.device = runtime, device
        self.rank, self.ranks = comms.rank, comms.world.size
        mesh = runtime.registry.mesh
        self.apart = mesh.index(mesh.coordinate(self.rank), [axis for axis in mesh.axes if axis in runtime.differs])
        self.recompute.attach(runtime, self.rank)

    def before_step(self, step: int) -> None:
        self.recompute.step = step
        self.gradient = NO_GRADIENT
        if self.stored and self.read is None:  # no update was applied since the checkpoint was read
            self.read = sum_arrays(self.runtime, self.device)

    def before_update(self, step: int, loss: float, grad_norm: float) -> Iterable[Verdict]:
        if self.options.gradients and self.ranks > 1 and step % self.options.every == 0:
            self.gradient = compute_fingerprint(list_gradients(self.runtime))
        return ()

    def collective(self, comm: Comm, step: int) -> None:
        self.odd, self.damaged = {}, []
        if self.agreed is None:  # replicas begin equal: they read one checkpoint, or draw from one seed
            self.agreed = step - 1
        self.begun = int(self.stored["step"]) if self.read is not None else None
        self._compare_read(comm)
        self._add_up(comm, step)
        self.recompute.collective(comm, self.device)
        if comm.size == 1:
            return
        if self.alone is None:
            own_row = torch.tensor(
                [[hash_boxes(list_weights(self.runtime)), self.apart]], dtype=torch.int64, device=self.device
            )
            rows = [tuple(row) for row in comm.all_gather(own_row).tolist()]
            self.alone = [rank for rank, row in enumerate(rows) if not row[0] or rows.count(row) == 1]
            self.untold = bool(self.alone) and self.rank == 0
        if (step % self.options.every and self.begun is None) or len(self.alone) == comm.size:
            return
        row = (*compute_fingerprint(list_weights(self.runtime)), *self.gradient, self.apart)
        own_row = torch.tensor([row], dtype=torch.int64, device=self.device)
        rows = comm.all_gather(own_row).tolist()
        for what, columns in (("gradients", slice(3, 6)), ("weights", slice(3))):
            same = [((each[columns][0], each[-1]), *each[columns][1:]) for each in rows]
            for rank, counts in find_odd_ranks(same).items():
                self.odd.setdefault(rank, {})[what] = counts
        if not self.odd:
            self.agreed = step

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _add_up(self, comm: Comm, step: int) -> None:
        """Store the checksums of the full weights in `saved`, if this step is saved."""
        if not self.options.checkpoints or not self.save_every or step % self.save_every:
            return
        names, sums = sum_arrays(self.runtime, self.device)
        total = comm.all_reduce(sums).tolist()
        self.saved = {
            "step": step,
            "sums": {n: [self._get_dtype(n), each] for n, each in zip(names, total, strict=True)},
        }

    def _compare_read(self, comm: Comm) -> None:
        """Compare checksums of weights after the read of a checkpoint with the checksums at its save.

        Arrays that are missing in one of both, or whose dtypes differ, are not compared.
        """
        if self.read is None:
            return
        names, sums = self.read
        read = dict(zip(names, comm.all_reduce(sums).tolist(), strict=True))
        for name, (dtype, checksum) in self.stored["sums"].items():
            if name in read and dtype == self._get_dtype(name) and read[name] != checksum:
                self.damaged.append(name)
        if not self.damaged:
            self.stored = {}
        self.read = None

    def _get_dtype(self, name: str) -> str:
        return str(self.runtime.registry[name].dtype)

    # --- verdicts -----------------------------------------------------------------------------------------------------

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        if self.untold and self.alone:
            self.untold = False
            yield self._report_not_compared(len(self.alone), self.alone)
        if damaged := self.damaged:
            yield self._report_damage(record)
        yield from self.recompute.judge(record.step)
        for rank, odd in self.odd.items():
            first = (self.agreed or 0) + 1
            if self.begun is not None:  # replicas read equal weights, unless the checkpoint or its read was damaged
                first = self.begun + (0 if damaged else 1)
            details: dict[str, int | str] = {"step": record.step, "first": first, "row": 1, "rank": rank}
            details["proven"] = True
            sure = all(each.outvoted for each in odd.values())
            one, what = next(iter(odd.values())), " and the ".join(odd)
            evidence = (
                f"silent data corruption: the {what} of rank {rank} differ from "
                f"{one.replicas - one.alike} of its {one.replicas - 1} other replicas"
            )
            if not sure:
                evidence += "; no majority shows which replica is right"
            if sure:
                details["exclude"] = f"rank {rank}"
            where, confidence = f"rank {rank}", 1.0 if sure else 0.5
            yield Verdict("corruption", where, confidence, evidence, Action.ROLL_BACK, details=details)

    def _report_damage(self, record: StepRecord) -> Verdict:
        step, some = int(self.stored["step"]), ", ".join(self.damaged[:4])
        more = f" and {len(self.damaged) - 4} more" if len(self.damaged) > 4 else ""
        evidence = (
            f"silent data corruption: weights read from the checkpoint of step {step} differ from the saved weights: "
            f"{some}{more}"
        )
        self.stored = {}
        details = {"step": record.step, "first": step, "row": 1, "arrays": self.damaged[:4]}
        return Verdict("corruption", "the checkpoint", 1.0, evidence, Action.ROLL_BACK, details=details)

    def _report_not_compared(self, count: int, alone: list[int]) -> Verdict:
        some = ", ".join(map(str, alone[:8])) + (", ..." if count > 8 else "")
        why = f"the weights of rank {some} have no exact replica"
        if self.runtime.differs:
            why = f"the replicas of rank {some} differ between synchronisations"
        evidence = (
            f"health.monitors.corruption compares the weights of {self.ranks - count} of {self.ranks} ranks; {why}, so "
            "a bit flip there is not detected"
        )
        return Verdict("not-compared", "the run", 1.0, evidence, Action.WARN)

    # --- state --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {} if self.agreed is None else {"agreed": self.agreed}
        if self.saved and self.saved["step"] == self.recompute.step:
            state["saved"] = self.saved
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        self.agreed, self.odd = int(state["agreed"]) if "agreed" in state else None, {}
        self.stored = state.get("saved", {}) if self.options.checkpoints else {}
        self.read = None
        self.recompute.trusted = None


def find_odd_ranks(rows: Sequence[tuple[Any, ...]]) -> dict[int, Odd]:
    """Return the ranks whose bits differ from the majority of their replicas, with the comparison of each.

    rows  for each rank (hash of its boxes, checksums of their bits...); ranks with the same hash are replicas

    If replicas differ and no value has a majority, all of these replicas are returned, and none is outvoted.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    for rank, row in enumerate(rows):
        groups[row[0]].append(rank)
    odd_ranks = {}
    for ranks in groups.values():
        count = Counter(rows[rank][1:] for rank in ranks)
        (most, number), *_ = count.most_common(1)
        majority = 2 * number > len(ranks)
        for rank in ranks if len(count) > 1 else ():
            if rows[rank][1:] != most or not majority:
                odd_ranks[rank] = Odd(len(ranks), count[rows[rank][1:]], majority)
    return odd_ranks
