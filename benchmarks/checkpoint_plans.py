"""Measure planning without writing: the largest published run, 1,024 ranks one by one, 1,000 checkpoints."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from gangline.checkpoint.id import CheckpointId
from gangline.config.defaults import build_default_run
from gangline.mesh import Mesh
from gangline.model.build import construct
from gangline.model.compose import compose_model
from gangline.plugin.registry import build
from gangline.run.directory import RunDirectory
from gangline.shard import Registry
from gangline_basics.model.config import DecoderConfig
from gangline_basics.model.presets import PRESETS
from gangline_ckpt_zarr.config import ZarrCheckpoint
from gangline_ckpt_zarr.format import packed, zarr_json
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.format.overlap import find_stored_boxes
from gangline_ckpt_zarr.format.packed import PackedFiles
from gangline_parallel_megatron_style.sharding.arrays import ModelShapes, lay_out

T = TypeVar("T")
WIDE = {"pp": 16, "dp_shard": 128, "tp": 8}  # 16,384 ranks, as in arXiv 2407.21783, section 3.3.2
NARROW = {"pp": 8, "dp_shard": 64, "tp": 16}  # 8,192 ranks, with other sizes of all axes
MODERATE = {"pp": 4, "dp_shard": 32, "tp": 8}  # 1,024 ranks


def registry_of(config: Callable[[], DecoderConfig], axes: dict[str, int]) -> Registry:
    """Return the registry of weights and AdamW moments, sharded like the strategy `3d` with zero=1."""
    mesh, model = Mesh.of(axes), config()
    tree, plan = compose_model(build_default_run(model=model))
    shapes = {name: tuple(parameter.shape) for name, parameter in construct(tree).named_parameters()}
    blocks, stages = model.layers, mesh.size("pp")
    homes = [block * stages // blocks for block in range(blocks)]
    given = ModelShapes(shapes, {}, {name: (name,) for name in shapes})
    found = lay_out(
        plan, mesh, given, (0, *homes, stages - 1), zero=1, sequence_parallel=True, dtype="float32"
    ).registry
    names = list(found)
    return found | found.add_like("optimizer/exp_avg", names) | found.add_like("optimizer/exp_avg_sq", names)


def llama() -> None:
    """Measure one rank's planning for Llama 3 405B on 16,384 ranks."""
    began = time.perf_counter()
    registry, other = registry_of(PRESETS["llama3-405b"], WIDE), registry_of(PRESETS["llama3-405b"], NARROW)
    world = registry.mesh.world
    print(f"\nLlama 3 405B on {world:,} ranks: {len(registry.layouts):,} arrays, {registry.nbytes / 1e12:.2f} TB")
    print(f"  build both registries               {time.perf_counter() - began:8.3f} s")
    rank = world // 2 + 77
    files = PackedFiles(registry)
    seconds, file = _timed(lambda: files.get_rank_file(rank))
    print(f"  plan one rank's file                {seconds:8.3f} s  ({len(file.runs)} boxes, {file.size / 1e6:.0f} MB)")
    seconds, content = _timed(lambda: packed.write(registry, files, {"step": 0, "attempt": 1}, "0badcafe"))
    print(f"  write zarr.json                     {seconds:8.3f} s  ({len(content):,} bytes)")
    seconds, meta = _timed(lambda: zarr_json.read(content, NAME))
    print(f"  read zarr.json                      {seconds:8.3f} s")
    for axes, wanted in ((WIDE, registry), (NARROW, other)):
        reader = wanted.mesh.world // 2 + 77
        seconds, (chunks, writers) = _timed(partial(read_by, meta, wanted, reader))
        shape = " ".join(f"{axis}={size}" for axis, size in axes.items())
        print(f"  load into {shape:<25} {seconds:8.3f} s  (one rank: {chunks:,} chunks of {writers:,} files)")


def read_by(meta: Meta, wanted: Registry, rank: int) -> tuple[int, int]:
    """Return the numbers of chunks and of files that a rank of another layout reads."""
    chunks, writers = 0, set()
    for name in wanted:
        for box, _ in wanted.list_rank_boxes(name, rank):
            for writer, stored in find_stored_boxes(meta.registry, name, box):
                run = meta.files.get_rank_file(writer).by_box[name, stored.offset]
                chunks += sum(count for _, count in run.find_chunk_ranges(box))
                writers.add(writer)
    return chunks, len(writers)


def dry_run() -> None:
    """Plan every rank's file of Llama 3 8B on 1,024 ranks, to show that a rank's work does not grow with the world."""
    registry = registry_of(PRESETS["llama3-8b"], MODERATE)
    files, seconds, sizes, boxes = PackedFiles(registry), [], [], 0
    for rank in range(registry.mesh.world):
        took, file = _timed(partial(files.get_rank_file, rank))
        seconds.append(took)
        sizes.append(file.size)
        boxes += len(file.runs)
    content = packed.write(registry, files, {"step": 0, "attempt": 1}, "0badcafe")
    middle, mean = statistics.median(seconds), statistics.fmean(sizes)
    print(f"\nLlama 3 8B on {registry.mesh.world:,} ranks, all planned in one process")
    print(f"  {sum(seconds):.2f} s; per rank {middle * 1e3:.1f} ms (maximum {max(seconds) * 1e3:.1f}); {boxes:,} boxes")
    print(f"  {sum(sizes) / 1e9:.1f} GB in {len(sizes):,} files and one zarr.json of {len(content):,} bytes")
    print(f"  the largest file is {max(sizes) / mean:.3f} x the mean; padding {1 - registry.nbytes / sum(sizes):.4f}")


def latest_of_many(folder: str, count: int) -> None:
    """Measure the search for the latest of `count` checkpoints of a small model."""
    registry = registry_of(DecoderConfig, {})
    run = build_default_run(run={"dir": f"{folder}/run"}, checkpoint=ZarrCheckpoint())
    files, directory = PackedFiles(registry), RunDirectory.create(run).path
    for step in range(count):
        document = {"step": step, "attempt": 1, "model": "small"}
        place = Path(directory, "checkpoints", str(CheckpointId(step)))
        place.mkdir(parents=True)
        (place / NAME).write_bytes(packed.write(registry, files, document, f"{step:08x}"))
    run.job.dir = str(directory)
    checkpointer = build(run.checkpoint, run, None)
    listing, found = _timed(checkpointer.list)
    assert len(found) == count
    latest, id = _timed(checkpointer.find_latest)
    opening, _ = _timed(lambda: checkpointer.read_document(id))
    print(f"\n{count:,} checkpoints, {len(registry.layouts)} arrays each")
    print(f"  list() {listing:.3f} s, find_latest() {latest:.3f} s, read_document() {opening:.3f} s")
    for verb in ("show", "ls"):
        words = [sys.executable, "-m", "gangline.cli.main", "ckpt", verb, str(directory)]
        seconds, cpu = zip(*(_command(words) for _ in range(3)), strict=True)
        with_python = "including the start of Python"
        print(f"  gangline ckpt {verb:<4}  {min(seconds):.3f} s, {min(cpu):.3f} s of CPU, {with_python}")


def _command(words: list[str]) -> tuple[float, float]:
    """Return (wall, CPU) seconds of a command."""
    wall, cpu = time.perf_counter(), _cpu_of_children()
    done = subprocess.run(words, capture_output=True, text=True)
    # exit code 1: `ls` finds only the metadata, because this benchmark writes no data files
    if done.stderr or done.returncode > 1:
        sys.exit(done.stderr)
    return time.perf_counter() - wall, _cpu_of_children() - cpu


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _timed(act: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = act()
    return time.perf_counter() - began, result
