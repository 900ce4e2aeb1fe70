"""A run on a mesh, described by numbers: the input of every closed form of a layout's cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from gangline.config import ItemSizes, Recompute
from gangline.mesh import DATA_AXES, Mesh
from gangline.model.compose import compose_model
from gangline.model.local_sizes import LocalSizes
from gangline.model.tree import Node
from gangline.plan import Plan, parse_block_number
from gangline.shard import Registry
from gangline_parallel_megatron_style.cost.parameters import Array, ModelArrays
from gangline_parallel_megatron_style.layout.alike import AlikeBlocks, group_blocks
from gangline_parallel_megatron_style.layout.stages import partition
from gangline_parallel_megatron_style.pipeline.actions import compute_place, compute_stage
from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES
from gangline_parallel_megatron_style.sharding.arrays import ModelShapes, lay_out
from gangline_parallel_megatron_style.sharding.ranks import find_active_fold

if TYPE_CHECKING:
    from gangline.config import GradientsConfig, OptimizerConfig, Run
    from gangline_parallel_megatron_style.config import AxesConfig


@dataclass(frozen=True)
class Case:
    """Numbers of a run's layout. Properties are sizes on one rank; all ranks of a pipeline stage have equal sizes."""

    config: AxesConfig
    mesh: Mesh
    tree: Node
    plan: Plan
    sequence_length: int
    micro_size: int  # number of sequences in a microbatch
    microbatches: int  # number of microbatches of a rank in a step
    bytes: ItemSizes
    deterministic: bool
    recompute: Recompute
    recompute_every: int
    optimizer: OptimizerConfig  # optimizer options; they determine the bytes of optimizer state per weight
    # options of the gradient reduction; they determine the bytes sent, and the bytes kept between steps
    gradients: GradientsConfig
    callback_copies: int = 0  # number of copies of each trained parameter that callbacks keep

    @classmethod
    def of(cls, run: Run, mesh: Mesh, model: tuple[Node, Plan] | None = None) -> Case:
        """Return the case of a run that uses a parallel strategy of this package."""
        config = cast("AxesConfig", run.parallel)
        tree, plan = model or compose_model(run)
        share = run.batch.global_size // mesh.size(*DATA_AXES)
        micro_size = run.batch.micro_size or share // config.count_microbatches(share, mesh)
        return cls(
            config=config,
            mesh=mesh,
            tree=tree,
            plan=plan,
            sequence_length=run.batch.sequence_length,
            micro_size=micro_size,
            microbatches=share // micro_size,
            bytes=run.precision.get_sizes(),
            deterministic=run.deterministic,
            recompute=run.job.recompute,
            recompute_every=run.job.recompute_every,
            optimizer=run.optimizer,
            gradients=run.gradients,
            callback_copies=sum(config.count_copies(run) for config in run.callback.values()),
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
        """Return the number of ranks over which ZeRO shards: dp_shard and cp, which hold equal weights."""
        return self.mesh.size("dp_shard", "cp")

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a microbatch in attention and inside feed-forward layers, split over cp."""
        return self.micro_size * self.sequence_length // self.cp

    @property
    def stream_tokens(self) -> int:
        """Return the number of tokens of a microbatch in the residual stream, after cp and sequence parallelism."""
        return self.tokens // (self.tp if self.sequence_parallel else 1)

    @cached_property
    def sizes(self) -> LocalSizes:
        """Return the sizes on a rank, from which nodes count their activation bytes and communication volume."""
        ranks = dict(self.mesh.sizes)
        ranks |= {fold.name: fold.size for fold in self.plan.folds if find_active_fold(self.plan, self.mesh, fold.name)}
        return LocalSizes(
            tokens=self.stream_tokens,
            inner_tokens=self.tokens,
            itemsize=self.bytes.compute,
            master_itemsize=self.bytes.master,
            ranks=ranks,
        )

    @cached_property
    def model(self) -> AlikeBlocks:
        """Return the model data that all layouts of this model share."""
        return group_blocks(self.tree, self.plan)

    @property
    def by_path(self) -> dict[str, Node]:
        return self.model.by_path

    @property
    def blocks(self) -> list[Node]:
        """Return the nodes of the blocks, in order; equal nodes are one object."""
        return self.model.blocks

    def get_kind(self, block: int) -> tuple[int, bool]:
        """Return the key of a block's costs: the index of the first equal block, and whether it is recomputed."""
        return self.model.kinds[block], self.is_recomputed(block)

    @cached_property
    def known(self) -> dict[object, Any]:
        """Return the cache of results for this case; results for a block are shared by all blocks of its kind."""
        return {}

    @cached_property
    def width(self) -> int:
        """Return D, the width of the residual stream."""
        return self.plan.facts.get("dim") or self.by_path[self.plan.embed].get_shapes()["weight"][-1]

    @cached_property
    def stages(self) -> list[range]:
        """Return the blocks of each model stage (chunk of a pipeline rank), in the order of the model."""
        return partition(self.config, self.mesh, self.tree, self.plan, self.sequence_length)

    @cached_property
    def arrays(self) -> list[Array]:
        """Return every parameter of the model, in the order of the model."""
        named_arrays = {
            array.name: array
            for place in ("embed", *range(self.plan.layers), "head")
            for array in self.list_arrays(place)
        }
        return [named_arrays[name] for name in self.model.shapes]

    def list_arrays(self, place: int | str) -> list[Array]:
        """Return the parameters of a block (by index), of "embed" (with tied parameters) or of "head"."""
        if place not in self._at:
            ends = {"embed": 0, "head": self.last_stage}
            stage = ends[place] if isinstance(place, str) else self.stage_of[place]
            self._at[place] = self._arrays.list_arrays(place, (stage,), self.last_stage)
        return self._at[place]

    @cached_property
    def _at(self) -> dict[int | str, list[Array]]:
        return {}

    @cached_property
    def _arrays(self) -> ModelArrays:
        mesh = Mesh(tuple((axis, 1 if axis == "pp" else size) for axis, size in self.mesh.sizes))
        model_arrays: ModelArrays = self.model.arrays.get(
            (mesh, self.sequence_parallel), lambda: ModelArrays(self.model, mesh, self.sequence_parallel)
        )
        return model_arrays

    @cached_property
    def stage_of(self) -> list[int]:
        """Return the model stage of each block."""
        return [stage for stage, blocks in enumerate(self.stages) for _ in blocks]

    @cached_property
    def registry(self) -> Registry:
        """Return the registry of every parameter, equal to the registry of the runtime."""
        placement = SCHEDULES[self.config.schedule].placement
        homes = [compute_place(self.pp, placement, stage)[0] for stage in range(len(self.stages))]
        blocks = [homes[stage] for stage, stage_blocks in enumerate(self.stages) for _ in stage_blocks]
        shapes = self.model.shapes
        aliases = {name: tuple(alias for alias, owner in self.plan.tied if owner == name) for name in shapes}
        frozen_names = {array.name for array in self.arrays if not array.trained}
        return lay_out(
            self.plan,
            self.mesh,
            ModelShapes(shapes, {}, aliases, frozen_names),
            (homes[0], *blocks, homes[-1]),
            zero=self.config.zero,
            sequence_parallel=self.sequence_parallel,
            dtype={8: "float64", 4: "float32", 2: "bfloat16"}[self.bytes.master],
        ).registry

    def get_stages(self, rank: int) -> list[int]:
        """Return the model stages of pipeline rank `rank`, in the order of its chunks."""
        return self._stages_of[rank]

    @cached_property
    def _stages_of(self) -> list[list[int]]:
        placement, chunks = SCHEDULES[self.config.schedule].placement, len(self.stages) // self.pp
        return [[compute_stage(self.pp, placement, rank, chunk) for chunk in range(chunks)] for rank in range(self.pp)]

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """Return the map from each model stage to its pipeline rank."""
        return {stage: rank for rank, stages in enumerate(self._stages_of) for stage in stages}

    def list_held(self, rank: int) -> list[Array]:
        """Return the parameters of pipeline rank `rank`, without repetition, in the order of the model."""
        key = ("held", rank)
        if key not in self.known:
            self.known[key] = self._list_held(rank)
        arrays: list[Array] = self.known[key]
        return arrays

    def _list_held(self, rank: int) -> list[Array]:
        own_stages = set(self.get_stages(rank))
        ends = [
            array
            for place in ("embed", "head")
            for array in self.list_arrays(place)
            if not own_stages.isdisjoint(array.stages)
        ]
        blocks = [array for block in sorted(self.list_blocks(rank)) for array in self.list_arrays(block)]
        if not ends:
            return blocks
        order = self._order
        return sorted([*ends, *blocks], key=lambda array: order[array.name])

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.model.shapes)}

    def list_blocks(self, rank: int) -> list[int]:
        """Return the indices of the blocks of pipeline rank `rank`."""
        return [block for stage in self.get_stages(rank) for block in self.stages[stage]]

    @property
    def last_stage(self) -> int:
        return len(self.stages) - 1

    @property
    def sums_each(self) -> bool:
        """Return whether gradients are reduced after every microbatch, so that no rank stores all gradients."""
        return self.config.zero >= 2 and not self.deterministic

    @cached_property
    def head_blocks(self) -> dict[str, Node]:
        """Return the nodes of the blocks inside the head, by path, in the order of their forward pass."""
        return {path: self.by_path[path] for path in self.plan.list_blocks_in_head(self.by_path)}

    def is_recomputed(self, block: int | str) -> bool:
        """Return whether a block (index or path), or its attention, is recomputed in the backward pass."""
        number = block if isinstance(block, int) else parse_block_number(block)
        return self.recompute is not Recompute.none and number % self.recompute_every == 0
