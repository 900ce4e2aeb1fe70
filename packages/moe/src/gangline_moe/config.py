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

FOLD = "ep"  # the axis that experts live on, made of ranks of others
TokenAxis = Literal["dp_replicate", "dp_shard", "cp", "tp"]


@dataclass
class MoeOptions(EditConfig):
    """Feed-forward layers become `experts` smaller ones, of which a router gives each token `top_k`."""

    experts: PositiveInt = 8  # in each layer
    top_k: PositiveInt = 2  # experts that each token goes through
    hidden: PositiveInt | None = None  # width of an expert; null: the feed-forward's / top_k: a token costs the same
    shared: NonNegativeInt = 0  # experts that every token goes through beside the routed ones
    shared_gate: bool = False  # what those give is multiplied by a number between 0 and 1 of each token (Qwen3-Next)
    first: NonNegativeInt = 0  # the first block with experts; those before it stay as they are
    every: PositiveInt = 1  # of every so many blocks from there one has experts
    router: RouterConfig = field(default_factory=Softmax)
    capacity_factor: PositiveFloat | None = None  # an expert takes at most this times the mean load; null: all
    ep: PositiveInt | None = None  # ranks that share the experts of a layer; null: as many as divide both
    # Not of pp: the ranks along it hold different layers.
    ep_out_of: list[TokenAxis] = field(default_factory=lambda: ["dp_shard", "cp"])  # the mesh axes those ranks are of
    ranks_per_node: PositiveInt | None = None  # with more of ep than this rows travel inside nodes first; null: at once
    upcycle_from: str | None = None  # the directory of a run without experts; each expert begins as its feed-forward

    file_options: ClassVar[tuple[str, ...]] = ("upcycle_from",)
    layout_options: ClassVar[tuple[str, ...]] = ("ep", "ep_out_of", "ranks_per_node")

    def resolve(self, run: Run) -> MoeOptions:
        """With `ep` as large as experts and layout allow, where it was left open."""
        options = replace(self, hidden=self.get_dense_hidden(run)) if self.upcycle_from and not self.hidden else self
        return replace(options, ep=gcd(self.experts, self._count_expert_ranks(run))) if self.ep is None else options

    def iterate_layouts(self, run: Run, world: int) -> Iterator[MoeOptions]:
        """Every size of `ep` where it is open, each said outright: what an open one comes to depends on the layout."""
        if self.ep is not None:
            yield self
            return
        both = gcd(self.experts, world)
        yield from (replace(self, ep=size) for size in range(1, both + 1) if both % size == 0)

    def _count_expert_ranks(self, run: Run) -> int:
        """Ranks that may share a layer's experts: of the axes of `ep_out_of`, where the strategy folds any."""
        from gangline.config.check import count_ranks

        if isinstance(run.parallel, Single | Ddp):
            return 1
        try:
            return Mesh.of(run.parallel.size_axes(count_ranks(run))).size(*self.ep_out_of)
        except UserError:  # said where layouts are checked
            return 1

    @staticmethod
    def get_dense_hidden(run: Run) -> int | None:
        """Width of the model's feed-forwards, where its options say it."""
        return getattr(run.model, "hidden", None)

    def summarise(self, metrics: Mapping[str, float | list[float]]) -> dict[str, float | list[float]]:
        return {**compute_imbalance(metrics)}

    def fill_first_weights(self, run: Run, shards: Sequence[Shard], plan: Plan) -> None:
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
                f"They are taken of {' x '.join(self.ep_out_of)}, and this layout has one rank there.",
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
        if not self.ep_out_of:
            yield Problem("moe.ep_out_of=[] names no ranks to share the experts.", "", "moe.ep=1 shares nothing.")


@dataclass
class ExpertsHealth(HealthConfig):
    """Warns of an expert without tokens, and of one with far more than its share."""

    patience: PositiveInt = 20  # steps in a row before it is said
    hot: Annotated[IsNotNan[float], Gt(1)] = 4.0  # times the mean load of its layer


@dataclass
class Heatmap(TrackConfig):
    """Pictures for TensorBoard: the load of every expert (across) of every layer (down), now and then."""

    file_options: ClassVar[tuple[str, ...]] = ("path",)

    every: PositiveInt = 50  # steps from one picture to the next; each is of all steps since the last
    path: str | None = None  # null: tensorboard/experts in the run directory

    def check(self, run: Run) -> list[Problem]:
        if find_spec("matplotlib") is None:
            what = "track=experts draws figures with matplotlib, which is not installed."
            return [Problem(what, "", "pip install 'gangline-moe[pictures]'   or another tracker")]
        return []
