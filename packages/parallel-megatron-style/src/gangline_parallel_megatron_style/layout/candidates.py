"""Candidate layouts of a run: sizes of unset axes, ZeRO stages, and pipeline schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from gangline.config import find_divisors
from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_parallel_megatron_style.config import AxesConfig

LONGEST = 16  # maximum cp size of a candidate
SHORTEST = 64  # minimum number of tokens of a sequence per cp rank: with fewer, compute cannot hide ring transfers


def iterate_candidates(config: AxesConfig, run: Run, world: int) -> Iterator[AxesConfig]:
    """Yield every layout of `world` ranks that keeps the axis sizes that `config` sets, small pp first.

    Unset axes: tp is a power of 2 within a node; cp is a power of 2; pp leaves every rank at least one block;
    dp_replicate is 1; dp_shard takes the other ranks. The number of data ranks must divide the global batch size. Two
    options may differ from the config's values although they are never null: zero, if ranks share state, and the
    schedule (`list_pipeline_options`).
    """
    axis_sizes = config.list_given()
    layers = getattr(run.model, "layers", None) or world
    copies, length = axis_sizes.get("dp_replicate", 1), run.batch.sequence_length
    powers = [size for size in find_divisors(world) if not size & (size - 1)]
    tps = (
        [axis_sizes["tp"]] if "tp" in axis_sizes else [size for size in powers if size <= config.topology.gpus_per_node]
    )
    cps = (
        [axis_sizes["cp"]]
        if "cp" in axis_sizes
        else [size for size in powers if size <= min(LONGEST, length // SHORTEST) or size == 1]
    )
    pps = [axis_sizes["pp"]] if "pp" in axis_sizes else [size for size in find_divisors(world) if size <= layers]
    for pp, tp, cp in product(pps, tps, cps):
        shard, rest = divmod(world, pp * tp * cp * copies)
        if rest or not shard or run.batch.global_size % (shard * copies) or length % (2 * cp if cp > 1 else 1):
            continue
        if "dp_shard" in axis_sizes and axis_sizes["dp_shard"] != shard:
            continue
        sized = replace(config, pp=pp, tp=tp, cp=cp, dp_replicate=copies, dp_shard=shard)
        zeros = dict.fromkeys((config.zero, 1, 2, 3)) if shard * cp > 1 else (config.zero,)
        for zero, order in product(zeros, list_pipeline_options(config, pp, layers)):
            yield sized if zero == config.zero and not order else replace(sized, zero=zero, **order)


def list_pipeline_options(config: AxesConfig, pp: int, layers: int) -> list[dict[str, Any]]:
    """Return changes to the pipeline options: none ({}), and for 1F1B also interleaved and zero-bubble schedules.

    GPipe is left out, because it is 1F1B with more memory.
    """
    options: list[dict[str, Any]] = [{}] if pp * config.model_chunks <= layers else []
    if pp == 1 or config.schedule != "1f1b" or config.stages is not None:
        return options
    most = min(layers // pp, 8)
    options += [
        {"schedule": "interleaved_1f1b", "chunks": chunks} for chunks in sorted({2, 4, most}) if 1 < chunks <= most
    ]
    others = (name for name in SCHEDULES if name not in ("gpipe", "1f1b", "interleaved_1f1b"))
    return options + [{"schedule": name} for name in others if pp * SCHEDULES[name].chunks <= layers]
