"""Options of the strategies `3d`, `fsdp`, `hsdp`, `tp` and `pp`: one set with different defaults. Torch-free."""

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
    """All five axes; an axis that is unset (null) is derived from the number of processes."""

    tp: PositiveInt | None = None  # tensor parallelism (TP) size: ranks that shard every matrix; null: derived
    pp: PositiveInt | None = None  # pipeline parallelism (PP) size: ranks that divide the blocks; null: derived
    cp: PositiveInt | None = None  # context parallelism (CP) size: ranks that split every sequence; null: 1
    dp_replicate: PositiveInt | None = None  # replicated data parallelism: ranks with full copies; null: derived
    dp_shard: PositiveInt | None = None  # sharded data parallelism (FSDP): ranks that share the state; null: derived
    zero: Literal[0, 1, 2, 3] = 1  # ZeRO stage over dp_shard, cp: 1 optimizer state, 2 + gradients, 3 + weights; 0: off
    schedule: Annotated[str, OneOf(SCHEDULES)] = "1f1b"  # pipeline schedule
    overlap: bool | None = None  # overlap of forward and backward passes in dualpipe_v; null: on if a fold communicates
    chunks: PositiveInt | None = None  # virtual pipeline stages (model chunks) per rank; null: the schedule's, 1 or 2
    stages: list[PositiveInt] | None = None  # number of blocks of each model chunk, in order; null: balanced by cost
    sequence_parallel: bool = True  # sequence parallelism with tp: activations between matmuls are split over tokens
    context: Literal["ring", "ulysses"] = "ring"  # context parallelism: ring attention or ulysses (all-to-all of heads)
    prefetch: NonNegativeInt = 1  # number of blocks whose weights are gathered ahead of use, with zero=3
    offload: bool = False  # CPU offload: master weights and optimizer state in host memory, optimizer step there
    record: bool = False  # recording of every action's time with pp, for `gangline parallel draw RUN_DIR`
    force: bool = False  # permission for a slow layout: tp wider than a node
    topology: Topology = field(default_factory=Topology)  # network topology

    reduces: ClassVar[bool] = True

    DEFAULT_WORLD: ClassVar[int] = 2  # number of processes without a GPU, if the sizes of the axes do not set it
    WISHES: ClassVar[Mapping[str, int]] = {}  # sizes of unset axes, used if they divide
    TAKERS: ClassVar[Sequence[str]] = ("dp_shard", "dp_replicate")  # the first unset one takes all remaining ranks

    def list_given(self) -> dict[str, int]:
        """Return the axes that the user gave a size, in mesh order."""
        return {axis: size for axis in AXES if (size := getattr(self, axis)) is not None}

    def count_ranks(self, gpus: int) -> int:
        """Return the number of ranks: all GPUs, or the product of the given axes if they include all of `TAKERS`.

        Without a GPU `DEFAULT_WORLD` if the product of the given axes divides it, else that product.
        """
        product = prod(self.list_given().values())
        if all(axis in self.list_given() for axis in self.TAKERS):
            return max(1, product)
        if gpus:
            return gpus
        return self.DEFAULT_WORLD if product > 0 and self.DEFAULT_WORLD % product == 0 else max(1, product)

    def size_axes(self, world: int) -> dict[str, int]:
        """Return the sizes of all five axes. Raises UserError, with the nearest layouts, if `world` does not divide."""
        return derive_axis_sizes(world, self.list_given(), self._choose_wishes(world), self.TAKERS)

    def _choose_wishes(self, world: int) -> Mapping[str, int]:
        return self.WISHES

    def check(self, run: Run) -> list[Problem]:
        from gangline_parallel_megatron_style.layout.check import check

        return check(self, run)

    def list_notices(self, run: Run) -> list[str]:
        """Return warnings about a layout that works but is a poor choice, for a run without problems in `check`."""
        from gangline.config.check import count_ranks
        from gangline_parallel_megatron_style.cost.case import Case
        from gangline_parallel_megatron_style.layout.notices import find_notices

        return find_notices(Case.of(run, Mesh.of(self.size_axes(count_ranks(run)))))

    def count_microbatches(self, share: int, mesh: Mesh) -> int:
        """Return the number of microbatches of a rank's `share` of the batch if the run leaves batch.micro_size unset.

        Without a pipeline 1. With p stages the divisor of `share` nearest to 4p, multiples of p preferred (an
        interleaved schedule runs p microbatches at a time): at 4p a 1F1B pipeline idles (p - 1) / (5p - 1) < 1/5 of the
        time, and more, smaller microbatches would make smaller matmuls for less and less of it.
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
        """Yield a config for every size of the unset axes, every ZeRO stage, and every pipeline schedule."""
        from gangline_parallel_megatron_style.layout.candidates import iterate_candidates

        return iterate_candidates(self, run, world)

    def compute_bounds(
        self, run: Run, mesh: Mesh, model: tuple[Node, Plan], topology: Topology | None = None
    ) -> LayoutBounds | None:
        from gangline_parallel_megatron_style.cost.bounds import compute_layout_bounds

        return compute_layout_bounds(self, run, mesh, model, topology)

    def overlaps(self, plan: Plan, mesh: Mesh) -> bool:
        """Return whether forwards take turns with backwards, each hiding the other's transfers over folds."""
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
        """Return `chunks`, or the schedule's default if it is unset."""
        return self.chunks or SCHEDULES[self.schedule].chunks


@dataclass
class ThreeD(AxesConfig):
    """Tensor, pipeline, context and sharded data parallelism together; unset axes: tp 2, pp 2, the rest dp_shard."""

    DEFAULT_WORLD = 8
    WISHES = {"tp": 2, "pp": 2}
    TAKERS = ("dp_shard", "dp_replicate", "pp", "tp")


@dataclass
class Fsdp(AxesConfig):
    """Weights, gradients and optimizer state sharded over all ranks; each block's weights are gathered when needed."""

    zero: Literal[0, 1, 2, 3] = 3


@dataclass
class Hsdp(AxesConfig):
    """Sharded as in fsdp inside a group of ranks (a node, or half of the ranks), replicated over the groups."""

    zero: Literal[0, 1, 2, 3] = 3

    DEFAULT_WORLD = 4
    TAKERS = ("dp_replicate", "dp_shard")

    def _choose_wishes(self, world: int) -> Mapping[str, int]:
        open_ranks = max(1, world // max(1, prod(self.list_given().values())))
        inside = [d for d in find_divisors(open_ranks) if d <= self.topology.gpus_per_node and d < open_ranks]
        return {"dp_shard": inside[-1] if inside and inside[-1] > 1 else open_ranks}


@dataclass
class Tp(AxesConfig):
    """Every matrix sharded over all ranks."""

    TAKERS = ("tp", "dp_shard", "dp_replicate")


@dataclass
class Pp(AxesConfig):
    """The blocks divided over all ranks, in order."""

    TAKERS = ("pp", "dp_shard", "dp_replicate")
