"""What error feedback keeps, as `local/...` arrays: one row for each rank of a stage, of this layout alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from torch import Tensor

from gangline.mesh import Mesh
from gangline.plan import Plan
from gangline.shard import Division, Layout, Registry, Shard
from gangline_parallel_megatron_style.data_parallel.compressed_comm import Compressed, row_of
from gangline_parallel_megatron_style.data_parallel.grad_codec import GradCodec
from gangline_parallel_megatron_style.data_parallel.param_buffer import ParamBuffer
from gangline_parallel_megatron_style.sharding.arrays import ModelLayout
from gangline_parallel_megatron_style.sharding.ranks import StateRanks


def name_of(mesh: Mesh, pp: int, group: str, index: int, error: str) -> str:
    """Says the layout, too: the errors of another would be of other ranges."""
    layout = "-".join(f"{axis}{size}" for axis, size in mesh.sizes)
    return f"local/compress/{layout}/{pp}/{group}.{index}/{error}"


def registry_of(arrays: ModelLayout, plan: Plan, mesh: Mesh, zero: int, codec: GradCodec, dtype: str) -> Registry:
    """The errors of all buffers of the run, on whatever stage."""
    axes = tuple(axis for axis in mesh.axes if axis != "pp")
    ranks = mesh.size(*axes)
    found = {}
    for group, buffers in arrays.groups.items():
        for (index, buffer), pp in product(enumerate(buffers), arrays.stage[group]):
            ranks_of = StateRanks.of(plan, mesh, buffer.kind.fold)
            n, R = ranks_of.shards, ranks_of.replicas
            if not (codec.feedback and buffer.kind.trained) or n * R == 1:
                continue
            senders, size = (R, -(-buffer.packing.size // n)) if R > 1 else (n, buffer.packing.size)
            row = row_of(size, senders, codec)
            rows = {"worker": senders} | ({"server": 1} if R > 1 or zero == 0 else {})
            for error, count in rows.items():
                cut = (Division(axes, (tuple(range(ranks + 1)),)),) if ranks > 1 else ()
                found[name_of(mesh, pp, group, index, error)] = Layout((ranks, count, row), dtype, cut, (("pp", pp),))
    return Registry.of(mesh, found)


def shards_of(groups: Mapping[str, Sequence[ParamBuffer]], registry: Registry, rank: int) -> Iterator[Shard]:
    """This rank's errors."""
    mesh = registry.mesh
    pp = mesh.coordinate(rank)["pp"]
    for group, buffers in groups.items():
        for index, buffer in enumerate(buffers):
            for error, tensor in _errors(buffer):
                name = name_of(mesh, pp, group, index, error)
                ((box, primary),) = registry.of_rank(name, rank)
                yield Shard(name, registry[name].shape, tensor.dtype, box.offset, tensor[None], primary)


def _errors(buffer: ParamBuffer) -> Iterator[tuple[str, Tensor]]:
    for comm in (buffer.reducer.replicas, buffer.reducer.shard):
        if isinstance(comm, Compressed):
            yield from comm.errors()
