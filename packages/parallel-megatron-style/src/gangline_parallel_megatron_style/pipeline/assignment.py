"""Assignment of the model's modules to pipeline stages and ranks, and the executor of this rank's stages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from gangline.comm.base import Comm
from gangline.mesh import Mesh
from gangline.model.buffers import iterate_listeners as listeners_of
from gangline.model.compose import Composed
from gangline.model.contracts import StepListener
from gangline_parallel_megatron_style.config import AxesConfig
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.timing import estimate_action_times
from gangline_parallel_megatron_style.layout.stages import partition
from gangline_parallel_megatron_style.pipeline.action_times import UNIFORM
from gangline_parallel_megatron_style.pipeline.actions import Placement, compute_place, compute_stage
from gangline_parallel_megatron_style.pipeline.executor import Executor
from gangline_parallel_megatron_style.pipeline.rank_stages import RankStages
from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES
from gangline_parallel_megatron_style.pipeline.stage import Segment
from gangline_parallel_megatron_style.sharding.arrays import EMBED, HEAD, TIED, ModelLayout


class StageAssignment:
    """The pipeline rank of each block, and the stages and schedule of this rank."""

    def __init__(self, config: AxesConfig, composed: Composed, mesh: Mesh, rank: int) -> None:
        run, plan = composed.run, composed.plan
        self.pp, self.index, self.plan = mesh.size("pp"), mesh.coordinate(rank)["pp"], plan
        self.schedule = config.schedule if self.pp > 1 else "1f1b"
        kind = SCHEDULES[self.schedule]
        self.splits = kind.splits_backward and self.pp > 1
        self.placement: Placement = kind.placement
        self.chunks = config.model_chunks if self.pp > 1 else 1
        self.tree = composed.tree
        self.ranges = partition(config, mesh, self.tree, plan, run.batch.sequence_length)
        homes = [compute_place(self.pp, self.placement, stage)[0] for stage in range(len(self.ranges))]
        blocks = [homes[stage] for stage, stage_blocks in enumerate(self.ranges) for _ in stage_blocks]
        self.ranks: Sequence[int] = (homes[0], *blocks, homes[-1])
        self.blocks = [index for index, home in enumerate(blocks) if home == self.index]
        self.has_head = homes[-1] == self.index
        self.records = config.record and self.pp > 1
        self.times = estimate_action_times(Case.of(run, mesh, (composed.tree, plan))) if self.pp > 1 else UNIFORM
        self.overlap = self.pp > 1 and config.overlaps(plan, mesh)

    def list_segments(self, model: nn.Module, chunk: int, arrays: ModelLayout) -> list[Segment]:
        """Return the modules, in order, of the stage that this rank holds as `chunk`."""
        stage = compute_stage(self.pp, self.placement, self.index, chunk)
        first, last = stage == 0, stage == len(self.ranges) - 1
        plan, segments = self.plan, []
        tied = (TIED,) if TIED in arrays.groups else ()
        if first:
            segments.append(Segment("embed", model.get_submodule(plan.embed), (EMBED, *tied), (EMBED, *tied)))
        for index in self.ranges[stage]:
            group = (f"{plan.blocks}.{index}",)
            segments.append(Segment("block", model.get_submodule(group[0]), group, group))
        if last:
            # on one rank, the tied gradient is complete only after the embedding's backward pass
            alone = self.ranks[0] != self.ranks[-1]
            reduces = (HEAD, *(tied if alone else ()))
            segments.append(Segment("head", model.get_submodule(plan.head), (HEAD, *tied), reduces))
        return segments

    def list_listeners(self, model: nn.Module) -> list[tuple[str, StepListener]]:
        """Return (path of the block, module) of each module on this rank that has `after_step`."""
        homes = {self.plan.embed: self.ranks[0], self.plan.head: self.ranks[-1]}
        paths = [path for path, rank in homes.items() if rank == self.index]
        paths += [f"{self.plan.blocks}.{index}" for index in self.blocks]
        return [
            (self.plan.get_emit_path(inside), module)
            for path in paths
            for inside, module in listeners_of(model.get_submodule(path), path, self.plan)
        ]

    def make_executor(self, stage: RankStages, comm: Comm, device: torch.device) -> Executor:
        """Return the executor of this rank's part of the schedule."""
        clock = partial(_measure_time, device) if self.records else None
        overlap = self.overlap and device.type != "meta"  # a meta-device trace sees only one thread
        return Executor(stage, comm, self.schedule, chunks=self.chunks, times=self.times, clock=clock, overlap=overlap)


def _measure_time(device: torch.device) -> float:
    """Return the current time in seconds, after synchronizing a GPU, so that the time includes the GPU's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.time()
