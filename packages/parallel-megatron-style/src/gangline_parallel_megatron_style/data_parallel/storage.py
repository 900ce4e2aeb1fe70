"""Everything of the model that this rank holds: groups of flat buffers, persistent buffers, and the tied copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from gangline.comm import Comm, Comms
from gangline.mesh import Mesh
from gangline.model.buffers import buffers_of, filled_buffers_of, put
from gangline.parallel.storage import dtype_name
from gangline.plan import Fold, Plan
from gangline.runtime import ShardedParam
from gangline.shard import Registry, Shard
from gangline_parallel_megatron_style.data_parallel import error_feedback
from gangline_parallel_megatron_style.data_parallel.compress import Switch, compressed
from gangline_parallel_megatron_style.data_parallel.grad_reducer import GradReducer
from gangline_parallel_megatron_style.data_parallel.param_buffer import BufferOptions, ParamBuffer
from gangline_parallel_megatron_style.sharding.arrays import (
    SHARD_AXES,
    TIED,
    ModelLayout,
    ModelShapes,
    ParamKind,
    active_fold,
)


def describe(model: nn.Module, plan: Plan) -> ModelShapes:
    """What `arrays.lay_out` wants to know of a model on the meta device."""
    given = dict(model.named_parameters(remove_duplicate=False))
    names: dict[int, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for alias, parameter in given.items():
        owner = plan.owner(alias)
        name = names.setdefault(id(given.get(owner, parameter)), owner)
        shapes.setdefault(name, tuple(parameter.shape))
        aliases[name] = (*aliases.get(name, ()), alias)
    buffers = {}
    for buffer in filled_buffers_of(model):
        if buffer.kept is not None:
            buffers[buffer.kept] = tuple(buffer.tensor.shape), dtype_name(buffer.tensor.dtype)
            aliases[buffer.kept] = buffer.names
    frozen = {name for name in shapes if not given[aliases[name][0]].requires_grad}
    return ModelShapes(shapes, buffers, aliases, frozen)


class Storage:
    """The groups of this rank's pipeline stage, by name."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        arrays: ModelLayout,
        given: ModelShapes,
        mesh: Mesh,
        comms: Comms,
        choices: BufferOptions,
        deterministic: bool,
    ) -> None:
        self.arrays, self.plan, self.mesh, self.comms, self.choices = arrays, plan, mesh, comms, choices
        self.registry, self.rank = arrays.registry, comms.rank
        self.pp = mesh.coordinate(self.rank)["pp"]
        self.deterministic = deterministic
        self._sums: dict[ParamKind, GradReducer] = {}
        self.switch = Switch()
        self.groups: dict[str, list[ParamBuffer]] = {}
        for group, buffers in arrays.groups.items():
            if self.pp in arrays.stage[group]:
                self.groups[group] = [self._flat(buffer) for buffer in buffers]
        self.flats = [flat for flats in self.groups.values() for flat in flats]
        owners = [flat for group, flats in self.groups.items() if arrays.stage[group][0] == self.pp for flat in flats]
        self.of_name = {name: flat for flat in owners for name in flat.parameters}
        self.trained = [name for name in given.shapes if name in self.of_name and self.of_name[name].trained]
        self.tied = _TiedCopy(self.groups[TIED], arrays.stage[TIED], comms) if TIED in self.groups else None
        self._take_values(model, given)
        for flat in self.flats:
            for name, parameter in flat.parameters.items():
                for alias in given.aliases[name]:
                    _put(model, alias, parameter)
        self.buffers = self._take_buffers(model)
        self._later = self._sums_over_tp()
        self._travelling: list[tuple[ParamBuffer, bool]] = []  # and whether in the last microbatch
        self._crossing: list[ParamBuffer] = []

    def _flat(self, buffer) -> ParamBuffer:
        if buffer.kind not in self._sums:
            self._sums[buffer.kind] = self._sums_of(buffer.kind)
        shapes = {array.name: self.local_shape(array.name) for array in buffer.packing.arrays}
        sums, choices = self._sums[buffer.kind], self.choices
        if choices.codec is not None and buffer.kind.trained:
            like = torch.empty(0, dtype=choices.wire, device=choices.device)
            sums = compressed(sums, buffer.packing.size, choices.codec, self.switch, like)
        return ParamBuffer(buffer, shapes, self.registry, self.rank, sums, choices)

    def _sums_of(self, kind: ParamKind) -> GradReducer:
        fold = active_fold(self.plan, self.mesh, kind.fold) if kind.fold else None
        cut = self.choices.zero > 0
        if fold is None:
            joint = self.comms.axis("dp_replicate", *SHARD_AXES) if self.deterministic else None
            return GradReducer(self.comms.axis(*SHARD_AXES), self.comms.axis("dp_replicate"), joint, cut)
        others = [axis for axis in ("dp_replicate", *SHARD_AXES) if axis not in fold.out_of]
        return GradReducer(self.comms.fold_rest(fold), self.comms.axis(*others), None, cut)

    def local_shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array on this rank before its rows are cut."""
        layout = self.registry[f"model/{name}"]
        shape, coordinate = list(layout.shape), self.mesh.coordinate(self.rank)
        for division in layout.divisions:
            if not division.rows:
                part = self.mesh.index(coordinate, division.axes) // division.every % division.parts
                shape[division.dim] = division.bounds[0][part + 1] - division.bounds[0][part]
        return tuple(shape)

    @torch.no_grad()
    def _take_values(self, model: nn.Module, given: ModelShapes) -> None:
        """A model that is not on the meta device comes with its values: each rank takes its boxes of them."""
        for name, flat in self.of_name.items():
            whole = model.get_parameter(given.aliases[name][0])
            if not whole.is_meta:
                for piece in flat.pieces[name]:
                    piece.shard.local.copy_(whole[piece.shard.box.slices])

    def _take_buffers(self, model: nn.Module) -> dict[str, Tensor]:
        found = {}
        for buffer in list(buffers_of(model)):
            if buffer.kept is not None and not self.registry.of_rank(f"model/{buffer.kept}", self.rank):
                continue  # of another stage
            device = self.choices.device
            local = (
                torch.empty_like(buffer.tensor, device=device) if buffer.tensor.is_meta else buffer.tensor.to(device)
            )
            put(model, buffer, local)
            if buffer.kept is not None:
                found[buffer.kept] = local
        return found

    # --- weights ----------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """What was written to the masters is taken up: start to fill what this rank computes with."""
        if self.tied is not None:
            self.tied.take_weights()
        for flat in self.flats:
            if flat.releases:
                flat.wait_and_release()  # gathered ahead in the last step, and never used
            else:
                flat.wait()  # a step that failed may have left a gather of older weights
                flat.gather()

    def arrays_here(self) -> Iterator[Shard]:
        """The `model/...` shards of this rank."""
        for flats in self.groups.values():
            copy = self.tied is not None and flats is self.tied.flats and not self.tied.owns
            for flat in flats:
                for pieces in flat.pieces.values():
                    for piece in pieces:
                        if not copy:
                            yield piece.shard
        for name, buffer in self.buffers.items():
            ((box, primary),) = self.registry.of_rank(f"model/{name}", self.rank)
            yield Shard(f"model/{name}", tuple(buffer.shape), buffer.dtype, box.offset, buffer, primary)

    def local(self) -> tuple[Registry, list[Shard]]:
        """What belongs to this layout alone: the errors of compressed sums, all of the run's and those held here."""
        choices = self.choices
        if choices.codec is None:
            return Registry(self.mesh), []
        registry = error_feedback.registry_of(
            self.arrays, self.plan, self.mesh, choices.zero, choices.codec, dtype_name(choices.wire)
        )
        return registry, list(error_feedback.shards_of(self.groups, registry, self.rank))

    def parameters(self) -> list[ShardedParam]:
        return [
            ShardedParam(name, self.registry[f"model/{name}"].shape, self.of_name[name].pieces[name])
            for name in self.trained
        ]

    # --- gradients --------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        self._travelling, self._crossing = [], []
        for flat in self.flats:
            flat.clear()

    def reduce(self, groups: Iterable[str], last: bool) -> None:
        """The backward pass is through with these groups: begin to add their gradients over the ranks.

        last: this is their last microbatch, so everything is added, over all ranks; else only what may not stay.
        Those of the groups before them have had this long to travel: they are waited for, so that the gradients of no
        more than two modules are whole at a time. After their last microbatch they then cross to the replicas, and
        those that did so before are waited for.
        """
        flats = [flat for group in groups for flat in self.groups[group] if flat.trained and (last or flat.each)]
        for flat in flats:
            flat.reduce()
        self._move_on([(flat, last) for flat in flats])

    def _move_on(self, behind: list[tuple[ParamBuffer, bool]]) -> None:
        before, self._travelling = self._travelling, behind
        for flat, _ in before:
            flat.collect()
        crossed, self._crossing = self._crossing, [flat for flat, last in before if last]
        for flat in self._crossing:
            flat.cross()
        for flat in crossed:
            flat.arrive()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all sums; afterwards each piece's `.grad` is the sum over all ranks."""
        while self._travelling or self._crossing:
            self._move_on([])
        trained = [flat for flat in self.flats if flat.trained]
        if self.tied is not None:
            self.tied.give_gradients()
        for flat in trained:
            flat.hand_over()
        for comm, names in self._later:
            gradients = [piece.tensor.grad for name in names for piece in self.of_name[name].pieces[name]]
            if gradients:
                together = torch.cat([g.reshape(-1) for g in gradients])  # type: ignore[union-attr]
                comm.all_reduce(together)
                for gradient, part in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):  # type: ignore[union-attr]
                    gradient.copy_(part.view_as(gradient))  # type: ignore[union-attr]

    def _sums_over_tp(self) -> list[tuple[Comm, list[str]]]:
        """Names whose gradients are added over ranks of `tp`, by those ranks: see `arrays.BufferLayout.sums`."""
        found: dict[int, list[str]] = {}
        for name in self.trained:
            count = self.of_name[name].buffer.sums[name]
            if count:
                found.setdefault(count, []).append(name)
        return [(self._neighbours(count), names) for count, names in found.items()]

    def _neighbours(self, count: int) -> Comm:
        """So many neighbours along tp, this rank one of them."""
        if count == self.mesh.size("tp"):
            return self.comms.axis("tp")
        return self.comms.fold(Fold(f"tp_by_{count}", count, ("tp",)))


class _TiedCopy:
    """A parameter that the first and the last stage use: the first owns it, the last has a copy of each range.

    Before a step the copy is told the weights, after it the owner the gradients: a range each way.
    """

    def __init__(self, flats: list[ParamBuffer], stages: tuple[int, ...], comms: Comms) -> None:
        self.flats, self.comm, self.stages = flats, comms.axis("pp"), stages
        self.trained = [flat for flat in flats if flat.trained]
        self.owns = self.comm.index == stages[0]
        self.alone = len(stages) == 1

    def take_weights(self) -> None:
        if not self.alone:
            self._tell([flat.shard for flat in self.flats], self.stages[0], self.stages[1])

    def give_gradients(self) -> None:
        if self.alone:
            return
        totals = [flat.total for flat in self.trained if flat.total is not None]
        if self.owns:
            received = [torch.empty_like(total) for total in totals]
            self._tell(received, self.stages[1], self.stages[0])
            for total, more in zip(totals, received, strict=True):
                total.add_(more)
        else:
            self._tell(totals, self.stages[1], self.stages[0])

    def _tell(self, tensors: list[Tensor], source: int, target: int) -> None:
        if self.comm.index == source:
            self.comm.exchange([(x.contiguous(), target) for x in tensors], [])
        else:
            self.comm.exchange([], [(x, source) for x in tensors])


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, tensor)
