"""The model state on this rank: parameter groups in flat buffers, persistent buffers, and the tied parameter's copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from gangline.comm.base import Comm, Comms
from gangline.comm.purpose import mark_traffic
from gangline.mesh import Mesh
from gangline.model.buffers import iterate_buffers, put
from gangline.plan import Fold, Plan
from gangline.runtime import ShardedParam
from gangline.shard import Registry, Shard, name_dtype, name_model_array
from gangline_parallel_megatron_style.data_parallel.grad_reducer import GradReducer
from gangline_parallel_megatron_style.data_parallel.grad_schedule import GradSchedule
from gangline_parallel_megatron_style.data_parallel.options import BufferOptions
from gangline_parallel_megatron_style.data_parallel.param_buffer import ParamBuffer
from gangline_parallel_megatron_style.data_parallel.reduction import (
    StepClock,
    add_reduction,
    build_kept_registry,
    iterate_kept_shards,
)
from gangline_parallel_megatron_style.data_parallel.tied import TiedCopy
from gangline_parallel_megatron_style.sharding.arrays import (
    TIED,
    BufferLayout,
    ModelLayout,
    ModelShapes,
    ParamKind,
    compute_local_shape,
)
from gangline_parallel_megatron_style.sharding.ranks import SHARD_AXES, StateRanks


class Storage:
    """The model state of this rank's pipeline stages: parameter groups by name, and persistent buffers."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        arrays: ModelLayout,
        model_shapes: ModelShapes,
        mesh: Mesh,
        comms: Comms,
        options: BufferOptions,
        deterministic: bool,
    ) -> None:
        self.arrays, self.plan, self.mesh, self.comms, self.options = arrays, plan, mesh, comms, options
        self.registry, self.rank, self._deterministic = arrays.registry, comms.rank, deterministic
        pp = mesh.coordinate(self.rank)["pp"]
        self.clock = StepClock()
        reducers: dict[ParamKind, GradReducer] = {}
        self.groups: dict[str, list[ParamBuffer]] = {}
        for group, buffers in arrays.groups.items():
            if pp in arrays.stage[group]:
                self.groups[group] = [self._make_param_buffer(buffer, reducers) for buffer in buffers]
        self.param_buffers = [buffer for buffers in self.groups.values() for buffer in buffers]
        owned = [
            buffer
            for group, group_buffers in self.groups.items()
            if arrays.stage[group][0] == pp
            for buffer in group_buffers
        ]
        self.owned = {name: buffer for buffer in owned for name in buffer.parameters}
        self.trained = [name for name in model_shapes.shapes if name in self.owned and self.owned[name].trained]
        self.tied = TiedCopy(self.groups[TIED], arrays.stage[TIED], comms) if TIED in self.groups else None
        self._take_values(model, model_shapes)
        for buffer in self.param_buffers:
            for name, parameter in buffer.parameters.items():
                for alias in model_shapes.aliases[name]:
                    _put(model, alias, parameter)
        self.buffers = self._take_buffers(model)
        self._over_tp = self._list_tp_sums()
        self._grads = GradSchedule()

    def _make_param_buffer(self, layout: BufferLayout, reducers: dict[ParamKind, GradReducer]) -> ParamBuffer:
        if layout.kind not in reducers:
            reducers[layout.kind] = self._make_reducer(layout.kind)
        reducer, options, coordinate = reducers[layout.kind], self.options, self.mesh.coordinate(self.rank)
        names = [array.name for array in layout.packing.arrays]
        shapes = {
            name: compute_local_shape(self.registry[name_model_array(name)], self.mesh, coordinate) for name in names
        }
        if options.reduction is not None and layout.kind.trained:
            like = torch.empty(0, dtype=options.reduce_dtype, device=options.device)
            reducer = add_reduction(reducer, layout.packing, options.reduction, self.clock, like)
        return ParamBuffer(layout, shapes, self.registry, self.rank, reducer, options)

    def _make_reducer(self, kind: ParamKind) -> GradReducer:
        ranks, cut = StateRanks.of(self.plan, self.mesh, kind.fold), self.options.zero > 0
        replicas = self.comms.get_comm(*ranks.replica_axes)
        if ranks.fold is not None:
            return GradReducer(self.comms.fold_rest(ranks.fold), replicas, None, cut)
        joint = self.comms.get_comm("dp_replicate", *SHARD_AXES) if self._deterministic else None
        return GradReducer(self.comms.get_comm(*SHARD_AXES), replicas, joint, cut)

    @torch.no_grad()
    def _take_values(self, model: nn.Module, model_shapes: ModelShapes) -> None:
        """Copy the values of this rank's boxes from the parameters of a model; skip parameters on the meta device."""
        for name, buffer in self.owned.items():
            whole = model.get_parameter(model_shapes.aliases[name][0])
            if not whole.is_meta:
                for piece in buffer.pieces[name]:
                    piece.shard.local.copy_(whole[piece.shard.box.slices])

    def _take_buffers(self, model: nn.Module) -> dict[str, Tensor]:
        buffers = {}
        for buffer in list(iterate_buffers(model)):
            if buffer.saved_name is not None and not self.registry.list_rank_boxes(
                name_model_array(buffer.saved_name), self.rank
            ):
                continue  # the buffer is on another pipeline rank
            device, tensor = self.options.device, buffer.tensor
            local = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
            put(model, buffer, local)
            if buffer.saved_name is not None:
                buffers[buffer.saved_name] = local
        return buffers

    # --- weights ----------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Start to refill the compute weights from the master weights; with ZeRO stage 3 free prefetched weights."""
        if self.tied is not None:
            self.tied.send_weights()
        for buffer in self.param_buffers:
            if buffer.reshards:
                buffer.discard()  # prefetched in the previous step, but unused
            else:
                buffer.wait_unshard()  # a failed step may have left a pending gather of old weights
                buffer.unshard()

    def iterate_model_shards(self) -> Iterator[Shard]:
        """Yield this rank's shards of the arrays `model/...`, for a checkpoint."""
        for group, buffers in self.groups.items():
            if group == TIED and self.tied is not None and not self.tied.owns:
                continue  # the owner saves the tied parameter, not the copy
            for buffer in buffers:
                for pieces in buffer.pieces.values():
                    for piece in pieces:
                        yield piece.shard
        for name, tensor in self.buffers.items():
            ((box, primary),) = self.registry.list_rank_boxes(name_model_array(name), self.rank)
            yield Shard(name_model_array(name), tuple(tensor.shape), tensor.dtype, box.offset, tensor, primary)

    def local(self) -> tuple[Registry, list[Shard]]:
        """Return the layout-dependent state: registry and this rank's shards of the arrays that the reduction keeps."""
        reduction, dtype = self.options.reduction, name_dtype(self.options.reduce_dtype)
        if reduction is None:
            return Registry(self.mesh), []
        registry = build_kept_registry(self.arrays, self.plan, self.mesh, self.options.zero, reduction, dtype)
        return registry, list(iterate_kept_shards(self.groups, reduction, registry, self.rank))

    def parameters(self) -> list[ShardedParam]:
        """Return the trained parameters that this rank's pipeline stages own."""
        return [
            ShardedParam(name, self.registry[name_model_array(name)].shape, self.owned[name].pieces[name])
            for name in self.trained
        ]

    # --- gradients --------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop the gradients of the previous step."""
        self._grads.clear()
        for buffer in self.param_buffers:
            if buffer.grads is not None:
                buffer.grads.clear()

    def reduce(self, groups: Iterable[str], last: bool) -> None:
        """Start to reduce the gradients of parameter groups over the ranks. Call after the groups' backward pass.

        last: whether the backward pass was of the last microbatch
        """
        buffers = [buffer for group in groups for buffer in self.groups[group]]
        self._grads.reduce([buffer.grads for buffer in buffers if buffer.grads is not None], last)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all reductions; afterwards the `.grad` of each parameter shard is the sum over all ranks."""
        self._grads.finish()
        if self.tied is not None:
            self.tied.send_gradients()
        for buffer in self.param_buffers:
            if buffer.grads is not None:
                buffer.grads.assign()
        if self.options.offload and self.options.device.type == "cuda":
            torch.cuda.synchronize(self.options.device)  # one synchronization for the copies of all buffers
        for comm, names in self._over_tp:
            pieces = [piece.tensor for name in names for piece in self.owned[name].pieces[name]]
            gradients = [tensor.grad for tensor in pieces if tensor.grad is not None]
            if gradients:
                together = torch.cat([g.reshape(-1) for g in gradients])
                with mark_traffic("gradients"):
                    comm.all_reduce(together)
                for gradient, part in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
                    gradient.copy_(part.view_as(gradient))

    def _list_tp_sums(self) -> list[tuple[Comm, list[str]]]:
        """Return (tp ranks, names of the parameters whose gradients they sum): see `BufferLayout.sums`."""
        summed_names: dict[int, list[str]] = {}
        for name in self.trained:
            count = self.owned[name].layout.sums[name]
            if count:
                summed_names.setdefault(count, []).append(name)
        return [(self._get_neighbour_comm(count), names) for count, names in summed_names.items()]

    def _get_neighbour_comm(self, count: int) -> Comm:
        """Return the communicator of this rank's group of `count` neighbouring tp ranks."""
        if count == self.mesh.size("tp"):
            return self.comms.get_comm("tp")
        return self.comms.fold(Fold(f"tp_by_{count}", count, ("tp",)))


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, tensor)
