"""Silent data corruption: ranks that hold the same boxes of the weights compare what the bits add up to.

Replicas take the same steps on the same gradients, so their weights agree to the last bit; a flipped bit in one of
them, in memory or in a product, stays in its weights. Every so many steps each rank adds up the words of its boxes,
plainly and weighted by their place, modulo 2^64 (Fletcher's idea): a pass over the weights, and 24 bytes a rank on the
wire. Of three replicas and more the odd one out is named; of two it is known that they differ.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from gangline.health import Action, Verdict
from gangline_health.config import CorruptionOptions
from gangline_health.monitors.base import Monitor

if TYPE_CHECKING:
    from gangline.comm import Comm, Comms, Store
    from gangline.strategy import Runtime
    from gangline.track import StepRecord

CHUNK = 1 << 22  # words that are widened to 64 bits at once
HOST = 64  # bytes of a machine's name


class CorruptionMonitor(Monitor):
    """Knows between two comparisons only the step of the last one on which all agreed."""

    name = "corruption"

    def __init__(self, options: CorruptionOptions) -> None:
        self.options = options
        self.agreed = 0  # the last step at which replicas had the same weights
        self.odd: dict[int, tuple[str, int, int]] = {}  # rank -> its machine, replicas, of them equal

    def watches(self) -> str:
        return f"weights of replicas compared each {self.options.every} steps"

    def attach(self, runtime: Runtime, comms: Comms, store: Store | None, device: torch.device) -> None:
        self.runtime, self.device = runtime, device

    def collective(self, comm: Comm, step: int) -> None:
        self.odd = {}
        if step % self.options.every or comm.size == 1:
            return
        mine = torch.tensor([fingerprint(self.runtime)], dtype=torch.int64, device=self.device)
        rows = [tuple(row) for row in comm.all_gather(mine).tolist()]
        odd = odd_ones(rows)
        if not odd:
            self.agreed = step
            return
        name = os.uname().nodename.encode()[:HOST].ljust(HOST, b"\0")
        names = comm.all_gather(torch.tensor([list(name)], dtype=torch.uint8, device=self.device)).cpu()
        for rank, (replicas, alike) in odd.items():
            self.odd[rank] = (bytes(names[rank].tolist()).rstrip(b"\0").decode(), replicas, alike)

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        for rank, (host, replicas, alike) in self.odd.items():
            details: dict[str, int | str] = {"step": record.step, "first": self.agreed + 1, "row": 1, "rank": rank}
            sure = alike == 1 and replicas > 2
            evidence = f"the weights of rank {rank} on {host} are those of {alike} of {replicas} replicas"
            if not sure:
                evidence += "; no majority says which are right"
            if sure:
                details["host"] = host
            where, confidence = f"rank {rank}", 1.0 if sure else 0.5
            yield Verdict("corruption", where, confidence, evidence, Action.ROLL_BACK, details=details)

    def state(self) -> dict[str, int]:
        return {"agreed": self.agreed}

    def load_state(self, state: dict[str, int]) -> None:
        self.agreed, self.odd = int(state.get("agreed", 0)), {}


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


def fingerprint(runtime: Runtime) -> tuple[int, int, int]:
    """(which boxes of the model this rank holds, the sum of their words, the sum weighted by place)."""
    shards = sorted(runtime.shards(), key=lambda shard: (shard.name, shard.offset))
    boxes = repr([(shard.name, shard.offset, tuple(shard.local.shape)) for shard in shards])
    held = int.from_bytes(hashlib.blake2b(boxes.encode(), digest_size=8).digest(), "little", signed=True)
    device = shards[0].local.device if shards else "cpu"
    plain, weighted = torch.zeros(2, dtype=torch.int64, device=device)
    for number, shard in enumerate(shards):
        bits, odd = words(shard.local), 2 * number + 1  # an odd factor loses no bit modulo 2^64
        for at in range(0, bits.numel(), CHUNK):
            part = bits[at : at + CHUNK].to(torch.int64)
            place = torch.arange(at + 1, at + 1 + part.numel(), dtype=torch.int64, device=device)
            plain += part.sum() * odd
            weighted += (part * place).sum() * odd
    return held, int(plain), int(weighted)


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as whole numbers, one for each element."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(kinds[tensor.element_size()]).reshape(-1)
