"""Build the state that the checkpoint benchmark saves and loads: a GPT with AdamW, float32, in 300 arrays."""

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
    """Return the shapes of 100 parameters; with both AdamW moments they have about `gib` GiB."""
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
    """Return the registry: matrices sharded along `dim` over the ranks like torch.chunk, vectors replicated."""
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
    """Return a box of an array in which all rows and all columns differ."""
    start = zlib.crc32(name.encode()) % 8191
    found = torch.zeros((), dtype=torch.int64)
    for dim, (at, n) in enumerate(zip(box.offset, box.shape, strict=True)):
        place = (torch.arange(at, at + n) * prod(shape[dim + 1 :])) % 8191
        found = found + place.view(-1, *[1] * (len(shape) - 1 - dim))
    return ((found + start) % 8191).float()


@dataclass
class State:
    """The shards of one rank."""

    registry: Registry
    shards: list[Shard]
    rank: int

    @property
    def nbytes(self) -> int:
        return sum(shard.local.nbytes for shard in self.shards)

    def right(self) -> bool:
        """Return whether every array has its expected values."""
        return all(torch.equal(shard.local, values(shard.name, shard.global_shape, shard.box)) for shard in self.shards)

    def clear(self) -> None:
        """Overwrite all arrays, so that the values of an earlier load cannot pass for those of the next."""
        for shard in self.shards:
            shard.local.fill_(-1)

    def own(self) -> list[Shard]:
        """Return the shards that this rank writes."""
        return [shard for shard in self.shards if shard.primary]

    def dtensors(self) -> dict[str, torch.Tensor]:
        """Return the same memory as DTensors, for torch's checkpointers."""
        if self.registry.mesh.world == 1:
            return {shard.name: shard.local for shard in self.shards}
        mesh = init_device_mesh("cpu", (self.registry.mesh.world,))
        found: dict[str, torch.Tensor] = {}
        for shard in self.shards:
            cuts = self.registry[shard.name].divisions
            found[shard.name] = to_dtensor(shard, mesh, [OnDim(cuts[0].dim) if cuts else Replicate()])
        return found


def state_of(gib: float, world: int, rank: int, dim: int = 0, fill: bool = True) -> State:
    """Return the state of a rank. fill: with values; else with memory that is allocated but has no values."""
    registry, shards = registry_of(gib, world, dim), []
    for name, layout in registry.layouts.items():
        for box, primary in registry.list_rank_boxes(name, rank):
            local = values(name, layout.shape, box) if fill else torch.zeros(box.shape).add_(-1)
            shards.append(Shard(name, layout.shape, torch.float32, box.offset, local, primary))
    return State(registry, shards, rank)
