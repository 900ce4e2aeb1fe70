"""AdamW with 8-bit moments (Dettmers et al., arXiv 2110.02861): 2.03 bytes of state per weight instead of 8.

    M, V  <-  decoded codes and scales               (`gangline_basics.optimizer.codes`)
    M, V, W  <-  one step of AdamW, in the dtype of the master weights
    codes and scales  <-  M, V

Blocks of codes follow the rows of the full array, and no layout may split a block, so results are layout-invariant up
to rounding. If the gradients of two layouts differ by rounding, a value near the midpoint of two levels may get another
level; from then on the results differ by more than rounding, as for a sign in Lion. If a run continues with another
block length, its moments are quantised once more, with an error of at most half of the distance between two levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

from gangline.config.schema import Run
from gangline.errors import UserError
from gangline.optimizer import Optimizer
from gangline.runtime import ParamShard, Runtime
from gangline.shard import Layout, Registry, Shard, name_model_array
from gangline_basics.optimizer.adamw import AdamwOptimizer
from gangline_basics.optimizer.codes import decode, encode
from gangline_basics.optimizer.config import Adamw8bit
from gangline_basics.optimizer.pieces import group_pieces

AT_ONCE = 1 << 24  # maximum number of elements of a piece that are decoded at a time
STATES = (("exp_avg", True), ("exp_avg_sq", False))  # name of the state, and whether its values are signed


@dataclass
class _Moment:
    """Quantised moment of a piece, flattened to rows: codes (R, F) and scales (R, S)."""

    state: str
    signed: bool
    codes: Tensor
    scales: Tensor


@dataclass
class _Piece:
    name: str
    of: ParamShard
    moments: list[_Moment]


class Adamw8bitOptimizer(Optimizer):
    """8-bit moments for arrays of at least two dims and `min_8bit_size` elements, AdamW for all others."""

    def __init__(self, config: Adamw8bit, runtime: Runtime, deterministic: bool) -> None:
        self.config, model = config, runtime.registry
        coded = [name for name in runtime.names() if config.quantises(model[name_model_array(name)].shape)]
        rest = [name for name in runtime.names() if name not in set(coded)]
        parameters = runtime.parameters()
        self._rest = AdamwOptimizer(
            config, runtime, [p for p in parameters if p.name in set(rest)], rest, deterministic
        )
        self.registry = self._rest.registry | build_registry(model, coded, config.block)
        self._groups = [
            (rate, decay, [self._make_piece(name, piece) for name, piece in pieces])
            for (rate, decay), pieces in group_pieces([p for p in parameters if p.name in set(coded)], config).items()
        ]
        self._steps = 0
        # moments to convert: (piece, moment, scales of complete rows in the block length of the checkpoint)
        self._read: list[tuple[_Piece, _Moment, Tensor]] = []

    def _make_piece(self, name: str, piece: ParamShard) -> _Piece:
        rows, moments = _flatten_rows(piece.tensor.detach()), []
        blocks = -(-rows.shape[1] // self.config.block)
        for state, signed in STATES:
            scales = torch.zeros(len(rows), blocks, dtype=torch.float32, device=rows.device)
            moments.append(_Moment(state, signed, torch.zeros_like(rows, dtype=torch.uint8), scales))
        return _Piece(name, piece, moments)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        self._steps += 1
        for rate, decay, pieces in self._groups:
            for piece in pieces:
                gradient = piece.of.tensor.grad
                assert gradient is not None
                self._step(piece, _flatten_rows(piece.of.tensor), _flatten_rows(gradient), learning_rate * rate, decay)
        self._rest.step(learning_rate)

    def _step(self, piece: _Piece, weights_RF: Tensor, gradients_RF: Tensor, rate: float, decay: float) -> None:
        """Update the weights and moments of a piece, as many rows at a time as fit into `AT_ONCE` elements."""
        (one, two), eps, block = self.config.betas, self.config.eps, self.config.block
        biases = 1 - one**self._steps, sqrt(1 - two**self._steps)
        every = max(1, AT_ONCE // weights_RF.shape[1])
        for start in range(0, len(weights_RF), every):
            rows = slice(start, start + every)
            w, g = weights_RF[rows], gradients_RF[rows]
            mean, square = (
                decode(moment.codes[rows], moment.scales[rows], block, moment.signed, w.dtype)
                for moment in piece.moments
            )
            mean = mean.lerp(g, 1 - one)
            square = (square * two).addcmul_(g, g, value=1 - two)
            w.mul_(1 - rate * decay)
            w.addcdiv_(mean, (square.sqrt() / biases[1]).add_(eps), value=-rate / biases[0])
            for moment, full in zip(piece.moments, (mean, square), strict=True):
                codes, scales = encode(full, block, moment.signed)
                moment.codes[rows].copy_(codes)
                moment.scales[rows].copy_(scales)

    def shards(self) -> Iterator[Shard]:
        for _, _, pieces in self._groups:
            for piece in pieces:
                for moment in piece.moments:
                    yield from self._iterate_shards(piece, moment)
        yield from self._rest.shards()

    def _iterate_shards(self, piece: _Piece, moment: _Moment) -> Iterator[Shard]:
        of, block = piece.of.shard, self.config.block
        state, lead = f"optimizer/{moment.state}", piece.of.tensor.shape[:-1]
        codes, scales = moment.codes.view(*lead, -1), moment.scales.view(*lead, -1)
        yield Shard(f"{state}/{piece.name}", of.global_shape, codes.dtype, of.offset, codes, of.primary)
        shape, offset = compute_scales_shape(of.global_shape, block), (*of.offset[:-1], of.offset[-1] // block)
        yield Shard(f"{state}_scales/{piece.name}", shape, scales.dtype, offset, scales, of.primary)

    def select_filled(self, state: Mapping[str, Any]) -> Iterator[Shard]:
        """Yield the shards to load; if the checkpoint has another block length, also the scales of complete rows."""
        block, self._read = int(state.get("block", self.config.block)), []
        if block == self.config.block:
            yield from self.shards()
            return
        for _, _, pieces in self._groups:
            for piece in pieces:
                of, lead = piece.of.shard, piece.of.tensor.shape[:-1]
                shape, offset = compute_scales_shape(of.global_shape, block), (*of.offset[:-1], 0)
                for moment in piece.moments:
                    codes, _ = self._iterate_shards(piece, moment)
                    scales = moment.scales.new_zeros(len(moment.codes), shape[-1])
                    name = f"optimizer/{moment.state}_scales/{piece.name}"
                    yield codes
                    yield Shard(name, shape, scales.dtype, offset, scales.view(*lead, -1), of.primary)
                    self._read.append((piece, moment, scales))
        yield from self._rest.shards()

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps, "block": self.config.block}

    def load_state(self, state: dict[str, Any]) -> None:
        self._steps = int(state["steps"])
        self._rest.load_state(state)
        for piece, moment, scales_RS in self._read:
            first, every = piece.of.shard.offset[-1], max(1, AT_ONCE // moment.codes.shape[1])
            for start in range(0, len(moment.codes), every):
                rows = slice(start, start + every)
                self._take_over(moment, rows, scales_RS[rows], int(state["block"]), first, piece.of.tensor.dtype)
        self._read = []

    def _take_over(
        self, moment: _Moment, rows: slice, scales_RS: Tensor, block: int, first: int, dtype: torch.dtype
    ) -> None:
        """Convert codes from block length `block` to that of the run. first: first column of the piece in the array."""
        codes_RF = moment.codes[rows]
        columns = torch.arange(first, first + codes_RF.shape[1], device=codes_RF.device)
        full = decode(codes_RF, scales_RS[:, columns // block], 1, moment.signed, dtype)
        codes, scales = encode(full, self.config.block, moment.signed)
        moment.codes[rows].copy_(codes)
        moment.scales[rows].copy_(scales)


def build_registry(model: Registry, names: Sequence[str], block: int) -> Registry:
    """Return the registry of codes and scales, sharded like the parameters. Raises UserError for a split block."""
    registry = Registry(model.mesh)
    for state, _ in STATES:
        registry |= model.add_like(f"optimizer/{state}", [name_model_array(name) for name in names], "uint8")
        scales = {
            f"optimizer/{state}_scales/{name}": build_scales_layout(name, model[name_model_array(name)], block)
            for name in names
        }
        registry |= Registry(model.mesh, scales)
    return registry


def build_scales_layout(name: str, layout: Layout, block: int) -> Layout:
    """Return the layout of a parameter's scales, each on the ranks of its block. Raises UserError for a split block."""
    last, width = len(layout.shape) - 1, layout.shape[-1]
    divisions = []
    for division in layout.divisions:
        if division.rows or division.dim != last:
            divisions.append(division)
            continue
        inside = [at for bounds in division.bounds for at in bounds if at % block and at != width]
        if inside:
            raise UserError(
                f"optimizer.block={block}: the layout shards {name} at column {inside[0]} of {width}, inside a block.",
                "The elements of a block share a scale, so a block must be on one rank.",
                "Choose a smaller optimizer.block, or another layout.",
            )
        bounds = tuple(tuple(-(-at // block) for at in bounds) for bounds in division.bounds)
        divisions.append(replace(division, bounds=bounds))
    return replace(layout, shape=compute_scales_shape(layout.shape, block), dtype="float32", divisions=tuple(divisions))


def compute_scales_shape(shape: Sequence[int], block: int) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // block))


def _flatten_rows(x: Tensor) -> Tensor:
    """Return a view (R, F) of an array, with leading dims flattened."""
    return x.view(prod(x.shape[:-1]), x.shape[-1])


def build(config: Adamw8bit, run: Run, runtime: Runtime) -> Adamw8bitOptimizer:
    """Return the optimizer `adamw8bit`."""
    return Adamw8bitOptimizer(config, runtime, run.deterministic)
