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
    """Options of the edit `moe`: feed-forwards become `experts` smaller ones, of which a token gets `top_k`."""

    experts: PositiveInt = 8  # number of routed experts per layer
    top_k: PositiveInt = 2  # number of experts per token
    ffn_dim: PositiveInt | None = None  # expert FFN width; null: the feed-forward's / top_k, at equal cost per token
    shared: NonNegativeInt = 0  # number of shared experts, which every token goes through besides the routed ones
    shared_gate: bool = False  # sigmoid gate per token on the shared experts' output (Qwen3-Next)
    first: NonNegativeInt = 0  # first block with experts; earlier blocks stay dense
    every: PositiveInt = 1  # interval of blocks with experts: one of every n, from `first` on
    router: RouterConfig = field(default_factory=Softmax)
    capacity_factor: PositiveFloat | None = None  # expert capacity as a multiple of the mean load; null: no limit
    ep: PositiveInt | None = None  # expert parallel size: ranks that share a layer's experts; null: largest possible
    # pp is not allowed: its ranks hold different layers.
    ep_axes: list[TokenAxis] = field(default_factory=lambda: ["dp_shard", "cp"])  # mesh axes whose ranks form ep
    ranks_per_node: PositiveInt | None = None  # ranks per node, from which a larger ep is hierarchical; null: never
    upcycle_from: str | None = None  # run directory of a dense run to upcycle: its feed-forwards become the experts

    file_options: ClassVar[tuple[str, ...]] = ("upcycle_from",)
    layout_options: ClassVar[tuple[str, ...]] = ("ep", "ep_axes", "ranks_per_node")

    def resolve(self, run: Run) -> MoeOptions:
        """Return the options with `ep` set: if null, as large as the experts and the layout allow."""
        options = replace(self, ffn_dim=self.get_dense_hidden(run)) if self.upcycle_from and not self.ffn_dim else self
        return replace(options, ep=gcd(self.experts, self._count_expert_ranks(run))) if self.ep is None else options

    def iterate_layouts(self, run: Run, world: int) -> Iterator[MoeOptions]:
        """Yield the options with every possible `ep` if it is null, each explicit: a null ep depends on the layout."""
        if self.ep is not None:
            yield self
            return
        both = gcd(self.experts, world)
        yield from (replace(self, ep=size) for size in range(1, both + 1) if both % size == 0)

    def _count_expert_ranks(self, run: Run) -> int:
        """Return the number of ranks that may share a layer's experts: those of `ep_axes`; 1 without folds."""
        from gangline.config.check import count_ranks

        if isinstance(run.parallel, Single | Ddp):
            return 1
        try:
            return Mesh.of(run.parallel.size_axes(count_ranks(run))).size(*self.ep_axes)
        except UserError:  # reported by the check of layouts
            return 1

    @staticmethod
    def get_dense_hidden(run: Run) -> int | None:
        """Return the width of the model's feed-forwards; None if its options do not give it."""
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
                f"moe.ep={self.ep}: under parallel={name} no ranks share the experts.",
                f"They are taken of {' x '.join(self.ep_axes)}, and this layout has one rank there.",
                "moe.ep=null takes as many as there are.",
            )
        ep, each = self.resolve(run).ep or 1, self.ranks_per_node
        if each is not None and ep > each and ep % each:
            yield Problem(
                f"moe.ranks_per_node={each} does not divide the {ep} ranks of {FOLD}.",
                "Every node has as many of them.",
                f"Choose among {list_divisors(ep)}, or null.",
            )

    def _find_option_problems(self, run: Run) -> Iterator[Problem]:
        if self.top_k > self.experts:
            what = f"moe.top_k={self.top_k} is more than moe.experts={self.experts}."
            yield Problem(what, "A token goes through each expert at most once.", f"moe.top_k={self.experts} or less.")
        if self.shared_gate and not self.shared:
            yield Problem("moe.shared_gate=true has nothing to gate.", "moe.shared is 0.", "moe.shared=1")
        if self.ep is not None and self.experts % self.ep:
            yield Problem(
                f"moe.ep={self.ep} does not divide moe.experts={self.experts}.",
                "Every rank of ep holds as many experts.",
                f"Choose moe.ep among {list_divisors(gcd(self.experts, self._count_expert_ranks(run)))}.",
            )
        if not self.ep_axes:
            yield Problem("moe.ep_axes=[] names no ranks to share the experts.", "", "moe.ep=1 shares nothing.")


@dataclass
class ExpertsHealth(HealthConfig):
    """Options of the health check `experts`: warns of an expert without tokens, or with far more than its share."""

    patience: PositiveInt = 20  # steps in a row before a dead or hot expert is reported
    hot: Annotated[IsNotNan[float], Gt(1)] = 4.0  # threshold of a hot expert, as a multiple of its layer's mean load


@dataclass
class Heatmap(TrackConfig):
    """Options of the tracker `experts`: TensorBoard heatmaps of the load of every expert (across) and layer (down)."""

    file_options: ClassVar[tuple[str, ...]] = ("path",)

    every: PositiveInt = 50  # interval of heatmaps in steps; each covers all steps since the last
    path: str | None = None  # directory of the event files; null: tensorboard/experts in the run directory

    def check(self, run: Run) -> list[Problem]:
        if find_spec("matplotlib") is None:
            what = "track=experts draws figures with matplotlib, which is not installed."
            return [Problem(what, "", "pip install 'gangline-moe[pictures]'   or another tracker")]
        return []
