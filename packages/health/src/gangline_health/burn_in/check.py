"""Health check `health=burn_in`: measures all ranks before the first step, and again if a restart gets other nodes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gangline.comm.objects import gather_json
from gangline.health import Action, HealthCheck, Verdict
from gangline.launch.network import name_of_this_node
from gangline.storage.files import read_regular, write_whole
from gangline_basics.cluster.file import load_cluster, save_cluster
from gangline_health.burn_in import measure
from gangline_health.burn_in.config import BurnInHealth
from gangline_health.burn_in.judge import RankRates, build_cluster, find_bad_ranks, find_slow_links

if TYPE_CHECKING:
    from gangline.comm.base import Comm, Comms, Store
    from gangline.config import Run
    from gangline.optimizer import Optimizer
    from gangline.record import StepRecord
    from gangline.runtime import Runtime

LOGS, FILE = "logs", "burn-in.json"
CLUSTER = "cluster.yaml"  # name of the cluster file in the run directory
SMALL_MESSAGE = 8  # size in bytes of the message whose transfer time counts as the latency


class BurnInCheck(HealthCheck):
    """Health check that measures all ranks once, before the first step; it does not observe steps."""

    def __init__(self, config: BurnInHealth, run: Run) -> None:
        self.config = config
        self.run_dir = None if run.job.dir is None else Path(run.job.dir)

    def attach(
        self, runtime: Runtime, optimizer: Optimizer, comms: Comms, store: Store | None, device: torch.device
    ) -> None:
        self.world, self.rank, self.device = comms.world, comms.rank, device

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        return ()

    def before_run(self) -> Iterable[Verdict]:
        answers = gather_json(self.world, [name_of_this_node(), read_measured_nodes(self.run_dir)])
        nodes = [node for node, _ in answers]
        if answers[0][1] == nodes:  # these nodes were measured and are good: skip burn-in, so that a restart is fast
            return []
        rows = [RankRates.of(row) for row in gather_json(self.world, self._measure(nodes))]
        if self.rank:  # only rank 0 reports, for all ranks
            return []
        return self._judge(rows)

    def _judge(self, rows: list[RankRates]) -> list[Verdict]:
        on_cpu = self.device.type == "cpu"
        bad, links = find_bad_ranks(rows, self.config, on_cpu), find_slow_links(rows, self.config, on_cpu)
        kind = "cpu" if on_cpu else f"cuda, {torch.cuda.get_device_name(self.device)}"
        about = f"{len(rows)} ranks on {len({row.node for row in rows})} nodes, {kind}"
        if self.run_dir is not None:
            content = {
                "version": 1,
                "ranks": [row.to_dict() for row in rows],
                "bad": [{"rank": one.rank, "node": one.node, "why": one.why} for one in bad],
                "links": links,
            }
            write_whole(Path(self.run_dir, LOGS, FILE), json.dumps(content, indent=1))
            small = measure.LARGE[self.device.type][1]
            when = time.strftime("%Y-%m-%d", time.gmtime())
            save_cluster(
                build_cluster(rows, load_cluster(self.config.base), about, when, small), self.run_dir / CLUSTER
            )
        action = Action.STOP if self.config.act == "stop" else Action.WARN
        verdicts = [
            Verdict("burn-in", f"rank {one.rank}", 1.0, f"{'; '.join(one.why)} (node {one.node})", action,
                    details={"rank": one.rank, "node": one.node, "exclude": f"rank {one.rank}"})
            for one in bad
        ]  # fmt: skip
        verdicts += [Verdict("burn-in-link", "the network", 0.8, link, Action.WARN) for link in links]
        if not verdicts:
            evidence = f"{about}: all ranks passed burn-in"
            verdicts.append(Verdict("burn-in", "the run", 1.0, evidence, Action.NOTE))
        return verdicts

    def _measure(self, nodes: list[str]) -> dict[str, Any]:
        """Return the measurements of this rank as a dict of `RankRates`. All ranks must call it together."""
        comm, device, options = self.world, self.device, self.config
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        large, small = measure.LARGE[device.type]
        comm.barrier()
        rates = {
            "matmul": measure.measure_matmul(device, dtype, large, options.seconds),
            "small_matmul": measure.measure_matmul(device, dtype, small, options.seconds / 2),
            "memory": measure.measure_memory_bandwidth(device, options.seconds),
        }
        wrong = [] if measure.is_matmul_exact(device, dtype) else [f"an integer matmul in {dtype}"]
        if not is_all_reduce_exact(comm, device):
            wrong.append("an all-reduce over all ranks")
        own = nodes[self.rank]
        same = [rank for rank, node in enumerate(nodes) if node == own]
        others = [rank for rank, node in enumerate(nodes) if node != own]
        again = options.repetitions
        peer_rates: dict[str, float] = {}
        for peers in measure.plan_rounds(comm.size, options.pairs):
            peer = peers[self.rank]
            rate = measure.measure_exchange(comm, device, peer, again)
            if peer is not None:
                peer_rates[str(peer)] = rate
        neighbour = measure.plan_rounds(comm.size, 1)[0][self.rank] if comm.size > 1 else None
        message = measure.measure_exchange(comm, device, neighbour, again, SMALL_MESSAGE) if comm.size > 1 else 0.0
        return RankRates(
            rank=self.rank,
            node=own,
            **rates,
            latency=SMALL_MESSAGE / message if message else 0.0,
            memory_bytes=get_memory_bytes(device, len(same)),
            all_reduce=measure.all_reduce(comm, device, again),
            to_node=measure.all_to_all(comm, device, same, again) if comm.size > 1 else 0.0,
            to_others=measure.all_to_all(comm, device, others, again) if len(set(nodes)) > 1 else 0.0,
            sent=peer_rates,
            wrong=tuple(wrong),
        ).to_dict()


def is_all_reduce_exact(comm: Comm, device: torch.device) -> bool:
    """Return whether an all-reduce of integers is exact.

    Uses float64, which represents integers up to 2^53 exactly; float32 only up to 2^24, which about 180 ranks exceed.
    """
    own = torch.arange(1024, dtype=torch.float64, device=device)
    total = comm.all_reduce((own * (comm.index + 1)).contiguous())
    return torch.equal(total, own * (comm.size * (comm.size + 1) // 2))


def get_memory_bytes(device: torch.device, ranks: int) -> float:
    """Return the memory of the accelerator in bytes; on CPU, the machine's memory divided by its `ranks` ranks."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / max(1, ranks)


def read_measured_nodes(run_dir: Path | None) -> list[str] | None:
    """Return the node of each rank in the last burn-in of this run; None without a burn-in that found no bad rank."""
    if run_dir is None:
        return None
    try:
        content = json.loads(read_regular(Path(run_dir, LOGS, FILE)))
        return None if content["bad"] else [row["node"] for row in content["ranks"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
