"""Options of the model edit `moe`, of `health=[experts]` and of `track=[experts]`. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import gcd
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt, IsNotNan

from gangline import Problem, UserError
from gangline.config import (
    EditConfig,
    HealthConfig,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TrackConfig,
    list_divisors,
)
from gangline.launch.devices import count_gpus
from gangline.mesh import Mesh
from gangline.plugin.registry import installed
from gangline_basics.parallel.config import Ddp, Single
from gangline_moe.load_history import compute_imbalance
from gangline_moe.routers.config import RouterConfig, Softmax

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline.plan import Plan
    from gangline.shard import Shard

FOLD = "ep"  # mesh axis of expert parallelism, folded from ranks of other axes
TokenAxis = Literal["dp_replicate", "dp_shard", "cp", "tp"]


@dataclass
class MoeOptions(EditConfig):
    """Options of the edit `moe`: feed-forwards become MoE layers of `experts` experts, `top_k` per token."""

    experts: PositiveInt = 8  # number of routed experts per layer
    top_k: PositiveInt = 2  # number of experts per token
    ffn_dim: PositiveInt | None = None  # expert FFN width; null: dense FFN width / top_k (upcycling: dense FFN width)
    shared: NonNegativeInt = 0  # number of shared experts, applied to every token in addition to its routed experts
    shared_gate: bool = False  # sigmoid gate per token on the shared experts' output (Qwen3-Next)
    first: NonNegativeInt = 0  # index (from 0) of the first block with experts; earlier blocks stay dense
    every: PositiveInt = 1  # interval of blocks with experts, counted from moe.first; 1: every block
    router: RouterConfig = field(default_factory=Softmax)
    capacity_factor: PositiveFloat | None = None  # expert capacity as a multiple of the mean load; null: no token drops
    ep: PositiveInt | None = None  # expert-parallel (EP) size: ranks that shard a layer's experts; null: maximum
    # `pp` is not allowed: pipeline ranks hold different layers.
    ep_axes: list[TokenAxis] = field(default_factory=lambda: ["dp_shard", "cp"])  # mesh axes whose ranks EP may use
    # number of ranks per node: with a larger moe.ep, the all-to-all runs inside nodes, then between nodes; null: flat
    ranks_per_node: PositiveInt | None = None
    upcycle_from: str | None = None  # directory of a dense run whose feed-forwards initialise the experts; null: none

    file_options: ClassVar[tuple[str, ...]] = ("upcycle_from",)
    layout_options: ClassVar[tuple[str, ...]] = ("ep", "ep_axes", "ranks_per_node")

    def resolve(self, run: Run) -> MoeOptions:
        """Return the options with null `ep` set to the maximum; upcycling sets null `ffn_dim` to the dense width."""
        options = replace(self, ffn_dim=self.get_dense_hidden(run)) if self.upcycle_from and not self.ffn_dim else self
        return replace(options, ep=gcd(self.experts, self._count_expert_ranks(run))) if self.ep is None else options

    def iterate_layouts(self, run: Run, world: int) -> Iterator[MoeOptions]:
        """Yield the options once per possible `ep` if `ep` is null (null depends on the layout), else unchanged."""
        if self.ep is not None:
            yield self
            return
        both = gcd(self.experts, world)
        yield from (replace(self, ep=size) for size in range(1, both + 1) if both % size == 0)

    def _count_expert_ranks(self, run: Run) -> int:
        """Return the maximum expert-parallel size: the number of ranks of `ep_axes`; 1 for parallel=single and ddp."""
        from gangline.config.check import count_ranks

        if isinstance(run.parallel, Single | Ddp):
            return 1
        try:
            return Mesh.of(run.parallel.size_axes(count_ranks(run))).size(*self.ep_axes)
        except UserError:  # reported by the check of layouts
            return 1

    @staticmethod
    def get_dense_hidden(run: Run) -> int | None:
        """Return the feed-forward width of the model; None if the model's options have no `ffn_dim`."""
        return getattr(run.model, "ffn_dim", None)

    def summarise(self, metrics: Mapping[str, float | list[float]]) -> dict[str, float | list[float]]:
        return {**compute_imbalance(metrics)}

    def fill_init_weights(self, run: Run, shards: Sequence[Shard], plan: Plan) -> None:
        if self.upcycle_from is not None:
            from gangline_moe.upcycle import upcycle

            upcycle(self.upcycle_from, shards)

    def check(self, run: Run) -> list[Problem]:
        problems = list(self._find_option_problems(run))
        if not problems:
            problems += self._find_layout_problems(run)
        if not problems and self.upcycle_from is not None:
            from gangline_moe.upcycle import find_upcycle_problems

            problems += find_upcycle_problems(self, run)
        if not problems and run.model.get_weights_directory() is not None:
            from gangline_moe.interop.format import find_weight_problems

            problems += find_weight_problems(self, run)
        return problems

    def _find_layout_problems(self, run: Run) -> Iterator[Problem]:
        if (self.ep or 1) > 1 and self._count_expert_ranks(run) == 1:
            name = installed().find_part(run.parallel).part.name
            yield Problem(
                f"moe.ep={self.ep} is not possible: parallel={name} does not shard the experts in this layout.",
                f"Experts are sharded over {' x '.join(self.ep_axes)} (moe.ep_axes). These axes have one rank in this "
                "layout, or the strategy has no expert parallelism (single, ddp).",
                "moe.ep=null uses the largest size that the layout allows.",
            )
        ep, each = self.resolve(run).ep or 1, self.ranks_per_node
        if each is not None and ep > each and ep % each:
            yield Problem(
                f"moe.ranks_per_node={each} does not divide the {ep} expert-parallel ranks (moe.ep).",
                "Every node has the same number of expert-parallel ranks.",
                f"Choose moe.ranks_per_node among {list_divisors(ep)}, or null.",
            )

    def _find_option_problems(self, run: Run) -> Iterator[Problem]:
        if self.top_k > self.experts:
            what = f"moe.top_k={self.top_k} is more than moe.experts={self.experts}."
            yield Problem(what, "A token uses each expert at most once.", f"moe.top_k={self.experts} or less.")
        if run.precision.get_matmul_format() == "fp8" and count_gpus(run.job.device):
            yield Problem(
                f"moe=on does not support precision={installed().find_part(run.precision).part.name} on a GPU.",
                "No grouped float8 matmul is available: each layer would compute its experts one by one, and wait for "
                "the GPU nine times per microbatch.",
                "precision=bf16, or moe=off, or run.device=cpu for a test",
            )
        if self.shared_gate and not self.shared:
            yield Problem(
                "moe.shared_gate=true needs at least one shared expert.",
                "moe.shared is 0, so there is no output to gate.",
                "moe.shared=1, or moe.shared_gate=false",
            )
        if self.ep is not None and self.experts % self.ep:
            yield Problem(
                f"moe.ep={self.ep} does not divide moe.experts={self.experts}.",
                "Every expert-parallel rank holds the same number of experts.",
                f"Choose moe.ep among {list_divisors(gcd(self.experts, self._count_expert_ranks(run)))}.",
            )
        if not self.ep_axes:
            yield Problem(
                "moe.ep_axes=[] must name at least one mesh axis.",
                "",
                "moe.ep_axes=[dp_shard,cp], and moe.ep=1 to leave the experts unsharded",
            )


@dataclass
class ExpertsHealth(HealthConfig):
    """Options of the health check `experts`, which warns of experts without tokens or with an excessive load."""

    patience: PositiveInt = 20  # number of consecutive steps before a dead or hot expert is reported
    hot: Annotated[IsNotNan[float], Gt(1)] = 4.0  # threshold of a hot expert, as a multiple of its layer's mean load


@dataclass
class Heatmap(TrackConfig):
    """Options of the tracker `experts`: TensorBoard heatmaps of the load of every expert (across) and layer (down)."""

    file_options: ClassVar[tuple[str, ...]] = ("path",)

    every: PositiveInt = 50  # interval of heatmaps in steps; each heatmap sums the load since the previous heatmap
    path: str | None = None  # directory of the event files; null: tensorboard/experts in the run directory

    def check(self, run: Run) -> list[Problem]:
        if find_spec("matplotlib") is None:
            what = "track=experts draws figures with matplotlib, which is not installed."
            return [Problem(what, "", "pip install 'gangline-moe[pictures]'   or another tracker")]
        return []
