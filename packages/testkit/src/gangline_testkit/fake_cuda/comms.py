"""Communicators that check what NCCL requires of tensors, and what it reads wrong without a word."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gangline.comm.base import Comm, Pending, Reduction, Splits, Transfers
from gangline.comm.wrap import Wrapped
from gangline_testkit.fake_cuda.watch import find_place

# Types that NCCL reduces and that torch.distributed passes to it.
TYPES = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
}
REDUCED = TYPES - {torch.float8_e4m3fn, torch.float8_e5m2}


class CheckedComm(Wrapped):
    """A communicator that adds a line to `problems` for each tensor that NCCL would refuse or read wrong.

    problems: shared list of all communicators of a rank
    """

    def __init__(self, inner: Comm, problems: list[str]) -> None:
        super().__init__(inner)
        self.problems = problems

    def _check(self, what: str, *tensors: Tensor | None, reduced: bool = False) -> None:
        for x in tensors:
            if x is None or x.device.type == "cpu":  # gloo
                continue
            if not x.is_contiguous():
                self._add(what, f"strides {x.stride()} of shape {tuple(x.shape)}")
            if x.dtype not in (REDUCED if reduced else TYPES):
                self._add(what, f"type {x.dtype}")

    def _add(self, what: str, problem: str) -> None:
        self.problems.append(f"{what} along {self.axis}: {problem} at {find_place()}")

    def _all_reduce(self, x: Tensor, op: Reduction, background: bool) -> Pending[Tensor]:
        self._check("all_reduce", x, reduced=True)
        return super()._all_reduce(x, op, background)

    def _all_gather(self, x: Tensor, into: Tensor | None, background: bool) -> Pending[Tensor]:
        self._check("all_gather", x, into)
        return super()._all_gather(x, into, background)

    def _reduce_scatter(self, x: Tensor, background: bool) -> Pending[Tensor]:
        self._check("reduce_scatter", x, reduced=True)
        if len(x) % self.size:
            self._add("reduce_scatter", f"{len(x)} rows for {self.size} ranks")
        return super()._reduce_scatter(x, background)

    def _all_to_all(self, x: Tensor, in_splits: Splits, out_splits: Splits, background: bool) -> Pending[Tensor]:
        self._check("all_to_all", x)
        if (sum(in_splits) if in_splits is not None else len(x) - len(x) % self.size) != len(x):
            self._add("all_to_all", f"splits {in_splits} of {len(x)} rows")
        return super()._all_to_all(x, in_splits, out_splits, background)

    def _exchange(self, sends: Transfers, recvs: Transfers, background: bool) -> Pending[Sequence[Tensor]]:
        self._check("exchange", *(x for x, _ in sends), *(x for x, _ in recvs))
        return super()._exchange(sends, recvs, background)
