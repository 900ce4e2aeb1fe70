"""Text report of an explained layout: a table of the axes, a table of the traffic, and a table of the memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from gangline.explain.explained import Explained
from gangline.mesh import AXES
from gangline_parallel_megatron_style.cost import memory, timing, traffic
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.links import find_slowest_tier
from gangline_parallel_megatron_style.layout.notices import find_notices

if TYPE_CHECKING:
    from gangline_parallel_megatron_style.explain.trace import Traced

GB = 1e9
KINDS = (
    "weights",
    "gradients",
    "master weights",
    "optimizer state",
    "callbacks",
    memory.REDUCTION_STATE,
    "activations",
    "logits",
    "buffers",
)


def format_page(case: Case, found: Explained, gpu_gb: float) -> str:
    """Return the complete report. `gpu_gb`: memory of one GPU in GB (10⁹ bytes)."""
    sections = [
        *_format_axes(case),
        "",
        *_format_work(case, found),
        "",
        "sent per step by a rank" + f" of pipeline rank {found.busiest}, which sends most" * (case.pp > 1),
        *_format_sent(case, found.busiest),
        "",
        *_format_memory(case, found, gpu_gb),
        *(f"note: {notice}" for notice in find_notices(case)),
    ]
    return "\n".join(sections)


def format_traced(found: Explained, real: Traced) -> str:
    """Format the results of a trace of the pipeline rank with most memory, compared with the closed forms."""
    expected = found.ranks[found.fullest].memory
    return (
        f"traced  {real.operators} operators of pipeline rank {found.fullest} in {real.seconds:.1f} s: peak "
        f"{real.peak / GB:.4g} GB, {real.peak / expected:.3f} x the total above; "
        f"{real.resident_bytes / GB:.4g} GB between steps"
    )


def _format_axes(case: Case) -> Iterable[str]:
    mesh, network = case.mesh, case.config.topology
    apart = f", {network.nodes_per_datacentre} nodes per datacentre" if network.nodes_per_datacentre else ""
    yield f"{mesh.world} ranks, {network.gpus_per_node} per node, {network.nodes_per_rack} nodes per rack{apart}"
    rows = [("axis", "ranks", "groups", "links", "group of rank 0")]
    for axis in AXES:
        size = mesh.size(axis)
        if size > 1:
            group = mesh.group(0, [axis])
            rows.append((axis, str(size), str(mesh.world // size), network.find_tier(mesh, axis), _format_ranks(group)))
    yield from _format_table(rows) if len(rows) > 1 else ["  one rank"]


def _format_ranks(ranks: Sequence[int]) -> str:
    stride = ranks[1] - ranks[0]
    if len(ranks) <= 4:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]} to {ranks[-1]}" if stride == 1 else f"{ranks[0]}, {ranks[1]}, {ranks[2]} ... {ranks[-1]}"


def _format_work(case: Case, found: Explained) -> Iterable[str]:
    most = max(rank.flops for rank in found.ranks)
    sequences = f"{case.micro_size} sequence{'s' * (case.micro_size > 1)}"
    batches = f"{case.microbatches} microbatch{'es' * (case.microbatches > 1)} of {sequences}"
    yield f"a step has {_format_number(found.tokens)} tokens: {batches} on each data-parallel rank"
    if case.pp > 1:
        blocks = [len(stage) for stage in case.stages]
        runs = " + ".join(_format_repeat(len(list(same)), size) for size, same in groupby(blocks))
        order = f"{case.config.schedule}, {len(blocks)} stages of {runs} blocks"
        bubble = timing.compute_bubble(case, timing.find_schedule(case))
        yield f"pipeline: {order}; each rank waits {bubble:.1%} of the time"
    parameters = _format_number(_count_most_parameters(found))
    yield f"each rank computes at most {_format_number(most)} FLOPs per step and holds at most {parameters} parameters"


def _count_most_parameters(found: Explained) -> int:
    return max(rank.parameters for rank in found.ranks)


def _format_repeat(count: int, size: int) -> str:
    return f"{count} x {size}" if count > 1 else str(size)


def _format_sent(case: Case, rank: int) -> Iterable[str]:
    network = case.config.topology
    rows = [("axis", "what", "links", "messages", "bytes", "seconds at full bandwidth")]
    for entry in traffic.list_sent(case, rank):
        tier = find_slowest_tier(case, entry)
        seconds = f"{entry.bytes / network.get_bandwidth(tier):.3g}"
        rows.append(
            (" x ".join(entry.axes), entry.purpose, tier, str(entry.calls), _format_bytes(entry.bytes), seconds)
        )
    return _format_table(rows) if len(rows) > 1 else ["  no traffic"]


def _format_memory(case: Case, found: Explained, gpu_gb: float) -> Iterable[str]:
    ranks = sorted({0, found.fullest, len(found.ranks) - 1})
    yield "peak memory of a rank" + f", for {len(ranks)} of the pipeline ranks" * (len(ranks) > 1)
    rows = [("", *(_format_heading(case, found, rank) for rank in ranks))]
    for kind in KINDS:
        numbers = [found.ranks[rank].bytes.get(kind, 0) for rank in ranks]
        if any(numbers):
            rows.append((kind, *(_format_bytes(number) for number in numbers)))
    rows.append(("total", *(_format_bytes(found.ranks[rank].memory) for rank in ranks)))
    yield from _format_table(rows)
    over = [rank.memory / GB for rank in found.ranks if rank.memory / GB > gpu_gb]
    if not over:
        yield f"fits a GPU of {gpu_gb:g} GB"
        return
    which = f"{len(over)} of {len(found.ranks)} pipeline ranks need" if case.pp > 1 else "a rank needs"
    yield f"does not fit a GPU of {gpu_gb:g} GB: {which} up to {max(over):.3g} GB"
    yield f"  {_suggest_option(case, found)}"


def _suggest_option(case: Case, found: Explained) -> str:
    """Return advice on the options that reduce the largest kind of memory."""
    needs = found.ranks[found.fullest].bytes
    kind = max(KINDS, key=lambda name: needs.get(name, 0))
    if kind in ("activations", "logits"):
        smaller = "batch.micro_size=1, " if case.micro_size > 1 else ""
        again = "run.recompute=full, " if case.recompute.value != "full" else ""
        return f"Most of the memory is {kind}: use {smaller}{again}a larger parallel.tp or parallel.cp."
    more = "" if case.config.zero == 3 else f"parallel.zero={max(2, case.config.zero + 1)}, "
    return f"Most of the memory is {kind}: use {more}a larger parallel.dp_shard, parallel.tp or parallel.pp."


def _format_heading(case: Case, found: Explained, rank: int) -> str:
    return f"pp {rank}" + " (most)" * (rank == found.fullest) if case.pp > 1 else "per rank"


def _format_number(value: float) -> str:
    for size, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:g}"


def _format_bytes(value: int) -> str:
    return f"{_format_number(value)}B" if value >= 1000 else f"{value} B"


def _format_table(rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
