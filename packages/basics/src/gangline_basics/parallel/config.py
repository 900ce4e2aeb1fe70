"""Configurations of the built-in strategies. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gangline.config.ranges import PositiveFloat, PositiveInt
from gangline.config.schema import ParallelConfig
from gangline.errors import Problem, UserError
from gangline.plugin.parts import Part

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline.explain.explained import Explained
    from gangline.explain.topology import Topology
    from gangline.mesh import Mesh
    from gangline.model.tree import Node
    from gangline.plan import Plan


@dataclass
class Single(ParallelConfig):
    """One process."""

    groups: PositiveInt = 1  # number of data ranks to simulate in the sum of gradients, as a reference for ddp

    def count_ranks(self, gpus: int) -> int:
        return 1

    def size_axes(self, world: int) -> dict[str, int]:
        """Return {}, because one process has no axes. Raises UserError for more than one process."""
        if world != 1:
            raise UserError(
                f"parallel=single supports one process, and this job has {world} processes.",
                "To train on one process:  launch.processes=1",
                "To split the batch over processes:  parallel=ddp",
            )
        return {}

    def explain(
        self, run: Run, mesh: Mesh, model: tuple[Node, Plan] | None = None, topology: Topology | None = None
    ) -> Explained:
        from gangline_basics.explain.replicated import explain_replicated

        return explain_replicated(run, mesh, model, topology)

    def check(self, run: Run) -> list[Problem]:
        from gangline_basics.advice import suggest_nearest

        size, micro = run.batch.global_size, run.batch.micro_size or 1
        if self.groups == 1 or not size % (self.groups * micro):
            return []
        fitting = [groups for groups in range(1, size + 1) if not size % (groups * micro)]
        return [
            Problem(
                f"batch.global_size={size} is not divisible by parallel.groups={self.groups} × "
                f"batch.micro_size={micro}.",
                "Each group sums the gradients of an equal share of the batch, like a data-parallel rank.",
                suggest_nearest(run, ({"parallel.groups": groups} for groups in reversed(fitting))),
            )
        ]


@dataclass
class Ddp(ParallelConfig):
    """Data parallelism (DDP): every rank holds the complete model and reads its share of the batch."""

    reduces: ClassVar[bool] = True

    bucket_mb: PositiveFloat = 25.0  # bucket size of the gradient all-reduce, in MiB; a bucket is sent when it is full

    def count_ranks(self, gpus: int) -> int:
        return gpus or 2

    def size_axes(self, world: int) -> dict[str, int]:
        return {"dp_replicate": world}

    def explain(
        self, run: Run, mesh: Mesh, model: tuple[Node, Plan] | None = None, topology: Topology | None = None
    ) -> Explained:
        from gangline_basics.explain.replicated import explain_replicated

        return explain_replicated(run, mesh, model, topology, bucket=int(self.bucket_mb * 2**20))


PARTS = (
    Part(
        name="single",
        config=Single,
        default=True,
        build="gangline_basics.parallel.single:build",
        summary="One process: the reference for tests of all other layouts",
    ),
    Part(
        name="ddp",
        config=Ddp,
        build="gangline_basics.parallel.ddp:build",
        summary="Data parallelism: complete model on every rank, gradients all-reduced during the backward pass",
        words={"dp data_parallel data_parallel_size ddp": "parallel=ddp launch.processes={n}"},
    ),
)
