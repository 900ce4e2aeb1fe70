"""The state that the checkpoint benchmark saves and loads: a GPT with AdamW, float32, in 300 arrays."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from math import prod, sqrt

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard as OnDim

from gangline.mesh import Mesh
from gangline.shard import Box, Division, Layout, Registry, Shard
from gangline_testkit.dtensor import to_dtensor

LAYERS, POSITIONS = 8, 1024


def shapes(gib: float) -> dict[str, tuple[int, ...]]:
    """100 parameters that with both moments of AdamW make about so many GiB."""
    width = max(64, round(sqrt(gib * (1 << 30) / (12 * (12 * LAYERS + 64))) / 64) * 64)
    found: dict[str, tuple[int, ...]] = {
        "embed.weight": (64 * width, width),
        "position.weight": (POSITIONS, width),
    }
    for block in (f"blocks.{number}" for number in range(LAYERS)):
        for name, rows, columns in (
            ("attention.qkv", 3 * width, width),
            ("attention.out", width, width),
            ("feed_forward.up", 4 * width, width),
            ("feed_forward.down", width, 4 * width),
        ):
            found |= {f"{block}.{name}.weight": (rows, columns), f"{block}.{name}.bias": (rows,)}
        for name in ("attention_norm", "feed_forward_norm"):
            found |= {f"{block}.{name}.weight": (width,), f"{block}.{name}.bias": (width,)}
    return found | {"norm.weight": (width,), "norm.bias": (width,)}


def registry_of(gib: float, world: int, dim: int) -> Registry:
    """Matrices cut along `dim` over so many ranks, as torch.chunk cuts them; vectors are whole on each."""
    mesh = Mesh.of({"dp_shard": world})
    layouts = {}
    for kind in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
        for name, shape in shapes(gib).items():
            cut: tuple[Division, ...] = ()
            if len(shape) > 1 and world > 1:
                step = -(-shape[dim] // world)
                cut = (Division(("dp_shard",), (tuple(min(shape[dim], step * i) for i in range(world + 1)),), dim),)
            layouts[f"{kind}/{name}"] = Layout(shape, "float32", cut)
    return Registry.of(mesh, layouts)


def values(name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """A part of an array whose every row and column differs."""
    start = zlib.crc32(name.encode()) % 8191
    found = torch.zeros((), dtype=torch.int64)
    for dim, (at, n) in enumerate(zip(box.offset, box.shape, strict=True)):
        place = (torch.arange(at, at + n) * prod(shape[dim + 1 :])) % 8191
        found = found + place.view(-1, *[1] * (len(shape) - 1 - dim))
    return ((found + start) % 8191).float()


@dataclass
class State:
    """What one rank holds."""

    registry: Registry
    shards: list[Shard]
    rank: int

    @property
    def nbytes(self) -> int:
        return sum(shard.local.nbytes for shard in self.shards)

    def right(self) -> bool:
        """Whether every array has its values."""
        return all(torch.equal(shard.local, values(shard.name, shard.global_shape, shard.box)) for shard in self.shards)

    def clear(self) -> None:
        """Nothing an earlier load left can pass for what the next one reads."""
        for shard in self.shards:
            shard.local.fill_(-1)

    def own(self) -> list[Shard]:
        """What this rank alone writes."""
        return [shard for shard in self.shards if shard.primary]

    def dtensors(self) -> dict[str, torch.Tensor]:
        """The same memory, as torch's checkpoints know it."""
        if self.registry.mesh.world == 1:
            return {shard.name: shard.local for shard in self.shards}
        mesh = init_device_mesh("cpu", (self.registry.mesh.world,))
        found: dict[str, torch.Tensor] = {}
        for shard in self.shards:
            cuts = self.registry[shard.name].divisions
            found[shard.name] = to_dtensor(shard, mesh, [OnDim(cuts[0].dim) if cuts else Replicate()])
        return found


def state_of(gib: float, world: int, rank: int, dim: int = 0, fill: bool = True) -> State:
    """The state of a rank; unless filled, its memory has been touched."""
    registry, shards = registry_of(gib, world, dim), []
    for name, layout in registry.layouts.items():
        for box, primary in registry.list_rank_boxes(name, rank):
            local = values(name, layout.shape, box) if fill else torch.zeros(box.shape).add_(-1)
            shards.append(Shard(name, layout.shape, torch.float32, box.offset, local, primary))
    return State(registry, shards, rank)
