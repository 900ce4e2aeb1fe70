"""Options of the strategies `3d`, `fsdp`, `hsdp`, `tp` and `pp`: the same fields, other defaults. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from gangline import Problem
from gangline.config import LayoutBounds, NonNegativeInt, OneOf, ParallelConfig, PositiveInt, find_divisors
from gangline.explain.topology import Topology
from gangline.mesh import AXES, Mesh
from gangline_parallel_megatron_style.layout.factor import derive_axis_sizes, find_nearest
from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline.explain.explained import Explained
    from gangline.model.tree import Node
    from gangline.plan import Plan


@dataclass
class AxesConfig(ParallelConfig):
    """Sizes of the five mesh axes, and other options; an unset axis (null) is derived from the number of processes."""

    tp: PositiveInt | None = None  # tensor parallelism (TP) size: number of ranks that shard a matrix; null: derived
    pp: PositiveInt | None = None  # pipeline parallelism (PP) size: number of pipeline ranks; null: derived
    cp: PositiveInt | None = None  # context parallelism (CP) size: number of ranks that split a sequence; null: 1
    dp_replicate: PositiveInt | None = None  # replicated data parallelism size: number of replicas; null: derived
    dp_shard: PositiveInt | None = None  # sharded data parallelism (FSDP) size: number of shards; null: derived
    zero: Literal[0, 1, 2, 3] = 1  # ZeRO stage over dp_shard, cp: 1 optimizer state, 2 + gradients, 3 + weights; 0: off
    schedule: Annotated[str, OneOf(SCHEDULES)] = "1f1b"  # pipeline schedule
    # overlap of forward and backward passes in the schedule dualpipe_v, which hides communication;
    # null: on with expert parallelism, or another fold of more than one rank
    overlap: bool | None = None
    # number of virtual stages (model chunks) per rank; null: 1 or 2, as the pipeline schedule needs
    chunks: PositiveInt | None = None
    stages: list[PositiveInt] | None = None  # number of blocks of each model chunk, in order; null: balanced by cost
    # sequence parallelism (Megatron-LM): with tp, activations outside attention and feed-forward layers are split over
    # tokens
    sequence_parallel: bool = True
    context: Literal["ring", "ulysses"] = "ring"  # context parallelism: ring attention or ulysses (all-to-all of heads)
    # prefetch depth with zero=3: number of blocks whose weights are gathered ahead of the computing block
    prefetch: NonNegativeInt = 1
    offload: bool = False  # CPU offload: master weights and optimizer state in host memory, optimizer step on the CPU
    record: bool = False  # whether a pipeline records the time of each action, for `gangline parallel draw RUN_DIR`
    force: bool = False  # permission for a slow layout: tp over more ranks than a node has GPUs
    topology: Topology = field(default_factory=Topology)  # network topology: nodes and their links

    reduces: ClassVar[bool] = True

    # number of processes on a machine without GPUs, if the axis sizes do not determine the number
    DEFAULT_WORLD: ClassVar[int] = 2
    WISHES: ClassVar[Mapping[str, int]] = {}  # preferred sizes of unset axes, used if they divide the number of ranks
    TAKERS: ClassVar[Sequence[str]] = ("dp_shard", "dp_replicate")  # the first unset axis takes all other ranks

    def list_given(self) -> dict[str, int]:
        """Return the sizes of the axes that the user has set, in mesh order."""
        return {axis: size for axis in AXES if (size := getattr(self, axis)) is not None}

    def count_ranks(self, gpus: int) -> int:
        """Return the number of ranks: all GPUs, or the product of the set axes if the user set every axis of `TAKERS`.

        Without a GPU: `DEFAULT_WORLD` if the product of the set axes divides `DEFAULT_WORLD`, else the product.
        """
        product = prod(self.list_given().values())
        if all(axis in self.list_given() for axis in self.TAKERS):
            return max(1, product)
        if gpus:
            return gpus
        return self.DEFAULT_WORLD if product > 0 and self.DEFAULT_WORLD % product == 0 else max(1, product)

    def size_axes(self, world: int) -> dict[str, int]:
        """Return the sizes of all five axes for `world` ranks. Raises UserError, with near layouts, if none fit."""
        return derive_axis_sizes(world, self.list_given(), self._choose_wishes(world), self.TAKERS)

    def _choose_wishes(self, world: int) -> Mapping[str, int]:
        return self.WISHES

    def check(self, run: Run) -> list[Problem]:
        from gangline_parallel_megatron_style.layout.check import check

        return check(self, run)

    def list_notices(self, run: Run) -> list[str]:
        """Return warnings about a layout that works but is a poor choice. The run must have passed `check`."""
        from gangline.config.check import count_ranks
        from gangline_parallel_megatron_style.cost.case import Case
        from gangline_parallel_megatron_style.layout.notices import find_notices

        return find_notices(Case.of(run, Mesh.of(self.size_axes(count_ranks(run)))))

    def count_microbatches(self, share: int, mesh: Mesh) -> int:
        """Return the number of microbatches per rank and step if batch.micro_size is unset.

        share: number of samples of a rank in a step
        Without a pipeline: 1. With p pipeline ranks: the divisor of `share` that is nearest to 4p, multiples of p
        first, because an interleaved schedule runs p microbatches at a time. With 4p microbatches a 1F1B pipeline idles
        (p - 1) / (5p - 1) < 1/5 of the time; more microbatches save little idle time and make the matmuls smaller.
        """
        stages = mesh.size("pp")
        if stages == 1:
            return 1
        whole_rounds = [number for number in find_divisors(share) if number % stages == 0]
        return find_nearest(4 * stages, whole_rounds or find_divisors(share), 1)[0]

    def explain(
        self, run: Run, mesh: Mesh, model: tuple[Node, Plan] | None = None, topology: Topology | None = None
    ) -> Explained:
        from gangline_parallel_megatron_style.cost.case import Case
        from gangline_parallel_megatron_style.explain.explained import explain_case

        case = Case.of(run, mesh, model)
        if topology is not None:
            case = replace(case, config=replace(case.config, topology=topology))
        return explain_case(case, run.job.device != "cpu", run.precision.get_matmul_format())

    def iterate_layouts(self, run: Run, world: int) -> Iterator[AxesConfig]:
        """Yield a config for every size of the unset axes, every ZeRO stage, and every pipeline schedule."""
        from gangline_parallel_megatron_style.layout.candidates import iterate_candidates

        return iterate_candidates(self, run, world)

    def compute_bounds(
        self, run: Run, mesh: Mesh, model: tuple[Node, Plan], topology: Topology | None = None
    ) -> LayoutBounds | None:
        from gangline_parallel_megatron_style.cost.bounds import compute_layout_bounds

        return compute_layout_bounds(self, run, mesh, model, topology)

    def overlaps(self, plan: Plan, mesh: Mesh) -> bool:
        """Return whether forward and backward passes overlap, so that each hides the other's communication in folds."""
        from gangline_parallel_megatron_style.sharding.ranks import find_active_fold

        if not SCHEDULES[self.schedule].pairs:
            return False
        return (
            any(find_active_fold(plan, mesh, fold.name) for fold in plan.folds)
            if self.overlap is None
            else self.overlap
        )

    @property
    def model_chunks(self) -> int:
        """Return the number of model chunks per rank: `chunks`, or the schedule's default if `chunks` is unset."""
        return self.chunks or SCHEDULES[self.schedule].chunks


@dataclass
class ThreeD(AxesConfig):
    """Tensor, pipeline, context and sharded data parallelism; unset axes: tp 2, pp 2, all other ranks in dp_shard."""

    DEFAULT_WORLD = 8
    WISHES = {"tp": 2, "pp": 2}
    TAKERS = ("dp_shard", "dp_replicate", "pp", "tp")


@dataclass
class Fsdp(AxesConfig):
    """Shards weights, gradients and optimizer state over all ranks; gathers each block's weights when needed."""

    zero: Literal[0, 1, 2, 3] = 3


@dataclass
class Hsdp(AxesConfig):
    """Shards the state like fsdp inside a group of ranks (a node, or half of the ranks); replicates it over groups."""

    zero: Literal[0, 1, 2, 3] = 3

    DEFAULT_WORLD = 4
    TAKERS = ("dp_replicate", "dp_shard")

    def _choose_wishes(self, world: int) -> Mapping[str, int]:
        open_ranks = max(1, world // max(1, prod(self.list_given().values())))
        inside = [d for d in find_divisors(open_ranks) if d <= self.topology.gpus_per_node and d < open_ranks]
        return {"dp_shard": inside[-1] if inside and inside[-1] > 1 else open_ranks}


@dataclass
class Tp(AxesConfig):
    """Shards every matrix over all ranks (tensor parallelism)."""

    TAKERS = ("tp", "dp_shard", "dp_replicate")


@dataclass
class Pp(AxesConfig):
    """Assigns consecutive blocks of the model to each rank (pipeline parallelism)."""

    TAKERS = ("pp", "dp_shard", "dp_replicate")
