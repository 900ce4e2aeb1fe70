"""Checkpoints staged by one invented layout and read by another, bit by bit; every damaged chunk is reported."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import made
import pytest
import torch
from hypothesis import given, settings, strategies as st
from layouts import registries
from made import WRITE_ID, whole

from gangline.errors import BadCheckpoint
from gangline.mesh import Mesh
from gangline.shard import Box, Division, Layout, Registry, Shard
from gangline_ckpt_zarr.format import packed, zarr_json
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.format.checksum import TRAILER
from gangline_ckpt_zarr.format.packed import PackedFiles
from gangline_ckpt_zarr.load import batch
from gangline_ckpt_zarr.load.read_plan import Target, plan_reads
from gangline_ckpt_zarr.load.reader import ChunkReader
from gangline_ckpt_zarr.save.staging import Staging


def staged(registry: Registry) -> tuple[Meta, dict[int, bytearray]]:
    """Return the parsed zarr.json and the files of all ranks in memory."""
    return zarr_json.read(
        packed.write(registry, PackedFiles(registry), {"step": 1, "attempt": 1}, WRITE_ID), "zarr.json"
    ), made.staged(registry)


class Memory:
    """Store with one file; `readers`: the threads that have read from it."""

    url = "memory://files"

    def __init__(self, content: bytearray, local: bool = False) -> None:
        self.content, self.local = content, local
        self.readers: set[int] = set()

    def open_reader(self, path: str):
        return nullcontext(lambda ranges: self.read_into(path, ranges))

    def read_into(self, path: str, ranges) -> None:
        self.readers.add(threading.get_ident())
        for start, buffers in ranges:
            for buffer in buffers:
                part = self.content[start : start + len(buffer)]
                if len(part) < len(buffer):
                    raise EOFError("it ends early")
                buffer[:] = part
                start += len(buffer)


def target_of(name: str, layout: Layout, box: Box) -> tuple[Target, torch.Tensor]:
    memory = torch.zeros(box.shape, dtype=getattr(torch, layout.dtype))
    bits = layout.dtype == "bfloat16"
    return Target(name, box, (memory.view(torch.int16) if bits else memory).numpy(), bits), memory


def filled(meta: Meta, files: dict[int, bytearray], wanted: list[Target], verify: bool = True) -> None:
    for rank, items in plan_reads(meta, wanted).items():
        ChunkReader(meta, f"{rank}.bin", Memory(files[rank]), verify).read(items)


@settings(max_examples=150, deadline=None)
@given(registries(), st.booleans(), st.data())
def test_any_layout_reads_any_other_layout(registry: Registry, verify: bool, data) -> None:
    meta, files = staged(registry)
    for name, layout in registry.layouts.items():
        wanted = []
        for _ in range(2):
            offset = tuple(data.draw(st.integers(0, n - 1)) for n in layout.shape)
            shape = tuple(data.draw(st.integers(1, n - start)) for n, start in zip(layout.shape, offset, strict=True))
            wanted.append((Box(offset, shape), *target_of(name, layout, Box(offset, shape))))
        filled(meta, files, [target for _, target, _ in wanted], verify)
        for box, _, memory in wanted:
            assert torch.equal(memory, whole(name, layout)[box.slices])


LARGE = Registry.of(
    Mesh.of({"dp_shard": 2}),
    {
        "model/w": Layout((600, 64), "float32", (Division(("dp_shard",), ((0, 300, 600),), rows=True),)),
        "model/b": Layout((64,), "float32"),
        "model/half": Layout((8, 4), "bfloat16", (Division(("dp_shard",), ((0, 4, 8),)),)),
    },
)


def targets() -> list[Target]:
    return [
        target_of(name, layout, Box((0,) * len(layout.shape), layout.shape))[0]
        for name, layout in LARGE.layouts.items()
    ]


def test_damage_to_any_chunk_is_named() -> None:
    """Flip a bit in each chunk, and truncate the file there."""
    meta, files = staged(LARGE)
    filled(meta, files, targets())
    draw = random.Random(0)
    for rank, content in files.items():
        for run in meta.files.get_rank_file(rank).runs:
            for number in range(run.count):
                start = run.base + number * run.stride
                place = start + draw.randrange(run.nbytes + TRAILER)
                flipped = bytearray(content)
                flipped[place] ^= 1 << draw.randrange(8)
                for damaged in (flipped, content[:place]):
                    with pytest.raises(BadCheckpoint) as raised:
                        filled(meta, {**files, rank: damaged}, targets())
                    named = run.chunk_box(number)
                    assert raised.value.array == run.name
                    assert raised.value.box == tuple(
                        (at, at + n) for at, n in zip(named.offset, named.shape, strict=True)
                    )
                    assert raised.value.file == f"memory://files/{rank}.bin"


def test_parallel_reads_are_correct_and_name_first_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use three threads and small batches, so that several batches are read at the same time."""
    pool = ThreadPoolExecutor(3)
    monkeypatch.setattr(batch, "count_lanes", lambda: 3)
    monkeypatch.setattr(batch, "_get_pool", lambda: pool)
    monkeypatch.setattr(batch, "BATCH", 4096)
    layout = Layout((640, 64), "float32", (Division(("dp_shard",), ((0, *range(32, 641, 32)),), rows=True),))
    registry = Registry.of(Mesh.of({"dp_shard": 20}), {"model/w": layout})
    meta, files = staged(registry)
    for columns in (slice(0, 64), slice(0, 32), slice(7, 50)):
        box = Box((0, columns.start), (640, columns.stop - columns.start))
        for verify in (True, False):
            target, memory = target_of("model/w", layout, box)
            for rank, items in plan_reads(meta, [target]).items():
                store = Memory(files[rank], local=True)
                ChunkReader(meta, f"{rank}.bin", store, verify).read(items)
                assert threading.get_ident() not in store.readers
            assert torch.equal(memory, whole("model/w", layout)[box.slices])
    target, memory = target_of("model/w", layout, Box((0, 0), layout.shape))
    items = plan_reads(meta, [target])[3]
    (run,) = meta.files.get_rank_file(3).runs
    broken = bytearray(files[3])
    broken[run.base] ^= 1
    with pytest.raises(BadCheckpoint) as raised:
        ChunkReader(meta, "3.bin", Memory(broken, local=True)).read(items)
    assert raised.value.box == ((96, 128), (0, 64))
    pool.shutdown()


def test_bfloat16_keeps_every_bit() -> None:
    """Check all 65,536 bit patterns, including NaN payloads."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    layout = Layout((1 << 16,), "bfloat16")
    registry = Registry.of(Mesh.of({}), {"model/x": layout})
    file = PackedFiles(registry).get_rank_file(0)
    staging = Staging()
    staging.fill(file, [Shard("model/x", layout.shape, torch.bfloat16, (0,), bits.view(torch.bfloat16))])
    values = staging._bytes[: 4 << 16].view(torch.float32).clone()
    staging.close()
    finite = ~bits.view(torch.bfloat16).isnan()
    assert torch.equal(values[finite], bits.view(torch.bfloat16)[finite].float())
    target, memory = target_of("model/x", layout, Box((0,), layout.shape))
    target.put(target.box, values.numpy())
    assert torch.equal(memory.view(torch.int16), bits)
