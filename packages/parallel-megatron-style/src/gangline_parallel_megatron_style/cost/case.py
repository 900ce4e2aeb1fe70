"""A run on a mesh as numbers: what every closed form of a layout's cost starts from."""

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
    """Sizes are those of one rank where their name does not say otherwise; every rank of a stage has the same."""

    config: AxesConfig
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
    optimizer: OptimizerConfig  # says what it keeps of each weight
    gradients: GradientsConfig  # says what a gradient is on the wire, and what is kept of it
    callback_copies: int = 0  # arrays like each trained parameter that callbacks keep

    @classmethod
    def of(cls, run: Run, mesh: Mesh, model: tuple[Node, Plan] | None = None) -> Case:
        """The numbers of a run whose parallel part is one of this package's."""
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
        """What all layouts of this model share."""
        return group_blocks(self.tree, self.plan)

    @property
    def by_path(self) -> dict[str, Node]:
        return self.model.by_path

    @property
    def blocks(self) -> list[Node]:
        """The nodes of the blocks, in order; those that are equal are one object."""
        return self.model.blocks

    def get_kind(self, block: int) -> tuple[int, bool]:
        """What a block's costs depend on: the first block that is like it, and whether it is computed again."""
        return self.model.kinds[block], self.is_recomputed(block)

    @cached_property
    def known(self) -> dict[object, Any]:
        """What was worked out for one block, to be read for all of its kind."""
        return {}

    @cached_property
    def width(self) -> int:
        """D, the width of the residual stream."""
        return self.plan.facts.get("dim") or self.by_path[self.plan.embed].get_shapes()["weight"][-1]

    @cached_property
    def stages(self) -> list[range]:
        """Which blocks each model stage (chunk of a pipeline rank) has, first to last."""
        return partition(self.config, self.mesh, self.tree, self.plan, self.sequence_length)

    @cached_property
    def arrays(self) -> list[Array]:
        """Every parameter of the model."""
        named_arrays = {
            array.name: array
            for place in ("embed", *range(self.plan.layers), "head")
            for array in self.list_arrays(place)
        }
        return [named_arrays[name] for name in self.model.shapes]

    def list_arrays(self, place: int | str) -> list[Array]:
        """The parameters of a block, of the embedding (what is tied to it included) or of the head."""
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
        """The model stage of each block."""
        return [stage for stage, blocks in enumerate(self.stages) for _ in blocks]

    @cached_property
    def registry(self) -> Registry:
        """Every parameter's place, as the runtime has it."""
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
        """The model stages of pipeline rank `rank`, in the order of its chunks."""
        return self._stages_of[rank]

    @cached_property
    def _stages_of(self) -> list[list[int]]:
        placement, chunks = SCHEDULES[self.config.schedule].placement, len(self.stages) // self.pp
        return [[compute_stage(self.pp, placement, rank, chunk) for chunk in range(chunks)] for rank in range(self.pp)]

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """Model stage -> the pipeline rank that has it."""
        return {stage: rank for rank, stages in enumerate(self._stages_of) for stage in stages}

    def list_held(self, rank: int) -> list[Array]:
        """The parameters of pipeline rank `rank`, each once, in the order of the model."""
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
        """The blocks of pipeline rank `rank`."""
        return [block for stage in self.get_stages(rank) for block in self.stages[stage]]

    @property
    def last_stage(self) -> int:
        return len(self.stages) - 1

    @property
    def sums_each(self) -> bool:
        """Whether gradients are added over the ranks after every microbatch, so that no rank keeps all of them."""
        return self.config.zero >= 2 and not self.deterministic

    @cached_property
    def head_blocks(self) -> dict[str, Node]:
        """Blocks inside the head, by path, in the order of their forward pass."""
        return {path: self.by_path[path] for path in self.plan.list_blocks_in_head(self.by_path)}

    def is_recomputed(self, block: int | str) -> bool:
        """Whether a block, given by its number or its path, is computed again in the backward pass, all or its
        attention.
        """
        number = block if isinstance(block, int) else parse_block_number(block)
        return self.recompute is not Recompute.none and number % self.recompute_every == 0
