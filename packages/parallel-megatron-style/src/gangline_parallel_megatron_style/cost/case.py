"""A run on a mesh as numbers: what every closed form of a layout's cost starts from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from gangline.config import ItemSizes, Recompute
from gangline.model import LocalSizes, Node, by_path, compose_model, parameter_shapes
from gangline.strategy import DATA_AXES, Mesh, Plan, Registry
from gangline_parallel_megatron_style.cost.parameters import Array, arrays_of
from gangline_parallel_megatron_style.layout.stages import partition
from gangline_parallel_megatron_style.pipeline.actions import place_of, stage_of
from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES
from gangline_parallel_megatron_style.sharding.arrays import ModelShapes, lay_out
from gangline_parallel_megatron_style.sharding.ranks import active_fold

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_parallel_megatron_style.config import Composed


# What layouts that are compared share: the arrays of a model on a mesh, by the model's identity, which they keep alive.
_ARRAYS: dict[tuple, tuple[Node, Plan, list[Array]]] = {}


@dataclass(frozen=True)
class Case:
    """Sizes are those of one rank where their name does not say otherwise; every rank of a stage has the same."""

    config: Composed
    mesh: Mesh
    tree: Node
    plan: Plan
    sequence_length: int
    micro_size: int  # sequences of a microbatch
    microbatches: int  # microbatches of a step
    bytes: ItemSizes
    deterministic: bool
    recompute: Recompute
    recompute_every: int
    matrix_states: int  # numbers that the optimizer keeps of each weight of a block's matrix
    other_states: int  # and of every other weight
    maps_matrices: bool = False  # whether the optimizer has matrices of blocks whole, each on one rank
    callback_copies: int = 0  # arrays like each trained parameter that callbacks keep

    @classmethod
    def of(cls, run: Run, mesh: Mesh, model: tuple[Node, Plan] | None = None) -> Case:
        """The numbers of a run whose parallel part is one of this package's."""
        from gangline_parallel_megatron_style.config import Composed

        config = run.parallel
        assert isinstance(config, Composed)
        tree, plan = model or compose_model(run)
        share = run.batch.global_size // mesh.size(*DATA_AXES)
        micro_size = run.batch.micro_size or share // config.accumulation(share, mesh)
        return cls(
            config=config,
            mesh=mesh,
            tree=tree,
            plan=plan,
            sequence_length=run.batch.sequence_length,
            micro_size=micro_size,
            microbatches=share // micro_size,
            bytes=run.precision.sizes(),
            deterministic=run.deterministic,
            recompute=run.run.recompute,
            recompute_every=run.run.recompute_every,
            matrix_states=run.optimizer.states(matrix=True),
            other_states=run.optimizer.states(matrix=False),
            maps_matrices=run.optimizer.maps_matrices(),
            callback_copies=sum(config.copies(run) for config in run.callback.values()),
        )

    @cached_property
    def tp(self) -> int:
        return self.mesh.size("tp")

    @cached_property
    def cp(self) -> int:
        return self.mesh.size("cp")

    @cached_property
    def pp(self) -> int:
        return self.mesh.size("pp")

    @property
    def sequence_parallel(self) -> bool:
        return self.config.sequence_parallel and self.tp > 1

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO cuts: dp_shard and cp, which hold the same weights."""
        return self.mesh.size("dp_shard", "cp")

    @property
    def tokens(self) -> int:
        """Of a microbatch, in attention and between the two products of a feed-forward layer."""
        return self.micro_size * self.sequence_length // self.cp

    @property
    def stream_tokens(self) -> int:
        """Of a microbatch, in the residual stream and the norms: sequence parallelism cuts them once more."""
        return self.tokens // (self.tp if self.sequence_parallel else 1)

    @cached_property
    def sizes(self) -> LocalSizes:
        """Sizes on a rank, as nodes are asked for their activation bytes and communication volume."""
        ranks = dict(self.mesh.sizes)
        ranks |= {fold.name: fold.size for fold in self.plan.folds if active_fold(self.plan, self.mesh, fold.name)}
        return LocalSizes(
            tokens=self.stream_tokens,
            inner_tokens=self.tokens,
            itemsize=self.bytes.compute,
            master_itemsize=self.bytes.master,
            ranks=ranks,
        )

    @cached_property
    def by_path(self) -> dict[str, Node]:
        return by_path(self.tree)

    @cached_property
    def blocks(self) -> list[Node]:
        """The nodes of the blocks, in order; those that are equal are one object."""
        same: dict[Node, Node] = {}
        found = [self.by_path[f"{self.plan.blocks}.{index}"] for index in range(self.plan.layers)]
        return [same.setdefault(node, node) for node in found]

    @cached_property
    def width(self) -> int:
        """D, the width of the residual stream."""
        return self.plan.facts.get("dim") or self.by_path[self.plan.embed].shapes()["weight"][-1]

    @cached_property
    def stages(self) -> list[range]:
        """Which blocks each model stage (chunk of a pipeline rank) has, first to last."""
        return partition(self.config, self.mesh, self.tree, self.plan, self.sequence_length)

    @cached_property
    def arrays(self) -> list[Array]:
        """Every parameter of the model."""
        key = (id(self.tree), id(self.plan), self.mesh, tuple(self.stages), self.sequence_parallel)
        if key not in _ARRAYS:
            shapes = parameter_shapes(self.tree)
            made = arrays_of(shapes, self.plan, self.mesh, self.stages, self.sequence_parallel)
            if len(_ARRAYS) >= 32:
                del _ARRAYS[next(iter(_ARRAYS))]
            _ARRAYS[key] = (self.tree, self.plan, made)
        return _ARRAYS[key][2]

    @cached_property
    def registry(self) -> Registry:
        """Every parameter's place, as the runtime has it."""
        placement = SCHEDULES[self.config.schedule].placement
        homes = [place_of(self.pp, placement, stage)[0] for stage in range(len(self.stages))]
        blocks = [homes[stage] for stage, found in enumerate(self.stages) for _ in found]
        shapes = {array.name: array.shape for array in self.arrays}
        aliases = {name: tuple(alias for alias, owner in self.plan.tied if owner == name) for name in shapes}
        frozen = {array.name for array in self.arrays if not array.trained}
        return lay_out(
            self.plan,
            self.mesh,
            ModelShapes(shapes, {}, aliases, frozen),
            (homes[0], *blocks, homes[-1]),
            zero=self.config.zero,
            sequence_parallel=self.sequence_parallel,
            dtype={8: "float64", 4: "float32", 2: "bfloat16"}[self.bytes.master],
        ).registry

    def stages_of(self, rank: int) -> list[int]:
        """The model stages of pipeline rank `rank`, in the order of its chunks."""
        return self._stages_of[rank]

    @cached_property
    def _stages_of(self) -> list[list[int]]:
        placement, chunks = SCHEDULES[self.config.schedule].placement, len(self.stages) // self.pp
        return [[stage_of(self.pp, placement, rank, chunk) for chunk in range(chunks)] for rank in range(self.pp)]

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """Model stage -> the pipeline rank that has it."""
        return {stage: rank for rank, stages in enumerate(self._stages_of) for stage in stages}

    def held(self, rank: int) -> list[Array]:
        """The parameters of pipeline rank `rank`, each once."""
        return self._held[rank]

    @cached_property
    def _held(self) -> list[list[Array]]:
        mine = [set(self.stages_of(rank)) for rank in range(self.pp)]
        return [[array for array in self.arrays if not stages.isdisjoint(array.stages)] for stages in mine]

    def blocks_of(self, rank: int) -> list[int]:
        """The blocks of pipeline rank `rank`."""
        return [block for stage in self.stages_of(rank) for block in self.stages[stage]]

    @property
    def last_stage(self) -> int:
        return len(self.stages) - 1

    @property
    def sums_each(self) -> bool:
        """Whether gradients are added over the ranks after every microbatch, so that no rank keeps all of them."""
        return self.config.zero >= 2 and not self.deterministic

    def recomputed(self, block: int) -> bool:
        """Whether a block is computed again in the backward pass, wholly or its attention."""
        return self.recompute is not Recompute.none and block % self.recompute_every == 0
