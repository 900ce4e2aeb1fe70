"""Checkpoints without the base (`checkpoint.frozen=false`): what is never trained is found again where it came from.

The base of a run are the arrays that its plan freezes. They are a function of the run: drawn by its seed, or read from
`model.weights`. A checkpoint that leaves them out says in its document what they were, by a fingerprint that no layout
changes; whoever opens it makes them again, and other weights in their place are refused.

The fingerprint of an array is a sum modulo 2**64 of hashes, of each number and its place: ranks add up theirs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from gangline.errors import UserError
from gangline.model.tree import parameter_shapes
from gangline.shard import Shard, model_array, parameter_of

if TYPE_CHECKING:
    import torch

    from gangline.comm.base import Comms
    from gangline.config.schema import Run
    from gangline.model.tree import Node
    from gangline.plan import Plan

ROWS = 1 << 20  # numbers that are hashed at once

Shapes = Mapping[str, tuple[int, ...]]
Read = Callable[[Shapes], Iterator[tuple[str, "torch.Tensor"]]]  # each until the next: they may share memory


def base_arrays(tree: Node, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Name and shape of each array of a parameter that no step changes, in order of name. Buffers are always saved."""
    frozen = ((name, shape) for name, shape in sorted(parameter_shapes(tree).items()) if plan.is_frozen(name))
    return {model_array(name): shape for name, shape in frozen}


def described(run: Run, fingerprint: str, names: Collection[str]) -> dict[str, Any]:
    """What a document says of a base that the checkpoint leaves out."""
    return {"fingerprint": fingerprint, "arrays": len(names), "from": run.model.pretrained()}


def fingerprint(names: Collection[str], shards: Iterable[Shard], comms: Comms | None = None) -> str:
    """Of the arrays `names`, of which this rank has `shards`; the same on all ranks and in every layout."""
    import torch

    names = sorted(names)
    place = {name: number for number, name in enumerate(names)}
    sums: torch.Tensor | None = None
    for shard in shards:
        if sums is None:
            sums = torch.zeros(len(names), dtype=torch.int64, device=shard.local.device)
        if shard.primary and shard.name in place:
            sums[place[shard.name]] += _sum(shard)
    if sums is None:
        sums = torch.zeros(len(names), dtype=torch.int64, device=None if comms is None else comms.device)
    if comms is not None:
        sums = comms.world.all_reduce(sums)
    return _digest(dict(zip(names, sums.tolist(), strict=True)))


def _digest(sums: Mapping[str, int]) -> str:
    """Of all arrays by name."""
    return hashlib.blake2b(json.dumps(sorted(sums.items())).encode(), digest_size=8).hexdigest()


def _sum(shard: Shard) -> torch.Tensor:
    """Of the hashes of its numbers (floats as float32) and their places in the whole array."""
    import torch

    from gangline.draws import mixed

    local = shard.local.detach().reshape(-1, shard.local.shape[-1] if shard.local.dim() else 1)
    places = _places(shard, local.device)
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    step = max(1, ROWS // max(1, local.shape[1]))
    for start in range(0, len(local), step):
        rows = local[start : start + step]
        bits = rows.float().contiguous().view(torch.int32) if rows.is_floating_point() else rows
        columns = torch.arange(rows.shape[1], device=rows.device)
        total += mixed(bits.to(torch.int64) + mixed(places[start : start + step, None] + columns)).sum()
    return total


def _places(shard: Shard, device: torch.device) -> torch.Tensor:
    """(rows,) int64: the number in the whole array of the first element of each row of the shard."""
    import torch

    place = torch.full((1,), shard.offset[-1] if shard.offset else 0, dtype=torch.int64, device=device)
    for dim, (offset, length) in enumerate(zip(shard.offset[:-1], shard.local.shape[:-1], strict=True)):
        stride = prod(shard.global_shape[dim + 1 :])
        along = (torch.arange(length, device=device) + offset) * stride
        place = (place[:, None] + along).reshape(-1)
    return place


# --- opening such a checkpoint ---------------------------------------------------------------------------------------


def refill(
    run: Run,
    plan: Plan,
    names: Collection[str],
    shards: Iterable[Sequence[Shard]],
    said: Mapping[str, Any],
    what: str,
    comms: Comms | None = None,
) -> None:
    """Make the base again. names: all arrays that the checkpoint leaves out; shards: this rank's, some at a time.

    said: what its document says of them; what: names the checkpoint. Raises UserError where the base is gone, or is
    another.
    """
    _check_said(said, names, what)

    from gangline.model.first_weights import draw_weights

    def filled() -> Iterator[Shard]:
        for some in shards:
            draw_weights(run, some, plan)
            yield from some

    try:
        now = fingerprint(names, filled(), comms)
    except UserError as error:
        raise _unreadable(error, said, what) from error
    _check_same(now, said, what)


def check_again(
    run: Run, plan: Plan, names: Collection[str], shards: Iterable[Shard], wanted: str, comms: Comms | None = None
) -> None:
    """Make the base again, beside the one in memory and one array after another. shards: this rank's of the run.

    wanted: its fingerprint. Raises UserError where it is gone, or comes out as another.
    """
    from dataclasses import replace

    import torch

    from gangline.model.first_weights import draw_weights

    def drawn() -> Iterator[Shard]:
        for shard in (shard for shard in shards if shard.name in names):
            copy = replace(shard, local=torch.empty_like(shard.local))
            draw_weights(run, [copy], plan)
            yield copy

    came = run.model.pretrained()
    whole = "checkpoint.frozen=true saves it with what is trained."
    try:
        now = fingerprint(names, drawn(), comms)
    except UserError as error:
        told = f"checkpoint.frozen=false: the base of this run cannot be made again: {error.what}"
        raise UserError(told, *error.details, whole) from error
    if now != wanted:
        where = f"now lie in {came}" if came else "the seed draws now"
        raise UserError(
            f"checkpoint.frozen=false: the base of this run is another than the weights that {where}.",
            f"Fingerprint {wanted} in the checkpoint, {now} there: who opens the next one would not find it again.",
            whole,
        )


def with_base(
    run: Run, arrays: Shapes, read: Read, said: Mapping[str, Any], what: str
) -> tuple[Shapes, Read, Callable[[], None]]:
    """(arrays, read, check) of a checkpoint with the base that it leaves out, each array of which is made when it is
    read. check: called behind all that is read, makes what nobody read; it raises UserError, as `refill` does, where
    the base is another.
    """
    from gangline.model.compose import compose_model

    tree, plan = compose_model(run)
    missing = {name: shape for name, shape in base_arrays(tree, plan).items() if name not in arrays}
    if not missing:
        return arrays, read, lambda: None
    base = _LeftOut(run, plan, missing, said, what)

    def whole(wanted: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
        yield from read({name: shape for name, shape in wanted.items() if name not in missing})
        for name in (name for name in wanted if name in missing):
            yield name, base.made(name)

    return {**arrays, **missing}, whole, base.check


class _LeftOut:
    """The arrays that a checkpoint leaves out, made one after another: together they may be larger than the memory."""

    def __init__(self, run: Run, plan: Plan, missing: Shapes, said: Mapping[str, Any], what: str) -> None:
        _check_said(said, missing, what)
        self.run, self.plan, self.missing, self.said, self.what = run, plan, missing, said, what
        self._sums: dict[str, int] = {}

    def made(self, name: str) -> torch.Tensor:
        """The array, whole. Raises UserError where it cannot be made."""
        import torch

        from gangline.model.first_weights import draw_weights

        codes = self.plan.dtype_of(parameter_of(name)) == "int8"
        local = torch.empty(self.missing[name], dtype=torch.int8 if codes else torch.float32)
        shard = Shard(name, self.missing[name], local.dtype, (0,) * local.dim(), local)
        try:
            draw_weights(self.run, [shard], self.plan)
        except UserError as error:
            raise _unreadable(error, self.said, self.what) from error
        if name not in self._sums:
            self._sums[name] = int(_sum(shard))
        return local

    def check(self) -> None:
        for name in self.missing:
            if name not in self._sums:
                self.made(name)
        _check_same(_digest(self._sums), self.said, self.what)


def _check_said(said: Mapping[str, Any], names: Iterable[str], what: str) -> None:
    if not said:
        raise UserError(f"{what} lacks {', '.join(map(parameter_of, sorted(names)[:3]))}.", "It does not say why.")


def _unreadable(error: UserError, said: Mapping[str, Any], what: str) -> UserError:
    told = f"{what} holds what is trained alone, and its base cannot be read: {error.what}"
    return UserError(told, *error.details, _origin(said))


def _check_same(now: str, said: Mapping[str, Any], what: str) -> None:
    if now != said.get("fingerprint"):
        came = said.get("from")
        raise UserError(
            f"{what} was trained on another base than the weights that are there now.",
            f"Fingerprint {said.get('fingerprint')} then, {now} now. {_origin(said)}",
            f"Put the weights back that lay in {came}." if came else "The model is drawn in another way by now.",
        )


def _origin(said: Mapping[str, Any]) -> str:
    return f"It came from {said['from']}." if said.get("from") else "It was drawn by the run's seed."
