"""Layouts that a run may have: sizes of open axes, and what of the schedule goes with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from gangline.config import divisors

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_parallel_megatron_style.config import Composed


def candidates(config: Composed, run: Run, world: int) -> Iterator[Composed]:
    """Every layout of `world` ranks that keeps the axes that `config` names, few-stage pipelines first.

    tp within a node, a power of 2; pp with a block for each rank at least; data ranks that divide the global batch. cp
    and dp_replicate stay at 1 where they are open. Beside 1F1B, interleaved 1F1B of a few chunks.
    """
    named = config.named()
    layers = getattr(run.model, "layers", None) or world
    fixed = prod(named.get(axis, 1) for axis in ("cp", "dp_replicate"))
    sizes = [size for size in divisors(world) if size <= config.topology.gpus_per_node and not size & (size - 1)]
    stages = [size for size in divisors(world) if size * config.model_chunks <= layers]
    for pp in (named["pp"],) if "pp" in named else stages:
        for tp in (named["tp"],) if "tp" in named else sizes:
            shard, rest = divmod(world, pp * tp * fixed)
            if rest or run.batch.global_size % (shard * named.get("dp_replicate", 1)):
                continue
            if "dp_shard" in named and named["dp_shard"] != shard:
                continue
            sized = replace(
                config,
                pp=pp,
                tp=tp,
                cp=named.get("cp", 1),
                dp_replicate=named.get("dp_replicate", 1),
                dp_shard=shard,
            )
            yield sized
            if pp > 1 and config.schedule == "1f1b" and config.stages is None:
                most = min(layers // pp, 8)
                for chunks in sorted({2, most} - {0, 1} if most > 1 else ()):
                    yield replace(sized, schedule="interleaved_1f1b", chunks=chunks)
