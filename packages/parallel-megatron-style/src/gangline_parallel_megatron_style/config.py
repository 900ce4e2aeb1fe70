"""Options of the strategies `3d`, `fsdp`, `hsdp`, `tp` and `pp`: one set, other defaults. Torch-free."""

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
    """All five axes, each of which may be left open (null) and is then derived from the number of processes."""

    tp: PositiveInt | None = None  # tensor parallelism: ranks that share every matrix; null: derived
    pp: PositiveInt | None = None  # pipeline parallelism: groups of ranks that share the blocks; null: derived
    cp: PositiveInt | None = None  # context parallelism: ranks that share every sequence; null: 1
    dp_replicate: PositiveInt | None = None  # data parallelism, whole copies: ranks that share the batch; null: derived
    dp_shard: PositiveInt | None = None  # data parallelism, sharded: ranks that share batch and state; null: derived
    zero: Literal[0, 1, 2, 3] = 1  # what dp_shard and cp cut: 1 optimizer state, 2 and gradients, 3 and weights; 0 none
    schedule: Annotated[str, OneOf(SCHEDULES)] = "1f1b"  # order of the pipeline
    overlap: bool | None = None  # with dualpipe_v: forwards take turns with backwards; null: where a fold has transfers
    chunks: PositiveInt | None = None  # model chunks a pipeline rank has; null: as the schedule needs (1 or 2)
    stages: list[PositiveInt] | None = None  # blocks of each model chunk, first to last; null: balanced by their cost
    sequence_parallel: bool = True  # with tp: between the matrices each rank keeps its part of the sequence only
    context: Literal["ring", "ulysses"] = "ring"  # with cp: keys and values go round (ring), or heads for tokens
    prefetch: NonNegativeInt = 1  # with zero=3: how many blocks' weights are gathered ahead of the one being computed
    offload: bool = False  # with a GPU: keep master weights and optimizer state in host memory, and step there
    record: bool = False  # with pp: time every action of every step, for `gangline parallel draw RUN_DIR`
    force: bool = False  # allow what is refused because it is slow: tp wider than a node
    topology: Topology = field(default_factory=Topology)  # the network

    reduces: ClassVar[bool] = True

    DEFAULT_WORLD: ClassVar[int] = 2  # processes without a GPU, where no axis says otherwise
    WISHES: ClassVar[Mapping[str, int]] = {}  # what open axes take where it divides
    TAKERS: ClassVar[Sequence[str]] = ("dp_shard", "dp_replicate")  # the first open one takes what is left

    def list_given(self) -> dict[str, int]:
        """The axes that the user gave a size, in mesh order."""
        return {axis: size for axis in AXES if (size := getattr(self, axis)) is not None}

    def count_ranks(self, gpus: int) -> int:
        """All GPUs; without one the part's default, or the product of the named axes where that does not fit it."""
        product = prod(self.list_given().values())
        if all(axis in self.list_given() for axis in self.TAKERS):
            return max(1, product)
        if gpus:
            return gpus
        return self.DEFAULT_WORLD if product > 0 and self.DEFAULT_WORLD % product == 0 else max(1, product)

    def size_axes(self, world: int) -> dict[str, int]:
        """Sizes of all five axes; raises UserError, with the nearest layouts that fit, where there is none."""
        return derive_axis_sizes(world, self.list_given(), self._choose_wishes(world), self.TAKERS)

    def _choose_wishes(self, world: int) -> Mapping[str, int]:
        return self.WISHES

    def check(self, run: Run) -> list[Problem]:
        from gangline_parallel_megatron_style.layout.check import check

        return check(self, run)

    def list_notices(self, run: Run) -> list[str]:
        """What works but is not what one would choose, for a run that `check` found nothing wrong with."""
        from gangline.config.check import count_ranks
        from gangline_parallel_megatron_style.cost.case import Case
        from gangline_parallel_megatron_style.layout.notices import find_notices

        return find_notices(Case.of(run, Mesh.of(self.size_axes(count_ranks(run)))))

    def count_microbatches(self, share: int, mesh: Mesh) -> int:
        """Microbatches that a rank's `share` of the batch is cut into where the run leaves batch.micro_size open.

        Without a pipeline one. With p stages the divisor of `share` nearest to 4p, multiples of p preferred (an
        interleaved schedule runs p microbatches at a time): at 4p a 1F1B pipeline idles (p - 1) / (5p - 1) < 1/5 of
        the time, and smaller microbatches would make smaller products for less and less of it.
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
        return explain_case(case, run.job.device != "cpu", run.precision.get_product_format())

    def iterate_layouts(self, run: Run, world: int) -> Iterator[AxesConfig]:
        """Every size of the axes that are left open, what ZeRO cuts, and orders of the pipeline."""
        from gangline_parallel_megatron_style.layout.candidates import iterate_candidates

        return iterate_candidates(self, run, world)

    def compute_bounds(
        self, run: Run, mesh: Mesh, model: tuple[Node, Plan], topology: Topology | None = None
    ) -> LayoutBounds | None:
        from gangline_parallel_megatron_style.cost.bounds import compute_layout_bounds

        return compute_layout_bounds(self, run, mesh, model, topology)

    def overlaps(self, plan: Plan, mesh: Mesh) -> bool:
        """Whether forwards take turns with backwards, each hiding the other's transfers over folds."""
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
        """`chunks` with its default filled in."""
        return self.chunks or SCHEDULES[self.schedule].chunks


@dataclass
class ThreeD(AxesConfig):
    """Tensor, pipeline, context and sharded data parallelism together; open axes: tp 2, pp 2, the rest dp_shard."""

    DEFAULT_WORLD = 8
    WISHES = {"tp": 2, "pp": 2}
    TAKERS = ("dp_shard", "dp_replicate", "pp", "tp")


@dataclass
class Fsdp(AxesConfig):
    """Weights, gradients and optimizer state cut over all ranks; each block's weights are gathered when needed."""

    zero: Literal[0, 1, 2, 3] = 3


@dataclass
class Hsdp(AxesConfig):
    """As fsdp inside a group of ranks (a node, or half of what there is), with copies over the groups."""

    zero: Literal[0, 1, 2, 3] = 3

    DEFAULT_WORLD = 4
    TAKERS = ("dp_replicate", "dp_shard")

    def _choose_wishes(self, world: int) -> Mapping[str, int]:
        open_ranks = max(1, world // max(1, prod(self.list_given().values())))
        inside = [d for d in find_divisors(open_ranks) if d <= self.topology.gpus_per_node and d < open_ranks]
        return {"dp_shard": inside[-1] if inside and inside[-1] > 1 else open_ranks}


@dataclass
class Tp(AxesConfig):
    """Every matrix cut over all ranks."""

    TAKERS = ("tp", "dp_shard", "dp_replicate")


@dataclass
class Pp(AxesConfig):
    """The blocks cut over all ranks, in order."""

    TAKERS = ("pp", "dp_shard", "dp_replicate")
