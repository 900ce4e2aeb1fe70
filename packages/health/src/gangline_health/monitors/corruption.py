"""Silent data corruption: ranks that hold the same boxes of the weights compare what the bits add up to.

Replicas take the same steps on the same gradients, so their weights agree to the last bit; a flipped bit in one of
them, in memory or in a product, stays in its weights. Every so many steps each rank adds up the words of its boxes,
plainly and weighted by their place, modulo 2^64 (Fletcher's idea): a pass over the weights, and 24 bytes a rank on the
wire. Of three replicas and more the odd one out is named; of two it is known that they differ. A rank whose boxes no
other holds exactly has none to be compared with, and that is said.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from gangline.health import Action, Verdict
from gangline_health.config import CorruptionOptions
from gangline_health.monitors.base import Monitor

if TYPE_CHECKING:
    from gangline.checkpoint import Shard
    from gangline.comm import Comm, Comms, Store
    from gangline.strategy import Runtime
    from gangline.track import StepRecord

CHUNK = 1 << 22  # words that are widened to 64 bits at once


class CorruptionMonitor(Monitor):
    """Knows between two comparisons only the step of the last one on which all agreed."""

    name = "corruption"

    def __init__(self, options: CorruptionOptions) -> None:
        self.options = options
        self.agreed: int | None = None  # the last step at which replicas had the same weights; None: not known yet
        self.odd: dict[int, tuple[int, int]] = {}  # rank -> replicas, of them equal
        self.alone: list[int] | None = None  # ranks that are compared with no other; None: not looked at yet
        self.untold = False  # whether that has to be said
        self.rank, self.ranks = 0, 1

    def watches(self) -> str:
        if self.ranks == 1:
            return "nothing: one rank has no replicas"
        return f"weights of ranks that hold the same boxes compared each {self.options.every} steps"

    def attach(self, runtime: Runtime, comms: Comms, store: Store | None, device: torch.device) -> None:
        self.runtime, self.device = runtime, device
        self.rank, self.ranks = comms.rank, comms.world.size

    def collective(self, comm: Comm, step: int) -> None:
        self.odd = {}
        if self.agreed is None:  # what all have read from one checkpoint, or drawn from one seed, is the same
            self.agreed = step - 1
        if comm.size == 1:
            return
        if self.alone is None:
            mine = torch.tensor([held(self.runtime)], dtype=torch.int64, device=self.device)
            rows = comm.all_gather(mine).flatten().tolist()
            self.alone = [rank for rank, boxes in enumerate(rows) if not boxes or rows.count(boxes) == 1]
            self.untold = bool(self.alone) and self.rank == 0
        if step % self.options.every or len(self.alone) == comm.size:
            return
        mine = torch.tensor([fingerprint(self.runtime)], dtype=torch.int64, device=self.device)
        self.odd = odd_ones([tuple(row) for row in comm.all_gather(mine).tolist()])
        if not self.odd:
            self.agreed = step

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        if self.untold and self.alone:
            self.untold = False
            yield self._not_compared(len(self.alone), self.alone)
        for rank, (replicas, alike) in self.odd.items():
            first = (self.agreed or 0) + 1
            details: dict[str, int | str] = {"step": record.step, "first": first, "row": 1, "rank": rank}
            sure = alike == 1 and replicas > 2
            evidence = f"the weights of rank {rank} are those of {alike} of {replicas} replicas"
            if not sure:
                evidence += "; no majority says which are right"
            if sure:
                details["exclude"] = f"rank {rank}"
            where, confidence = f"rank {rank}", 1.0 if sure else 0.5
            yield Verdict("corruption", where, confidence, evidence, Action.ROLL_BACK, details=details)

    def _not_compared(self, count: int, alone: list[int]) -> Verdict:
        some = ", ".join(map(str, alone[:8])) + (", ..." if count > 8 else "")
        evidence = (
            f"health.on.corruption compares the weights of {self.ranks - count} of {self.ranks} ranks; nobody else "
            f"holds exactly what rank {some} holds, so that a flipped bit is not found there"
        )
        return Verdict("not-compared", "the run", 1.0, evidence, Action.WARN)

    def state(self) -> dict[str, int]:
        return {} if self.agreed is None else {"agreed": self.agreed}

    def load_state(self, state: dict[str, int]) -> None:
        self.agreed, self.odd = int(state["agreed"]) if "agreed" in state else None, {}


def odd_ones(rows: Sequence[tuple[int, ...]]) -> dict[int, tuple[int, int]]:
    """Rank -> (replicas of what it holds, how many of them have its bits), for ranks that are not with the majority.

    rows: by rank, (which boxes it holds, sums of their bits...). Without a majority all of the group are named.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for rank, row in enumerate(rows):
        groups[row[0]].append(rank)
    found = {}
    for ranks in groups.values():
        count = Counter(rows[rank][1:] for rank in ranks)
        (most, number), *_ = count.most_common(1)
        for rank in ranks if len(count) > 1 else ():
            if rows[rank][1:] != most or 2 * number <= len(ranks):
                found[rank] = (len(ranks), count[rows[rank][1:]])
    return found


def held(runtime: Runtime) -> int:
    """Which boxes of the model this rank holds: a hash of 64 bits, 0 where it holds none."""
    boxes = [(shard.name, shard.offset, tuple(shard.local.shape)) for shard in _sorted(runtime)]
    digest = hashlib.blake2b(repr(boxes).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) if boxes else 0


def fingerprint(runtime: Runtime) -> tuple[int, int, int]:
    """(which boxes of the model this rank holds, the sum of their words, the sum weighted by place)."""
    sums: dict[torch.device, torch.Tensor] = {}  # a shard is added up where it is
    for number, shard in enumerate(_sorted(runtime)):
        device = shard.local.device
        if device not in sums:
            sums[device] = torch.zeros(2, dtype=torch.int64, device=device)
        plain, weighted = sums[device]
        bits, odd = words(shard.local), 2 * number + 1  # an odd factor loses no bit modulo 2^64
        for at in range(0, bits.numel(), CHUNK):
            part = bits[at : at + CHUNK].to(torch.int64)
            place = torch.arange(at + 1, at + 1 + part.numel(), dtype=torch.int64, device=device)
            plain += part.sum() * odd
            weighted += (part * place).sum() * odd
    total = torch.zeros(2, dtype=torch.int64)
    for each in sums.values():
        total += each.cpu()
    return held(runtime), int(total[0]), int(total[1])


def _sorted(runtime: Runtime) -> list[Shard]:
    return sorted(runtime.shards(), key=lambda shard: (shard.name, shard.offset))


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as whole numbers, one for each element."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(kinds[tensor.element_size()]).reshape(-1)
